//! One step of an optimizer for a stretch of values, from the gradients of all ranks, with the bits of torch's kernels.
//!
//! torch's kernels are compiled with products and sums contracted to fused multiply-adds. Where a sum has two products,
//! its last few values of a parameter, which do not fill a vector, round the other product than the rest do. [`Rule`]
//! says what of this holds; callers have compared it with the torch that they run (`trigram/sharded/rules.py`).

// A rule's copy in a closure: behind a reference, its numbers might be what the loop writes.
#![allow(clippy::redundant_locals)]

use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::reduce;
use crate::vector::unit;

/// The arithmetic of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// `torch.optim.SGD`; one state, the momentum, if `momentum` is not 0.
    Sgd(Sgd),
    /// `torch.optim.Adam` and `AdamW` without `amsgrad`; two states, the moments.
    Adam(Adam),
}

/// See [`Rule::Sgd`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// 1, or -1 to maximize.
    pub sign: f32,
    /// The weight decay.
    pub decay: f32,
    /// The momentum.
    pub momentum: f32,
    /// 1 - dampening.
    pub undamped: f32,
    /// Whether the momentum is Nesterov's.
    pub nesterov: bool,
    /// Whether the gradient becomes the momentum, as in a parameter's first step.
    pub first: bool,
    /// -lr.
    pub rate: f32,
}

/// See [`Rule::Adam`]. All numbers are rounded from float64 at last.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// 1, or -1 to maximize.
    pub sign: f32,
    /// Times the weight, added to the gradient; 0 in AdamW.
    pub decay: f32,
    /// The weight is multiplied by it first; 1 in Adam.
    pub shrink: f32,
    /// 1 - beta1, less than one half.
    pub first: f32,
    /// beta2.
    pub keep: f32,
    /// 1 - beta2.
    pub second: f32,
    /// The square root of 1 - beta2^step.
    pub correction: f32,
    /// The term that keeps the denominator from 0.
    pub eps: f32,
    /// -lr / (1 - beta1^step).
    pub rate: f32,
}

impl Rule {
    /// How many states there are.
    pub fn states(&self) -> usize {
        match self {
            Self::Sgd(sgd) => usize::from(sgd.momentum != 0.0),
            Self::Adam(_) => 2,
        }
    }
}

/// Values that are updated at a time: what they need stays in the first-level cache.
pub const TILE: usize = 2048;

/// How products and sums round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    /// Whether they are fused multiply-adds.
    pub fused: bool,
    /// The index of the first value where, of two products, the other is rounded.
    pub flipped_from: usize,
}

/// Updates a stretch of weights and their state with the mean of several gradients, summed in the order given.
///
/// # Errors
///
/// [`Error::Misuse`] if lengths differ, the number of states is not the rule's, or memory is misaligned.
pub fn step(
    rule: &Rule,
    rounding: Rounding,
    gradients: &[&[u8]],
    weights: &mut [u8],
    states: [&mut [u8]; 2],
) -> Result<()> {
    let bytes = weights.len();
    let count = rule.states();
    if gradients.iter().any(|g| g.len() != bytes) || states[..count].iter().any(|s| s.len() != bytes) {
        return Err(Error::misuse("update: weights, gradients and states differ in length"));
    }
    let ranks = u32::try_from(gradients.len()).unwrap_or(u32::MAX);
    let [first, second] = states;
    let (weights, first, second) = (cast(weights)?, cast(first)?, cast(second)?);
    let mut mean = [0f32; TILE];
    let mut sources = vec![&[][..]; gradients.len()];
    for at in (0..weights.len()).step_by(TILE) {
        let n = TILE.min(weights.len() - at);
        let mean = &mut mean[..n];
        sources.iter_mut().zip(gradients).for_each(|(s, g)| *s = &g[4 * at..4 * (at + n)]);
        reduce::fold(DType::F32, ReduceOp::Avg, Some(ranks), &sources, bytemuck::cast_slice_mut(mean))?;
        let plain = rounding.flipped_from.saturating_sub(at).min(n);
        for (from, to, flip) in [(0, plain, false), (plain, n, true)] {
            let (mean, weights) = (&mean[from..to], &mut weights[at + from..at + to]);
            match (rounding.fused, flip) {
                (true, false) => stretch::<true, false>(rule, mean, weights, first, second, at + from),
                (true, true) => stretch::<true, true>(rule, mean, weights, first, second, at + from),
                (false, _) => stretch::<false, false>(rule, mean, weights, first, second, at + from),
            }
        }
    }
    Ok(())
}

