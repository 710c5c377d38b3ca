//! One piece of work that a lane may do, and how it is taken back.

use std::sync::{Arc, PoisonError};

use std::sync::atomic::Ordering;

use crate::sys::atomics::{AtomicBool, Mutex};

/// What a lane can do.
pub(crate) trait Work: Send + 'static {
    /// Works until all is done, until nothing more can be done now, or until `stop` says that somebody waits for it.
    fn run(&mut self, stop: &dyn Fn() -> bool);
}

/// A piece of work that has been handed over. Whoever handed it over takes it back, finished or not; if the task is
/// dropped before, its work is taken back and dropped too, so that no lane goes on with it.
pub(crate) struct Task<W: Work>(Arc<Shared<W>>);

/// What the lane has of it.
pub(crate) struct Shared<W> {
    finished: AtomicBool,
    stop: AtomicBool,
    /// `None` once it has been taken back.
    work: Mutex<Option<W>>,
}

/// A task as lanes see it.
pub(crate) trait Run: Send + Sync {
    /// Does the work; false if it has been taken back before.
    fn run(&self) -> bool;
}

impl<W: Work> Run for Shared<W> {
    fn run(&self) -> bool {
        let mut slot = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(work) = slot.as_mut() else { return false };
        work.run(&|| self.stop.load(Ordering::Relaxed));
        // Under the lock: whoever sees this finds the work and all that it wrote.
        self.finished.store(true, Ordering::Release);
        true
    }
}

impl<W: Work> Task<W> {
    pub(crate) fn new(work: W) -> Self {
        let work = Mutex::new(Some(work));
        Self(Arc::new(Shared { finished: AtomicBool::new(false), stop: AtomicBool::new(false), work }))
    }

    /// For a lane.
    pub(crate) fn shared(&self) -> Arc<Shared<W>> {
        self.0.clone()
    }

    /// Whether a lane has done what it could.
    pub(crate) fn is_finished(&self) -> bool {
        self.0.finished.load(Ordering::Acquire)
    }

    /// Takes the work back: as it is if no lane has begun, otherwise after the lane has stopped. From then on no lane
    /// touches it. `None` only if it has been taken back before.
    pub(crate) fn recall(&self) -> Option<W> {
        self.0.stop.store(true, Ordering::Relaxed);
        self.0.work.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<W: Work> Drop for Task<W> {
    fn drop(&mut self) {
        // In a forked child no lane runs, and the lock may be held for ever.
        if !crate::sys::fork::is_child() {
            drop(self.recall());
        }
    }
}
