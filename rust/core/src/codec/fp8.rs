//! fp8, the `e4m3fn` of current accelerators, with a scale per block (OCP 8-bit floating point,
//! revision 1.0): four exponent bits keep relative precision over a range of 2^15.

use super::block::{BlockCodec, INFINITE, largest};

/// The largest number of the format.
const TOP: f32 = 448.0;
/// Blocks whose largest value is below this are zero; the reciprocal of a scale stays finite above.
const LEAST: f32 = 1e-35;
/// Bits of 2^-6, the smallest normal number.
const NORMAL: u32 = 0x3c80_0000;
/// Added to a smaller one, it leaves its code, rounded to nearest even, in the low bits.
const MAGIC: f32 = 24_576.0;

/// The table of all 256 numbers.
pub struct Fp8([f32; 256]);

impl Default for Fp8 {
    fn default() -> Self {
        let mut table = [f32::NAN; 256];
        for (code, value) in (0..=u8::MAX).zip(&mut table) {
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
            let size = match exponent {
                0 => mantissa / 512.0,
                _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
            };
            if code & 0x7f != 0x7f {
                *value = if code & 0x80 == 0 { size } else { -size };
            }
        }
        Self(table)
    }
}

impl BlockCodec for Fp8 {
    #[inline(always)]
    fn size(&self, n: usize) -> usize {
        4 + n
    }

    #[inline(always)]
    fn encode(&self, x: &[f32], out: &mut [u8]) {
        let (head, codes) = out.split_at_mut(4);
        let top = largest(x);
        let scale = if top >= INFINITE { f32::NAN } else { f32::from_bits(top) / TOP };
        if scale.is_nan() || f32::from_bits(top) < LEAST {
            head.copy_from_slice(&(if scale.is_nan() { f32::NAN } else { 0.0 }).to_le_bytes());
            return codes.fill(0);
        }
        head.copy_from_slice(&scale.to_le_bytes());
        let inverse = 1.0 / scale;
        for (c, &v) in codes.iter_mut().zip(x) {
            let bits = (v * inverse).clamp(-TOP, TOP).to_bits();
            let size = bits & 0x7fff_ffff;
            let normal = ((size + 0x7_ffff + (size >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
            let small = (f32::from_bits(size) + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits());
            let code = if size < NORMAL { small } else { normal };
            *c = (code | bits >> 24 & 0x80) as u8;
        }
    }

    #[inline(always)]
    fn decode(&self, code: &[u8], out: &mut [f32]) {
        let (head, codes) = code.split_at(4);
        let scale = f32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        for (o, &c) in out.iter_mut().zip(codes) {
            *o = (self.0[c as usize] * scale).clamp(f32::MIN, f32::MAX);
        }
    }
}
