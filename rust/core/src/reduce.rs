//! The arithmetic: fold several sources into one destination, in the order given.
//!
//! `out[i] = finish(srcs[0][i] op srcs[1][i] op ...)`, left to right. The order is part of the
//! result for floats, so callers pass sources in rank order (invariant NUM-4). Sixteen-bit floats
//! are widened, accumulated in `f32` and rounded once (invariant NUM-3).
//!
//! The loops are plain and vectorise; `pulp` compiles each for the instruction sets that matter
//! and picks one at run time.

use bytemuck::{AnyBitPattern, NoUninit};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};

/// Folds `srcs` into `out`, element by element, left to right.
///
/// All slices have the same length in bytes, a multiple of the element size, and are aligned for
/// the element. `divide_by` is used by [`ReduceOp::Avg`] only: pass the number of ranks where the
/// result is final, `None` where it is partial.
///
/// # Errors
///
/// [`Error::Misuse`] when a slice is misaligned or lengths differ.
pub fn fold(
    dtype: DType,
    op: ReduceOp,
    divide_by: Option<u32>,
    srcs: &[&[u8]],
    out: &mut [u8],
) -> Result<()> {
    if srcs.iter().any(|s| s.len() != out.len()) {
        return Err(Error::misuse("reduce: sources and destination differ in length"));
    }
    let divide_by = divide_by.filter(|_| op == ReduceOp::Avg);
    if let ([only], None) = (srcs, divide_by) {
        out.copy_from_slice(only);
        return Ok(());
    }
    match dtype {
        DType::F32 => {
            let n = divide_by.map(|n| n as f32);
            fold_float::<f32>(op, n, srcs, out)
        }
        DType::F64 => {
            let n = divide_by.map(f64::from);
            fold_float::<f64>(op, n, srcs, out)
        }
        DType::F16 => fold_half::<f16>(op, divide_by, srcs, out),
        DType::BF16 => fold_half::<bf16>(op, divide_by, srcs, out),
        DType::I8 => fold_int::<i8>(op, srcs, out),
        DType::U8 | DType::Bool => fold_int::<u8>(op, srcs, out),
        DType::I32 => fold_int::<i32>(op, srcs, out),
        DType::I64 => fold_int::<i64>(op, srcs, out),
    }
}

/// Views bytes as elements, or says that they are misaligned.
fn cast<T: AnyBitPattern>(bytes: &[u8]) -> Result<&[T]> {
    bytemuck::try_cast_slice(bytes).map_err(|e| Error::misuse(format!("reduce: {e}")))
}

fn cast_mut<T: AnyBitPattern + NoUninit>(bytes: &mut [u8]) -> Result<&mut [T]> {
    bytemuck::try_cast_slice_mut(bytes).map_err(|e| Error::misuse(format!("reduce: {e}")))
}

/// Two, three and four sources take one pass with no intermediate; more accumulate in `out`.
fn fold_with<T, F>(srcs: &[&[u8]], out: &mut [u8], f: F) -> Result<()>
where
    T: AnyBitPattern + NoUninit,
    F: Fn(T, T) -> T + Copy,
{
    let out = cast_mut::<T>(out)?;
    let arch = pulp::Arch::new();
    match srcs {
        [] => {}
        [a] => out.copy_from_slice(cast(a)?),
        [a, b] => {
            let (a, b) = (cast::<T>(a)?, cast::<T>(b)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
                        *o = f(a, b);
                    }
                },
            );
        }
        [a, b, c] => {
            let (a, b, c) = (cast::<T>(a)?, cast::<T>(b)?, cast::<T>(c)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    for (((o, &a), &b), &c) in out.iter_mut().zip(a).zip(b).zip(c) {
                        *o = f(f(a, b), c);
                    }
                },
            );
        }
        [a, b, c, d, rest @ ..] => {
            let (a, b, c, d) = (cast::<T>(a)?, cast::<T>(b)?, cast::<T>(c)?, cast::<T>(d)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    for ((((o, &a), &b), &c), &d) in out.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                        *o = f(f(f(a, b), c), d);
                    }
                },
            );
            for more in rest {
                let more = cast::<T>(more)?;
                arch.dispatch(
                    #[inline(always)]
                    || {
                        for (o, &m) in out.iter_mut().zip(more) {
                            *o = f(*o, m);
                        }
                    },
                );
            }
        }
    }
    Ok(())
}

