//! The words of a doorbell: how a rank goes to sleep so that no ring is missed.
//!
//! Who sleeps says so, and looks for work once more before it does; who rings publishes the work first, and looks
//! whether anybody sleeps. A fence on each side sees that not both look too early.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::sys::atomics::{AtomicU32, fence, futex_wait, futex_wake};

/// The shared words of a doorbell.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Words {
    /// Counts the rings that found somebody asleep; the futex.
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
        // Pairs with the fence in `arm`: either we see that it sleeps, or it sees what we wrote.
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

    /// Says that the owner is about to sleep. It must look once more for work before it does.
    pub fn arm(&self, on_event: bool) -> u32 {
        let seen = self.count.load(Ordering::Acquire);
        self.asleep.store(if on_event { ON_EVENT } else { ON_FUTEX }, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        seen
    }

    /// The owner found work after all, or has woken.
    pub fn disarm(&self) {
        self.asleep.store(AWAKE, Ordering::Relaxed);
    }

    /// Sleeps until rung, for at most `limit`. `seen` is from [`Words::arm`].
    pub fn sleep(&self, seen: u32, limit: Duration) {
        futex_wait(&self.count, seen, limit);
        self.disarm();
    }
}
