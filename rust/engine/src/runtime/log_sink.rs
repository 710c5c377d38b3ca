//! A logger for the `log` crate that keeps lines in a bounded queue, from which another thread fetches them.
//!
//! A thread of the engine that logs must not wait, for a slow disk or for an interpreter's lock: its rank would send no
//! heartbeats. So [`install`] puts lines into a queue, and a thread that may wait takes them out with [`next()`].

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use log::{Level, LevelFilter};

use crate::sys::fork;

/// The most lines that wait; beyond, the oldest is dropped.
const MOST: usize = 1000;

#[derive(Default)]
struct Lines {
    lines: VecDeque<(Level, String)>,
    /// How many lines have been dropped since they were last fetched.
    dropped: u64,
}

struct Queue {
    lines: Mutex<Lines>,
    arrived: Condvar,
}

impl Queue {
    const fn new() -> Self {
        Self { lines: Mutex::new(Lines { lines: VecDeque::new(), dropped: 0 }), arrived: Condvar::new() }
    }
}

/// One for each depth of forks: in a child, a thread that the child does not have may hold the parent's lock.
static QUEUES: [Queue; 8] = [const { Queue::new() }; 8];

fn queue() -> &'static Queue {
    &QUEUES[fork::depth() % QUEUES.len()]
}

/// The logger: puts lines into this process's queue.
struct Sink;

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl log::Log for Sink {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.target() == "trigram"
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let line = (record.level(), record.args().to_string());
        let queue = queue();
        let mut lines = queue.lock();
        if lines.lines.len() == MOST {
            lines.lines.pop_front();
            lines.dropped += 1;
        }
        lines.lines.push_back(line);
        drop(lines);
        queue.arrived.notify_one();
    }

    fn flush(&self) {}
}

/// Queues the engine's log lines from now on.
pub fn install() {
    fork::watch(); // counts the depth of forks
    // If the process's own Rust code has installed another logger, that one gets the lines.
    if log::set_logger(&Sink).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

/// The lines that wait, the oldest first. If there are none, waits for one until `deadline`, or until `is_over` and
/// [`wake`].
pub fn next(deadline: Instant, is_over: impl Fn() -> bool) -> Vec<(Level, String)> {
    let queue = queue();
    let mut lines = queue.lock();
    while lines.lines.is_empty() && !is_over() {
        let Some(left) = deadline.checked_duration_since(Instant::now()).filter(|d| *d > Duration::ZERO)
        else {
            break;
        };
        (lines, _) = queue.arrived.wait_timeout(lines, left).unwrap_or_else(PoisonError::into_inner);
    }
    if is_over() {
        return Vec::new();
    }
    let dropped = std::mem::take(&mut lines.dropped);
    let mut taken = Vec::new();
    if dropped > 0 {
        let text =
            format!("{dropped} earlier log lines were dropped: the process was too slow to fetch them");
        taken.push((Level::Warn, text));
    }
    taken.extend(lines.lines.drain(..));
    taken
}

/// Wakes a thread that waits in [`next()`], so that it checks `is_over`.
pub fn wake() {
    let queue = queue();
    drop(queue.lock());
    queue.arrived.notify_all();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(text: &str) {
        let args = format_args!("{text}");
        let record = log::Record::builder().level(Level::Warn).target("trigram").args(args).build();
        log::Log::log(&Sink, &record);
    }

    #[test]
    fn lines_come_in_order_and_the_oldest_give_way() {
        let now = Instant::now;
        assert!(next(now(), || false).is_empty());
        (0..MOST + 2).for_each(|i| log(&i.to_string()));
        let lines = next(now(), || false);
        assert_eq!(lines.len(), MOST + 1);
        assert!(lines[0].1.starts_with("2 earlier log lines"));
        assert_eq!((lines[1].clone(), lines[MOST].0), ((Level::Warn, "2".into()), Level::Warn));
        let waiter = std::thread::spawn(|| next(Instant::now() + Duration::from_secs(20), || false));
        std::thread::sleep(Duration::from_millis(20));
        log("late");
        assert_eq!(waiter.join().unwrap(), [(Level::Warn, "late".to_string())]);
        let over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let seen = over.clone();
        let is_over = move || seen.load(std::sync::atomic::Ordering::Acquire);
        let waiter = std::thread::spawn(move || next(Instant::now() + Duration::from_secs(20), is_over));
        over.store(true, std::sync::atomic::Ordering::Release);
        wake();
        assert!(waiter.join().unwrap().is_empty());
    }
}