/// Folds all of `ends`, left to right, and leaves the result in each of them.
///
/// What an AllReduce inside a host does with the same slice of everybody's memory: up to four ends take one
/// pass in which the result goes from a register to each.
///
/// # Errors
///
/// As [`fold`].
pub fn fold_into_all(
    dtype: DType,
    op: ReduceOp,
    divide_by: Option<u32>,
    ends: &mut [&mut [u8]],
) -> Result<()> {
    let len = ends.first().map_or(0, |end| end.len());
    if ends.iter().any(|end| end.len() != len) {
        return Err(Error::misuse("reduce: sources and destinations differ in length"));
    }
    let mean = divide_by.filter(|_| op == ReduceOp::Avg);
    if let (DType::F32, ReduceOp::Sum | ReduceOp::Avg, 2..=4) = (dtype, op, ends.len()) {
        return match mean {
            Some(n) => sum_into_all(ends, |x| x / n as f32),
            None => sum_into_all(ends, |x| x),
        };
    }
    let mut block = [0u64; ALL_BLOCK / 8];
    let mut at = 0;
    while at < len {
        let n = ALL_BLOCK.min(len - at);
        let out = &mut bytemuck::cast_slice_mut(&mut block)[..n];
        let mut few: [&[u8]; 8] = [&[]; 8];
        if ends.len() <= few.len() {
            few.iter_mut().zip(&*ends).for_each(|(few, end)| *few = &end[at..at + n]);
            fold(dtype, op, divide_by, &few[..ends.len()], out)?;
        } else {
            let many: Vec<&[u8]> = ends.iter().map(|end| &end[at..at + n]).collect();
            fold(dtype, op, divide_by, &many, out)?;
        }
        ends.iter_mut().for_each(|end| end[at..at + n].copy_from_slice(out));
        at += n;
    }
    Ok(())
}

/// Bytes that [`fold_into_all`] folds at a time where it has no pass of its own.
const ALL_BLOCK: usize = 8 << 10;

/// The sum of two to four ends, finished, into each of them.
fn sum_into_all(ends: &mut [&mut [u8]], finish: impl Fn(f32) -> f32 + Copy) -> Result<()> {
    let arch = pulp::Arch::new();
    match ends {
        [a, b] => {
            let (a, b) = (cast_mut::<f32>(a)?, cast_mut::<f32>(b)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    for (a, b) in a.iter_mut().zip(b) {
                        let sum = finish(*a + *b);
                        (*a, *b) = (sum, sum);
                    }
                },
            );
        }
        [a, b, c] => {
            let (a, b, c) = (cast_mut::<f32>(a)?, cast_mut::<f32>(b)?, cast_mut::<f32>(c)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    for ((a, b), c) in a.iter_mut().zip(b).zip(c) {
                        let sum = finish(*a + *b + *c);
                        (*a, *b, *c) = (sum, sum, sum);
                    }
                },
            );
        }
        [a, b, c, d] => {
            let (a, b) = (cast_mut::<f32>(a)?, cast_mut::<f32>(b)?);
            let (c, d) = (cast_mut::<f32>(c)?, cast_mut::<f32>(d)?);
            arch.dispatch(
                #[inline(always)]
                || {
                    for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
                        let sum = finish(*a + *b + *c + *d);
                        (*a, *b, *c, *d) = (sum, sum, sum, sum);
                    }
                },
            );
        }
        _ => {}
    }
    Ok(())
}

/// What the folds need of `f32` and `f64`; one bound instead of five.
trait Float:
    AnyBitPattern
    + NoUninit
    + PartialOrd
    + std::ops::Add<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
{
}
impl Float for f32 {}
impl Float for f64 {}

