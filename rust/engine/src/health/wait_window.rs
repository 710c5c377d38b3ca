//! Measures how long this rank waits for each other rank, and logs a line that names one that stands out; or the machine,
//! where other processes had the cores of either.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::group::world::World;
use crate::health::counters::Counters;
use crate::health::log_lines::LogLine;
use crate::host::control_segment::ControlSegment;

/// The least time between two such lines.
const WINDOW: Duration = Duration::from_secs(60);
/// A rank is named if this share of the time was spent waiting for it,
const SHARE: f64 = 0.2;
/// and it was waited for this many times as long as the next; otherwise all ranks are alike.
const LEAD: f64 = 2.0;
/// The machine is named instead if other processes had the core of either rank so often. Where they compute all the time,
/// a rank finds that twice as often at least ([`crate::sys::cores`]).
const BUSY: u64 = 10;

/// The time waited for each rank, as of the last line.
#[derive(Debug)]
pub(crate) struct WaitWindow {
    began: Instant,
    before: Vec<u64>,
    /// By rank, how often other processes had had its core; 0 for ranks of other hosts, which do not tell.
    lost_cores: Vec<u64>,
    /// Calls that had ended.
    calls: u64,
}

impl Default for WaitWindow {
    fn default() -> Self {
        Self { began: Instant::now(), before: Vec::new(), lost_cores: Vec::new(), calls: 0 }
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
    /// At the end of a window, queues a log line that names the rank waited for longest, if it stands out.
    pub(crate) fn name_straggler(&mut self, counters: &Counters, world: &World) {
        if self.began.elapsed() < WINDOW {
            return;
        }
        let waited = counters.waited.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        let lost_cores =
            (0..world.size() as u32).map(|rank| world.control(rank).map_or(0, ControlSegment::lost_cores));
        let before = std::mem::replace(&mut self.lost_cores, lost_cores.collect());
        let (me, window) = (world.rank, WINDOW);
        let calls = counters.calls.load(Ordering::Relaxed);
        // Where none has ended, one call lasts: nobody is slow, and the line that tells of that call names the ranks.
        let some_ended = std::mem::replace(&mut self.calls, calls) != calls;
        if let Some((rank, seconds)) = self.close(waited).filter(|_| some_ended) {
            let is_busy = |rank: usize| is_busy(&before, &self.lost_cores, rank);
            counters.log.push(match is_busy(me as usize) || is_busy(rank) {
                true => LogLine::BusyCores { me, seconds, window },
                false => LogLine::Straggler { me, rank: rank as u32, seconds, window },
            });
        }
    }
}

/// Whether other processes had the core of a rank again and again, by how often they had had it `before` and `now`.
fn is_busy(before: &[u64], now: &[u64], rank: usize) -> bool {
    let before = before.get(rank).copied().unwrap_or_default();
    now.get(rank).is_some_and(|now| now.saturating_sub(before) >= BUSY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_core_is_one_that_others_have_had_often_since() {
        assert!(is_busy(&[], &[0, BUSY], 1));
        assert!(!is_busy(&[], &[0, BUSY], 0));
        assert!(!is_busy(&[5, 5], &[5, 4 + BUSY], 1), "before that does not count");
        assert!(!is_busy(&[5, 5], &[5, 0], 1), "a peer that counts backwards");
    }

    #[test]
    fn only_a_rank_that_stands_out_is_named() {
        let mut window = WaitWindow {
            began: Instant::now() - Duration::from_secs(10),
            before: vec![1_000_000_000; 3],
            lost_cores: vec![],
            calls: 0,
        };
        let (rank, seconds) = window.close(vec![1_000_000_000, 6_000_000_000, 2_000_000_000]).unwrap();
        assert_eq!((rank, seconds.round() as u64), (1, 5));
        window.began -= Duration::from_secs(10);
        assert!(window.close(vec![5_000_000_000, 10_000_000_000, 6_000_000_000]).is_none(), "all alike");
        window.began -= Duration::from_secs(10);
        assert!(window.close(vec![5_000_000_000, 11_000_000_000, 6_000_000_000]).is_none(), "little");
    }
}