fn cast(bytes: &mut [u8]) -> Result<&mut [f32]> {
    if bytes.is_empty() {
        return Ok(&mut []); // no memory is not aligned
    }
    bytemuck::try_cast_slice_mut(bytes).map_err(|e| Error::misuse(format!("update: {e}")))
}

/// The values from `at` on of the states, as many as there are gradients.
fn stretch<const FUSED: bool, const FLIP: bool>(
    rule: &Rule,
    gradients: &[f32],
    weights: &mut [f32],
    first: &mut [f32],
    second: &mut [f32],
    at: usize,
) {
    let n = gradients.len();
    if n == 0 {
        return;
    }
    match rule {
        Rule::Adam(adam) => {
            let (first, second) = (&mut first[at..at + n], &mut second[at..at + n]);
            adam_step::<FUSED, FLIP>(*adam, gradients, weights, first, second);
        }
        Rule::Sgd(sgd) if sgd.momentum == 0.0 => sgd_step::<FUSED>(*sgd, gradients, weights),
        Rule::Sgd(sgd) => momentum_step::<FUSED, FLIP>(*sgd, gradients, weights, &mut first[at..at + n]),
    }
}

/// `a * b + c`.
#[inline(always)]
fn product_and_sum<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// `a * b + c * d`, of which `c * d` is fused, or `a * b` with `FLIP`.
#[inline(always)]
fn two_products<const FUSED: bool, const FLIP: bool>(a: f32, b: f32, c: f32, d: f32) -> f32 {
    match (FUSED, FLIP) {
        (true, false) => c.mul_add(d, a * b),
        (true, true) => a.mul_add(b, c * d),
        (false, _) => a * b + c * d,
    }
}

fn adam_step<const FUSED: bool, const FLIP: bool>(
    rule: Adam,
    gradients: &[f32],
    weights: &mut [f32],
    first: &mut [f32],
    second: &mut [f32],
) {
    unit().dispatch(
        #[inline(always)]
        || {
            let r = rule;
            let decays = r.decay != 0.0;
            for (((&g, p), m), v) in gradients.iter().zip(weights).zip(first).zip(second) {
                let mut g = g * r.sign;
                if decays {
                    g = product_and_sum::<FUSED>(*p, r.decay, g);
                }
                *m = product_and_sum::<FUSED>(r.first, g - *m, *m);
                *v = two_products::<FUSED, FLIP>(*v, r.keep, r.second * g, g);
                let denominator = v.sqrt() / r.correction + r.eps;
                *p = *p * r.shrink + r.rate * *m / denominator;
            }
        },
    );
}

fn sgd_step<const FUSED: bool>(rule: Sgd, gradients: &[f32], weights: &mut [f32]) {
    unit().dispatch(
        #[inline(always)]
        || {
            let r = rule;
            let decays = r.decay != 0.0;
            for (&g, p) in gradients.iter().zip(weights) {
                let mut g = g * r.sign;
                if decays {
                    g = product_and_sum::<FUSED>(*p, r.decay, g);
                }
                *p = product_and_sum::<FUSED>(g, r.rate, *p);
            }
        },
    );
}

