//! When the background thread drives, and how it is asked to.
//!
//! A thread that starts a large call asks it to drive at once. Waking a thread costs more than a small collective, so a
//! small call is begun by the thread that starts it, and the thread that waits for it drives it. In case nobody waits,
//! or not soon, the background thread *looks in* every [`LOOK`] while small calls are being started, and takes over what
//! has been under way since its last look. So whoever lets go of the progress lock leaves nothing behind that nobody
//! moves: see `Driver::leave`.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::sys::atomics::{AtomicBool, AtomicU64, Condvar, Mutex, MutexGuard, fence};

/// How often the background thread looks in: a small call that nobody waits for gets its thread after one to two times
/// as long.
const LOOK: Duration = Duration::from_micros(200);

/// It rests after this many looks in which no small call was left to it.
pub(crate) const QUIET: u32 = 4;

/// What the background thread does, or has been asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Duty {
    /// It sleeps until it is asked.
    Rest,
    /// It looks in now and then.
    Look,
    /// It drives, or is about to.
    Drive,
    /// The engine is closed.
    End,
}

/// How the background thread is asked to drive.
#[derive(Debug)]
pub(crate) struct Background {
    duty: Mutex<Duty>,
    asked: Condvar,
    /// Whether it looks in by itself, for threads that would otherwise have to ask it to.
    looks_in: AtomicBool,
    /// How many times small calls were left to it.
    pub(crate) left: AtomicU64,
}

impl Background {
    pub(crate) fn new() -> Self {
        Self {
            duty: Mutex::new(Duty::Rest),
            asked: Condvar::new(),
            looks_in: AtomicBool::new(false),
            left: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Duty> {
        self.duty.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks it to drive now.
    pub(crate) fn wake(&self) {
        let mut duty = self.lock();
        if matches!(*duty, Duty::Rest | Duty::Look) {
            *duty = Duty::Drive;
            self.asked.notify_one();
        }
    }

    /// Asks it to look in soon. To be called without the progress lock, after the call is under way.
    pub(crate) fn look_soon(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
        // Pairs with the fence in `change`: either this thread sees that it rests, or it finds the progress lock free.
        fence(Ordering::SeqCst);
        if self.looks_in.load(Ordering::Relaxed) {
            return;
        }
        let mut duty = self.lock();
        if *duty == Duty::Rest {
            *duty = Duty::Look;
            self.asked.notify_one();
        }
    }

    /// Ends it.
    pub(crate) fn end(&self) {
        *self.lock() = Duty::End;
        self.asked.notify_all();
    }

    /// Changes what it does next, if nobody has asked for something else meanwhile and `still` holds, which no thread
    /// that asks can change at the same time.
    pub(crate) fn change(&self, from: Duty, to: Duty, still: impl FnOnce() -> bool) {
        let mut duty = self.lock();
        if *duty == from && still() {
            *duty = to;
            self.looks_in.store(to == Duty::Look, Ordering::Relaxed);
        }
        drop(duty);
        fence(Ordering::SeqCst);
    }

    /// Sleeps until there is something to do; between two looks, for a while.
    pub(crate) fn next(&self) -> Duty {
        let mut duty = self.lock();
        while *duty == Duty::Rest {
            duty = self.asked.wait(duty).unwrap_or_else(PoisonError::into_inner);
        }
        if *duty == Duty::Look {
            self.looks_in.store(true, Ordering::Relaxed);
            (duty, _) = self.asked.wait_timeout(duty, LOOK).unwrap_or_else(PoisonError::into_inner);
        }
        *duty
    }
}
