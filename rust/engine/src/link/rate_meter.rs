//! Measures what this rank's link carries, from the traffic itself.
//!
//! Bytes are counted in the kernel: received are those that have been read or wait to be read, sent are those that
//! have been written and acknowledged. So a rank that looks late mistakes neither a full buffer for a fast link nor
//! its own lateness for a slow one. A link is seldom busy all the time, so its rate is what it carried in the best
//! tenth of many short windows; not in the very best, because acknowledgements that waited behind data arrive in
//! bursts.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::link::frames::{Rx, Tx};

/// A window lasts at least this long, and
const WINDOW: Duration = Duration::from_millis(8);
/// carries at least this many bytes in one direction: far more than a traffic shaper lets through at once.
const LEAST: u64 = 512 << 10;
/// Bytes that this rank moves between two looks at the counters, at least.
const LOOK: u64 = 128 << 10;

/// So many windows, and bytes in them as in so many of the least, a rate takes. Fewer tell nothing: ranks begin a step at
/// different times, and a declaration may fall due just then. And a link that is idle has windows too.
const ENOUGH: usize = 8;

/// The most windows that are remembered.
const KEPT: usize = 1024;

/// The last windows.
#[derive(Debug, Default)]
pub struct RateMeter {
    began: Option<(Instant, u64, u64)>,
    looked: u64,
    windows: VecDeque<Window>,
}

/// What went through the link in one window, which ended at this moment.
#[derive(Debug)]
struct Window {
    ended: Instant,
    /// In the direction in which there were more.
    bytes: u64,
    /// Bytes per second.
    inward: f64,
    outward: f64,
}

impl RateMeter {
    /// Looks at the counters, if enough has moved since the last look.
    pub(crate) fn sample(&mut self, rx: &[Option<Rx>], tx: &[Option<Tx>]) {
        let sockets = || rx.iter().flatten().filter(|rx| rx.has_socket());
        let out = || sockets().filter_map(|rx| tx.get(rx.peer as usize)?.as_ref());
        let moved = sockets().map(Rx::bytes).sum::<u64>() + out().map(Tx::written).sum::<u64>();
        if moved < self.looked + LOOK {
            return;
        }
        self.looked = moved;
        let now = Instant::now();
        if self.began.is_some_and(|(at, ..)| now - at < WINDOW) {
            return;
        }
        let (mut inn, mut gone) = (0, 0);
        for rx in sockets() {
            inn += rx.bytes() + rx.waiting(libc::FIONREAD).unwrap_or(0);
            let written = tx.get(rx.peer as usize).and_then(Option::as_ref).map_or(0, Tx::written);
            gone += written.saturating_sub(rx.waiting(libc::TIOCOUTQ).unwrap_or(0));
        }
        if let Some((at, inn_then, gone_then)) = self.began {
            let (inn, gone) = (inn.saturating_sub(inn_then), gone.saturating_sub(gone_then));
            if inn.max(gone) < LEAST && now - at < 100 * WINDOW {
                return;
            }
            self.note(now, now - at, inn, gone);
        }
        self.began = Some((now, inn, gone));
    }

    /// A window has ended, in which so many bytes went in and out. What goes one way alone, as a broadcast does, shows
    /// nothing of the other, and is left out.
    fn note(&mut self, ended: Instant, length: Duration, inn: u64, gone: u64) {
        let bytes = inn.max(gone);
        if inn.min(gone) < bytes / 4 {
            return;
        }
        if self.windows.len() == KEPT {
            self.windows.pop_front();
        }
        let seconds = length.as_secs_f64();
        let (inward, outward) = (inn as f64 / seconds, gone as f64 / seconds);
        self.windows.push_back(Window { ended, bytes, inward, outward });
    }

    /// Bytes per second that the link carried in the best tenth of the windows that ended after `since`, in the
    /// slower direction; `None` if there was too little traffic to tell.
    pub fn rate(&self, since: Option<Instant>) -> Option<f64> {
        let windows = || self.windows.iter().rev().take_while(|w| since.is_none_or(|s| w.ended > s));
        let bytes: u64 = windows().map(|w| w.bytes).sum();
        if windows().count() < ENOUGH || bytes < ENOUGH as u64 * LEAST {
            return None;
        }
        let best = |mut rates: Vec<f64>| {
            rates.sort_unstable_by(|a, b| b.total_cmp(a));
            rates.get(rates.len() / 10).copied()
        };
        let (inward, outward) =
            (best(windows().map(|w| w.inward).collect()), best(windows().map(|w| w.outward).collect()));
        inward.zip(outward).map(|(a, b)| a.min(b)).filter(|rate| *rate > 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a meter knows after windows of 10 ms, in which so many bytes went in; out went half as many.
    fn after(windows: &[u64]) -> (RateMeter, Vec<Instant>) {
        let (mut meter, mut now, mut ends) = (RateMeter::default(), Instant::now(), Vec::new());
        for &bytes in windows {
            now += Duration::from_millis(10);
            meter.note(now, Duration::from_millis(10), bytes, bytes / 2);
            ends.push(now);
        }
        (meter, ends)
    }

    #[test]
    fn the_slower_direction_of_the_best_tenth_counts() {
        let mut windows = [LEAST; 20];
        windows[7] = 9 * LEAST;
        windows[8] = 3 * LEAST;
        windows[11] = 2 * LEAST;
        assert_eq!(after(&windows).0.rate(None), Some(2.0 * LEAST as f64 * 50.0));
    }

    #[test]
    fn what_goes_one_way_alone_hides_nothing() {
        let (mut meter, ends) = after(&[LEAST; ENOUGH]);
        let known = meter.rate(None);
        for _ in 0..2 * KEPT {
            meter.note(ends[ENOUGH - 1], Duration::from_millis(10), 100, LEAST);
            meter.note(ends[ENOUGH - 1], Duration::from_millis(10), LEAST, 0);
        }
        assert!(known.is_some() && meter.rate(None) == known);
    }

    #[test]
    fn too_little_tells_nothing() {
        let (meter, ends) = after(&[LEAST; ENOUGH + 3]);
        assert!(meter.rate(None).is_some() && meter.rate(Some(ends[2])).is_some());
        assert_eq!(meter.rate(Some(ends[3])), None, "a step has just begun");
        assert_eq!(after(&[LEAST / 20; 100]).0.rate(None), None, "nobody needs the link");
    }
}
