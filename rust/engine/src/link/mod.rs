//! Frames over a byte stream, in both directions, and a meter of what this rank's link carries.
//!
//! Uses [`crate::transport`].

pub mod frames;
pub mod rate_meter;
