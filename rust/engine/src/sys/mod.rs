//! What the operating system gives: atomics and futexes, shared memory, unix sockets that carry descriptors, this
//! host's name and addresses, a clock that is fast to read, whether a core is wanted, what a forked child may do, threads
//! that come back to an interpreter that ends, completion handles, what waiting threads do for other ranks, the threads
//! that make calls, copies past the cache, and lists of stretches of memory.
//!
//! Uses nothing else of the engine.

pub mod address;
pub(crate) mod atomics;
pub mod callers;
pub mod clock;
pub mod completion;
pub(crate) mod copy;
pub(crate) mod cores;
pub mod exit;
pub mod fork;
pub mod limits;
pub mod memory;
pub mod passing;
pub(crate) mod process_state;
pub mod runs;
pub mod serving;
pub(crate) mod socket;
pub(crate) mod thread_time;
pub mod unix;
