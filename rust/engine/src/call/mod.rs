//! The collectives and messages under way: what the caller asked for, the memory that a call may touch, its schedule
//! and how the steps are carried out, and what came for calls that are not made yet.
//!
//! Uses [`crate::group`], [`crate::link`] and what they use.

pub mod active_call;
pub mod agreed_rates;
pub mod body;
pub mod calls;
pub(crate) mod fold;
pub(crate) mod index;
pub(crate) mod mismatch;
pub(crate) mod overlap;
pub mod request;
pub mod schedule_cache;
pub mod steps;
pub(crate) mod unexpected;
