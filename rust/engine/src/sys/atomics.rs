//! Atomics and futexes, and copies into and out of memory that another process accesses.
//!
//! The files that hold a protocol between processes or threads (`host/pipe.rs`, `host/op_slot.rs`,
//! `host/doorbell_words.rs`, `lanes/queue.rs`, `lanes/task.rs`, `sys/completion.rs`, `runtime/background.rs`) take them from here. `tests/loom` compiles the same files over loom's versions, which try
//! every order of accesses that the processor may show.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

use rustix::thread::futex;
use rustix::time::Timespec;

/// A byte of shared memory.
pub(crate) type Byte = u8;

/// Copies into shared memory.
///
/// # Safety
///
/// As for [`std::ptr::copy_nonoverlapping`].
pub(crate) unsafe fn copy_in(from: *const u8, to: *mut Byte, len: usize) {
    // SAFETY: as the caller of this function promises.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// Copies out of shared memory.
///
/// # Safety
///
/// As for [`std::ptr::copy_nonoverlapping`].
pub(crate) unsafe fn copy_out(from: *const Byte, to: *mut u8, len: usize) {
    // SAFETY: as the caller of this function promises.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) }
}

/// Sleeps while `word` is `seen`, for at most `limit`.
pub(crate) fn futex_wait(word: &AtomicU32, seen: u32, limit: std::time::Duration) {
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    // Rung already, timed out or interrupted: in each case the caller checks for itself.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&limit));
}

/// Wakes all threads that sleep on `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    // A failed wake-up means that nobody waits.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}
