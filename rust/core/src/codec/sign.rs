//! One bit per value, and the mean of |x| per block: EF-signSGD (arXiv 1901.09847). It needs error
//! feedback, which is what makes it converge.

use super::block::{BlockCodec, INFINITE, largest};

/// Signs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sign;

/// Eight bits, each in a byte of its own, as one byte: the product adds up each of them, shifted to its place, in the
/// highest byte.
#[inline(always)]
fn gathered(bits: [u8; 8]) -> u8 {
    (u64::from_le_bytes(bits).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8
}

impl BlockCodec for Sign {
    #[inline(always)]
    fn size(&self, n: usize) -> usize {
        4 + n.div_ceil(8)
    }

    #[inline(always)]
    fn encode(&self, x: &[f32], out: &mut [u8]) {
        let (head, bits) = out.split_at_mut(4);
        let mut sums = [0f64; 8];
        let (chunks, rest) = x.as_chunks::<8>();
        rest.iter().for_each(|v| sums[0] += f64::from(v.abs()));
        for chunk in chunks {
            sums.iter_mut().zip(chunk).for_each(|(s, v)| *s += f64::from(v.abs()));
        }
        let scale = match largest(x) >= INFINITE {
            true => f32::NAN,
            false => (sums.iter().sum::<f64>() / x.len().max(1) as f64) as f32,
        };
        head.copy_from_slice(&scale.to_le_bytes());
        if scale.is_nan() {
            return bits.fill(0);
        }
        let (bytes, last) = bits.split_at_mut(chunks.len());
        for (byte, eight) in bytes.iter_mut().zip(chunks) {
            let mut signs = [0u8; 8];
            signs.iter_mut().zip(eight).for_each(|(sign, v)| *sign = (v.to_bits() >> 31) as u8);
            *byte = gathered(signs);
        }
        for byte in last {
            *byte = (0..).zip(rest).fold(0, |b, (k, v)| b | ((v.to_bits() >> 31) << k) as u8);
        }
    }

    #[inline(always)]
    fn decode(&self, code: &[u8], out: &mut [f32]) {
        let (head, bits) = code.split_at(4);
        let scale = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        let value = |byte: u8, k: usize| f32::from_bits(scale ^ ((u32::from(byte) >> k & 1) << 31));
        let (eights, rest) = out.as_chunks_mut::<8>();
        let (bytes, last) = bits.split_at(eights.len());
        for (&byte, eight) in bytes.iter().zip(eights) {
            *eight = std::array::from_fn(|k| value(byte, k));
        }
        for (&byte, rest) in last.iter().zip(rest.chunks_mut(8)) {
            rest.iter_mut().enumerate().for_each(|(k, o)| *o = value(byte, k));
        }
    }
}
