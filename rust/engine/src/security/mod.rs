//! What keeps strangers out: the secret of the job, the proofs that two ranks give each other, and the keys of TLS
//! sessions. No sockets; [`crate::bootstrap`] uses this when it connects ranks.
//!
//! Uses nothing else of the engine.

pub mod proofs;
pub mod secret;
pub mod tls_keys;
