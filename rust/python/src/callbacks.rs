//! Callbacks of calls that have ended, on their way to the thread of the process that runs them.
//!
//! The engine tells of the end of a call under its progress lock, where no Python code may run: it only leaves a note here.
//! The callbacks of one group's collectives come out in the order in which they were asked for, which is the same on all
//! ranks if their programs are; so a callback may make calls of another group. Those of messages come out as the messages
//! end, because on two ranks messages need not have the same order.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use trigram_engine::runtime::engine::Engine;
use trigram_engine::sys::completion::Completion;
use trigram_engine::sys::fork;

/// How often the thread checks for engines that have failed: their calls never end.
const CHECK: Duration = Duration::from_secs(1);

/// What has one order.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Line {
    /// The collectives of a group of an engine: ranks that are threads of one process have the same groups.
    Collectives(usize, u64),
    /// A message.
    Message(u64),
}

struct Asked {
    completion: Arc<Completion>,
    engine: Weak<Engine>,
    callback: Py<PyAny>,
}

impl Asked {
    /// `kept` gets the engine that was asked: it may be the last to hold it, and an engine ends calls, whose listeners
    /// take the lock under which this is called.
    fn is_due(&self, kept: &mut Vec<Arc<Engine>>) -> bool {
        if self.completion.is_done() {
            return true;
        }
        let Some(engine) = self.engine.upgrade() else { return true };
        let failed = engine.check_sound().is_err();
        kept.push(engine);
        failed
    }
}

#[derive(Default)]
struct Notes {
    asked: HashMap<Line, VecDeque<Asked>>,
    /// Lines in which a call has ended since they were looked at.
    ended: Vec<Line>,
    messages: u64,
}

#[derive(Default)]
struct Queue {
    notes: Mutex<Option<Notes>>,
    told: Condvar,
}

/// One for each depth of forks: in a child, a thread that the child does not have may hold the parent's lock.
static QUEUES: [Queue; 8] = [const { Queue { notes: Mutex::new(None), told: Condvar::new() } }; 8];

fn queue() -> &'static Queue {
    &QUEUES[fork::depth() % QUEUES.len()]
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Option<Notes>> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, line: Line) {
        self.lock().get_or_insert_default().ended.push(line);
        self.told.notify_one();
    }
}

/// Has `callback` run when a call has ended; `group`: the group whose collective it is, `None` for a message.
pub(crate) fn add(
    group: Option<u64>,
    completion: &Arc<Completion>,
    engine: &Weak<Engine>,
    callback: Py<PyAny>,
) {
    let queue = queue();
    let mut lock = queue.lock();
    let notes = lock.get_or_insert_default();
    notes.messages += 1;
    let line =
        group.map_or(Line::Message(notes.messages), |id| Line::Collectives(engine.as_ptr() as usize, id));
    let asked = Asked { completion: completion.clone(), engine: engine.clone(), callback };
    notes.asked.entry(line).or_default().push_back(asked);
    drop(lock);
    completion.when_done(move || queue.tell(line));
    if !completion.is_done()
        && let Some(engine) = engine.upgrade()
    {
        engine.hurry();
    }
}

impl Notes {
    /// The callbacks that are due; with `all`, also those of engines that have failed.
    fn take(&mut self, all: bool, kept: &mut Vec<Arc<Engine>>) -> Vec<Py<PyAny>> {
        let mut due = Vec::new();
        let mut lines = std::mem::take(&mut self.ended);
        if all {
            lines.extend(self.asked.keys().copied());
        }
        for line in lines {
            let Some(asked) = self.asked.get_mut(&line) else { continue };
            while asked.front().is_some_and(|asked| asked.is_due(kept))
                && let Some(next) = asked.pop_front()
            {
                due.push(next.callback);
            }
            if asked.is_empty() {
                self.asked.remove(&line);
            }
        }
        due
    }
}

/// The callbacks that are due. If there are none, waits for one until `deadline`, or until `is_over` and [`wake`].
pub(crate) fn next(deadline: Instant, is_over: impl Fn() -> bool) -> Vec<Py<PyAny>> {
    let queue = queue();
    let mut kept = Vec::new(); // dropped after the lock
    let mut lock = queue.lock();
    let mut checked = Instant::now();
    while !is_over() {
        let now = Instant::now();
        let check = now - checked >= CHECK;
        if check {
            checked = now;
        }
        let due = lock.get_or_insert_default().take(check, &mut kept);
        if !due.is_empty() || now >= deadline {
            return due;
        }
        let limit = CHECK.min(deadline - now);
        (lock, _) = queue.told.wait_timeout(lock, limit).unwrap_or_else(PoisonError::into_inner);
    }
    Vec::new()
}

/// Wakes the thread that waits in [`next`], so that it checks `is_over`.
pub(crate) fn wake() {
    let queue = queue();
    drop(queue.lock());
    queue.told.notify_all();
}
