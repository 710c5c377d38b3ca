//! Some values drawn at random: one from each of k equal stretches, so that indices need not be
//! sent. Values are not scaled up: with error feedback what is not drawn is kept.

use super::sparse::{Left, choose, count, scatter, spoil};
use super::{Codec, Keep, Target, Values};

/// A fraction of the values.
#[derive(Clone, Copy, Debug)]
pub struct RandomK {
    /// Above 0, up to 1.
    pub fraction: f64,
}

/// Seed and poison.
const HEADER: usize = 12;

/// The `i`-th of `k` indices below `n` (splitmix64 as a hash).
fn index(seed: u64, i: usize, k: usize, n: usize) -> usize {
    let mut z = seed.wrapping_add((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    let at = |i: usize| (i as u128 * n as u128 / k as u128) as usize;
    let (start, end) = (at(i), at(i + 1));
    start + (((z >> 32) * (end - start) as u64) >> 32) as usize
}

impl Codec for RandomK {
    fn size(&self, n: usize) -> usize {
        if n == 0 { 0 } else { HEADER + 4 * count(self.fraction, n) }
    }

    fn encode(&self, src: Values<'_>, keep: Keep<'_>, seed: u64, out: &mut [u8]) {
        let n = src.len();
        if n == 0 {
            return;
        }
        let k = count(self.fraction, n);
        choose(src, keep, |x, take| {
            // Values that are not drawn are not seen by the receivers; that they are broken must be.
            let sound = x.iter().all(|v| v.is_finite());
            let poison = if sound { 0.0 } else { f32::NAN };
            let (head, values) = out.split_at_mut(HEADER);
            head[..8].copy_from_slice(&seed.to_le_bytes());
            head[8..].copy_from_slice(&poison.to_le_bytes());
            for (i, v) in values.chunks_exact_mut(4).enumerate() {
                let at = index(seed, i, k, n);
                v.copy_from_slice(&x[at].to_le_bytes());
                take(at, x[at]);
            }
            if sound { Left::Finite } else { Left::Broken }
        });
    }

    fn decode(&self, code: &[u8], out: Target<'_>) -> Result<(), String> {
        let n = out.len();
        let Some((head, values)) = code.split_first_chunk::<HEADER>() else { return Ok(()) };
        let [seed @ .., p0, p1, p2, p3] = *head;
        let poison = f32::from_le_bytes([p0, p1, p2, p3]);
        if poison != 0.0 {
            spoil(out);
            return Ok(());
        }
        let (seed, k) = (u64::from_le_bytes(seed), values.len() / 4);
        let pairs = values.chunks_exact(4).enumerate();
        scatter(
            pairs.map(|(i, v)| (index(seed, i, k, n), f32::from_le_bytes([v[0], v[1], v[2], v[3]]))),
            out,
        );
        Ok(())
    }
}
