//! How ranks find each other, connect, and prove that they belong to the job; the result is an engine.
//!
//! Uses [`crate::runtime`], [`crate::security`] and what they use.

pub mod cables;
pub mod handshake;
pub mod handshake_stream;
pub mod host_handshake;
pub mod relay;
pub mod rendezvous;
pub mod routes;
pub mod tuning_file;
