//! Lanes: threads that move bytes for the thread that drives.
//!
//! One thread decides everything (`runtime/driver.rs`). What takes long and decides nothing, sending or receiving
//! a piece with its checksum and summing pieces, it may give to a lane: it hands over all that the work needs, and takes
//! it back when a ticket says that the work is over. So what one thread decides needs no further locks, and a rank
//! without lanes runs the same code.
//!
//! A lane never waits for another rank: where a connection takes or has nothing more, the work is over, and the thread
//! that drives gets it back as it is. So taking work back early (`Task::recall`) takes no longer than it takes
//! to move a piece of a message, half a mebibyte, or to sum as much.

pub(crate) mod free_cores;
pub(crate) mod load;
pub mod pool;
pub(crate) mod queue;
pub(crate) mod task;
