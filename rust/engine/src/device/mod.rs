//! Collectives on GPU memory: NCCL moves the data, the engine watches the ranks.
//!
//! Uses [`crate::runtime`] and what it uses, and nccl-rs.

pub mod call;
pub mod failure;
pub mod group;
mod nccl_call;
mod watch;
