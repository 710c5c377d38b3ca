//! 8 or 4 bits per value: an affine code per block, with an integer zero point.
//!
//! The range is widened to hold 0, which is carried exactly: sparse gradients stay sparse, and
//! optimizers that divide by what was never touched stay safe. The step is relative to the range,
//! with no constant added, so small gradients keep their precision; both ends are clamped, so
//! nothing wraps.

use super::block::{BlockCodec, INFINITE, SHORT, TOGETHER, largest};

/// Blocks whose range is below this are zero; the reciprocal of a step stays finite above it.
const LEAST: f32 = 1e-36;
/// Added to a float of moderate size, it leaves the float, rounded to nearest even, in the low bits.
const MAGIC: f32 = 12_582_912.0;

/// `BITS` bits per value: 8 or 4.
#[derive(Clone, Copy, Debug, Default)]
pub struct Affine<const BITS: u32>;

impl<const BITS: u32> Affine<BITS> {
    const TOP: i32 = (1 << BITS) - 1;
    const ZERO: u32 = (1 << BITS) - 1;
    const PER_BYTE: usize = 8 / BITS as usize;

    /// The header: the step, and in its lowest bits the zero point.
    #[inline(always)]
    fn header(x: &[f32]) -> u32 {
        if largest(x) >= INFINITE {
            return f32::NAN.to_bits() & !Self::ZERO;
        }
        let (mut lows, mut highs) = ([0f32; 16], [0f32; 16]);
        let chunks = x.chunks_exact(16);
        for &v in chunks.remainder() {
            lows[0] = if v < lows[0] { v } else { lows[0] };
            highs[0] = if v > highs[0] { v } else { highs[0] };
        }
        for chunk in chunks {
            for ((l, h), &v) in lows.iter_mut().zip(&mut highs).zip(chunk) {
                *l = if v < *l { v } else { *l };
                *h = if v > *h { v } else { *h };
            }
        }
        // By halves: one after the other, sixteen comparisons wait for each other.
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                lows[i] = if lows[i + half] < lows[i] { lows[i + half] } else { lows[i] };
                highs[i] = if highs[i + half] > highs[i] { highs[i + half] } else { highs[i] };
            }
        }
        Self::header_of(lows[0], highs[0])
    }

    /// The headers of [`TOGETHER`] blocks of [`SHORT`] finite values, as [`Affine::header`] has them one by one. Each
    /// division is made for all of them at once.
    #[inline(always)]
    fn headers(x: &[f32]) -> [u32; TOGETHER] {
        let least = |a: f32, b: f32| if b < a { b } else { a };
        let most = |a: f32, b: f32| if b > a { b } else { a };
        // Of each block four lanes are left at first, then two, then one: the blocks lie side by side.
        let (mut lows, mut highs) = ([0f32; 4 * TOGETHER], [0f32; 4 * TOGETHER]);
        let places = lows.as_chunks_mut::<4>().0.iter_mut().zip(highs.as_chunks_mut::<4>().0);
        for (x, (low, high)) in x.as_chunks::<SHORT>().0.iter().zip(places) {
            let (mut l, mut h) = ([0f32; 16], [0f32; 16]);
            for half in x.as_chunks::<16>().0 {
                l.iter_mut().zip(half).for_each(|(l, &v)| *l = least(*l, v));
                h.iter_mut().zip(half).for_each(|(h, &v)| *h = most(*h, v));
            }
            for half in [8, 4] {
                for i in 0..half {
                    l[i] = least(l[i], l[i + half]);
                    h[i] = most(h[i], h[i + half]);
                }
            }
            low.copy_from_slice(&l[..4]);
            high.copy_from_slice(&h[..4]);
        }
        let mut headers = [0; TOGETHER];
        let lows: [f32; 2 * TOGETHER] = halved(&lows, least);
        let highs: [f32; 2 * TOGETHER] = halved(&highs, most);
        let (lows, highs): ([f32; TOGETHER], [f32; TOGETHER]) = (halved(&lows, least), halved(&highs, most));
        for ((header, low), high) in headers.iter_mut().zip(lows).zip(highs) {
            *header = Self::header_of(low, high);
        }
        headers
    }

    /// The header of a block between `low`, at most 0, and `high`, at least 0.
    #[inline(always)]
    fn header_of(low: f32, high: f32) -> u32 {
        let exact = high / Self::TOP as f32 - low / Self::TOP as f32;
        let step = (exact.to_bits() + Self::ZERO) & !Self::ZERO;
        let inverse = 1.0 / f32::from_bits(step);
        // Rounded as codes are. A cast would look at each for NaN, and this not be made for many at once.
        let zero = ((-low * inverse).clamp(0.0, Self::TOP as f32) + MAGIC).to_bits() - MAGIC.to_bits();
        if high - low < LEAST { 0 } else { step | zero & Self::ZERO }
    }

    /// Encodes a block whose header, and the inverse of whose step, are known.
    #[inline(always)]
    fn encode_with(header: u32, inverse: f32, x: &[f32], out: &mut [u8]) {
        let (head, codes) = out.split_at_mut(4);
        head.copy_from_slice(&header.to_le_bytes());
        let (step, zero) = Self::parts(header);
        if header == 0 || step.is_nan() {
            return codes.fill(0);
        }
        let code = |v: f32| {
            let q = (v * inverse + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32;
            (q + zero).clamp(0, Self::TOP) as u8
        };
        if BITS == 8 {
            codes.iter_mut().zip(x).for_each(|(c, &v)| *c = code(v));
        } else {
            // Thirty-two codes, and then two of them to a byte.
            let (runs, rest) = x.as_chunks::<32>();
            let (bytes, last) = codes.split_at_mut(16 * runs.len());
            for (bytes, run) in bytes.as_chunks_mut::<16>().0.iter_mut().zip(runs) {
                let mut each = [0u8; 32];
                each.iter_mut().zip(run).for_each(|(c, &v)| *c = code(v));
                let pairs: [u16; 16] = bytemuck::cast(each);
                let both = pairs.map(|p| (u16::from_le(p) | u16::from_le(p) >> 4) as u8);
                *bytes = both;
            }
            for (c, p) in last.iter_mut().zip(rest.chunks(2)) {
                *c = code(p[0]) | p.get(1).map_or(0, |&v| code(v) << 4);
            }
        }
    }

    #[inline(always)]
    fn parts(header: u32) -> (f32, i32) {
        (f32::from_bits(header & !Self::ZERO), (header & Self::ZERO) as i32)
    }
}

