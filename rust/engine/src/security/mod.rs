//! Keeps strangers out: the secret of the job, the proofs that two ranks exchange, and the keys of TLS sessions. It
//! opens no sockets; [`crate::bootstrap`] uses it when it connects ranks.
//!
//! Uses nothing else of the engine.

pub mod proofs;
pub mod secret;
pub mod tls_keys;
