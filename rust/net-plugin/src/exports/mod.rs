//! NCCL's tables of functions: one file per version, over the same calls.
//!
//! NCCL asks for the newest table that it knows. Version 7 serves 2.19 and later; 8 takes sizes beyond 2 GiB in
//! registrations; 11 has a context per communicator.

mod common;
mod v11;
mod v7;
mod v8;

pub use v7::ncclNetPlugin_v7;
pub use v8::ncclNetPlugin_v8;
pub use v11::ncclNetPlugin_v11;
