//! Sixteen-bit floats to `f32` and back, rounded to nearest even, in arithmetic that vectorises.
//!
//! The conversions of the `half` crate give the same bits, but choose their instructions per call and
//! slice; these are inlined into the loops that use them and compiled for each instruction set with
//! them. No intermediate is a subnormal `f32`, so they are right in threads that flush those to zero.

use half::{bf16, f16};

/// The value of a bfloat16.
#[inline(always)]
pub fn bf16_to_f32(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// The bfloat16 nearest to `x`; NaN stays NaN.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // A NaN whose payload lies in the dropped half must not become an infinity.
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded } as u16)
}

/// The difference of the exponents' biases, 127 - 15, in the place of an `f32`'s exponent.
const BIAS: u32 = 112 << 23;

/// The value of an IEEE half.
#[inline(always)]
pub fn f16_to_f32(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let shifted = (bits & 0x7fff) << 13;
    let normal = shifted + BIAS;
    // Of a subnormal, 2^-14 (1 + m) - 2^-14, which is exact.
    let subnormal = (f32::from_bits(normal + (1 << 23)) - f32::from_bits(BIAS + (1 << 23))).to_bits();
    let value = match shifted >> 23 {
        0 => subnormal,
        31 => normal + BIAS,
        _ => normal,
    };
    f32::from_bits(value | (bits & 0x8000) << 16)
}

/// The IEEE half nearest to `x`: infinite from 65520 on; NaN stays NaN.
#[inline(always)]
pub fn f32_to_f16(x: f32) -> f16 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let odd = magnitude >> 13 & 1;
    let normal = magnitude.wrapping_sub(BIAS).wrapping_add(0xfff + odd) >> 13;
    // Adding a half leaves the ten bits of a subnormal's fraction at the end, rounded by the addition.
    let half = 0.5f32.to_bits();
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(half);
    let nan = 0x7e00 | magnitude >> 13 & 0x3ff;
    let short = if magnitude > 0x7f80_0000 {
        nan
    } else if magnitude >= 0x4780_0000 {
        0x7c00
    } else if magnitude < BIAS + (1 << 23) {
        subnormal
    } else {
        normal
    };
    f16::from_bits((short | bits >> 16 & 0x8000) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_short_float_widens_as_the_library_says() {
        for bits in 0..=u16::MAX {
            let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert!(f16_to_f32(h).to_bits() == h.to_f32().to_bits() || h.is_nan() && f16_to_f32(h).is_nan());
            assert!(
                bf16_to_f32(b).to_bits() == b.to_f32().to_bits() || b.is_nan() && bf16_to_f32(b).is_nan()
            );
        }
    }

    #[test]
    fn floats_round_as_the_library_says() {
        let same = |x: f32| {
            let (h, b) = (f32_to_f16(x), f32_to_bf16(x));
            assert!(h == f16::from_f32(x) || x.is_nan() && h.is_nan(), "{x:e} {h:?}");
            assert!(b == bf16::from_f32(x) || x.is_nan() && b.is_nan(), "{x:e} {b:?}");
        };
        // Every half, the middles between neighbours, and a bit to either side of those.
        for bits in (0..=u16::MAX).step_by(if cfg!(miri) { 1009 } else { 1 }) {
            let x = f16::from_bits(bits).to_f32();
            let next = f16::from_bits(bits.wrapping_add(1)).to_f32();
            let middle = ((f64::from(x) + f64::from(next)) / 2.0) as f32;
            for near in [x, middle, 65520.0, 65519.99] {
                (-1i32..=1).for_each(|by| same(f32::from_bits(near.to_bits().wrapping_add_signed(by))));
            }
        }
        let mut state = 7u32;
        for _ in 0..if cfg!(miri) { 1000 } else { 1_000_000 } {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            same(f32::from_bits(state));
        }
    }
}
