//! What the ranks of one host share: each rank's control segment, with an operation slot for each call in flight, a
//! doorbell that wakes the rank, and a pipe from each neighbour.
//!
//! Uses [`crate::sys`].

pub mod control_segment;
pub mod doorbell;
pub mod doorbell_words;
pub mod op_slot;
pub mod pipe;