fn momentum_step<const FUSED: bool, const FLIP: bool>(
    rule: Sgd,
    gradients: &[f32],
    weights: &mut [f32],
    momenta: &mut [f32],
) {
    unit().dispatch(
        #[inline(always)]
        || {
            let r = rule;
            let decays = r.decay != 0.0;
            for ((&g, p), b) in gradients.iter().zip(weights).zip(momenta) {
                let mut g = g * r.sign;
                if decays {
                    g = product_and_sum::<FUSED>(*p, r.decay, g);
                }
                *b = match r.first {
                    true => g,
                    false => two_products::<FUSED, FLIP>(*b, r.momentum, g, r.undamped),
                };
                let g = if r.nesterov { product_and_sum::<FUSED>(*b, r.momentum, g) } else { *b };
                *p = product_and_sum::<FUSED>(g, r.rate, *p);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADAM: Adam = Adam {
        sign: 1.0,
        decay: 0.1,
        shrink: 0.999,
        first: 0.1,
        keep: 0.999,
        second: 0.001,
        correction: 0.08,
        eps: 1e-8,
        rate: -0.02,
    };
    const SGD: Sgd = Sgd {
        sign: -1.0,
        decay: 0.01,
        momentum: 0.9,
        undamped: 0.7,
        nesterov: true,
        first: false,
        rate: -0.1,
    };

    fn values(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1000.0 + 0.01).collect()
    }

    /// One value at a time, in the plainest way.
    fn reference(rule: &Rule, flip: bool, g: f32, p: &mut f32, a: &mut f32, b: &mut f32) {
        match rule {
            Rule::Adam(r) => {
                let g = p.mul_add(r.decay, g * r.sign);
                *a = r.first.mul_add(g - *a, *a);
                let x = r.second * g;
                *b = if flip { b.mul_add(r.keep, x * g) } else { x.mul_add(g, *b * r.keep) };
                let shrunk = *p * r.shrink;
                *p = shrunk + r.rate * *a / (b.sqrt() / r.correction + r.eps);
            }
            Rule::Sgd(r) => {
                let g = p.mul_add(r.decay, g * r.sign);
                let x = g * r.undamped;
                *a = if flip { a.mul_add(r.momentum, x) } else { g.mul_add(r.undamped, *a * r.momentum) };
                let g = a.mul_add(r.momentum, g);
                *p = g.mul_add(r.rate, *p);
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "takes miri a long time")]
    fn each_value_is_that_of_the_formula() {
        let mut differ = 0;
        for rule in [Rule::Adam(ADAM), Rule::Sgd(SGD)] {
            for ranks in [1usize, 2, 3, 5, 9] {
                for (n, flipped_from) in [(1, 9), (7, 0), (2 * TILE + 13, 2 * TILE + 8), (TILE, TILE - 3)] {
                    let gradients: Vec<Vec<f32>> = (0..ranks).map(|r| values(n, r)).collect();
                    let bytes: Vec<&[u8]> = gradients.iter().map(|g| bytemuck::cast_slice(g)).collect();
                    let (mut p, mut a, mut b) = (values(n, 20), values(n, 21), values(n, 22));
                    let (mut q, mut c, mut d) = (p.clone(), a.clone(), b.clone());
                    let states = [bytemuck::cast_slice_mut(&mut a), bytemuck::cast_slice_mut(&mut b)];
                    let rounding = Rounding { fused: true, flipped_from };
                    step(&rule, rounding, &bytes, bytemuck::cast_slice_mut(&mut p), states).unwrap();
                    let mut mean = vec![0f32; n];
                    let out = bytemuck::cast_slice_mut(&mut mean);
                    reduce::fold(DType::F32, ReduceOp::Avg, Some(ranks as u32), &bytes, out).unwrap();
                    for i in 0..n {
                        let (mut x, mut y, mut z) = (q[i], c[i], d[i]);
                        let flip = i >= flipped_from;
                        reference(&rule, flip, mean[i], &mut q[i], &mut c[i], &mut d[i]);
                        reference(&rule, !flip, mean[i], &mut x, &mut y, &mut z);
                        differ += usize::from((x, y, z) != (q[i], c[i], d[i]));
                    }
                    assert!(p == q && a == c && (rule.states() == 1 || b == d), "{rule:?} of {ranks}, {n}");
                }
            }
        }
        assert!(differ > 0, "which product is rounded does not show in these values");
    }

    #[test]
    fn no_state_needs_no_memory() {
        let (g, mut p) = ([1f32; 3], [2f32; 3]);
        let rule = Rule::Sgd(Sgd { momentum: 0.0, decay: 0.0, sign: 1.0, rate: -0.5, ..SGD });
        let rounding = Rounding { fused: true, flipped_from: usize::MAX };
        let weights = bytemuck::cast_slice_mut(&mut p);
        step(&rule, rounding, &[bytemuck::cast_slice(&g)], weights, [&mut [], &mut []]).unwrap();
        assert_eq!(p, [1.5; 3]);
    }

    #[test]
    fn lengths_must_fit() {
        let g = [0u8; 8];
        let (mut p, mut a, mut b) = ([0f32; 2], [0f32; 2], [0f32; 1]);
        let rounding = Rounding { fused: true, flipped_from: usize::MAX };
        let states = [bytemuck::cast_slice_mut(&mut a), bytemuck::cast_slice_mut(&mut b)];
        let weights = bytemuck::cast_slice_mut(&mut p);
        let e = step(&Rule::Adam(ADAM), rounding, &[&g], weights, states);
        assert!(matches!(e, Err(Error::Misuse(_))));
    }
}
