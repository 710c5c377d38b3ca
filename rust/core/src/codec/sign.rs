//! One bit per value, and the mean of |x| per block: EF-signSGD (arXiv 1901.09847). It needs error
//! feedback, which is what makes it converge.

use super::block::{BlockCodec, INFINITE, largest};

/// Signs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sign;

impl BlockCodec for Sign {
    #[inline(always)]
    fn size(&self, n: usize) -> usize {
        4 + n.div_ceil(8)
    }

    #[inline(always)]
    fn encode(&self, x: &[f32], out: &mut [u8]) {
        let (head, bits) = out.split_at_mut(4);
        let mut sums = [0f64; 8];
        let chunks = x.chunks_exact(8);
        chunks.remainder().iter().for_each(|v| sums[0] += f64::from(v.abs()));
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
        for (byte, eight) in bits.iter_mut().zip(x.chunks(8)) {
            *byte = (0..).zip(eight).fold(0, |b, (k, v)| b | ((v.to_bits() >> 31) << k) as u8);
        }
    }

    #[inline(always)]
    fn decode(&self, code: &[u8], out: &mut [f32]) {
        let (head, bits) = code.split_at(4);
        let scale = u32::from_le_bytes([head[0], head[1], head[2], head[3]]);
        for (&byte, eight) in bits.iter().zip(out.chunks_mut(8)) {
            for (k, o) in (0..).zip(eight) {
                *o = f32::from_bits(scale ^ ((u32::from(byte) >> k & 1) << 31));
            }
        }
    }
}
