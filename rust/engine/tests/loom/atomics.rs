//! What `src/sys/atomics.rs` has, over loom's atomics. Nothing times out here, so that a lost wake-up is a deadlock.

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};

/// A byte whose readers and writers loom orders.
pub(crate) type Byte = loom::cell::UnsafeCell<u8>;

pub(crate) unsafe fn copy_in(from: *const u8, to: *const Byte, len: usize) {
    for i in 0..len {
        // SAFETY: the caller's promise; loom fails the test if another thread is at this byte.
        unsafe { (*to.add(i)).with_mut(|to| *to = *from.add(i)) };
    }
}

pub(crate) unsafe fn copy_out(from: *const Byte, to: *mut u8, len: usize) {
    for i in 0..len {
        // SAFETY: as above.
        unsafe { (*from.add(i)).with(|from| *to.add(i) = *from) };
    }
}

loom::lazy_static! {
    /// The kernel's queue of who sleeps: looking at the word and going to sleep is one step there.
    static ref QUEUE: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
}

pub(crate) fn futex_wait(word: &AtomicU32, seen: u32, _limit: std::time::Duration) {
    let mut queue = QUEUE.0.lock().unwrap();
    while word.load(std::sync::atomic::Ordering::Relaxed) == seen {
        queue = QUEUE.1.wait(queue).unwrap();
    }
}

pub(crate) fn futex_wake(_word: &AtomicU32) {
    drop(QUEUE.0.lock().unwrap());
    QUEUE.1.notify_all();
}
