//! The arithmetic: fold several sources into one destination, in the order given.
//!
//! `out[i] = finish(srcs[0][i] op srcs[1][i] op ...)`, left to right. The order is part of the
//! result for floats, so callers pass sources in rank order (invariant NUM-4). Sixteen-bit floats
//! are widened, accumulated in `f32` and rounded once (invariant NUM-3).

#[cfg(target_arch = "x86_64")]
mod halves;
mod kernels;

use half::{bf16, f16};

use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use kernels::Element;

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
    let mean = divide_by.filter(|_| op == ReduceOp::Avg);
    if let ([only], None) = (srcs, mean) {
        out.copy_from_slice(only);
        return Ok(());
    }
    match dtype {
        DType::F32 => fold_float::<f32>(op, mean.map(Mean::of), srcs, out),
        DType::F64 => fold_float::<f64>(op, mean.map(Mean::of), srcs, out),
        DType::F16 => fold_float::<f16>(op, mean.map(Mean::of), srcs, out),
        DType::BF16 => fold_float::<bf16>(op, mean.map(Mean::of), srcs, out),
        // A complex number is two floats, whose sums do not mix.
        DType::C64 if op.check(dtype).is_ok() => fold_float::<f32>(op, mean.map(Mean::of), srcs, out),
        DType::C128 if op.check(dtype).is_ok() => fold_float::<f64>(op, mean.map(Mean::of), srcs, out),
        DType::I8 => fold_int::<i8>(op, srcs, out),
        DType::I16 => fold_int::<i16>(op, srcs, out),
        DType::U8 => fold_int::<u8>(op, srcs, out),
        DType::Bool => match op {
            ReduceOp::Sum => fold_int::<u8>(ReduceOp::Max, srcs, out),
            ReduceOp::Prod => fold_int::<u8>(ReduceOp::Min, srcs, out),
            op => fold_int::<u8>(op, srcs, out),
        },
        DType::I32 => fold_int::<i32>(op, srcs, out),
        DType::I64 => fold_int::<i64>(op, srcs, out),
        DType::C64 | DType::C128 | DType::F8E4M3 | DType::F8E5M2 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz => {
            op.check(dtype)
        }
    }
}

/// Folds all of `ends`, left to right, and leaves the result in each of them.
///
/// What an AllReduce inside a host does with the same slice of everybody's memory: sums of up to four ends
/// take one pass in which the result goes from a register to each.
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
    if matches!(op, ReduceOp::Sum | ReduceOp::Avg) && (2..=4).contains(&ends.len()) {
        match dtype {
            DType::F32 | DType::C64 => return sum_into_all::<f32>(mean.map(Mean::of), ends),
            DType::F64 | DType::C128 => return sum_into_all::<f64>(mean.map(Mean::of), ends),
            DType::F16 if kernels::one_pass_of_halves(ends.len()) => {
                return sum_into_all::<f16>(mean.map(Mean::of), ends);
            }
            DType::BF16 => return sum_into_all::<bf16>(mean.map(Mean::of), ends),
            _ => {}
        }
    }
    let mut block = [0u64; BLOCK / 8];
    for at in (0..len).step_by(BLOCK) {
        let n = BLOCK.min(len - at);
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
    }
    Ok(())
}

/// Bytes that [`fold_into_all`] folds at a time where it has no pass of its own.
const BLOCK: usize = 8 << 10;

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

/// What the float folds need of `f32` and `f64`; one bound instead of four.
trait Float:
    Copy + PartialOrd + std::ops::Add<Output = Self> + std::ops::Mul<Output = Self> + std::ops::Div<Output = Self>
{
    fn of(n: u32) -> Self;
}
impl Float for f32 {
    fn of(n: u32) -> Self {
        n as f32
    }
}
impl Float for f64 {
    fn of(n: u32) -> Self {
        f64::from(n)
    }
}

/// How a sum becomes a mean. Divisions take several times as long as the sum; by a power of two, a product has the same
/// bits.
#[derive(Clone, Copy)]
enum Mean<W> {
    By(W),
    Times(W),
}

impl<W: Float> Mean<W> {
    fn of(n: u32) -> Self {
        if n.is_power_of_two() { Self::Times(W::of(1) / W::of(n)) } else { Self::By(W::of(n)) }
    }
}

fn fold_float<T>(op: ReduceOp, mean: Option<Mean<T::Wide>>, srcs: &[&[u8]], out: &mut [u8]) -> Result<()>
where
    T: Element,
    T::Wide: Float,
{
    match (op, mean) {
        (ReduceOp::Avg, Some(Mean::Times(r))) => T::fold(srcs, out, |a, b| a + b, |x| x * r),
        (ReduceOp::Avg, Some(Mean::By(n))) => T::fold(srcs, out, |a, b| a + b, |x| x / n),
        (ReduceOp::Sum | ReduceOp::Avg, _) => T::fold(srcs, out, |a, b| a + b, |x| x),
        (ReduceOp::Prod, _) => T::fold(srcs, out, |a, b| a * b, |x| x),
        (ReduceOp::Min, _) => T::fold(srcs, out, nan_min, |x| x),
        (ReduceOp::Max, _) => T::fold(srcs, out, nan_max, |x| x),
        (ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor, _) => op.check(DType::F32),
    }
}

fn sum_into_all<T>(mean: Option<Mean<T::Wide>>, ends: &mut [&mut [u8]]) -> Result<()>
where
    T: Element,
    T::Wide: Float,
{
    match mean {
        Some(Mean::Times(r)) => T::fold_into_all(ends, |a, b| a + b, |x| x * r),
        Some(Mean::By(n)) => T::fold_into_all(ends, |a, b| a + b, |x| x / n),
        None => T::fold_into_all(ends, |a, b| a + b, |x| x),
    }
}

