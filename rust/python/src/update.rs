//! Updates of weights, see `trigram_core::update`: what Python asks for, as the engine takes it.

use pyo3::prelude::*;
use trigram_core::planner::Call;
use trigram_core::signature::{Collective, Via};
use trigram_core::update::{self, Adam, Rounding, Rule, Sgd};
use trigram_core::{DType, Error, ReduceOp, Result};
use trigram_engine::call::request::{Piece, Request, Tensors, Update};

use crate::errors::Raise;

/// The name of an optimizer, and its numbers in the order of the fields of [`Sgd`] or [`Adam`].
pub(crate) type Numbers = (String, Vec<f64>);
/// First value, the one after the last, the first that rounds otherwise, the rule, and the addresses of the states.
pub(crate) type Place = (usize, usize, usize, usize, usize, usize);

fn rule((name, numbers): &Numbers) -> Result<Rule> {
    let narrow: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
    match (name.as_str(), &narrow[..]) {
        ("sgd", &[sign, decay, momentum, undamped, nesterov, first, rate]) => {
            let (nesterov, first) = (nesterov != 0.0, first != 0.0);
            Ok(Rule::Sgd(Sgd { sign, decay, momentum, undamped, nesterov, first, rate }))
        }
        ("adam", &[sign, decay, shrink, first, keep, second, correction, eps, rate]) => {
            Ok(Rule::Adam(Adam { sign, decay, shrink, first, keep, second, correction, eps, rate }))
        }
        _ => Err(Error::misuse(format!("update: {name} with {} numbers is no rule", numbers.len()))),
    }
}

/// An update of `lengths` values by rank.
pub(crate) fn request(
    (gradients, gradient_bytes, weights, weight_bytes): (usize, usize, usize, usize),
    lengths: Vec<usize>,
    pieces: Vec<Place>,
    rules: &[Numbers],
    fused: bool,
) -> Result<Request> {
    let piece = |(start, stop, flipped_from, rule, first, second): Place| Piece {
        start,
        stop,
        flipped_from,
        rule,
        states: [first as *mut u8, second as *mut u8],
    };
    let rules = rules.iter().map(rule).collect::<Result<_>>()?;
    let update = Update { pieces: pieces.into_iter().map(piece).collect(), rules, fused };
    Ok(Request {
        call: Call {
            what: Collective::Update,
            dtype: DType::F32,
            len: 0,
            root: 0,
            via: Via::Auto,
            splits: Some((lengths.clone(), lengths)),
        },
        op: ReduceOp::Avg,
        tensors: Tensors {
            input: gradients as *const u8,
            input_len: gradient_bytes,
            output: weights as *mut u8,
            output_len: weight_bytes,
        },
        update: Some(Box::new(update)),
        ..Request::nothing()
    })
}

/// One step for `n` values of one rank, without a call: to compare it with torch's.
#[pyfunction]
pub(crate) fn update_alone(
    py: Python<'_>,
    numbers: Numbers,
    fused: bool,
    flipped_from: usize,
    memory: (usize, usize, usize, usize),
    n: usize,
) -> PyResult<()> {
    let rule = rule(&numbers).raise(py)?;
    let (gradient, weights, first, second) = memory;
    let bytes = 4 * n;
    let state = |k: usize, at: usize| -> &mut [u8] {
        match k < rule.states() {
            // SAFETY: as below.
            true => unsafe { std::slice::from_raw_parts_mut(at as *mut u8, bytes) },
            false => &mut [],
        }
    };
    // SAFETY: `trigram/sharded/rules.py` holds the tensors, dense ones of `n` float32 values that do not
    // overlap, during the call.
    let (gradient, weights) = unsafe {
        let gradient = std::slice::from_raw_parts(gradient as *const u8, bytes);
        (gradient, std::slice::from_raw_parts_mut(weights as *mut u8, bytes))
    };
    let states = [state(0, first), state(1, second)];
    update::step(&rule, Rounding { fused, flipped_from }, &[gradient], weights, states).raise(py)
}
