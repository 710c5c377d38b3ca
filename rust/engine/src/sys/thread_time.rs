//! What a thread has had of the processors.

/// What this thread has had so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ThreadTime {
    /// Microseconds of processor time.
    pub(crate) spent: u64,
    /// How often it lost its core although it could go on: to another thread, or because its container's time was used up.
    pub(crate) interrupted: u64,
}

impl ThreadTime {
    pub(crate) fn now() -> Self {
        // SAFETY: zeros are a valid value of all its fields.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes one structure.
        unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
        let micros = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
        Self { spent: micros(usage.ru_utime) + micros(usage.ru_stime), interrupted: usage.ru_nivcsw as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_spends_nothing_and_loses_nothing() {
        let before = ThreadTime::now();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let slept = ThreadTime::now();
        assert!(slept.spent - before.spent < 10_000, "{before:?} {slept:?}");
        let began = std::time::Instant::now();
        while began.elapsed().as_millis() < 20 {
            std::hint::spin_loop();
        }
        let worked = ThreadTime::now();
        assert!(worked.spent > slept.spent && worked.interrupted >= slept.interrupted);
    }
}
