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

/// The most windows that are remembered.
const KEPT: usize = 1024;

/// The last windows.
#[derive(Debug, Default)]
pub struct RateMeter {
    began: Option<(Instant, u64, u64)>,
    looked: u64,
    /// When each ended, and bytes per second inward and outward.
    windows: VecDeque<(Instant, f64, f64)>,
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
            let seconds = (now - at).as_secs_f64();
            if self.windows.len() == KEPT {
                self.windows.pop_front();
            }
            self.windows.push_back((now, inn as f64 / seconds, gone as f64 / seconds));
        }
        self.began = Some((now, inn, gone));
    }

    /// Bytes per second that the link carried in the best tenth of the windows that ended after `since`, in the
    /// slower direction; `None` if there was too little traffic to tell.
    pub fn rate(&self, since: Option<Instant>) -> Option<f64> {
        let windows = || self.windows.iter().rev().take_while(|w| since.is_none_or(|s| w.0 > s));
        let best = |mut rates: Vec<f64>| {
            rates.sort_unstable_by(|a, b| b.total_cmp(a));
            rates.get(rates.len() / 10).copied()
        };
        let (inward, outward) =
            (best(windows().map(|w| w.1).collect()), best(windows().map(|w| w.2).collect()));
        inward.zip(outward).map(|(a, b)| a.min(b)).filter(|rate| *rate > 0.0)
    }
}
