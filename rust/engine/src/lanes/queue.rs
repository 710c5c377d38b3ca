//! What waits for a lane, and how lanes sleep.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::sys::atomics::{AtomicU32, Condvar, Mutex, MutexGuard};

/// What waits for a lane, first come first served.
pub(crate) struct Queue<T> {
    inner: Mutex<Inner<T>>,
    asked: Condvar,
    /// How many items wait, and how many lanes may begin with one, for those that look without the lock.
    waiting: AtomicU32,
    idle: AtomicU32,
}

struct Inner<T> {
    /// What goes first: until it is done, a connection stands still.
    first: VecDeque<T>,
    items: VecDeque<T>,
    /// How many lanes work, and how many may.
    working: u32,
    most: u32,
    /// How many lanes sleep, and how many of these have been woken: a wake-up is a system call, even if no thread sleeps.
    asleep: u32,
    woken: u32,
    closed: bool,
}

impl<T> Inner<T> {
    fn pop(&mut self) -> Option<T> {
        self.first.pop_front().or_else(|| self.items.pop_front())
    }

    fn len(&self) -> usize {
        self.first.len() + self.items.len()
    }

    /// Takes an item out for a lane.
    fn begin(&mut self) -> Option<T> {
        let item = if self.working < self.most { self.pop() } else { None };
        self.working += u32::from(item.is_some());
        item
    }

    /// Whether a lane is to be woken.
    fn wakes(&mut self) -> bool {
        let wakes = self.asleep > self.woken && self.working + self.woken < self.most;
        self.woken += u32::from(wakes);
        wakes
    }
}

impl<T> Queue<T> {
    /// For so many lanes.
    pub(crate) fn new(most: u32) -> Self {
        let (first, items) = (VecDeque::new(), VecDeque::new());
        let inner = Inner { first, items, working: 0, most, asleep: 0, woken: 0, closed: false };
        Self {
            inner: Mutex::new(inner),
            asked: Condvar::new(),
            waiting: AtomicU32::new(0),
            idle: AtomicU32::new(most),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, inner: &Inner<T>) {
        self.waiting.store(inner.len() as u32, Ordering::Relaxed);
        self.idle.store(inner.most.saturating_sub(inner.working), Ordering::Relaxed);
    }

    /// How many lanes may work from now on. Those that do, end what they have begun.
    pub(crate) fn set_most(&self, most: u32) {
        let mut inner = self.lock();
        inner.most = most;
        self.note(&inner);
        let waits = inner.len() > 0;
        drop(inner);
        if waits {
            self.asked.notify_all();
        }
    }

    /// Adds an item, and wakes a lane if one sleeps that may work; false after the end.
    pub(crate) fn push(&self, item: T, goes_first: bool) -> bool {
        let mut inner = self.lock();
        if inner.closed {
            return false;
        }
        if goes_first {
            inner.first.push_back(item)
        } else {
            inner.items.push_back(item)
        }
        self.note(&inner);
        let wakes = inner.wakes();
        drop(inner);
        if wakes {
            self.asked.notify_one();
        }
        true
    }

    /// Takes an item out that no lane will begin with soon, if there is one.
    pub(crate) fn take(&self) -> Option<T> {
        if self.waiting.load(Ordering::Relaxed) <= self.idle.load(Ordering::Relaxed) {
            return None;
        }
        let mut inner = self.lock();
        let item = inner.pop();
        self.note(&inner);
        item
    }

    /// Whether a lane may find an item.
    pub(crate) fn has_work(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0 && self.idle.load(Ordering::Relaxed) > 0
    }

    /// Takes an item out for a lane, and sleeps until there is one; `None` after the end. When the lane has done it, it
    /// calls [`Queue::done`].
    pub(crate) fn wait(&self) -> Option<T> {
        let mut inner = self.lock();
        loop {
            if inner.closed {
                return None;
            }
            if let Some(item) = inner.begin() {
                self.note(&inner);
                return Some(item);
            }
            inner.asleep += 1;
            inner = self.asked.wait(inner).unwrap_or_else(PoisonError::into_inner);
            inner.asleep -= 1;
            // If nobody has woken this one, another is woken once more than it needs.
            inner.woken = inner.woken.saturating_sub(1);
        }
    }

    /// A lane has done an item.
    pub(crate) fn done(&self) {
        let mut inner = self.lock();
        inner.working -= 1;
        self.note(&inner);
    }

    /// Ends it: lanes go home, and what waits is dropped.
    pub(crate) fn close(&self) {
        let mut inner = self.lock();
        inner.closed = true;
        let dropped = (std::mem::take(&mut inner.first), std::mem::take(&mut inner.items));
        self.note(&inner);
        drop(inner);
        self.asked.notify_all();
        drop(dropped);
    }
}
