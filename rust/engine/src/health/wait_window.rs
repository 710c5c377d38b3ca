//! Measures how long this rank waits for each other rank, and logs a line that names one that stands out.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::health::counters::Counters;
use crate::health::log_lines::LogLine;

/// The least time between two such lines.
const WINDOW: Duration = Duration::from_secs(60);
/// A rank is named if this share of the time was spent waiting for it,
const SHARE: f64 = 0.2;
/// and it was waited for this many times as long as the next; otherwise all ranks are alike.
const LEAD: f64 = 2.0;

/// The time waited for each rank, as of the last line.
#[derive(Debug)]
pub(crate) struct WaitWindow {
    began: Instant,
    before: Vec<u64>,
}

impl Default for WaitWindow {
    fn default() -> Self {
        Self { began: Instant::now(), before: Vec::new() }
    }
}

impl WaitWindow {
    /// At the end of a window, the rank to name and the seconds waited for it.
    fn close(&mut self, waited: Vec<u64>) -> Option<(usize, f64)> {
        let spent = self.began.elapsed().as_secs_f64();
        self.began = Instant::now();
        let before = std::mem::replace(&mut self.before, waited);
        let seconds = |i: usize| {
            let new = self.before[i] - before.get(i).copied().unwrap_or_default();
            new as f64 * 1e-9
        };
        let mut ranks: Vec<(usize, f64)> = (0..self.before.len()).map(|i| (i, seconds(i))).collect();
        ranks.sort_by(|a, b| b.1.total_cmp(&a.1));
        let next = ranks.get(1).map_or(0.0, |r| r.1);
        ranks.first().copied().filter(|&(_, s)| s > SHARE * spent && s > LEAD * next)
    }
}

impl WaitWindow {
    /// At the end of a window, queues a log line that names the rank waited for longest, if it stands out; `me` is this rank.
    pub(crate) fn name_straggler(&mut self, counters: &Counters, me: u32) {
        if self.began.elapsed() < WINDOW {
            return;
        }
        let waited = counters.waited.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        if let Some((rank, seconds)) = self.close(waited) {
            let rank = rank as u32;
            counters.log.push(LogLine::Straggler { me, rank, seconds, window: WINDOW });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_rank_that_stands_out_is_named() {
        let mut window =
            WaitWindow { began: Instant::now() - Duration::from_secs(10), before: vec![1_000_000_000; 3] };
        let (rank, seconds) = window.close(vec![1_000_000_000, 6_000_000_000, 2_000_000_000]).unwrap();
        assert_eq!((rank, seconds.round() as u64), (1, 5));
        window.began -= Duration::from_secs(10);
        assert!(window.close(vec![5_000_000_000, 10_000_000_000, 6_000_000_000]).is_none(), "all alike");
        window.began -= Duration::from_secs(10);
        assert!(window.close(vec![5_000_000_000, 11_000_000_000, 6_000_000_000]).is_none(), "little");
    }
}
