//! What a thread has had of the processors.

use std::cell::Cell;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

thread_local! {
    /// How often this thread had lost its core when it was asked last.
    static SEEN: Cell<i64> = const { Cell::new(0) };
}

/// The processor time that this thread has had so far; a look takes 0.2 us.
pub(crate) fn spent() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Whether this thread has lost its core although it could go on, since it was asked last: to another thread, or because
/// its container's time was used up. A look takes 1.4 us.
pub(crate) fn was_interrupted() -> bool {
    // SAFETY: zeros are a valid value of all its fields.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one structure.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    SEEN.replace(usage.ru_nivcsw) != usage.ru_nivcsw
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn work(length: Duration) {
        let began = Instant::now();
        while began.elapsed() < length {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn a_thread_that_sleeps_spends_nothing() {
        let length = Duration::from_millis(20);
        let before = spent();
        std::thread::sleep(length);
        let slept = spent();
        assert!(slept - before < length / 2);
        work(length);
        assert!(spent() > slept);
    }

    #[test]
    fn threads_that_want_more_than_the_cores_interrupt_each_other() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let interrupted = || {
            was_interrupted();
            work(Duration::from_millis(300));
            was_interrupted()
        };
        let threads: Vec<_> = (0..2 * cores + 1).map(|_| std::thread::spawn(interrupted)).collect();
        assert!(threads.into_iter().any(|thread| thread.join().unwrap()));
    }
}