/// Minimum that keeps a NaN from either side, as torch does.
#[allow(clippy::eq_op)] // x != x is NaN, for any float type
fn nan_min<T: PartialOrd + Copy>(a: T, b: T) -> T {
    if b < a || b != b { b } else { a }
}

/// Maximum that keeps a NaN from either side, as torch does.
#[allow(clippy::eq_op)] // x != x is NaN, for any float type
fn nan_max<T: PartialOrd + Copy>(a: T, b: T) -> T {
    if b > a || b != b { b } else { a }
}

fn fold_float<T: Float>(op: ReduceOp, divide_by: Option<T>, srcs: &[&[u8]], out: &mut [u8]) -> Result<()> {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => fold_with::<T, _>(srcs, out, |a, b| a + b)?,
        ReduceOp::Prod => fold_with::<T, _>(srcs, out, |a, b| a * b)?,
        ReduceOp::Min => fold_with::<T, _>(srcs, out, nan_min)?,
        ReduceOp::Max => fold_with::<T, _>(srcs, out, nan_max)?,
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => op.check(DType::F32)?,
    }
    if let Some(n) = divide_by {
        let out = cast_mut::<T>(out)?;
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for o in out.iter_mut() {
                    *o = *o / n;
                }
            },
        );
    }
    Ok(())
}

/// What the integer folds need of each type.
trait Int:
    AnyBitPattern
    + NoUninit
    + Ord
    + std::ops::BitAnd<Output = Self>
    + std::ops::BitOr<Output = Self>
    + std::ops::BitXor<Output = Self>
{
    fn wrapping_sum(self, other: Self) -> Self;
    fn wrapping_prod(self, other: Self) -> Self;
}

