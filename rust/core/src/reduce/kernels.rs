//! The loops: several sources, one pass.
//!
//! They are plain and vectorise; `pulp` compiles each for the instruction sets that matter and picks
//! one at run time. Two, three and four sources take one pass with no intermediate; more accumulate
//! in a block that stays in the first-level cache.
// `let finish = finish` in a closure is a copy of what it has captured.
#![allow(clippy::redundant_locals)]

use bytemuck::{AnyBitPattern, NoUninit};
use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use super::halves;
use crate::error::{Error, Result};
use crate::float16;

/// An element, and what it is summed in: sixteen-bit floats are widened and rounded once (NUM-3).
pub(super) trait Element: AnyBitPattern + NoUninit {
    type Wide: Copy + Default;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;

    /// [`fold`], by instructions of this element's own where there are any.
    fn fold<F, G>(srcs: &[&[u8]], out: &mut [u8], f: F, finish: G) -> Result<()>
    where
        F: Fn(Self::Wide, Self::Wide) -> Self::Wide + Copy,
        G: Fn(Self::Wide) -> Self::Wide + Copy,
    {
        fold::<Self, F, G>(srcs, out, f, finish)
    }

    /// [`fold_into_all`], by instructions of this element's own where there are any.
    fn fold_into_all<F, G>(ends: &mut [&mut [u8]], f: F, finish: G) -> Result<()>
    where
        F: Fn(Self::Wide, Self::Wide) -> Self::Wide + Copy,
        G: Fn(Self::Wide) -> Self::Wide + Copy,
    {
        fold_into_all::<Self, F, G>(ends, f, finish)
    }
}

macro_rules! own_width {
    ($($t:ty),*) => {$(
        impl Element for $t {
            type Wide = $t;
            #[inline(always)]
            fn widen(self) -> $t { self }
            #[inline(always)]
            fn narrow(wide: $t) -> $t { wide }
        }
    )*};
}
own_width!(f32, f64, i8, u8, i16, i32, i64);

impl Element for bf16 {
    type Wide = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        float16::bf16_to_f32(self)
    }
    #[inline(always)]
    fn narrow(wide: f32) -> bf16 {
        float16::f32_to_bf16(wide)
    }
}

impl Element for f16 {
    type Wide = f32;
    #[inline(always)]
    fn widen(self) -> f32 {
        float16::f16_to_f32(self)
    }
    #[inline(always)]
    fn narrow(wide: f32) -> f16 {
        float16::f32_to_f16(wide)
    }

    #[cfg(target_arch = "x86_64")]
    fn fold<F, G>(srcs: &[&[u8]], out: &mut [u8], f: F, finish: G) -> Result<()>
    where
        F: Fn(f32, f32) -> f32 + Copy,
        G: Fn(f32) -> f32 + Copy,
    {
        let pulp::Arch::V4(simd) = crate::vector::unit() else {
            return match one_pass_of_halves(srcs.len()) {
                true => fold::<f16, F, G>(srcs, out, f, finish),
                false => fold_in_blocks::<f16, F, G>(srcs, out, f, finish),
            };
        };
        let out = cast_mut::<f16>(out)?;
        match srcs {
            [a, b] => halves::fold(simd, [cast(a)?, cast(b)?], out, f, finish),
            [a, b, c] => halves::fold(simd, [cast(a)?, cast(b)?, cast(c)?], out, f, finish),
            [a, b, c, d] => {
                halves::fold(simd, [cast(a)?, cast(b)?, cast(c)?, cast(d)?], out, f, finish);
            }
            _ => {
                let mut wide = [0f32; BLOCK];
                for (k, out) in out.chunks_mut(BLOCK).enumerate() {
                    let wide = &mut wide[..out.len()];
                    for (i, src) in srcs.iter().enumerate() {
                        let src = &cast::<f16>(src)?[k * BLOCK..][..out.len()];
                        halves::accumulate(simd, wide, src, i == 0, f);
                    }
                    halves::round(simd, wide, out, finish);
                }
            }
        }
        Ok(())
    }

