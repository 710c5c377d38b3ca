//! One round of everything that moves, under the progress lock: what arrives is matched with the call that waits for
//! it, calls advance, failures are announced, heartbeats are sent and watched.
//!
//! Uses [`crate::call`], [`crate::health`] and what they use. Has no threads of its own.

pub(crate) mod cross_waits;
pub(crate) mod failures;
pub(crate) mod heartbeat;
pub(crate) mod helper;
pub(crate) mod losses;
pub(crate) mod matching;
pub(crate) mod one_shot;
pub mod progress;
pub(crate) mod receives;
pub(crate) mod scheduling;
