//! How the job is doing: which peers are lost and why, what has been counted, which rank keeps this one waiting, and the
//! records of the last calls.
//!
//! Uses [`crate::group`].

pub mod counters;
pub mod events;
pub(crate) mod log_lines;
pub mod losses;
pub mod peers;
pub(crate) mod stuck;
pub(crate) mod wait_window;