    #[cfg(target_arch = "x86_64")]
    fn fold_into_all<F, G>(ends: &mut [&mut [u8]], f: F, finish: G) -> Result<()>
    where
        F: Fn(f32, f32) -> f32 + Copy,
        G: Fn(f32) -> f32 + Copy,
    {
        let pulp::Arch::V4(simd) = crate::vector::unit() else {
            return fold_into_all::<f16, F, G>(ends, f, finish);
        };
        match ends {
            [a, b] => halves::fold_into_all(simd, [cast_mut(a)?, cast_mut(b)?], f, finish),
            [a, b, c] => {
                halves::fold_into_all(simd, [cast_mut(a)?, cast_mut(b)?, cast_mut(c)?], f, finish);
            }
            [a, b, c, d] => {
                let ends = [cast_mut(a)?, cast_mut(b)?, cast_mut(c)?, cast_mut(d)?];
                halves::fold_into_all(simd, ends, f, finish);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Elements that are accumulated at a time where there is no pass for so many sources.
const BLOCK: usize = 512;

/// Whether one pass over so many sources of halves is the fastest. Without AVX-512's conversions it is so for two: the
/// compiler does not vectorise the portable conversions of more in one loop.
pub(super) fn one_pass_of_halves(sources: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    if matches!(crate::vector::unit(), pulp::Arch::V4(_)) {
        return true;
    }
    sources <= 2
}

/// Views bytes as elements, or says that they are misaligned.
fn cast<T: AnyBitPattern>(bytes: &[u8]) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(|e| Error::misuse(format!("reduce: {e}")))
}

fn cast_mut<T: AnyBitPattern + NoUninit>(bytes: &mut [u8]) -> Result<&mut [T]> {
    bytemuck::try_cast_slice_mut(bytes).map_err(|e| Error::misuse(format!("reduce: {e}")))
}

/// `out = finish(f(f(srcs[0], srcs[1]), ...))`, element by element.
pub(super) fn fold<T, F, G>(srcs: &[&[u8]], out: &mut [u8], f: F, finish: G) -> Result<()>
where
    T: Element,
    F: Fn(T::Wide, T::Wide) -> T::Wide + Copy,
    G: Fn(T::Wide) -> T::Wide + Copy,
{
    let out = cast_mut::<T>(out)?;
    let arch = crate::vector::unit();
    match srcs {
        [a, b] => {
            let (a, b) = (cast::<T>(a)?, cast::<T>(b)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    // A copy of its own: behind a reference, what it divides by might be what the loop writes, and the
                    // loop would not vectorise.
                    let finish = finish;
                    for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
                        *o = T::narrow(finish(f(a.widen(), b.widen())));
                    }
                },
            );
        }
        [a, b, c] => {
            let (a, b, c) = (cast::<T>(a)?, cast::<T>(b)?, cast::<T>(c)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    let finish = finish;
                    for (((o, &a), &b), &c) in out.iter_mut().zip(a).zip(b).zip(c) {
                        *o = T::narrow(finish(f(f(a.widen(), b.widen()), c.widen())));
                    }
                },
            );
        }
        [a, b, c, d] => {
            let (a, b, c, d) = (cast::<T>(a)?, cast::<T>(b)?, cast::<T>(c)?, cast::<T>(d)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    let finish = finish;
                    for ((((o, &a), &b), &c), &d) in out.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                        *o = T::narrow(finish(f(f(f(a.widen(), b.widen()), c.widen()), d.widen())));
                    }
                },
            );
        }
        _ => return fold_in_blocks::<T, F, G>(srcs, bytemuck::cast_slice_mut(out), f, finish),
    }
    Ok(())
}

/// As [`fold`], of any number of sources, accumulated in blocks that stay in the first-level cache.
fn fold_in_blocks<T, F, G>(srcs: &[&[u8]], out: &mut [u8], f: F, finish: G) -> Result<()>
where
    T: Element,
    F: Fn(T::Wide, T::Wide) -> T::Wide + Copy,
    G: Fn(T::Wide) -> T::Wide + Copy,
{
    let arch = crate::vector::unit();
    let mut wide = [T::Wide::default(); BLOCK];
    for (k, out) in cast_mut::<T>(out)?.chunks_mut(BLOCK).enumerate() {
        let wide = &mut wide[..out.len()];
        for (i, src) in srcs.iter().enumerate() {
            let src = &cast::<T>(src)?[k * BLOCK..][..out.len()];
            arch.dispatch(
                #[inline(always)]
                || match i {
                    0 => wide.iter_mut().zip(src).for_each(|(w, s)| *w = s.widen()),
                    _ => wide.iter_mut().zip(src).for_each(|(w, s)| *w = f(*w, s.widen())),
                },
            );
        }
        arch.dispatch(
            #[inline(always)]
            || {
                let finish = finish;
                out.iter_mut().zip(&*wide).for_each(|(o, &w)| *o = T::narrow(finish(w)));
            },
        );
    }
    Ok(())
}

/// As [`fold`], of two to four ends, and the result into each of them.
pub(super) fn fold_into_all<T, F, G>(ends: &mut [&mut [u8]], f: F, finish: G) -> Result<()>
where
    T: Element,
    F: Fn(T::Wide, T::Wide) -> T::Wide + Copy,
    G: Fn(T::Wide) -> T::Wide + Copy,
{
    let arch = crate::vector::unit();
    match ends {
        [a, b] => {
            let (a, b) = (cast_mut::<T>(a)?, cast_mut::<T>(b)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    let finish = finish;
                    for (a, b) in a.iter_mut().zip(b) {
                        let all = T::narrow(finish(f(a.widen(), b.widen())));
                        (*a, *b) = (all, all);
                    }
                },
            );
        }
        [a, b, c] => {
            let (a, b, c) = (cast_mut::<T>(a)?, cast_mut::<T>(b)?, cast_mut::<T>(c)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    let finish = finish;
                    for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
                        let all = T::narrow(finish(f(f(a.widen(), b.widen()), c.widen())));
                        (*a, *b, *c) = (all, all, all);
                    }
                },
            );
        }
        [a, b, c, d] => {
            let (a, b) = (cast_mut::<T>(a)?, cast_mut::<T>(b)?);
            let (c, d) = (cast_mut::<T>(c)?, cast_mut::<T>(d)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    let finish = finish;
                    for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
                        let all = T::narrow(finish(f(f(f(a.widen(), b.widen()), c.widen()), d.widen())));
                        (*a, *b, *c, *d) = (all, all, all, all);
                    }
                },
            );
        }
        _ => {}
    }
    Ok(())
}
