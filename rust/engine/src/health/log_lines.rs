//! Log lines of the thread that drives the work: queued under the progress lock, written out after it is released.
//!
//! Formatting a line takes memory, and whatever the process has installed as its logger may take its time. Neither may
//! happen while this thread holds the progress lock, for then the rank would send no heartbeats. So the lock's holder
//! only queues what happened, and a thread without the lock formats it and hands it to the `log` crate.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use trigram_core::Error;
use trigram_core::error::name_ranks;
use trigram_core::signature::Signature;

/// Lines that wait at most; more are dropped.
const MOST: usize = 1024;

/// Something to log; `me` is this rank.
#[derive(Debug)]
pub(crate) enum LogLine {
    /// This rank has waited long for others to make the same call.
    LongWait {
        /// This rank.
        me: u32,
        /// For how long.
        waited: Duration,
        /// The call.
        call: Signature,
        /// For whom.
        ranks: Vec<u32>,
    },
    /// One rank keeps this one waiting far longer than any other does.
    Straggler {
        /// This rank.
        me: u32,
        /// The rank that is waited for.
        rank: u32,
        /// Seconds waited for it,
        seconds: f64,
        /// of the last so many.
        window: Duration,
    },
    /// This rank has evicted another.
    Evicted {
        /// This rank.
        me: u32,
        /// The rank that is evicted.
        rank: u32,
        /// Why.
        why: Error,
    },
    /// This rank has ended the process of a rank that was evicted.
    Killed {
        /// This rank.
        me: u32,
        /// The rank whose process was ended.
        rank: u32,
    },
}

impl fmt::Display for LogLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LongWait { me, waited, call, ranks } => write!(
                f,
                "rank {me} has waited {:.0} s in {call} for {}",
                waited.as_secs_f64(),
                name_ranks(ranks)
            ),
            Self::Straggler { me, rank, seconds, window } => write!(
                f,
                "rank {me} spent {seconds:.0} of the last {} s waiting for rank {rank}, the slowest rank",
                window.as_secs()
            ),
            Self::Evicted { me, rank, why } => {
                write!(f, "rank {me} evicted rank {rank}: {why}. Calls that need rank {rank} fail")
            }
            Self::Killed { me, rank } => {
                write!(
                    f,
                    "rank {me} ended the process of rank {rank} on this host: it was evicted, and could still have written to \
                     shared memory"
                )
            }
        }
    }
}

/// Lines that wait to be written out.
#[derive(Debug, Default)]
pub(crate) struct LogQueue {
    /// Whether there are any: looking costs no lock.
    waiting: AtomicBool,
    lines: Mutex<Vec<LogLine>>,
}

impl LogQueue {
    /// Queues a line.
    pub(crate) fn push(&self, line: LogLine) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() < MOST {
            lines.push(line);
            self.waiting.store(true, Ordering::Release);
        }
    }

    /// Hands the lines to the logger. To be called without the progress lock.
    pub(crate) fn write_out(&self) {
        if !self.waiting.load(Ordering::Relaxed) {
            return;
        }
        let lines = {
            let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
            self.waiting.store(false, Ordering::Release);
            std::mem::take(&mut *lines)
        };
        for line in lines {
            log::warn!(target: "trigram", "{line}");
        }
    }
}
