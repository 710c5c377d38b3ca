//! The threads of this process that make calls, and when all of them wait in the engine.
//!
//! A thread that is outside may still make the call that a peer waits for. So whoever concludes that this rank makes no
//! call any more must know all its threads: those that have made calls count themselves here, and whoever embeds the
//! engine says, when it is asked, that the process has no others that could ([`Callers::set_census`]). The thread that
//! created the engine counts for good: if it ends, this rank is never taken to wait with all its threads.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use rustix::thread::gettid;
use trigram_core::Result;

use crate::sys::completion::{Completion, InterruptCheck};

/// Gets the system's numbers of the threads that make calls; true if no other thread of the process can make one.
pub type Census = Box<dyn Fn(&[i32]) -> bool + Send + Sync>;

/// A wait asks for the census at this interrupt check, half a second after its start, and at each later one.
const ASKS_AT: u32 = 10;

/// The threads that make calls.
#[derive(Default)]
pub struct Callers {
    threads: Mutex<Vec<i32>>,
    census: OnceLock<Census>,
    /// Whether the census has found no other thread since the last wait began.
    are_all: AtomicBool,
}

impl std::fmt::Debug for Callers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Callers").field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// An engine's threads of which this one is counted as one, until it ends.
struct Counted {
    callers: Weak<Callers>,
    stays: bool,
}

thread_local! {
    static COUNTED: RefCell<Vec<Counted>> = const { RefCell::new(Vec::new()) };
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some(callers) = self.callers.upgrade().filter(|_| !self.stays) {
            let me = gettid().as_raw_nonzero().get();
            callers.lock().retain(|&thread| thread != me);
        }
    }
}

impl Callers {
    /// With the thread that creates the engine.
    pub(crate) fn new() -> Arc<Self> {
        let callers = Arc::<Self>::default();
        callers.add_this_thread(true);
        callers
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<i32>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This thread makes a call.
    pub(crate) fn count(self: &Arc<Self>) {
        self.add_this_thread(false);
    }

    fn add_this_thread(self: &Arc<Self>, stays: bool) {
        // A thread that is about to end, and whose locals are gone, is not counted: it is outside of a wait soon.
        let _ = COUNTED.try_with(|counted| {
            let mut counted = counted.borrow_mut();
            if counted.iter().any(|c| std::ptr::eq(c.callers.as_ptr(), Arc::as_ptr(self))) {
                return;
            }
            counted.retain(|c| c.callers.strong_count() > 0);
            counted.push(Counted { callers: Arc::downgrade(self), stays });
            self.lock().push(gettid().as_raw_nonzero().get());
        });
    }

    /// Sets who is asked whether other threads can make calls; without, that is always taken to be so.
    pub fn set_census(&self, census: Census) {
        let _ = self.census.set(census);
    }

    fn ask(&self) {
        let threads = self.lock().clone();
        let are_all = self.census.get().is_some_and(|census| census(&threads));
        self.are_all.store(are_all, Ordering::Relaxed);
    }

    /// Whether all threads that can make calls wait for this one, and do nothing else until it ends.
    pub(crate) fn all_wait_for(&self, completion: &Completion) -> bool {
        self.are_all.load(Ordering::Relaxed) && completion.waiters() == self.lock().len()
    }

    /// Waits for a call by `wait`; `for_good`: until its end, whenever that is.
    pub(crate) fn wait<T>(
        &self,
        completion: &Completion,
        for_good: bool,
        check_interrupt: InterruptCheck<'_>,
        wait: impl FnOnce(InterruptCheck<'_>) -> Result<T>,
    ) -> Result<T> {
        if !for_good {
            return wait(check_interrupt);
        }
        let checks = Cell::new(0);
        self.are_all.store(false, Ordering::Relaxed);
        let waiting = Waiting::new(completion);
        let outcome = wait(&mut || {
            // It may run a signal handler of the user's, which may make calls.
            completion.count_waiter(false);
            let checked = check_interrupt();
            checks.set(checks.get() + 1);
            if checked.is_ok() && checks.get() >= ASKS_AT {
                self.ask();
            }
            completion.count_waiter(true);
            checked
        });
        drop(waiting);
        outcome
    }
}

/// A thread waits for a call.
struct Waiting<'a>(&'a Completion);

impl<'a> Waiting<'a> {
    fn new(completion: &'a Completion) -> Self {
        completion.count_waiter(true);
        Self(completion)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.count_waiter(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_count_once_and_until_they_end() {
        let callers = std::thread::spawn(Callers::new).join().unwrap();
        assert_eq!(callers.lock().len(), 1, "the thread that created the engine has ended, and counts");
        callers.count();
        callers.count();
        assert_eq!(callers.lock().len(), 2);
        let other = callers.clone();
        std::thread::spawn(move || {
            other.count();
            assert_eq!(other.lock().len(), 3);
        })
        .join()
        .unwrap();
        assert_eq!(callers.lock().len(), 2);
    }

    #[test]
    fn a_thread_that_checks_for_interrupts_does_not_wait() {
        let (callers, done) = (Callers::new(), Completion::default());
        let asked = Arc::new(AtomicBool::new(true));
        let says = asked.clone();
        callers.set_census(Box::new(move |threads| threads.len() == 1 && says.load(Ordering::Relaxed)));
        let is_seen = |for_good: bool| {
            let outside = &mut || {
                assert!(!callers.all_wait_for(&done));
                Ok(())
            };
            let wait = |check: InterruptCheck<'_>| {
                assert!(!callers.all_wait_for(&done), "nobody has been asked yet");
                (0..ASKS_AT).try_for_each(|_| check())?;
                Ok(callers.all_wait_for(&done))
            };
            callers.wait(&done, for_good, outside, wait).unwrap()
        };
        assert!(is_seen(true) && !is_seen(false));
        asked.store(false, Ordering::Relaxed);
        assert!(!is_seen(true), "another thread may make calls");
    }
}
