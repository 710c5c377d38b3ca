//! The largest values by size, and where they are: gradients are dominated by few (DGC, arXiv
//! 1712.01887).

use std::cell::RefCell;

#[cfg(target_arch = "x86_64")]
use pulp::Simd as _;

use super::block::INFINITE;
use super::places::Places;
use super::sparse::{Left, choose, count, scatter};
use super::{Codec, Keep, Target, Values};

/// A fraction of the values.
#[derive(Clone, Copy, Debug)]
pub struct TopK {
    /// Above 0, up to 1.
    pub fraction: f64,
}

/// Sizes order as these bits do; NaN is above infinity.
fn key(v: f32) -> u32 {
    v.to_bits() & 0x7fff_ffff
}

thread_local! {
    /// Keys to sort.
    static KEYS: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
    /// Values that may be taken, in order, with their indices.
    static CANDIDATES: RefCell<Vec<(u32, f32)>> = const { RefCell::new(Vec::new()) };
}

/// Keys are sorted into this many bins by their leading bits: exponent and 3 bits of mantissa.
const BINS: usize = 1 << 11;

/// Values that are looked at together.
const RUN: usize = 16;
/// How many of the values in a sample are to be among those taken.
const SAMPLED: usize = 128;
/// In a smaller tensor, or where a larger part is taken, a sample gains nothing.
const LEAST_VALUES: usize = 1 << 15;
const LEAST_PARTS: usize = 8;

/// Adds the values that reach a key, with their indices from `first` on.
fn look(first: usize, x: &[f32], low: u32, found: &mut Vec<(u32, f32)>) {
    let numbered = (first..).zip(x).filter(|&(_, &v)| key(v) >= low);
    found.extend(numbered.map(|(index, &v)| (index as u32, v)));
}

/// The values that reach a key, with their indices.
fn reaching(x: &[f32], low: u32, found: &mut Vec<(u32, f32)>) {
    found.clear();
    match crate::vector::unit() {
        #[cfg(target_arch = "x86_64")]
        pulp::Arch::V4(simd) => simd.vectorize(
            #[inline(always)]
            move || {
                // Its comparisons make a bit of each value, and only those that are set are looked at.
                let (runs, rest) = x.as_chunks::<64>();
                let least = simd.splat_u32s(low);
                for (s, run) in runs.iter().enumerate() {
                    let mut marks = 0u64;
                    for (quarter, values) in run.as_chunks::<RUN>().0.iter().enumerate() {
                        let reach = simd.greater_than_or_equal_u32s(bytemuck::cast(values.map(key)), least);
                        marks |= u64::from(reach.0) << (RUN * quarter);
                    }
                    while marks != 0 {
                        let place = marks.trailing_zeros() as usize;
                        found.push(((64 * s + place) as u32, run[place]));
                        marks &= marks - 1;
                    }
                }
                look(64 * runs.len(), rest, low, found);
            },
        ),
        unit => unit.dispatch(
            #[inline(always)]
            move || {
                let found = found; // moved out, so that it is inlined: see block.rs
                let (runs, rest) = x.as_chunks::<RUN>();
                for (s, run) in runs.iter().enumerate() {
                    // Most runs hold none, which is quickly seen.
                    if run.iter().fold(0, |top, &v| top.max(key(v))) >= low {
                        look(RUN * s, run, low, found);
                    }
                }
                look(RUN * runs.len(), rest, low, found);
            },
        ),
    }
}

/// The smallest key that is taken, and how many of those equal to it. A sample tells a key that somewhat more than `k`
/// values reach, and only these are sorted, and collected in `found`. `None` where fewer do, or where the sample says
/// nothing.
fn by_sample(x: &[f32], k: usize, found: &mut Vec<(u32, f32)>) -> Option<(u32, usize)> {
    let (runs, _) = x.as_chunks::<RUN>();
    if x.len() < LEAST_VALUES || x.len() / k < LEAST_PARTS || u32::try_from(x.len()).is_err() {
        return None;
    }
    let sampled = (SAMPLED * (x.len() / k) / RUN).clamp(256, runs.len() / 8);
    KEYS.with_borrow_mut(|keys| {
        keys.clear();
        keys.extend(runs.iter().step_by(runs.len() / sampled).flat_map(|run| run.map(key)));
        let share = keys.len() as f64 * k as f64 / x.len() as f64;
        let place = (1.1 * share + 4.0 * share.sqrt()) as usize + 8;
        if place >= keys.len() {
            return None;
        }
        let (_, &mut low, _) = keys.select_nth_unstable_by(place, |a, b| b.cmp(a));
        if low == 0 {
            return None;
        }
        reaching(x, low, found);
        if found.len() < k {
            return None;
        }
        keys.clear();
        keys.extend(found.iter().map(|&(_, v)| key(v)));
        let (larger, &mut at, _) = keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        Some((at, k - larger.iter().filter(|&&key| key > at).count()))
    })
}

