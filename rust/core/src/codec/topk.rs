//! The largest values by size, and where they are: gradients are dominated by few (DGC, arXiv
//! 1712.01887). Indices are coded as Elias and Fano did (1974): about 2 + log2(n/k) bits each, in
//! a size that is known before encoding.

use std::cell::RefCell;

use super::sparse::{choose, count, scatter};
use super::{Codec, Keep, Target, Values};

/// A fraction of the values.
#[derive(Clone, Copy, Debug)]
pub struct TopK {
    /// Above 0, up to 1.
    pub fraction: f64,
}

/// Where the parts of a code lie.
#[derive(Clone, Copy)]
struct Layout {
    k: usize,
    /// Low bits of each index.
    bits: usize,
    /// First byte of the low parts, after the values.
    low: usize,
    /// First byte of the bitmap of the high parts.
    high: usize,
    end: usize,
}

impl TopK {
    fn layout(&self, n: usize) -> Layout {
        let k = count(self.fraction, n);
        if k == 0 {
            return Layout { k, bits: 0, low: 0, high: 0, end: 0 };
        }
        let bits = (n / k).ilog2() as usize;
        let low = 4 * k;
        let high = low + (k * bits).div_ceil(8);
        let span = k + ((n - 1) >> bits) + 1;
        Layout { k, bits, low, high, end: high + span.div_ceil(8) }
    }
}

/// Sizes order as these bits do; NaN is above infinity.
fn key(v: f32) -> u32 {
    v.to_bits() & 0x7fff_ffff
}

thread_local! {
    static CANDIDATES: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Keys are sorted into this many bins by their leading bits: exponent and 3 bits of mantissa.
const BINS: usize = 1 << 11;

/// The smallest key that is taken, and how many of those equal to it.
fn threshold(x: &[f32], k: usize) -> (u32, usize) {
    // Four counters, so that runs of similar values do not wait for each other.
    let mut bins = [[0u32; BINS]; 4];
    let quads = x.chunks_exact(4);
    quads.remainder().iter().for_each(|&v| bins[0][(key(v) >> 20) as usize] += 1);
    for quad in quads {
        for (bin, &v) in bins.iter_mut().zip(quad) {
            bin[(key(v) >> 20) as usize] += 1;
        }
    }
    let (mut above, mut edge) = (0, 0);
    for b in (0..BINS).rev() {
        let here: usize = bins.iter().map(|bin| bin[b] as usize).sum();
        if above + here >= k {
            edge = b as u32;
            break;
        }
        above += here;
    }
    CANDIDATES.with_borrow_mut(|keys| {
        keys.clear();
        keys.extend(x.iter().map(|&v| key(v)).filter(|key| key >> 20 == edge));
        let nth = k - above - 1;
        let (larger, &mut at, _) = keys.select_nth_unstable_by(nth, |a, b| b.cmp(a));
        (at, k - above - larger.iter().filter(|&&key| key > at).count())
    })
}

impl Codec for TopK {
    fn size(&self, n: usize) -> usize {
        self.layout(n).end
    }

    fn encode(&self, src: Values<'_>, keep: Keep<'_>, _seed: u64, out: &mut [u8]) {
        let at = self.layout(src.len());
        if at.k == 0 {
            return;
        }
        out[at.low..].fill(0);
        choose(src, keep, |x, take| {
            let (least, mut equals) = threshold(x, at.k);
            let mut i = 0;
            // Most stretches hold none, which is quickly seen.
            for (s, stretch) in x.chunks(16).enumerate() {
                if stretch.iter().fold(0, |top, &v| top.max(key(v))) < least {
                    continue;
                }
                for (j, &v) in stretch.iter().enumerate() {
                    let taken = key(v) > least || key(v) == least && equals > 0;
                    if !taken {
                        continue;
                    }
                    equals -= usize::from(key(v) == least);
                    let index = s * 16 + j;
                    out[4 * i..4 * i + 4].copy_from_slice(&v.to_le_bytes());
                    put(&mut out[at.low..at.high], i * at.bits, index & ((1 << at.bits) - 1));
                    put(&mut out[at.high..], (index >> at.bits) + i, 1);
                    take(index);
                    i += 1;
                }
            }
            true
        });
    }

    fn decode(&self, code: &[u8], out: Target<'_>) -> Result<(), String> {
        let n = out.len();
        let at = self.layout(n);
        let bitmap = &code[at.high..];
        let ones: u32 = bitmap.iter().map(|b| b.count_ones()).sum();
        if ones as usize != at.k {
            return Err(format!("a top-k code of {} values marks {ones}", at.k));
        }
        let indices = || {
            let set = bitmap.iter().enumerate().flat_map(|(byte, &b)| {
                (0..8usize).filter(move |bit| b >> bit & 1 == 1).map(move |bit| 8 * byte + bit)
            });
            set.enumerate().map(|(i, p)| {
                // A bit at p is the i-th, so at least i are before it.
                (p - i) << at.bits | get(&code[at.low..at.high], i * at.bits, at.bits)
            })
        };
        let mut before = None;
        for index in indices() {
            if index >= n || before.is_some_and(|b| index <= b) {
                return Err(format!("a top-k code of {n} values has index {index} after {before:?}"));
            }
            before = Some(index);
        }
        let values = code.chunks_exact(4).map(|v| f32::from_le_bytes([v[0], v[1], v[2], v[3]]));
        scatter(indices().zip(values), out);
        Ok(())
    }
}

/// Sets the bits of `value` from bit `at` on; they are zero before.
fn put(bytes: &mut [u8], at: usize, value: usize) {
    let (mut byte, mut rest) = (at / 8, (value as u128) << (at % 8));
    while rest > 0 {
        bytes[byte] |= rest as u8;
        rest >>= 8;
        byte += 1;
    }
}

/// Reads `bits` bits from bit `at` on.
fn get(bytes: &[u8], at: usize, bits: usize) -> usize {
    let mut value = 0u128;
    let last = (at + bits).div_ceil(8);
    for byte in (at / 8..last).rev() {
        value = value << 8 | u128::from(bytes[byte]);
    }
    (value >> (at % 8)) as usize & ((1usize << bits) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_come_back_and_nothing_else() {
        for (n, fraction) in [(1, 0.5), (10, 0.3), (1000, 0.01), (1000, 1.0), (4097, 0.37)] {
            let codec = TopK { fraction };
            let x: Vec<f32> = (0..n).map(|i| ((i * 7919) % 1009) as f32 - 500.0).collect();
            let mut code = vec![0; codec.size(n)];
            codec.encode(Values::F32(&x), Keep::Nothing, 0, &mut code);
            let mut out = vec![0f32; n];
            codec.decode(&code, Target::F32(&mut out)).unwrap();
            let k = count(fraction, n);
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by_key(|&i| (std::cmp::Reverse(key(x[i])), i));
            for (place, &i) in order.iter().enumerate() {
                assert_eq!(out[i], if place < k { x[i] } else { 0.0 }, "n {n}, value {i}");
            }
        }
    }
}
