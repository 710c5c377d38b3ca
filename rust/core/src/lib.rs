//! What a collective is, as data.
//!
//! This crate is pure: no sockets, no clock, no threads, no unsafe code. It says *what* must
//! move where; `trigram-engine` moves it.
//!
//! # Layout
//!
//! * [`codec`] — fewer bits for the same numbers.
//! * [`dtype`], [`reduce`] — element types, reduction operators and the kernels that apply them.
//! * `vector` — which vector unit those kernels use.
//! * [`float16`] — sixteen-bit floats to `f32` and back.
//! * [`lossless`] — exact codes of `f32`, shorter where the values allow it.
//! * [`schedule`] — a collective for one rank, as a list of steps with dependencies.
//! * [`topology`] — pure functions `(place, world, length) -> Schedule`: ring, trees, ...
//! * [`planner`] — which topology serves which call.
//! * [`pipeline`] — the order in which the averages of a backward pass start.
//! * [`executor`] — the state machine that walks a schedule; it has no I/O of its own.
//! * [`sim`] — the same executor for all ranks at once, in virtual time.
//! * [`signature`] — what ranks compare to find out that they disagree.
//! * [`second_moment`] — a loop for optimizers whose ranks average weights.
//! * [`update`] — a step of an optimizer inside an all_reduce.
//! * [`tuning`] — measured sizes at which schedules change.
//! * [`wire`] — the header of every message, decoded without trust.
//! * [`error`] — one error type, its kinds named by who is to blame.
#![forbid(unsafe_code)]

pub mod codec;
pub mod dtype;
pub mod error;
pub mod executor;
pub mod float16;
pub mod lossless;
pub mod pipeline;
pub mod planner;
pub mod reduce;
pub mod schedule;
pub mod second_moment;
pub mod signature;
pub mod sim;
pub mod topology;
pub mod tuning;
pub mod update;
mod vector;
pub mod wire;

pub use dtype::{DType, ReduceOp};
pub use error::{Error, Result};
