//! Codecs that work block by block, and what is common to them.

use super::{Codec, Keep, Target, Values};
use crate::float16;

/// The longest block, in values: two blocks of `f32` fit in the first-level cache.
pub const MAX: usize = 2048;

/// Blocks of this length have a loop of their own; int4's are of it.
pub(super) const SHORT: usize = 32;

/// So many short blocks are coded together: their headers fill the lanes of a vector.
pub(super) const TOGETHER: usize = 16;

/// A codec of one block. Both functions are `#[inline(always)]` in their implementations: they are
/// compiled for each instruction set in the loop over blocks.
pub trait BlockCodec: Send + Sync {
    /// Bytes of the code of a block of `n` values.
    fn size(&self, n: usize) -> usize;

    /// Encodes a block; `out` has [`BlockCodec::size`] bytes.
    fn encode(&self, x: &[f32], out: &mut [u8]);

    /// Decodes any bytes into numbers.
    fn decode(&self, code: &[u8], out: &mut [f32]);

    /// Encodes `TOGETHER` blocks of `SHORT` values, to the same bytes as one by one.
    #[inline(always)]
    fn encode_together(&self, x: &[f32], out: &mut [u8]) {
        let size = self.size(SHORT);
        for (x, out) in x.chunks_exact(SHORT).zip(out.chunks_exact_mut(size)) {
            self.encode(x, out);
        }
    }
}

/// The values of these blocks.
const RUN: usize = TOGETHER * SHORT;

/// [`TOGETHER`] short blocks, as one.
struct Together<'a, C>(&'a C);

impl<C: BlockCodec> BlockCodec for Together<'_, C> {
    #[inline(always)]
    fn size(&self, n: usize) -> usize {
        n / SHORT * self.0.size(SHORT)
    }

    #[inline(always)]
    fn encode(&self, x: &[f32], out: &mut [u8]) {
        self.0.encode_together(x, out);
    }

    #[inline(always)]
    fn decode(&self, code: &[u8], out: &mut [f32]) {
        let size = self.0.size(SHORT);
        for (code, out) in code.chunks_exact(size).zip(out.chunks_exact_mut(SHORT)) {
            self.0.decode(code, out);
        }
    }
}

/// A block codec over whole tensors.
pub struct Blocks<C> {
    codec: C,
    block: usize,
}

impl<C: BlockCodec> Blocks<C> {
    /// With blocks of `block` values, at most [`MAX`].
    pub fn new(codec: C, block: usize) -> Self {
        Self { codec, block: block.min(MAX) }
    }
}

impl<C: BlockCodec> Codec for Blocks<C> {
    fn size(&self, n: usize) -> usize {
        n / self.block * self.codec.size(self.block)
            + match n % self.block {
                0 => 0,
                rest => self.codec.size(rest),
            }
    }

    fn encode(&self, src: Values<'_>, keep: Keep<'_>, _seed: u64, out: &mut [u8]) {
        let (n, codec, block) = (src.len(), &self.codec, self.block);
        let step = codec.size(block).max(1);
        crate::vector::unit().dispatch(
            #[inline(always)]
            move || {
                let mut keep = keep; // moved out, so that it is inlined: see below
                if block == SHORT {
                    // The compiler knows their length, and unrolls what is done to one of them.
                    let (whole, together, mut room) = (n / RUN * RUN, Together(codec), [[0f32; RUN]; 2]);
                    let (runs, rest) = out.split_at_mut(whole / SHORT * step);
                    for (at, out) in (0..whole).step_by(RUN).zip(runs.chunks_exact_mut(TOGETHER * step)) {
                        encode_block(&together, src, &mut keep, (at, RUN), &mut room, out);
                    }
                    let mut room = [[0f32; SHORT]; 2];
                    for (at, out) in (whole..n).step_by(SHORT).zip(rest.chunks_mut(step)) {
                        encode_block(codec, src, &mut keep, (at, SHORT.min(n - at)), &mut room, out);
                    }
                    return;
                }
                let mut room = [[0f32; MAX]; 2];
                for (at, out) in (0..n).step_by(block).zip(out.chunks_mut(step)) {
                    encode_block(codec, src, &mut keep, (at, block.min(n - at)), &mut room, out);
                }
            },
        );
    }

