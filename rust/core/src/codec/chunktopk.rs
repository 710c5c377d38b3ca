//! Of each chunk of 4096 values the largest: where they are, their signs, and one of two magnitudes (SparseLoCo, arXiv
//! 2508.15706). With a fraction of 0.02 the code is some 150 times smaller than the values.

use std::ops::Range;

use super::block::INFINITE;
use super::places::Places;
use super::sparse::{Left, choose, count, scatter, spoil};
use super::{Codec, Keep, Target, Values};

/// A fraction of the values of each chunk.
#[derive(Clone, Copy, Debug)]
pub struct ChunkTopK {
    /// Above 0, up to 1.
    pub fraction: f64,
}

/// Values of a chunk; the last one may be shorter.
const CHUNK: usize = 4096;
/// Two magnitudes.
const HEADER: usize = 8;

/// The code of chunks of one length: the magnitudes, two bits per value sent (1: negative, 2: the larger magnitude),
/// and the places.
#[derive(Clone, Copy)]
struct Chunk {
    kept: usize,
    places: Places,
}

/// Room for the work on a chunk.
struct Room {
    /// Bits of the absolute values, which order as these do.
    keys: [i32; CHUNK],
    /// Places of the largest.
    taken: [u16; CHUNK],
}

impl ChunkTopK {
    fn chunk(&self, len: usize) -> Chunk {
        let kept = count(self.fraction, len);
        Chunk { kept, places: Places::new(len, kept) }
    }

    /// The chunks of `n` values: which values they are, their format, and where their codes lie.
    fn chunks(&self, n: usize) -> impl Iterator<Item = (Range<usize>, Chunk, Range<usize>)> {
        let whole = self.chunk(CHUNK);
        (0..n).step_by(CHUNK).map(move |at| {
            let len = CHUNK.min(n - at);
            let chunk = if len == CHUNK { whole } else { self.chunk(len) };
            let begin = at / CHUNK * whole.size();
            (at..at + len, chunk, begin..begin + chunk.size())
        })
    }
}

impl Codec for ChunkTopK {
    fn size(&self, n: usize) -> usize {
        let rest = n % CHUNK;
        let last = if rest == 0 { 0 } else { self.chunk(rest).size() };
        n / CHUNK * self.chunk(CHUNK).size() + last
    }

    fn encode(&self, src: Values<'_>, mut keep: Keep<'_>, _seed: u64, out: &mut [u8]) {
        let mut room = Room { keys: [0; CHUNK], taken: [0; CHUNK] };
        for (range, chunk, code) in self.chunks(src.len()) {
            choose(src.part(range.clone()), keep.part(range), |x, take| {
                chunk.encode(x, &mut room, take, &mut out[code])
            });
        }
    }

    fn decode(&self, code: &[u8], mut out: Target<'_>) -> Result<(), String> {
        for (_, chunk, at) in self.chunks(out.len()) {
            chunk.check(&code[at])?;
        }
        for (range, chunk, at) in self.chunks(out.len()) {
            chunk.decode(&code[at], out.part(range));
        }
        Ok(())
    }
}

impl Chunk {
    fn size(self) -> usize {
        HEADER + (2 * self.kept).div_ceil(8) + self.places.size()
    }

    fn encode(self, x: &[f32], room: &mut Room, take: &mut dyn FnMut(usize, f32), code: &mut [u8]) -> Left {
        code.fill(0);
        let (header, rest) = code.split_at_mut(HEADER);
        let (kinds, places) = rest.split_at_mut((2 * self.kept).div_ceil(8));
        let mut begin = |magnitudes: [f32; 2]| {
            header.chunks_exact_mut(4).zip(magnitudes).for_each(|(h, m)| h.copy_from_slice(&m.to_le_bytes()));
        };
        if !select(x, self.kept, room) {
            // The places are of no account, but there must be as many.
            begin([f32::NAN; 2]);
            (0..self.kept).for_each(|i| self.places.put(places, i, i));
            return Left::Broken;
        }
        let taken = room.taken[..self.kept].iter().map(|&place| usize::from(place));
        let size = |place: usize| f64::from(x[place].abs());
        let mean = taken.clone().map(size).sum::<f64>() / self.kept as f64;
        let (mut low, mut high, mut larger) = (0.0, 0.0, 0);
        for size in taken.clone().map(size) {
            // No branch: which of them are larger is not to be foreseen.
            low += if size > mean { 0.0 } else { size };
            high += if size > mean { size } else { 0.0 };
            larger += usize::from(size > mean);
        }
        // The mean is rounded, but never below the smallest size: not all are larger.
        low /= (self.kept - larger) as f64;
        high = if larger > 0 { high / larger as f64 } else { low };
        let magnitudes = [low as f32, high as f32];
        begin(magnitudes);
        let values = values(magnitudes);
        for (i, place) in taken.enumerate() {
            let kind = usize::from(x[place] < 0.0) | usize::from(size(place) > mean) << 1;
            kinds[i / 4] |= (kind << (2 * (i % 4))) as u8;
            self.places.put(places, i, place);
            take(place, values[kind]);
        }
        Left::Finite
    }

