//! What codecs that send some of the values and drop the others have in common.

use std::cell::RefCell;

use super::block::widen;
use super::{Keep, Target, Values};

thread_local! {
    /// Room for 16-bit values made wide; kept, so that steps allocate nothing.
    static WIDE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// How many of `n` values a fraction is: at least one, at most all.
pub(super) fn count(fraction: f64, n: usize) -> usize {
    ((fraction * n as f64).ceil() as usize).clamp(1.min(n), n)
}

thread_local! {
    static TAKEN: RefCell<Vec<(usize, f32)>> = const { RefCell::new(Vec::new()) };
}

/// What the values are that are not taken.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// Numbers.
    Finite,
    /// Some may not be finite.
    Mixed,
    /// The code will not decode to numbers at all.
    Broken,
}

/// Calls `pick` with the values to choose from; it calls its argument with each index taken and the
/// value that the code holds there, and says what is left. What the code does not hold is kept as asked.
pub(super) fn choose(
    src: Values<'_>,
    keep: Keep<'_>,
    pick: impl FnOnce(&[f32], &mut dyn FnMut(usize, f32)) -> Left,
) {
    match (src, keep) {
        (Values::F32(x), Keep::Nothing) => {
            pick(x, &mut |_, _| {});
        }
        (src, Keep::Nothing) => WIDE.with_borrow_mut(|wide| {
            wide.resize(src.len(), 0.0);
            widen(src, 0..src.len(), wide);
            pick(wide, &mut |_, _| {});
        }),
        (src, Keep::Feedback(r)) => {
            match src {
                Values::F32(x) => r.iter_mut().zip(x).for_each(|(r, x)| *r += x),
                Values::F16(x) => r.iter_mut().zip(x).for_each(|(r, x)| *r += x.to_f32()),
                Values::BF16(x) => r.iter_mut().zip(x).for_each(|(r, x)| *r += x.to_f32()),
            }
            match subtract(r, pick, |lost| if lost.is_finite() { lost } else { 0.0 }) {
                Left::Finite => {}
                Left::Mixed => r.iter_mut().for_each(|r| *r = if r.is_finite() { *r } else { 0.0 }),
                Left::Broken => r.fill(0.0),
            }
        }
        (src, Keep::Remainder(r)) => {
            widen(src, 0..src.len(), r);
            if subtract(r, pick, |lost| lost) == Left::Broken {
                r.fill(f32::NAN);
            }
        }
    }
}

/// Picks from `r`, then subtracts what the code holds; `rest` of the difference is left.
fn subtract(
    r: &mut [f32],
    pick: impl FnOnce(&[f32], &mut dyn FnMut(usize, f32)) -> Left,
    rest: impl Fn(f32) -> f32,
) -> Left {
    TAKEN.with_borrow_mut(|taken| {
        taken.clear();
        let left = pick(r, &mut |i, held| taken.push((i, held)));
        taken.iter().for_each(|&(i, held)| r[i] = rest(r[i] - held));
        left
    })
}

/// Writes decoded values at their indices; `values` and `indices` have the same length.
pub(super) fn scatter(pairs: impl Iterator<Item = (usize, f32)>, out: Target<'_>) {
    match out {
        Target::F32(out) => {
            out.fill(0.0);
            pairs.for_each(|(i, v)| out[i] = v);
        }
        Target::F16(out) => {
            out.fill(half::f16::ZERO);
            pairs.for_each(|(i, v)| out[i] = half::f16::from_f32(v));
        }
        Target::BF16(out) => {
            out.fill(half::bf16::ZERO);
            pairs.for_each(|(i, v)| out[i] = half::bf16::from_f32(v));
        }
        Target::Add(out, weight) => pairs.for_each(|(i, v)| out[i] += weight * v),
    }
}

/// What a code of values that are not finite decodes to, where it does not hold these.
pub(super) fn spoil(out: Target<'_>) {
    match out {
        Target::F32(out) | Target::Add(out, _) => out.fill(f32::NAN),
        Target::F16(out) => out.fill(half::f16::NAN),
        Target::BF16(out) => out.fill(half::bf16::NAN),
    }
}
