//! How many cores nobody needs: what the system counts as idle on those that this process may use.

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity};

/// A window lasts at least this long: the system counts in hundredths of a second.
const WINDOW: Duration = Duration::from_millis(300);
/// After this long without a look, what happened in between says nothing.
const STALE: Duration = Duration::from_secs(2);
/// So much of a core may be in use, and it counts as free: by lanes that look for more, and by what every machine does.
const CLOSE: f64 = 0.25;
/// What `/proc/stat` counts in a second.
const PER_SECOND: f64 = 100.0;

/// The last look.
#[derive(Debug, Default)]
pub(crate) struct FreeCores {
    last: Option<Look>,
}

#[derive(Debug)]
struct Look {
    at: Instant,
    /// Hundredths of a second that the cores were idle, all together.
    idle: u64,
    /// Processor time of the lanes.
    spent: Duration,
}

impl FreeCores {
    /// How many cores were free for one of `ranks` ranks since the last look, or used by its lanes, which have spent so much
    /// time since their start; `None` if it is too early to tell, or the system does not tell.
    pub(crate) fn look(&mut self, spent: Duration, ranks: usize) -> Option<u32> {
        let at = Instant::now();
        if self.last.as_ref().is_some_and(|last| at - last.at < WINDOW) {
            return None;
        }
        let idle = idle_time(&std::fs::read_to_string("/proc/stat").ok()?, &sched_getaffinity(None).ok()?)?;
        let last = self.last.replace(Look { at, idle, spent })?;
        let seconds = (at - last.at).as_secs_f64();
        let idle = idle.saturating_sub(last.idle) as f64 / PER_SECOND;
        let free = (idle / ranks.max(1) as f64 + spent.saturating_sub(last.spent).as_secs_f64()) / seconds;
        (at - last.at < STALE).then_some((free + CLOSE) as u32)
    }
}

/// Of the text of `/proc/stat`, how long these cores were idle, all together; `None` if it names none of them.
fn idle_time(text: &str, cores: &CpuSet) -> Option<u64> {
    let idle = |line: &str| {
        let (core, times) = line.strip_prefix("cpu")?.split_once(' ')?;
        core.parse().ok().filter(|&core: &usize| core < CpuSet::MAX_CPU && cores.is_set(core))?;
        // user nice system idle iowait
        let times = times.split_ascii_whitespace().skip(3).take(2);
        times.map(|time| time.parse::<u64>().ok()).sum::<Option<u64>>()
    };
    text.lines().filter_map(idle).reduce(|a, b| a + b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_is_what_the_cores_of_this_process_were() {
        let text = "cpu  9 9 9 999 9 9 9 9 9 9\ncpu0 1 2 3 400 50 6 7 8 0 0\ncpu1 1 2 3 1000 0 6 7 8 0 0\ncpu7 1 1 1 70 7\nintr 3\n";
        let mut cores = CpuSet::new();
        assert_eq!(idle_time(text, &cores), None);
        cores.set(0);
        assert_eq!(idle_time(text, &cores), Some(450));
        cores.set(7);
        assert_eq!(idle_time(text, &cores), Some(527));
        assert_eq!(idle_time("", &cores), None);
    }

    #[test]
    fn a_short_window_says_nothing() {
        let mut free = FreeCores::default();
        assert_eq!(free.look(Duration::ZERO, 1), None);
        assert_eq!(free.look(Duration::ZERO, 1), None);
        std::thread::sleep(WINDOW);
        let cores = std::thread::available_parallelism().unwrap().get() as u32;
        assert!(free.look(Duration::ZERO, 1).is_none_or(|free| free <= cores));
    }
}
