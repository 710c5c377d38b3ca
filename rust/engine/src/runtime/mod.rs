//! The threads of the engine: callers' threads, which make calls of a [`group`], the thread that drives all calls, and
//! the queue from which another thread fetches log lines.
//!
//! Uses [`crate::drive`] and what it uses.

pub(crate) mod background;
pub(crate) mod driver;
pub mod engine;
pub mod group;
pub mod log_sink;
