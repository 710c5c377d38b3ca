//! Whether somebody else wants the core that this rank waits on.
//!
//! A yield costs less than a microsecond while nobody else wants the core. Otherwise it gives the core away for a whole
//! time slice, several milliseconds, whatever happens meanwhile; a thread that sleeps gets it back as soon as it is
//! woken. So a rank that waits measures its yields, and where one was slow it sleeps at once, for a while. Then it tries
//! again: where it finds the core wanted each time, the whiles become longer, so that it loses a slice now and then only.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::sys::clock;

/// What a yield costs at least that has given the core to somebody else for a time slice.
const SLOW: Duration = Duration::from_micros(200);
/// How long a core counts as wanted after a slow yield, at first: a short disturbance must not cost much.
const FIRST: Duration = Duration::from_millis(5);
/// The same at most.
const LONGEST: Duration = Duration::from_secs(2);

/// What this process knows of its cores. Lengths and moments are in ticks, see [`clock`].
#[derive(Debug)]
pub(crate) struct Cores {
    slow: u64,
    first: u64,
    longest: u64,
    /// Until when they count as wanted; 0: nobody has wanted them yet.
    until: AtomicU64,
    /// How long they were last taken for wanted.
    last: AtomicU64,
}

impl Cores {
    pub(crate) fn new() -> Self {
        let [slow, first, longest] = [SLOW, FIRST, LONGEST].map(clock::in_ticks);
        Self { slow, first, longest, until: AtomicU64::new(0), last: AtomicU64::new(0) }
    }

    /// Whether this thread would lose its core if it did not sleep while it waits.
    pub(crate) fn are_wanted(&self) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        until != 0 && clock::ticks() < until
    }

    /// Lets others have the core; true if they wanted it.
    pub(crate) fn give_way(&self) -> bool {
        let before = clock::ticks();
        std::thread::yield_now();
        let now = clock::ticks();
        let is_slow = now.saturating_sub(before) >= self.slow;
        if is_slow {
            self.note_slow(now);
        }
        is_slow
    }

    /// Others have wanted them.
    pub(crate) fn note_wanted(&self) {
        self.note_slow(clock::ticks());
    }

    #[cold]
    fn note_slow(&self, now: u64) {
        // Threads may do this at the same time; what one of them notes is good enough.
        let (until, last) = (self.until.load(Ordering::Relaxed), self.last.load(Ordering::Relaxed));
        let is_again = until != 0 && now < until.saturating_add(last.max(self.first));
        let length = if is_again { (last * 2).clamp(self.first, self.longest) } else { self.first };
        self.last.store(length, Ordering::Relaxed);
        self.until.store(now.saturating_add(length), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_a_core_is_wanted_the_rarer_it_is_tried() {
        let cores = Cores::new();
        assert!(!cores.are_wanted());
        let mut now = clock::ticks();
        let mut lengths = Vec::new();
        for _ in 0..12 {
            cores.note_slow(now);
            let until = cores.until.load(Ordering::Relaxed);
            lengths.push(until - now);
            now = until + 1;
        }
        assert_eq!(lengths[..3], [cores.first, 2 * cores.first, 4 * cores.first]);
        assert_eq!(lengths[11], cores.longest);
        assert!(cores.are_wanted());
        // Once it was left alone for as long, it is tried soon again.
        now += 2 * cores.longest;
        cores.note_slow(now);
        assert_eq!(cores.until.load(Ordering::Relaxed), now + cores.first);
    }

    #[test]
    fn a_core_that_nobody_wants_any_more_is_yielded_again() {
        let cores = Cores::new();
        cores.note_slow(clock::ticks());
        assert!(cores.are_wanted());
        std::thread::sleep(FIRST);
        assert!(!cores.are_wanted());
    }
}