/// Each two neighbours as one.
#[inline(always)]
fn halved<const N: usize>(x: &[f32], of: impl Fn(f32, f32) -> f32) -> [f32; N] {
    let mut out = [0f32; N];
    out.iter_mut().zip(x.as_chunks::<2>().0).for_each(|(o, &[a, b])| *o = of(a, b));
    out
}

impl<const BITS: u32> BlockCodec for Affine<BITS> {
    #[inline(always)]
    fn size(&self, n: usize) -> usize {
        4 + n.div_ceil(Self::PER_BYTE)
    }

    #[inline(always)]
    fn encode(&self, x: &[f32], out: &mut [u8]) {
        let header = Self::header(x);
        Self::encode_with(header, 1.0 / Self::parts(header).0, x, out);
    }

    #[inline(always)]
    fn encode_together(&self, x: &[f32], out: &mut [u8]) {
        if largest(x) >= INFINITE {
            let blocks = x.chunks_exact(SHORT).zip(out.chunks_exact_mut(self.size(SHORT)));
            return blocks.for_each(|(x, out)| self.encode(x, out));
        }
        let headers = Self::headers(x);
        let inverses = headers.map(|header| 1.0 / Self::parts(header).0);
        let blocks = x.chunks_exact(SHORT).zip(out.chunks_exact_mut(self.size(SHORT)));
        for ((x, out), (header, inverse)) in blocks.zip(headers.into_iter().zip(inverses)) {
            Self::encode_with(header, inverse, x, out);
        }
    }

    #[inline(always)]
    fn decode(&self, code: &[u8], out: &mut [f32]) {
        let (head, codes) = code.split_at(4);
        let (step, zero) = Self::parts(u32::from_le_bytes([head[0], head[1], head[2], head[3]]));
        // The step is rounded up, so the ends of a huge range may lie just above the largest float.
        let value = |c: i32| ((c - zero) as f32 * step).clamp(f32::MIN, f32::MAX);
        if BITS == 8 {
            out.iter_mut().zip(codes).for_each(|(o, &c)| *o = value(c.into()));
        } else {
            let (runs, rest) = out.as_chunks_mut::<32>();
            let (bytes, last) = codes.split_at(16 * runs.len());
            for (run, bytes) in runs.iter_mut().zip(bytes.as_chunks::<16>().0) {
                let mut apart = [0u8; 32];
                for (two, b) in apart.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                    *two = [b & 15, b >> 4];
                }
                run.iter_mut().zip(apart).for_each(|(o, c)| *o = value(c.into()));
            }
            for (p, &c) in rest.chunks_mut(2).zip(last) {
                p[0] = value((c & 15).into());
                p.iter_mut().skip(1).for_each(|o| *o = value((c >> 4).into()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Keep, Target, Values, find};
    use super::*;

    /// Sixteen blocks are coded at once where there are as many; the bytes are those of each block alone.
    #[test]
    fn blocks_together_have_the_bytes_of_each_alone() {
        let mut state = 1u32;
        let mut draw = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let spread: Vec<f32> = (0..1500).map(|_| draw() * (40.0 * draw()).exp()).collect();
        let mut kinds = vec![spread.clone(), spread.iter().map(|v| v.abs()).collect(), vec![0.0; 1024]];
        kinds.push(spread.iter().map(|v| -v.abs()).collect());
        kinds.push(spread.iter().enumerate().map(|(i, v)| if i % 7 == 0 { *v } else { -0.0 }).collect());
        kinds.push(spread.iter().map(|v| v * 1e-36).collect());
        kinds.push(spread.iter().map(|v| v.signum() * f32::MAX).collect());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut broken = spread.clone();
            (broken[3], broken[700], broken[1499]) = (bad, bad, -bad);
            kinds.push(broken);
        }
        let codec = find("int4", None).unwrap();
        for x in &kinds {
            let mut together = vec![0; codec.size(x.len())];
            codec.encode(Values::F32(x), Keep::Nothing, 0, &mut together);
            let mut alone = Vec::new();
            for block in x.chunks(SHORT) {
                let mut code = vec![0; Affine::<4>.size(block.len())];
                Affine::<4>.encode(block, &mut code);
                alone.extend(code);
            }
            assert_eq!(together, alone);
            let (mut all, mut each) = (vec![0f32; x.len()], vec![0f32; x.len()]);
            codec.decode(&together, Target::F32(&mut all)).unwrap();
            let codes = alone.chunks(Affine::<4>.size(SHORT));
            each.chunks_mut(SHORT).zip(codes).for_each(|(out, code)| Affine::<4>.decode(code, out));
            let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&all), bits(&each));
        }
    }
}
