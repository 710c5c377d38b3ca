//! Counts the connections of other ranks that this one passes on, so that it does not leave before they do.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use trigram_core::Result;

use crate::sys::completion::InterruptCheck;

/// How many there are.
#[derive(Debug, Default)]
pub struct Passing(AtomicUsize);

impl Passing {
    /// One more.
    pub fn begin(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// Both ends of one have closed.
    pub fn end(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// Waits until all have closed, for at most `limit`.
    ///
    /// # Errors
    ///
    /// That of `check_interrupt`, which ends the wait.
    pub fn wait(&self, limit: Duration, check_interrupt: InterruptCheck<'_>) -> Result<()> {
        let began = Instant::now();
        while self.0.load(Ordering::Acquire) > 0 && began.elapsed() < limit {
            check_interrupt()?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}
