//! A safe binding to NVIDIA's NCCL (2.18 and newer) that needs no CUDA to build: `libnccl.so.2` and
//! `libcuda.so.1` are loaded when they are asked for, and what is missing is an error that says what
//! was looked for and where.
//!
//! ```no_run
//! use std::time::Duration;
//! use nccl_rs::{Buffer, Communicator, Config, Cuda, Nccl, Op, Search, Stream, UniqueId};
//!
//! # fn exchange(_: Option<UniqueId>) -> UniqueId { unimplemented!() }
//! fn main() -> nccl_rs::Result<()> {
//!     let (rank, size) = (0, 2);
//!     let nccl = Nccl::load(&Search::new())?;
//!     let id = exchange(if rank == 0 { Some(nccl.unique_id()?) } else { None }); // by other means
//!
//!     let device = Cuda::load()?.device(rank as i32)?;
//!     let stream = Stream::new(&device, 0)?;
//!     let limit = Duration::from_secs(60);
//!     let comm = Communicator::init(&nccl, &stream, id, rank, size, Config::new(), limit)?.wait(limit)?;
//!
//!     let mut x = Buffer::from_slice(&stream, &[1.0f32, 2.0, 3.0])?;
//!     comm.all_reduce(None, x.data_mut(), Op::SUM)?;
//!     println!("{:?}", x.read()?);
//!     Ok(())
//! }
//! ```
//!
//! What the types rule out: a call on a communicator that is not ready ([`Pending`] has none), on one
//! of another stream or device (a [`Buffer`] knows its stream), a group that is not ended
//! ([`Nccl::group`] is a scope), a wait without end (communicators never block inside NCCL).
//! Structures that NCCL has changed over time are checked against the headers of all versions from
//! 2.18 to 2.32 (`tests/layouts.txt`).

mod collectives;
mod communicator;
mod config;
mod cuda;
mod error;
mod extras;
mod ffi;
mod library;
mod membership;
mod search;
mod types;
mod window;

pub use communicator::{Aborter, Communicator, Pending};
pub use config::{Config, RawConfig};
pub use cuda::{Buffer, Cuda, Data, DataMut, Device, Event, Stream};
pub use error::{Attempt, Error, Result};
pub use extras::{PreMulSum, Registration};
pub use library::Nccl;
pub use membership::Shrinking;
pub use search::{CUDA_VARIABLE, NCCL_VARIABLE, Search};
pub use types::{DataType, Element, Op, UniqueId, Version};
pub use window::{Memory, Window};
