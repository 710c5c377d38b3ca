//! How bytes reach a peer. A transport is one file: a [`stream::Sender`] and a [`stream::Receiver`] that never block.
//! Frames, matching and errors are the same above all of them.
//!
//! Uses [`crate::sys`] and [`crate::host`].

pub mod bundle;
pub mod far;
pub mod faulty;
pub mod mem;
pub mod shm;
pub mod stream;
pub mod tcp;
pub mod tls;