    fn decode(&self, code: &[u8], out: Target<'_>) -> Result<(), String> {
        let (n, codec, block) = (out.len(), &self.codec, self.block);
        let step = codec.size(block).max(1);
        crate::vector::unit().dispatch(
            #[inline(always)]
            move || {
                // A closure that can be called once only has no shim around it. A shim would not be
                // inlined where it is large, and the loops be compiled for the oldest processor.
                let mut out = out;
                if block == SHORT {
                    // By runs: a block that is read again as soon as it is written waits for its writes.
                    let (whole, together, mut room) = (n / RUN * RUN, Together(codec), [0f32; RUN]);
                    let (runs, rest) = code.split_at(whole / SHORT * step);
                    for (at, code) in (0..whole).step_by(RUN).zip(runs.chunks_exact(TOGETHER * step)) {
                        decode_block(&together, code, &mut out, (at, RUN), &mut room);
                    }
                    let mut room = [0f32; SHORT];
                    for (at, code) in (whole..n).step_by(SHORT).zip(rest.chunks(step)) {
                        decode_block(codec, code, &mut out, (at, SHORT.min(n - at)), &mut room);
                    }
                    return;
                }
                let mut room = [0f32; MAX];
                for (at, code) in (0..n).step_by(block).zip(code.chunks(step)) {
                    decode_block(codec, code, &mut out, (at, block.min(n - at)), &mut room);
                }
            },
        );
        Ok(())
    }
}

/// Encodes the `len` values, at most `LEN`, from `at` on.
#[inline(always)]
fn encode_block<C: BlockCodec, const LEN: usize>(
    codec: &C,
    src: Values<'_>,
    keep: &mut Keep<'_>,
    (at, len): (usize, usize),
    room: &mut [[f32; LEN]; 2],
    out: &mut [u8],
) {
    let range = at..at + len;
    let [wide, back] = room;
    let (wide, back) = (&mut wide[..len], &mut back[..len]);
    let x: &[f32] = match (src, &*keep) {
        (Values::F32(x), Keep::Nothing | Keep::Remainder(_)) => &x[range.clone()],
        (Values::F32(x), Keep::Feedback(r)) => {
            let sums = x[range.clone()].iter().zip(&r[range.clone()]).map(|(x, r)| x + r);
            wide.iter_mut().zip(sums).for_each(|(w, sum)| *w = sum);
            wide
        }
        (_, keep) => {
            widen(src, range.clone(), wide);
            if let Keep::Feedback(r) = keep {
                wide.iter_mut().zip(&r[range.clone()]).for_each(|(w, r)| *w += r);
            }
            wide
        }
    };
    codec.encode(x, out);
    match keep {
        Keep::Nothing => {}
        Keep::Feedback(r) => {
            codec.decode(out, back);
            for ((r, x), b) in r[range].iter_mut().zip(x).zip(&*back) {
                let lost = x - b;
                *r = if lost.abs() < f32::INFINITY { lost } else { 0.0 };
            }
        }
        Keep::Remainder(r) => {
            codec.decode(out, back);
            for ((r, x), b) in r[range].iter_mut().zip(x).zip(&*back) {
                *r = x - b;
            }
        }
    }
}

/// Decodes the `len` values, at most `LEN`, from `at` on.
#[inline(always)]
fn decode_block<C: BlockCodec, const LEN: usize>(
    codec: &C,
    code: &[u8],
    out: &mut Target<'_>,
    (at, len): (usize, usize),
    room: &mut [f32; LEN],
) {
    let range = at..at + len;
    let wide = &mut room[..len];
    match out {
        Target::F32(out) => codec.decode(code, &mut out[range]),
        Target::Add(out, weight) => {
            codec.decode(code, wide);
            let weight = *weight;
            out[range].iter_mut().zip(&*wide).for_each(|(o, v)| *o += weight * v);
        }
        Target::F16(out) => {
            codec.decode(code, wide);
            out[range].iter_mut().zip(&*wide).for_each(|(o, v)| *o = float16::f32_to_f16(*v));
        }
        Target::BF16(out) => {
            codec.decode(code, wide);
            out[range].iter_mut().zip(&*wide).for_each(|(o, v)| *o = float16::f32_to_bf16(*v));
        }
    }
}

