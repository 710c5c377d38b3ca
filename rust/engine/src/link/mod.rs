//! Frames over a byte stream, in both directions, what waits to be sent, how connections end, and a meter of what this
//! rank's link carries.
//!
//! Uses [`crate::transport`].

pub mod closing;
pub mod frames;
mod moves;
pub mod outbox;
pub mod rate_meter;
