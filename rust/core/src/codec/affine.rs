//! 8 or 4 bits per value: an affine code per block, with an integer zero point.
//!
//! The range is widened to hold 0, which is carried exactly: sparse gradients stay sparse, and
//! optimizers that divide by what was never touched stay safe. The step is relative to the range,
//! with no constant added, so small gradients keep their precision; both ends are clamped, so
//! nothing wraps.

use super::block::{BlockCodec, INFINITE, largest};

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
        let (low, high) = (lows[0], highs[0]);
        if high - low < LEAST {
            return 0;
        }
        let exact = high / Self::TOP as f32 - low / Self::TOP as f32;
        let step = (exact.to_bits() + Self::ZERO) & !Self::ZERO;
        let inverse = 1.0 / f32::from_bits(step);
        let zero = (-low * inverse).round_ties_even().clamp(0.0, Self::TOP as f32);
        step | zero as u32
    }

    #[inline(always)]
    fn parts(header: u32) -> (f32, i32) {
        (f32::from_bits(header & !Self::ZERO), (header & Self::ZERO) as i32)
    }
}

impl<const BITS: u32> BlockCodec for Affine<BITS> {
    #[inline(always)]
    fn size(&self, n: usize) -> usize {
        4 + n.div_ceil(Self::PER_BYTE)
    }

    #[inline(always)]
    fn encode(&self, x: &[f32], out: &mut [u8]) {
        let header = Self::header(x);
        let (head, codes) = out.split_at_mut(4);
        head.copy_from_slice(&header.to_le_bytes());
        let (step, zero) = Self::parts(header);
        if header == 0 || step.is_nan() {
            return codes.fill(0);
        }
        let inverse = 1.0 / step;
        let code = |v: f32| {
            let q = (v * inverse + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32;
            (q + zero).clamp(0, Self::TOP) as u8
        };
        if BITS == 8 {
            codes.iter_mut().zip(x).for_each(|(c, &v)| *c = code(v));
        } else {
            // Sixteen codes at a time, and then two of them to a byte.
            let (runs, rest) = x.as_chunks::<16>();
            let (bytes, last) = codes.split_at_mut(8 * runs.len());
            for (bytes, run) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(runs) {
                let mut sixteen = [0u8; 16];
                sixteen.iter_mut().zip(run).for_each(|(c, &v)| *c = code(v));
                let pairs: [u16; 8] = bytemuck::cast(sixteen);
                *bytes = pairs.map(|p| (u16::from_le(p) | u16::from_le(p) >> 4) as u8);
            }
            for (c, p) in last.iter_mut().zip(rest.chunks(2)) {
                *c = code(p[0]) | p.get(1).map_or(0, |&v| code(v) << 4);
            }
        }
    }

    #[inline(always)]
    fn decode(&self, code: &[u8], out: &mut [f32]) {
        let (head, codes) = code.split_at(4);
        let (step, zero) = Self::parts(u32::from_le_bytes([head[0], head[1], head[2], head[3]]));
        // The step is rounded up, so the ends of a huge range may lie just above the largest float.
        let value = |c: u8| ((i32::from(c) - zero) as f32 * step).clamp(f32::MIN, f32::MAX);
        if BITS == 8 {
            out.iter_mut().zip(codes).for_each(|(o, &c)| *o = value(c));
        } else {
            let (runs, rest) = out.as_chunks_mut::<16>();
            let (bytes, last) = codes.split_at(8 * runs.len());
            for (run, bytes) in runs.iter_mut().zip(bytes.as_chunks::<8>().0) {
                let pairs = bytes.map(|b| ((u16::from(b) | u16::from(b) << 4) & 0x0f0f).to_le());
                let sixteen: [u8; 16] = bytemuck::cast(pairs);
                run.iter_mut().zip(sixteen).for_each(|(o, c)| *o = value(c));
            }
            for (p, &c) in rest.chunks_mut(2).zip(last) {
                p[0] = value(c & 15);
                p.iter_mut().skip(1).for_each(|o| *o = value(c >> 4));
            }
        }
    }
}
