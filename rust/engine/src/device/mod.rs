//! Collectives on GPU memory: NCCL carries the data, the engine watches over the ranks.
//!
//! Uses [`crate::runtime`] and what it uses, and nccl-rs.

pub mod call;
pub mod failure;
pub mod group;
mod nccl_call;
mod watch;
