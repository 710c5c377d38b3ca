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
        let low = lows.iter().fold(0f32, |a, &b| a.min(b));
        let high = highs.iter().fold(0f32, |a, &b| a.max(b));
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
            let pairs = x.chunks_exact(2);
            if let (&[last], Some(c)) = (pairs.remainder(), codes.last_mut()) {
                *c = code(last);
            }
            codes.iter_mut().zip(pairs).for_each(|(c, p)| *c = code(p[0]) | code(p[1]) << 4);
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
            let mut pairs = out.chunks_exact_mut(2);
            for (p, &c) in pairs.by_ref().zip(codes) {
                p[0] = value(c & 15);
                p[1] = value(c >> 4);
            }
            if let ([last], Some(&c)) = (pairs.into_remainder(), codes.last()) {
                *last = value(c & 15);
            }
        }
    }
}
