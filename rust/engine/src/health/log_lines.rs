//! Log lines of the thread that holds the progress lock: queued under it, written after it is released.
//!
//! Formatting a line allocates memory, and the process's logger may be slow. Neither may happen under the progress
//! lock, because the rank would send no heartbeats meanwhile. So the thread that holds the lock only queues what
//! happened; a thread without the lock formats the line and passes it to the `log` crate.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use trigram_core::Error;
use trigram_core::error::name_ranks;
use trigram_core::signature::Signature;

/// The most lines that wait; further ones are dropped.
const MOST: usize = 1024;

/// An event to log.
#[derive(Debug)]
pub(crate) enum LogLine {
    /// This rank has waited long for other ranks in one call.
    LongWait {
        /// This rank.
        me: u32,
        /// How long it has waited.
        waited: Duration,
        /// The call.
        call: Signature,
        /// The ranks that it waits for.
        ranks: Vec<u32>,
    },
    /// This rank spends far more time waiting for one rank than for any other. In a ring, or between two ranks, that can
    /// be the network as well.
    Straggler {
        /// This rank.
        me: u32,
        /// The rank waited for.
        rank: u32,
        /// Seconds spent waiting for it,
        seconds: f64,
        /// out of the last period of this length.
        window: Duration,
    },
    /// The same on a host where other processes had the core of either rank again and again.
    BusyCores {
        /// This rank.
        me: u32,
        /// Seconds spent waiting,
        seconds: f64,
        /// out of the last period of this length.
        window: Duration,
    },
    /// A rank sends no heartbeats.
    Silent {
        /// This rank.
        me: u32,
        /// The silent rank.
        rank: u32,
        /// For how long.
        silent: Duration,
        /// Why, as far as it is known; otherwise empty.
        why: &'static str,
        /// After how long it is lost.
        limit: Duration,
    },
    /// A rank sends heartbeats again.
    Resumed {
        /// This rank.
        me: u32,
        /// The other.
        rank: u32,
        /// For how long it had sent none.
        silent: Duration,
    },
    /// This rank has evicted another.
    Evicted {
        /// This rank.
        me: u32,
        /// The evicted rank.
        rank: u32,
        /// Why.
        why: Error,
    },
    /// This rank has killed the process of an evicted rank.
    Killed {
        /// This rank.
        me: u32,
        /// The rank whose process was killed.
        rank: u32,
    },
    /// This rank leaves although a peer has not received all that it has sent.
    Undelivered {
        /// This rank.
        me: u32,
        /// The peer.
        rank: u32,
        /// Bytes that have not arrived.
        bytes: u64,
        /// For how long none has.
        waited: Duration,
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
                "rank {me} spent {seconds:.0} of the last {} s waiting for rank {rank}: it comes late, or its data takes long \
                 on the way (TRIGRAM_REPORT=1 tells which)",
                window.as_secs()
            ),
            Self::BusyCores { me, seconds, window } => write!(
                f,
                "rank {me} spent {seconds:.0} of the last {} s waiting: other processes of this host want the cores that its \
                 ranks run on",
                window.as_secs()
            ),
            Self::Silent { me, rank, silent, why, limit } => write!(
                f,
                "rank {me}: no heartbeat from rank {rank} for {:.1} s{}; after {} s it is lost (TRIGRAM_SILENCE)",
                silent.as_secs_f64(),
                if why.is_empty() { String::new() } else { format!(": {why}") },
                limit.as_secs_f64()
            ),
            Self::Resumed { me, rank, silent } => {
                write!(f, "rank {me}: rank {rank} sends heartbeats again after {:.1} s", silent.as_secs_f64())
            }
            Self::Evicted { me, rank, why } => {
                write!(f, "rank {me} evicted rank {rank}: {why}. Calls that need rank {rank} fail")
            }
            Self::Killed { me, rank } => {
                write!(
                    f,
                    "rank {me} ended the process of rank {rank} on this host: it was evicted, and TRIGRAM_KILL=on is set or its \
                     access to shared memory could not be taken back"
                )
            }
            Self::Undelivered { me, rank, bytes, waited } => {
                write!(
                    f,
                    "rank {me} leaves, and rank {rank} has not received the last {bytes} bytes that it sent: none arrived for \
                     {:.1} s. A call that rank {rank} has not finished fails there",
                    waited.as_secs_f64()
                )
            }
        }
    }
}

/// Lines that wait to be written out.
#[derive(Debug, Default)]
pub(crate) struct LogQueue {
    /// Whether there are any: checking it takes no lock.
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

    /// Passes the lines to the logger. To be called without the progress lock.
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
