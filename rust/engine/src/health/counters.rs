//! What an engine has done and what has failed, for threads that do not hold the progress lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::health::events::EventRing;
use crate::health::log_lines::LogQueue;
use crate::health::losses::Failures;

/// Counters that may be read at any time.
#[derive(Debug, Default)]
pub struct Counters {
    /// Calls that ended well.
    pub calls: AtomicU64,
    /// Bytes moved directly through peers' memory.
    pub direct_bytes: AtomicU64,
    /// Payload bytes sent, by world rank.
    pub sent: Vec<AtomicU64>,
    /// Nanoseconds slept while a caller waited, by the world rank that was waited for.
    pub waited: Vec<AtomicU64>,
    /// Nanoseconds since the last heartbeat, by world rank; 0 for ranks whose heartbeats come in time.
    pub silent: Vec<AtomicU64>,
    /// Processor time of the background thread in nanoseconds, as of its last look at the clock.
    pub background: AtomicU64,
    failures: Mutex<Failures>,
    /// Records of the last calls.
    pub events: Arc<EventRing>,
    /// Log lines that wait until the progress lock is free.
    pub(crate) log: LogQueue,
}

impl Counters {
    /// All zero, for a world of this many ranks.
    pub(crate) fn new(ranks: usize) -> Self {
        let zeros = || (0..ranks).map(|_| AtomicU64::new(0)).collect();
        Self {
            sent: zeros(),
            waited: zeros(),
            silent: zeros(),
            events: Arc::new(EventRing::new()),
            ..Self::default()
        }
    }

    /// Counts a call that has ended well, and bytes moved directly. Only under the progress lock, as all that counts
    /// these: so no instruction has to lock the bus, which would take as long as the rest of the bookkeeping of a short
    /// call.
    pub(crate) fn count(&self, calls: u64, direct_bytes: u64) {
        for (counter, more) in [(&self.calls, calls), (&self.direct_bytes, direct_bytes)] {
            counter.store(counter.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        }
    }

    /// Records that this rank slept while it waited for these ranks.
    pub(crate) fn note_wait(&self, ranks: &[u32], slept: Duration) {
        for &rank in ranks {
            if let Some(counter) = self.waited.get(rank as usize) {
                counter.fetch_add(slept.as_nanos() as u64, Ordering::Relaxed);
            }
        }
    }

    /// What has failed so far.
    pub fn failures(&self) -> MutexGuard<'_, Failures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
