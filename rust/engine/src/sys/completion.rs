//! The completion handle of a call: its caller holds it while the call is under way.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use trigram_core::Result;

use crate::sys::atomics::{AtomicBool, AtomicU32, Condvar, Mutex};
use crate::sys::serving;

/// How often a waiting caller checks for an interrupt such as Ctrl-C (invariant PY-3).
pub const INTERRUPT_INTERVAL: Duration = Duration::from_millis(50);

/// Called from time to time while a caller waits, and when something is due for other ranks ([`serving`]); an error, such
/// as Ctrl-C, ends the wait.
pub type InterruptCheck<'a> = &'a mut dyn FnMut() -> Result<()>;

/// Told when a call has ended. It runs under the progress lock, so it only takes a note, and never waits.
type Listener = Box<dyn FnOnce() + Send>;

/// The outcome of a call, once there is one.
#[derive(Default)]
pub struct Completion {
    done: AtomicBool,
    awaited: AtomicBool,
    /// How many threads wait for its end and do nothing else until then.
    waiters: AtomicU32,
    /// Whether it has, or has had, a listener.
    listened: AtomicBool,
    listeners: Mutex<Vec<Listener>>,
    /// Whether something follows its end that other ranks may wait for.
    is_followed: AtomicBool,
    /// Whether a thread sleeps on `arrived`: a wake-up is a system call, even if no thread sleeps.
    asleep: AtomicBool,
    outcome: Mutex<Option<Result<()>>>,
    /// One more than the rank whose message a receive has taken; 0: none yet.
    sender: AtomicU32,
    arrived: Condvar,
}

impl std::fmt::Debug for Completion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion").field("outcome", &self.outcome()).finish_non_exhaustive()
    }
}

impl Completion {
    /// Whether the call has ended, successfully or not.
    pub fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Records that a caller waits, or has waited, for the end. Only then log lines name the ranks it waits for.
    pub fn set_awaited(&self) {
        self.awaited.store(true, Ordering::Relaxed);
    }

    /// Whether a caller waits. A receive that runs in the background may take as long as it likes.
    pub fn is_awaited(&self) -> bool {
        self.awaited.load(Ordering::Relaxed)
    }

    /// One more thread waits for the end and does nothing else until then, or one less.
    pub(crate) fn count_waiter(&self, waits: bool) {
        match waits {
            true => self.waiters.fetch_add(1, Ordering::Relaxed),
            false => self.waiters.fetch_sub(1, Ordering::Relaxed),
        };
    }

    /// How many threads wait for the end and do nothing else until then.
    pub(crate) fn waiters(&self) -> usize {
        self.waiters.load(Ordering::Relaxed) as usize
    }

    /// Adds a listener, which is told when the call has ended; at once, if it has.
    pub fn when_done(&self, listener: impl FnOnce() + Send + 'static) {
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        self.listened.store(true, Ordering::SeqCst);
        if !self.done.load(Ordering::SeqCst) {
            listeners.push(Box::new(listener));
            return;
        }
        drop(listeners);
        listener();
    }

    /// Whether something follows the end of the call that other ranks may wait for.
    pub(crate) fn is_followed(&self) -> bool {
        self.is_followed.load(Ordering::Relaxed)
    }

    /// When the call has ended, threads that wait make what follows ([`serving`]).
    pub fn serve_when_done(&self) {
        self.is_followed.store(true, Ordering::SeqCst);
        if self.done.load(Ordering::SeqCst) {
            serving::note();
        }
    }

    /// Whether a caller waits or a listener is to be told: then a thread must move the call at once.
    pub fn is_urgent(&self) -> bool {
        self.is_awaited() || self.listened.load(Ordering::Relaxed)
    }

    /// The outcome, if the call has ended.
    pub fn outcome(&self) -> Option<Result<()>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records whose message a receive takes.
    pub fn set_sender(&self, rank: u32) {
        self.sender.store(rank.wrapping_add(1), Ordering::Relaxed);
    }

    /// The world rank whose message a receive takes, once it is known; to be asked after the end.
    pub fn sender(&self) -> Option<u32> {
        self.sender.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Ends the call.
    pub fn resolve(&self, outcome: Result<()>) {
        let mut ended = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        *ended = Some(outcome);
        // Under the lock: whoever has waited for the outcome finds that the call is done.
        self.done.store(true, Ordering::SeqCst);
        drop(ended);
        if self.listened.load(Ordering::SeqCst) {
            let told = std::mem::take(&mut *self.listeners.lock().unwrap_or_else(PoisonError::into_inner));
            told.into_iter().for_each(|listener| listener());
        }
        if self.is_followed.load(Ordering::SeqCst) {
            serving::note();
        }
        if self.asleep.load(Ordering::Relaxed) {
            self.arrived.notify_all(); // set before the lock was let go that we have held above
        }
    }

    /// Sleeps until another thread has ended the call, or `deadline` has passed (then `None`). `check_interrupt` is called
    /// every [`INTERRUPT_INTERVAL`]; its error ends the wait, not the call.
    pub fn wait(
        &self,
        deadline: Option<Instant>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<Option<Result<()>>> {
        self.set_awaited();
        let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let mut checked = Instant::now();
        loop {
            if let Some(outcome) = &*outcome {
                return Ok(Some(outcome.clone()));
            }
            let now = Instant::now();
            if deadline.is_some_and(|d| now >= d) {
                return Ok(None);
            }
            let interval = if serving::is_active() { serving::LOOK_INTERVAL } else { INTERRUPT_INTERVAL };
            let limit = deadline.map_or(interval, |d| interval.min(d - now));
            self.asleep.store(true, Ordering::Relaxed);
            (outcome, _) = self.arrived.wait_timeout(outcome, limit).unwrap_or_else(PoisonError::into_inner);
            if outcome.is_none() && (serving::is_due() || checked.elapsed() >= INTERRUPT_INTERVAL) {
                checked = Instant::now();
                drop(outcome);
                check_interrupt()?;
                outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}
