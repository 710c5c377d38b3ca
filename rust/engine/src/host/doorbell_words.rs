//! The shared words of a doorbell, and how a rank goes to sleep without missing a ring.
//!
//! A rank that goes to sleep first marks itself as asleep and then checks once more for work; a rank that rings first
//! publishes the work and then checks whether the other sleeps. A fence on each side ensures that not both check too
//! early.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::sys::atomics::{AtomicU32, fence, futex_wait, futex_wake};

/// The shared words of a doorbell.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Words {
    /// Counts the rings that found the owner asleep; the futex.
    count: AtomicU32,
    /// How the owner sleeps: one of the constants below.
    asleep: AtomicU32,
}

const AWAKE: u32 = 0;
const ON_FUTEX: u32 = 1;
const ON_EVENT: u32 = 2;

impl Words {
    /// Wakes the owner if it sleeps, by `event` if it sleeps on that. Everything written before is visible to it when
    /// it wakes.
    pub fn ring(&self, event: impl FnOnce()) {
        // Pairs with the fence in `arm`: either this rank sees that the owner sleeps, or the owner sees what was
        // published.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) == AWAKE {
            return;
        }
        match self.asleep.swap(AWAKE, Ordering::AcqRel) {
            ON_FUTEX => {
                self.count.fetch_add(1, Ordering::Release);
                futex_wake(&self.count);
            }
            ON_EVENT => event(),
            _ => {}
        }
    }

    /// Announces that the owner is about to sleep. It must check once more for work before it does.
    pub fn arm(&self, on_event: bool) -> u32 {
        let seen = self.count.load(Ordering::Acquire);
        self.asleep.store(if on_event { ON_EVENT } else { ON_FUTEX }, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        seen
    }

    /// The owner has found work after all, or has woken.
    pub fn disarm(&self) {
        self.asleep.store(AWAKE, Ordering::Relaxed);
    }

    /// Sleeps until rung, for at most `limit`. `seen` is from [`Words::arm`].
    pub fn sleep(&self, seen: u32, limit: Duration) {
        futex_wait(&self.count, seen, limit);
        self.disarm();
    }
}
