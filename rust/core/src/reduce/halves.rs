//! Folds of IEEE halves where the processor converts them: sixteen at a time, by AVX-512's instructions.
//!
//! They round to nearest even and know subnormals whatever the thread's flush modes, as the portable
//! conversions in `float16` do, so the bits are the same (a NaN stays one). Sums are in `f32` all the same;
//! AVX-512 FP16, which would add halves, has no use here.

use half::f16;
use pulp::core_arch::x86::Avx512f;
use pulp::x86::V4;

/// Halves that are converted at a time.
const LANES: usize = 16;
type Short = [f16; LANES];
type Wide = [f32; LANES];

/// To nearest even, and no exceptions.
const NEAREST: i32 = 8;

#[inline(always)]
fn widen(avx: Avx512f, x: Short) -> Wide {
    bytemuck::cast(avx._mm512_cvtph_ps(bytemuck::cast(x)))
}

#[inline(always)]
fn narrow(avx: Avx512f, x: Wide) -> Short {
    bytemuck::cast(avx._mm512_cvtps_ph::<NEAREST>(bytemuck::cast(x)))
}

/// The part of a slice that does not fill all lanes.
#[inline(always)]
fn padded(rest: &[f16]) -> Short {
    let mut short = [f16::ZERO; LANES];
    short[..rest.len()].copy_from_slice(rest);
    short
}

/// `finish(f(f(a, b), ...))` of one run of lanes of each source.
#[inline(always)]
fn lanes<const N: usize>(
    avx: Avx512f,
    srcs: [Short; N],
    f: impl Fn(f32, f32) -> f32 + Copy,
    finish: impl Fn(f32) -> f32 + Copy,
) -> Short {
    let mut all = widen(avx, srcs[0]);
    for src in &srcs[1..] {
        let src = widen(avx, *src);
        for (a, b) in all.iter_mut().zip(src) {
            *a = f(*a, b);
        }
    }
    all.iter_mut().for_each(|a| *a = finish(*a));
    narrow(avx, all)
}

/// As `kernels::fold`, of `N` sources of the length of `out`.
pub(super) fn fold<const N: usize>(
    simd: V4,
    srcs: [&[f16]; N],
    out: &mut [f16],
    f: impl Fn(f32, f32) -> f32 + Copy,
    finish: impl Fn(f32) -> f32 + Copy,
) {
    simd.vectorize(
        #[inline(always)]
        || {
            let avx = simd.avx512f;
            let (out, last) = out.as_chunks_mut::<LANES>();
            let runs = srcs.map(|s| &s.as_chunks::<LANES>().0[..out.len()]);
            let rests = srcs.map(|s| s.as_chunks::<LANES>().1);
            for (i, out) in out.iter_mut().enumerate() {
                *out = lanes(avx, runs.map(|s| s[i]), f, finish);
            }
            if !last.is_empty() {
                last.copy_from_slice(&lanes(avx, rests.map(padded), f, finish)[..last.len()]);
            }
        },
    );
}

/// As `kernels::fold_into_all`, of `N` ends of one length.
pub(super) fn fold_into_all<const N: usize>(
    simd: V4,
    ends: [&mut [f16]; N],
    f: impl Fn(f32, f32) -> f32 + Copy,
    finish: impl Fn(f32) -> f32 + Copy,
) {
    simd.vectorize(
        #[inline(always)]
        || {
            let avx = simd.avx512f;
            let len = ends[0].len() / LANES;
            let mut ends = ends.map(|end| end.as_chunks_mut::<LANES>());
            for i in 0..len {
                let all = lanes(avx, std::array::from_fn::<_, N, _>(|k| ends[k].0[i]), f, finish);
                ends.iter_mut().for_each(|(runs, _)| runs[i] = all);
            }
            let rests = std::array::from_fn::<_, N, _>(|k| padded(ends[k].1));
            let all = lanes(avx, rests, f, finish);
            ends.iter_mut().for_each(|(_, rest)| rest.copy_from_slice(&all[..rest.len()]));
        },
    );
}

/// `wide = f(wide, src)`, or `src` where it is the first; of more sources than have a pass of their own.
pub(super) fn accumulate(
    simd: V4,
    wide: &mut [f32],
    src: &[f16],
    first: bool,
    f: impl Fn(f32, f32) -> f32 + Copy,
) {
    simd.vectorize(
        #[inline(always)]
        || {
            let put = |wide: &mut [f32], run: Wide| match first {
                true => wide.iter_mut().zip(run).for_each(|(w, s)| *w = s),
                false => wide.iter_mut().zip(run).for_each(|(w, s)| *w = f(*w, s)),
            };
            let (runs, rest) = src.as_chunks::<LANES>();
            let (wides, last) = wide.as_chunks_mut::<LANES>();
            for (wide, run) in wides.iter_mut().zip(runs) {
                put(wide, widen(simd.avx512f, *run));
            }
            put(last, widen(simd.avx512f, padded(rest)));
        },
    );
}

/// `out = finish(wide)`, rounded.
pub(super) fn round(simd: V4, wide: &[f32], out: &mut [f16], finish: impl Fn(f32) -> f32 + Copy) {
    simd.vectorize(
        #[inline(always)]
        || {
            let (wides, rest) = wide.as_chunks::<LANES>();
            let (runs, last) = out.as_chunks_mut::<LANES>();
            for (run, wide) in runs.iter_mut().zip(wides) {
                let mut wide = *wide;
                wide.iter_mut().for_each(|w| *w = finish(*w));
                *run = narrow(simd.avx512f, wide);
            }
            for (o, &w) in last.iter_mut().zip(rest) {
                *o = crate::float16::f32_to_f16(finish(w));
            }
        },
    );
}
