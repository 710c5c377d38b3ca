//! The threads of the engine: callers' threads, which make calls of a [`group`], and whichever thread drives all
//! calls.
//!
//! Uses [`crate::drive`] and what it uses.

pub(crate) mod driver;
pub mod engine;
pub mod group;
