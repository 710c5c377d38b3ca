//! How the job is doing: which peers are lost and why, what has been counted, and which rank keeps this one waiting.
//!
//! Uses [`crate::group`].

pub mod counters;
pub(crate) mod log_lines;
pub mod losses;
pub mod peers;
pub(crate) mod wait_window;