    /// The magnitudes, kinds and places in a code.
    fn parts(self, code: &[u8]) -> ([f32; 2], &[u8], &[u8]) {
        let (header, rest) = code.split_at(HEADER);
        let (kinds, places) = rest.split_at((2 * self.kept).div_ceil(8));
        let magnitude = |at: usize| f32::from_le_bytes(std::array::from_fn(|byte| header[at + byte]));
        ([magnitude(0), magnitude(4)], kinds, places)
    }

    /// Whether a code of the right size is one.
    fn check(self, code: &[u8]) -> Result<(), String> {
        let ([low, high], _, places) = self.parts(code);
        let number = |m: f32| (0.0..f32::INFINITY).contains(&m);
        if !(number(low) && number(high) || low.is_nan() && high.is_nan()) {
            return Err(format!("a chunktopk code has the magnitudes {low} and {high}"));
        }
        self.places.check(places).map_err(|what| format!("a chunktopk code: {what}"))
    }

    /// Decodes a code that [`Chunk::check`] has accepted.
    fn decode(self, code: &[u8], out: Target<'_>) {
        let (magnitudes, kinds, places) = self.parts(code);
        if magnitudes[0].is_nan() {
            return spoil(out);
        }
        let values = values(magnitudes);
        let sent = self.places.read(places).enumerate();
        let kind = |i: usize| usize::from(kinds[i / 4] >> (2 * (i % 4)) & 3);
        scatter(sent.map(|(i, place)| (place, values[kind(i)])), out);
    }
}

/// What the two bits of a value stand for; there is no negative zero.
fn values([low, high]: [f32; 2]) -> [f32; 4] {
    [low, 0.0 - low, high, 0.0 - high]
}

/// Finds the places of the `k` largest values by size, in order; of equal values the first. False if a value is not
/// finite.
fn select(x: &[f32], k: usize, room: &mut Room) -> bool {
    crate::vector::unit().dispatch(
        #[inline(always)]
        move || {
            let Room { keys, taken } = room;
            let keys = &mut keys[..x.len()];
            let mut top = 0;
            for (key, v) in keys.iter_mut().zip(x) {
                *key = (v.to_bits() & 0x7fff_ffff) as i32;
                top = top.max(*key);
            }
            if top >= INFINITE as i32 {
                return false;
            }
            // The k-th largest key, bit by bit: the loops over the chunk have no branches and suit a vector unit.
            let (mut least, mut found) = (0, keys.len());
            for bit in (0..31).rev() {
                let next = least | 1 << bit;
                if next <= top && found > k {
                    let reached = reached(keys, next);
                    if reached >= k {
                        (least, found) = (next, reached);
                    }
                }
            }
            // Those equal to it, after this place, are too many.
            let mut last = keys.len();
            if found > k {
                let equal = k - reached(keys, least + 1);
                let mut those = keys.iter().enumerate().filter(|&(_, &key)| key == least);
                last = those.nth(equal - 1).map_or(last, |(place, _)| place);
            }
            let mut at = 0;
            for (place, &key) in keys.iter().enumerate() {
                taken[at] = place as u16;
                at += usize::from(key >= least + i32::from(place > last));
            }
            true
        },
    )
}

/// How many keys reach one.
#[inline(always)]
fn reached(keys: &[i32], least: i32) -> usize {
    keys.iter().map(|&key| u32::from(key >= least)).sum::<u32>() as usize
}