macro_rules! int {
    ($($t:ty),*) => {$(
        impl Int for $t {
            #[inline(always)]
            fn wrapping_sum(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn wrapping_prod(self, other: Self) -> Self { self.wrapping_mul(other) }
        }
    )*};
}
int!(i8, u8, i32, i64);

fn fold_int<T: Int>(op: ReduceOp, srcs: &[&[u8]], out: &mut [u8]) -> Result<()> {
    match op {
        ReduceOp::Sum => fold_with::<T, _>(srcs, out, T::wrapping_sum),
        ReduceOp::Prod => fold_with::<T, _>(srcs, out, T::wrapping_prod),
        ReduceOp::Min => fold_with::<T, _>(srcs, out, Ord::min),
        ReduceOp::Max => fold_with::<T, _>(srcs, out, Ord::max),
        ReduceOp::Band => fold_with::<T, _>(srcs, out, |a, b| a & b),
        ReduceOp::Bor => fold_with::<T, _>(srcs, out, |a, b| a | b),
        ReduceOp::Bxor => fold_with::<T, _>(srcs, out, |a, b| a ^ b),
        ReduceOp::Avg => op.check(DType::I32),
    }
}

/// Elements widened at a time: small enough that both `f32` blocks stay in the first-level cache.
const HALF_BLOCK: usize = 512;

fn fold_half<T>(op: ReduceOp, divide_by: Option<u32>, srcs: &[&[u8]], out: &mut [u8]) -> Result<()>
where
    T: AnyBitPattern + NoUninit,
    [T]: HalfFloatSliceExt,
{
    let f: fn(&mut [f32], &[f32]) = match op {
        ReduceOp::Sum | ReduceOp::Avg => |a, b| accumulate(a, b, |x, y| x + y),
        ReduceOp::Prod => |a, b| accumulate(a, b, |x, y| x * y),
        ReduceOp::Min => |a, b| accumulate(a, b, nan_min),
        ReduceOp::Max => |a, b| accumulate(a, b, nan_max),
        ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => return op.check(DType::F16),
    };
    let out = cast_mut::<T>(out)?;
    let (mut acc, mut next) = ([0f32; HALF_BLOCK], [0f32; HALF_BLOCK]);
    for (k, out) in out.chunks_mut(HALF_BLOCK).enumerate() {
        let (from, n) = (k * HALF_BLOCK, out.len());
        let (acc, next) = (&mut acc[..n], &mut next[..n]);
        for (i, src) in srcs.iter().enumerate() {
            let src = &cast::<T>(src)?[from..from + n];
            if i == 0 {
                src.convert_to_f32_slice(acc);
            } else {
                src.convert_to_f32_slice(next);
                f(acc, next);
            }
        }
        if let Some(n) = divide_by {
            acc.iter_mut().for_each(|a| *a /= n as f32);
        }
        out.convert_from_f32_slice(acc);
    }
    Ok(())
}

fn accumulate(acc: &mut [f32], next: &[f32], f: impl Fn(f32, f32) -> f32 + Copy) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for (a, &b) in acc.iter_mut().zip(next) {
                *a = f(*a, b);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T: AnyBitPattern + NoUninit>(
        dtype: DType,
        op: ReduceOp,
        n: Option<u32>,
        srcs: &[Vec<T>],
    ) -> Vec<T> {
        let bytes: Vec<&[u8]> = srcs.iter().map(|s| bytemuck::cast_slice(s)).collect();
        let mut out = srcs[0].clone();
        fold(dtype, op, n, &bytes, bytemuck::cast_slice_mut(&mut out)).unwrap();
        out
    }

    #[test]
    fn sums_go_left_to_right() {
        for k in 1..=9usize {
            let srcs: Vec<Vec<f32>> =
                (0..k).map(|r| (0..77).map(|i| 0.1 + (r * 77 + i) as f32 * 1.7).collect()).collect();
            let want: Vec<f32> =
                (0..77).map(|i| srcs[1..].iter().fold(srcs[0][i], |a, s| a + s[i])).collect();
            assert_eq!(run(DType::F32, ReduceOp::Sum, None, &srcs), want);
            let avg: Vec<f32> = want.iter().map(|x| x / k as f32).collect();
            assert_eq!(run(DType::F32, ReduceOp::Avg, Some(k as u32), &srcs), avg);
        }
    }

    #[test]
    fn halves_accumulate_in_f32() {
        // 2048 + 1 is 2048 in f16; four ones must not be lost one by one.
        let one = f16::from_f32(1.0);
        let srcs = vec![vec![f16::from_f32(2048.0)], vec![one], vec![one], vec![one], vec![one]];
        let got = run(DType::F16, ReduceOp::Sum, None, &srcs);
        assert_eq!(got[0].to_f32(), 2052.0);
    }

    #[test]
    fn nan_is_never_lost() {
        for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod] {
            for place in 0..3 {
                let mut srcs = vec![vec![1f32], vec![2.0], vec![3.0]];
                srcs[place][0] = f32::NAN;
                assert!(run(DType::F32, op, None, &srcs)[0].is_nan(), "{op:?} {place}");
            }
        }
    }

    #[test]
    fn integers_wrap_and_mask() {
        let srcs = vec![vec![127i8, 0b1100], vec![1, 0b1010]];
        assert_eq!(run(DType::I8, ReduceOp::Sum, None, &srcs), vec![-128, 22]);
        assert_eq!(run(DType::I8, ReduceOp::Band, None, &srcs)[1], 0b1000);
        assert_eq!(run(DType::I8, ReduceOp::Bxor, None, &srcs)[1], 0b0110);
        assert_eq!(run(DType::I8, ReduceOp::Max, None, &srcs), vec![127, 12]);
    }

    #[test]
    fn misaligned_bytes_are_an_error() {
        let buf = [0u64; 4];
        let bytes: &[u8] = bytemuck::cast_slice(&buf);
        let mut out = [0u64; 1];
        let out = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut out)[..4];
        let r = fold(DType::F32, ReduceOp::Sum, None, &[&bytes[1..5], &bytes[4..8]], out);
        assert!(matches!(r, Err(Error::Misuse(_))));
    }
}