/// What the integer folds need of each type.
trait Int:
    Element<Wide = Self>
    + Ord
    + Default
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
int!(i8, u8, i16, i32, i64);

fn fold_int<T: Int>(op: ReduceOp, srcs: &[&[u8]], out: &mut [u8]) -> Result<()> {
    match op {
        ReduceOp::Sum => T::fold(srcs, out, T::wrapping_sum, |x| x),
        ReduceOp::Prod => T::fold(srcs, out, T::wrapping_prod, |x| x),
        ReduceOp::Min => T::fold(srcs, out, Ord::min, |x| x),
        ReduceOp::Max => T::fold(srcs, out, Ord::max, |x| x),
        ReduceOp::Band => T::fold(srcs, out, |a, b| a & b, |x| x),
        ReduceOp::Bor => T::fold(srcs, out, |a, b| a | b, |x| x),
        ReduceOp::Bxor => T::fold(srcs, out, |a, b| a ^ b, |x| x),
        ReduceOp::Avg => op.check(DType::I32),
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::{AnyBitPattern, NoUninit};

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
    fn complex_numbers_are_pairs_and_bools_are_logical() {
        let srcs = vec![vec![1f32, -2.0, 3.0, 4.0], vec![10.0, 20.0, -30.0, 40.0]];
        assert_eq!(run(DType::C64, ReduceOp::Sum, None, &srcs), vec![11.0, 18.0, -27.0, 44.0]);
        assert_eq!(run(DType::C64, ReduceOp::Avg, Some(2), &srcs), vec![5.5, 9.0, -13.5, 22.0]);
        let srcs = vec![vec![1u8, 1, 0], vec![1, 0, 0]];
        assert_eq!(run(DType::Bool, ReduceOp::Sum, None, &srcs), vec![1, 1, 0]);
        assert_eq!(run(DType::Bool, ReduceOp::Prod, None, &srcs), vec![1, 0, 0]);
        let bytes: Vec<&[u8]> = srcs.iter().map(|s| &s[..]).collect();
        assert!(fold(DType::F8E4M3, ReduceOp::Sum, None, &bytes, &mut [0; 3]).is_err());
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes miri a long time")]
    fn into_all_is_the_same_fold() {
        for dtype in [
            DType::F32,
            DType::F64,
            DType::F16,
            DType::BF16,
            DType::I8,
            DType::I16,
            DType::I64,
            DType::C64,
            DType::C128,
        ] {
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Prod, ReduceOp::Max] {
                if op.check(dtype).is_err() {
                    continue;
                }
                for k in 1..=9usize {
                    let byte = |r: usize, i: usize| ((r * 131 + i * 37 + 11) % 61) as u8;
                    let words = |r: usize| (0..1100).map(|i| u64::from_ne_bytes([byte(r, i); 8])).collect();
                    let mut all: Vec<Vec<u64>> = (0..k).map(words).collect();
                    let mut want = all[0].clone();
                    let sources: Vec<&[u8]> = all.iter().map(|s| bytemuck::cast_slice(s)).collect();
                    fold(dtype, op, Some(k as u32), &sources, bytemuck::cast_slice_mut(&mut want)).unwrap();
                    let mut ends: Vec<&mut [u8]> =
                        all.iter_mut().map(|s| bytemuck::cast_slice_mut(s)).collect();
                    fold_into_all(dtype, op, Some(k as u32), &mut ends).unwrap();
                    assert!(all.iter().all(|end| *end == want), "{dtype:?} {op:?} of {k}");
                }
            }
        }
    }

    /// Every half with others of every kind: what the processor's conversions give is what ours give.
    #[test]
    #[cfg_attr(miri, ignore = "takes miri a long time")]
    fn halves_are_the_same_by_any_conversion() {
        fn both<F, G>(srcs: &[Vec<f16>], what: &str, f: F, finish: G)
        where
            F: Fn(f32, f32) -> f32 + Copy,
            G: Fn(f32) -> f32 + Copy,
        {
            let bytes: Vec<&[u8]> = srcs.iter().map(|s| bytemuck::cast_slice(s)).collect();
            let (mut ours, mut plain) = (srcs[0].clone(), srcs[0].clone());
            f16::fold(&bytes, bytemuck::cast_slice_mut(&mut ours), f, finish).unwrap();
            kernels::fold::<f16, F, G>(&bytes, bytemuck::cast_slice_mut(&mut plain), f, finish).unwrap();
            for (i, (a, b)) in ours.iter().zip(&plain).enumerate() {
                let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(same, "{what} of {}: element {i}: {a:?} is not {b:?}", srcs.len());
            }
        }
        let every: Vec<f16> = (0..=u16::MAX).chain(0..7).map(f16::from_bits).collect();
        for salt in [0u16, 1, 0x3ff, 0x400, 0x7bff, 0x7c00, 0x7e01, 0x8000, 0x8123] {
            for k in [2usize, 3, 4, 5] {
                let other = |r: usize| {
                    every
                        .iter()
                        .map(move |h| f16::from_bits(h.to_bits().wrapping_mul(r as u16) ^ salt))
                        .collect()
                };
                let srcs: Vec<Vec<f16>> =
                    (0..k).map(|r| if r == 0 { every.clone() } else { other(r) }).collect();
                both(&srcs, "sum", |a, b| a + b, |x| x);
                both(&srcs, "mean", |a, b| a + b, |x| x / k as f32);
                both(&srcs, "product", |a, b| a * b, |x| x);
                both(&srcs, "least", nan_min, |x| x);
            }
        }
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