#[cfg(test)]
mod tests {
    use super::super::{decode, encode};
    use super::*;

    /// The same by sorting.
    fn expected(x: &[f32], fraction: f64) -> Vec<f32> {
        let mut out = vec![0f32; x.len()];
        for (x, out) in x.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
            if x.iter().any(|v| !v.is_finite()) {
                out.fill(f32::NAN);
                continue;
            }
            let mut order: Vec<usize> = (0..x.len()).collect();
            order.sort_by(|&a, &b| x[b].abs().total_cmp(&x[a].abs())); // stable
            order.truncate(count(fraction, x.len()));
            order.sort_unstable();
            let size = |i: &usize| f64::from(x[*i].abs());
            let mean = order.iter().map(size).sum::<f64>() / order.len() as f64;
            for part in [true, false] {
                let those: Vec<usize> = order.iter().copied().filter(|i| (size(i) > mean) == part).collect();
                let mean = (those.iter().map(size).sum::<f64>() / those.len() as f64) as f32;
                those.iter().for_each(|&i| out[i] = if x[i] < 0.0 { -mean } else { mean });
            }
        }
        out
    }

    fn kinds(n: usize) -> Vec<(&'static str, Vec<f32>)> {
        let mut state = 1u32;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let spread: Vec<f32> = (0..n).map(|_| draw() * (8.0 * draw()).exp()).collect();
        let mut broken = spread.clone();
        broken[n / 2] = f32::NEG_INFINITY;
        let of = |f: fn(usize) -> f32| (0..n).map(f).collect::<Vec<f32>>();
        vec![
            ("spread", spread),
            ("broken", broken),
            ("equal", of(|_| -1.5)),
            ("zeros", of(|i| if i % 2 == 0 { 0.0 } else { -0.0 })),
            ("sorted", of(|i| i as f32)),
            ("two values", of(|i| if i % 3 == 0 { -2.0 } else { 1.0 })),
            ("few", of(|i| if i % 1000 == 7 { 1.0 } else { 0.0 })),
            ("subnormal", of(|i| f32::from_bits((i * 7919 % 1009) as u32))),
            ("largest", of(|i| if i % 5 == 0 { f32::MAX } else { -1.0 })),
        ]
    }

    #[test]
    fn it_is_the_same_as_by_sorting() {
        let sizes: &[usize] = if cfg!(miri) { &[1, 70] } else { &[1, 2, 63, 4095, 4096, 4097, 3 * 4096 + 5] };
        for &n in sizes {
            for fraction in [1e-6, 0.02, 0.3, 1.0] {
                let codec = ChunkTopK { fraction };
                for (what, x) in kinds(n) {
                    let mut code = vec![0xa5; codec.size(n)];
                    let (mut out, mut left) = (vec![7f32; n], vec![7f32; n]);
                    encode(&codec, Values::F32(&x), Keep::Remainder(&mut left), 0, &mut code).unwrap();
                    decode(&codec, &code, Target::F32(&mut out), 0).unwrap();
                    for (i, want) in expected(&x, fraction).into_iter().enumerate() {
                        let same = |a: f32, b: f32| a == b || a.is_nan() && b.is_nan();
                        assert!(same(out[i], want), "{what}, {n}, {fraction}: {i} is {}, not {want}", out[i]);
                        assert!(same(left[i], x[i] - want), "{what}, {n}, {fraction}: {} is left", left[i]);
                    }
                }
            }
        }
    }

    #[test]
    fn nothing_is_written_before_all_is_checked() {
        let (codec, n) = (ChunkTopK { fraction: 0.02 }, CHUNK + 100);
        let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let mut code = vec![0; codec.size(n)];
        encode(&codec, Values::F32(&x), Keep::Nothing, 0, &mut code).unwrap();
        let second = codec.chunk(CHUNK).size();
        for (at, bytes) in [(second, f32::INFINITY), (second + 4, -1.0), (second + 4, f32::NAN)] {
            let mut spoilt = code.clone();
            spoilt[at..at + 4].copy_from_slice(&bytes.to_le_bytes());
            let mut out = vec![7f32; n];
            assert!(decode(&codec, &spoilt, Target::Add(&mut out, 1.0), 0).is_err(), "{bytes}");
            assert!(out.iter().all(|&v| v == 7.0), "{bytes}");
        }
    }
}
