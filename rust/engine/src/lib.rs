//! Runs `trigram-core`'s schedules on real memory and real sockets.
//!
//! # Rooms
//!
//! A room uses itself and the rooms above it in this list, and nothing below.
//!
//! * [`sys`] — what the operating system gives: shared memory, descriptors, unix sockets, addresses, atomics.
//! * [`security`] — the job's secret, what two ranks prove to each other, TLS keys.
//! * [`host`] — what the ranks of one host share: control segments, operation slots, doorbells, pipes.
//! * [`lanes`] — threads that move bytes for the one that drives.
//! * [`transport`] — byte streams: `mem`, `shm`, `tcp`, `tls`; `faulty` damages one on purpose.
//! * [`group`] — the job and its groups, as this rank sees them.
//! * [`link`] — frames over a byte stream, what waits to be sent, and what this rank's link carries.
//! * [`health`] — which peers are lost and why, and what has been counted.
//! * [`call`] — the collectives and messages under way, their memory and their schedules.
//! * [`drive`] — one round of everything that moves, under the progress lock.
//! * [`runtime`] — the threads that make calls, and the one that drives them.
//! * [`bootstrap`] — how ranks find each other, connect and prove who they are.
//! * [`device`] — calls on GPU memory, which NCCL carries out.
//!
//! `tools/layers_rust.py` holds this order, and that no two files use each other.
//!
//! Unsafe code is in `sys::memory`, `sys::fork`, `sys::atomics` (two copies), `sys::clock` (a register),
//! `sys::thread_time` (a look at a count), `sys::unix` (a socket option), `host`, `transport::shm`,
//! `transport::tcp` (one socket option), `transport::faulty` (one mapping), `link`, `link::socket` (two ioctls),
//! `call`, `sys::runs` (addresses), and `runtime::group` and `device` (callers' memory).

pub mod bootstrap;
pub mod call;
pub mod device;
pub mod drive;
pub mod group;
pub mod health;
pub mod host;
pub mod lanes;
pub mod link;
pub mod runtime;
pub mod security;
pub mod sys;
pub mod transport;
