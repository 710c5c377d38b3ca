//! One collective or message under way: what the caller asked for, the memory that may be touched, the schedule and
//! how its steps are carried out.
//!
//! Uses [`crate::group`], [`crate::link`] and what they use.

pub mod agreed_rates;
pub mod job;
pub mod schedules;
pub mod steps;
