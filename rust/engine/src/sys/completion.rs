//! What a caller holds while its call is under way.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use trigram_core::Result;

use crate::sys::atomics::{AtomicBool, Condvar, Mutex};

/// How often a waiting caller looks up, to answer Ctrl-C (invariant PY-3).
pub const INTERRUPT_INTERVAL: Duration = Duration::from_millis(50);

/// A caller's wish to stop waiting, asked for from time to time: Ctrl-C.
pub type InterruptCheck<'a> = &'a mut dyn FnMut() -> Result<()>;

/// The outcome of a call, now or later.
#[derive(Debug, Default)]
pub struct Completion {
    done: AtomicBool,
    awaited: AtomicBool,
    /// Whether a thread sleeps on `arrived`: waking nobody costs a system call too.
    asleep: AtomicBool,
    outcome: Mutex<Option<Result<()>>>,
    arrived: Condvar,
}

impl Completion {
    /// Whether the call has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Says that a caller waits, or has waited, for the end: then it is told for whom.
    pub fn set_awaited(&self) {
        self.awaited.store(true, Ordering::Relaxed);
    }

    /// Whether a caller waits. A message that is merely listened for may be long in coming.
    pub fn is_awaited(&self) -> bool {
        self.awaited.load(Ordering::Relaxed)
    }

    /// The outcome, once there is one.
    pub fn outcome(&self) -> Option<Result<()>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the call.
    pub fn resolve(&self, outcome: Result<()>) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.done.store(true, Ordering::Release);
        if self.asleep.load(Ordering::Relaxed) {
            self.arrived.notify_all(); // set before the lock was let go that we have held above
        }
    }

    /// Sleeps until the call has ended, or `deadline` has passed (then `None`). `check_interrupt` is called
    /// every [`INTERRUPT_INTERVAL`]; its error ends the wait, not the call.
    pub fn wait(
        &self,
        deadline: Option<Instant>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<Option<Result<()>>> {
        self.set_awaited();
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(outcome) = &*outcome {
                return Ok(Some(outcome.clone()));
            }
            let now = Instant::now();
            if deadline.is_some_and(|d| now >= d) {
                return Ok(None);
            }
            let limit = deadline.map_or(INTERRUPT_INTERVAL, |d| INTERRUPT_INTERVAL.min(d - now));
            self.asleep.store(true, Ordering::Relaxed);
            (outcome, _) = self.arrived.wait_timeout(outcome, limit).unwrap_or_else(PoisonError::into_inner);
            if outcome.is_none() {
                drop(outcome);
                check_interrupt()?;
                outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
