//! Whether moving bytes keeps one thread busy.
//!
//! Handing work over costs processor time: a thread is woken, and wakes the one that drives. It is worth that only where
//! the thread that drives would have no time left. Behind a slow link it mostly sleeps.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::sys::clock;

/// A window lasts at least this long, and at most so many times as long: in between nobody may have driven.
const WINDOW: Duration = Duration::from_millis(2);
const LONGEST: u64 = 8;
/// Of a window, in tenths, what moving bytes takes at least where it is worth a second thread.
const MUCH: u64 = 6;

/// What moving bytes takes. Times are in ticks, see [`clock`]. Only the thread that drives changes it.
#[derive(Debug)]
pub(crate) struct Load {
    window: u64,
    since: AtomicU64,
    /// How long the thread that drives has slept in this window.
    slept: AtomicU64,
    /// What lanes had done when it began.
    done: AtomicU64,
    is_much: AtomicBool,
}

impl Load {
    pub(crate) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        let window = clock::in_ticks(WINDOW);
        Self { window, since: zero(), slept: zero(), done: zero(), is_much: AtomicBool::new(true) }
    }

    /// The thread that drives has slept from this moment on until now.
    pub(crate) fn note_sleep(&self, since: u64) {
        let slept = clock::ticks().saturating_sub(since);
        self.slept.store(self.slept.load(Ordering::Relaxed) + slept, Ordering::Relaxed);
    }

    /// Whether it was much lately; `done`: how long lanes have worked since their start.
    pub(crate) fn is_much(&self, done: u64) -> bool {
        let now = clock::ticks();
        let passed = now.saturating_sub(self.since.load(Ordering::Relaxed));
        if passed >= self.window {
            let slept = self.slept.swap(0, Ordering::Relaxed);
            let lanes = done.saturating_sub(self.done.swap(done, Ordering::Relaxed));
            self.since.store(now, Ordering::Relaxed);
            if passed <= LONGEST * self.window {
                let work = passed.saturating_sub(slept) + lanes;
                self.is_much.store(work * 10 >= passed * MUCH, Ordering::Relaxed);
            }
        }
        self.is_much.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One window in which the thread that drives slept for so many tenths, and lanes worked for so many.
    fn after(load: &Load, slept: u64, lanes: u64) -> bool {
        let done = load.done.load(Ordering::Relaxed);
        load.since.store(clock::ticks() - load.window, Ordering::Relaxed);
        load.slept.store(load.window / 10 * slept, Ordering::Relaxed);
        load.is_much(done + load.window / 10 * lanes)
    }

    #[test]
    fn who_sleeps_needs_no_help() {
        let load = Load::new();
        assert!(load.is_much(0), "nothing is known yet");
        assert!(!after(&load, 9, 0));
        assert!(!load.is_much(0), "until the window is over");
        assert!(after(&load, 1, 0));
        assert!(after(&load, 8, 7), "it sleeps because lanes work");
        assert!(!after(&load, 8, 2));
    }

    #[test]
    fn a_time_without_calls_says_nothing() {
        let load = Load::new();
        assert!(!after(&load, 9, 0));
        load.since.store(clock::ticks() - 2 * LONGEST * load.window, Ordering::Relaxed);
        assert!(!load.is_much(0), "it was neither asleep nor busy");
    }
}