/// As [`by_sample`], of any values, without candidates.
fn by_bins(x: &[f32], k: usize) -> (u32, usize) {
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
    KEYS.with_borrow_mut(|keys| {
        keys.clear();
        keys.extend(x.iter().map(|&v| key(v)).filter(|key| key >> 20 == edge));
        let nth = k - above - 1;
        let (larger, &mut at, _) = keys.select_nth_unstable_by(nth, |a, b| b.cmp(a));
        (at, k - above - larger.iter().filter(|&&key| key > at).count())
    })
}

impl Codec for TopK {
    fn size(&self, n: usize) -> usize {
        let k = count(self.fraction, n);
        if k == 0 { 0 } else { 4 * k + Places::new(n, k).size() }
    }

    fn encode(&self, src: Values<'_>, keep: Keep<'_>, _seed: u64, out: &mut [u8]) {
        let (n, k) = (src.len(), count(self.fraction, src.len()));
        if k == 0 {
            return;
        }
        let (format, (values, places)) = (Places::new(n, k), out.split_at_mut(4 * k));
        places.fill(0);
        choose(src, keep, |x, take| {
            let (mut values, mut places) = (values.as_chunks_mut::<4>().0.iter_mut(), format.writer(places));
            let mut send = |index: usize, v: f32| {
                // There is room for as many as are taken.
                if let Some(room) = values.next() {
                    *room = v.to_le_bytes();
                    places.put(index);
                    take(index, v);
                }
            };
            let least = CANDIDATES.with_borrow_mut(|found| {
                let sampled = by_sample(x, k, found);
                let (least, mut equals) = sampled.unwrap_or_else(|| by_bins(x, k));
                let mut look = |index: usize, v: f32| {
                    if key(v) > least || key(v) == least && equals > 0 {
                        equals -= usize::from(key(v) == least);
                        send(index, v);
                    }
                };
                if sampled.is_some() {
                    found.iter().for_each(|&(index, v)| look(index as usize, v));
                } else {
                    x.iter().enumerate().for_each(|(index, &v)| look(index, v));
                }
                least
            });
            places.finish();
            if least < INFINITE { Left::Finite } else { Left::Mixed }
        });
    }

    fn decode(&self, code: &[u8], out: Target<'_>) -> Result<(), String> {
        let (n, k) = (out.len(), count(self.fraction, out.len()));
        if k == 0 {
            return Ok(());
        }
        let (format, (values, places)) = (Places::new(n, k), code.split_at(4 * k));
        format.check(places)?;
        let values = values.chunks_exact(4).map(|v| f32::from_le_bytes([v[0], v[1], v[2], v[3]]));
        scatter(format.read(places).zip(values), out);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_come_back_and_nothing_else() {
        let large = if cfg!(miri) { (1001, 0.02) } else { (100_003, 0.01) }; // by a sample
        for (n, fraction) in [(1, 0.5), (10, 0.3), (1000, 0.01), (1000, 1.0), (4097, 0.37), large] {
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

    /// What a sample says of values that are spread, equal, sorted, few, or in the sample's own places.
    #[test]
    #[cfg_attr(miri, ignore = "takes miri a long time")]
    fn a_sample_finds_what_bins_find() {
        let n = 70_001;
        let mut state = 1u32;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let spread: Vec<f32> = (0..n).map(|_| draw() * (8.0 * draw()).exp()).collect();
        let mut broken = spread.clone();
        broken.iter_mut().step_by(97).for_each(|v| *v = f32::NAN);
        broken.iter_mut().skip(1).step_by(113).for_each(|v| *v = f32::NEG_INFINITY);
        let of = |f: fn(usize) -> f32| (0..n).map(f).collect::<Vec<f32>>();
        let kinds = [
            ("spread", spread),
            ("broken", broken),
            ("equal", of(|_| -1.5)),
            ("sorted", of(|i| i as f32)),
            ("two values", of(|i| if i % 3 == 0 { 2.0 } else { 1.0 })),
            ("at the end", of(|i| if i > 69_000 { i as f32 } else { 1.0 })),
            ("in runs", of(|i| if i / 16 % 17 == 0 { i as f32 } else { 1e-3 })),
            ("few", of(|i| if i % 1000 == 7 { 1.0 } else { 0.0 })),
        ];
        for (what, x) in &kinds {
            for k in [1, 7, 70, 701, 7001, 8750] {
                let mut candidates = Vec::new();
                let found = by_sample(x, k, &mut candidates);
                assert!(found.is_none_or(|found| found == by_bins(x, k)), "{what}, {k} of {n}");
                assert!(found.is_none() || candidates.iter().all(|&(i, v)| key(v) == key(x[i as usize])));
                assert!(found.is_some() || !matches!(*what, "spread" | "equal" | "sorted"), "{what}, {k}");
            }
        }
    }
}
