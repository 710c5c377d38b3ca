//! Two bytes per value: bfloat16 and IEEE half, rounded to nearest even. What is not finite stays
//! so; in `f16` what exceeds 65504 becomes infinite.

use half::{bf16, f16};

use super::block::BlockCodec;
use crate::float16;

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
            o.copy_from_slice(&float16::f32_to_bf16(*v).to_le_bytes());
        }
    }

    #[inline(always)]
    fn decode(&self, code: &[u8], out: &mut [f32]) {
        for (o, c) in out.iter_mut().zip(code.chunks_exact(2)) {
            *o = float16::bf16_to_f32(bf16::from_le_bytes([c[0], c[1]]));
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
        for (o, v) in out.chunks_exact_mut(2).zip(x) {
            o.copy_from_slice(&float16::f32_to_f16(*v).to_le_bytes());
        }
    }

    #[inline(always)]
    fn decode(&self, code: &[u8], out: &mut [f32]) {
        for (o, c) in out.iter_mut().zip(code.chunks_exact(2)) {
            *o = float16::f16_to_f32(f16::from_le_bytes([c[0], c[1]]));
        }
    }
}
