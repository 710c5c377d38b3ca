//! Adam's second moment of the mean gradient of several ranks, from one rank's gradients: the loop.
//!
//! `trigram/optimizers/adam_variance.py` says why.

use crate::error::{Error, Result};
use crate::vector::unit;

/// How much of what enters the second moment.
#[derive(Clone, Copy, Debug)]
pub struct Factors {
    /// Of the first moment after the step, in the one before it, without its bias.
    pub first: f32,
    /// Of the gradient in the same; negative.
    pub own: f32,
    /// Of the difference in the second moment.
    pub part: f32,
    /// What is left of the second moment at least.
    pub least: f32,
}

/// `second += part * (max(g * (first * f.first + g * f.own), 0) - g * g)`, but to no less than its part `least`,
/// element by element, g from `gradient`.
///
/// # Errors
///
/// [`Error::Misuse`] if the lengths differ.
pub fn adapt(second: &mut [f32], first: &[f32], gradient: &[f32], f: Factors) -> Result<()> {
    if second.len() != first.len() || second.len() != gradient.len() {
        return Err(Error::misuse(format!(
            "second moment: {} values, with {} of the first and {} of the gradient",
            second.len(),
            first.len(),
            gradient.len()
        )));
    }
    unit().dispatch(|| {
        for ((v, &m), &g) in second.iter_mut().zip(first).zip(gradient) {
            let others = g * (m * f.first + g * f.own);
            *v = (*v + f.part * (others.max(0.0) - g * g)).max(*v * f.least);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_written() {
        let f = Factors { first: 2.0, own: -0.5, part: 0.25, least: 0.5 };
        let mut second = [1.0f32, 1.0, 1.0];
        adapt(&mut second, &[3.0, -3.0, 0.0], &[1.0, 1.0, 0.0], f).unwrap();
        // 1 (6 - 0.5) - 1 = 4.5; max(-6.5, 0) - 1 = -1; nothing.
        assert_eq!(second, [1.0 + 0.25 * 4.5, 1.0 - 0.25, 1.0]);
        // A gradient that is not the one whose square is in the moment: it would be negative.
        second[1] = 1.0;
        adapt(&mut second, &[0.0, -3.0, 0.0], &[0.0, 4.0, 0.0], f).unwrap();
        assert_eq!(second[1], 0.5);
        assert!(adapt(&mut second, &[0.0], &[0.0; 3], f).is_err());
    }
}
