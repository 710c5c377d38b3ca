//! Two bytes per value: bfloat16 and IEEE half, rounded to nearest even. What is not finite stays
//! so; in `f16` what exceeds 65504 becomes infinite.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::block::{BlockCodec, MAX};

/// bfloat16: the range of `f32`, 8 bits of precision.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bf16;

/// IEEE half: 11 bits of precision, up to 65504.
#[derive(Clone, Copy, Debug, Default)]
pub struct F16;

impl BlockCodec for Bf16 {
    #[inline(always)]
    fn size(&self, n: usize) -> usize {
        2 * n
    }

    #[inline(always)]
    fn encode(&self, x: &[f32], out: &mut [u8]) {
        for (o, v) in out.chunks_exact_mut(2).zip(x) {
            let bits = v.to_bits();
            let rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            // A NaN whose payload lies in the dropped half must not become an infinity.
            let quiet = bits >> 16 | 0x40;
            let short = if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded };
            o.copy_from_slice(&(short as u16).to_le_bytes());
        }
    }

    #[inline(always)]
    fn decode(&self, code: &[u8], out: &mut [f32]) {
        for (o, c) in out.iter_mut().zip(code.chunks_exact(2)) {
            *o = f32::from_bits(u32::from(u16::from_le_bytes([c[0], c[1]])) << 16);
        }
    }
}

impl BlockCodec for F16 {
    #[inline(always)]
    fn size(&self, n: usize) -> usize {
        2 * n
    }

    #[inline(always)]
    fn encode(&self, x: &[f32], out: &mut [u8]) {
        let mut short = [f16::ZERO; MAX];
        let short = &mut short[..x.len()];
        short.convert_from_f32_slice(x);
        for (o, s) in out.chunks_exact_mut(2).zip(short) {
            o.copy_from_slice(&s.to_le_bytes());
        }
    }

    #[inline(always)]
    fn decode(&self, code: &[u8], out: &mut [f32]) {
        let mut short = [f16::ZERO; MAX];
        let short = &mut short[..out.len()];
        for (s, c) in short.iter_mut().zip(code.chunks_exact(2)) {
            *s = f16::from_le_bytes([c[0], c[1]]);
        }
        short.convert_to_f32_slice(out);
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn bf16_rounds_as_the_library_does() {
        let mut state = 7u32;
        for _ in 0..100_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(state);
            let mut code = [0; 2];
            Bf16.encode(&[x], &mut code);
            let (ours, theirs) = (u16::from_le_bytes(code), bf16::from_f32(x));
            assert!(ours == theirs.to_bits() || x.is_nan() && bf16::from_bits(ours).is_nan(), "{x}");
        }
    }
}
