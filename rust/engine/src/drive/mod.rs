//! One round of everything that moves, under the progress lock: what arrives is matched with the call that waits for
//! it, calls advance, failures are announced, heartbeats are sent and watched.
//!
//! Uses [`crate::call`], [`crate::health`] and what they use. Has no threads of its own.

pub mod failing;
pub(crate) mod heartbeat;
pub mod helper;
pub mod hub;
pub mod matching;
pub mod progress;