/// Part of the values as `f32`.
#[inline(always)]
pub(super) fn widen(src: Values<'_>, range: std::ops::Range<usize>, out: &mut [f32]) {
    match src {
        Values::F32(x) => out.copy_from_slice(&x[range]),
        Values::F16(x) => out.iter_mut().zip(&x[range]).for_each(|(o, &x)| *o = float16::f16_to_f32(x)),
        Values::BF16(x) => out.iter_mut().zip(&x[range]).for_each(|(o, &x)| *o = float16::bf16_to_f32(x)),
    }
}

/// The largest |x| of a block, as bits: these order as the values do, infinities and NaN on top.
#[inline(always)]
pub(super) fn largest(x: &[f32]) -> u32 {
    x.iter().fold(0, |top, v| top.max(v.to_bits() & 0x7fff_ffff))
}

/// The bits of infinity: what is at or above is not finite.
pub(super) const INFINITE: u32 = 0x7f80_0000;

#[cfg(test)]
mod tests {
    use super::super::{Keep, Target, Values, decode, encode, find};

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.013).collect()
    }

    #[test]
    fn feedback_loses_nothing_over_time() {
        for name in ["bf16", "int8", "int4", "fp8", "sign", "topk:0.1", "randomk:0.2", "chunktopk:0.1"] {
            let codec = find(name, None).unwrap();
            let x = wave(1000);
            let mut code = vec![0; codec.size(1000)];
            let (mut residual, mut decoded) = (vec![0f32; 1000], vec![0f32; 1000]);
            for round in 0..20u64 {
                let keep = Keep::Feedback(&mut residual);
                encode(&*codec, Values::F32(&x), keep, round, &mut code).unwrap();
                decode(&*codec, &code, Target::Add(&mut decoded, 1.0), 0).unwrap();
            }
            for i in 0..1000 {
                assert!((20.0 * x[i] - decoded[i] - residual[i]).abs() < 1e-3, "{name}: value {i}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_does_not_look_like_a_number_and_is_forgotten() {
        for name in ["bf16", "f16", "int8", "int4", "fp8", "sign", "topk:0.1", "randomk:0.2", "chunktopk:0.1"]
        {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let codec = find(name, None).unwrap();
                let mut x = wave(100);
                x[77] = bad;
                let mut residual = vec![0f32; 100];
                let mut code = vec![0; codec.size(100)];
                encode(&*codec, Values::F32(&x), Keep::Feedback(&mut residual), 1, &mut code).unwrap();
                let mut out = vec![0f32; 100];
                decode(&*codec, &code, Target::F32(&mut out), 0).unwrap();
                assert!(!out[77].is_finite(), "{name}: {bad} became {}", out[77]);
                assert!(residual.iter().all(|r| r.is_finite()), "{name}");
            }
        }
    }

    #[test]
    fn any_bytes_are_numbers_or_an_error() {
        for name in ["bf16", "f16", "int8", "int4", "fp8", "sign", "topk:0.1", "randomk:0.2", "chunktopk:0.1"]
        {
            let codec = find(name, None).unwrap();
            let mut state = 1u32;
            for n in [0, 1, 7, 33, 600] {
                for _ in 0..50 {
                    let code: Vec<u8> = (0..codec.size(n))
                        .map(|_| {
                            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                            (state >> 24) as u8
                        })
                        .collect();
                    let mut out = vec![0f32; n];
                    let _ = decode(&*codec, &code, Target::F32(&mut out), 0);
                }
                let mut out = vec![0f32; n];
                assert!(decode(&*codec, &vec![0; codec.size(n) + 1], Target::F32(&mut out), 0).is_err());
            }
        }
    }
}
