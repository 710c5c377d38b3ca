//! What this process does for other ranks while its threads wait for them.
//!
//! Some of a rank's calls are made only when calls before them have ended: second phases, answers to offers. Other ranks
//! may wait for these, so whoever waits here makes them first ([`crate::sys::completion::InterruptCheck`] does so, and is
//! called when there may be one). Otherwise two ranks would wait for each other for ever: this one in a call,
//! the other in what this one has not got round to.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// How often a thread that sleeps until another one has ended its call looks whether something is due.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Whether there is anything that may become due.
static ACTIVE: AtomicBool = AtomicBool::new(false);
/// How many calls have ended after which something may be made: [`note`].
static NOTED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// What [`NOTED`] was when this thread came to [`take`]. Each thread has its own: what another has looked at may be
    /// for this one to make, as of another rank of this process.
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

/// Says whether there is anything that may become due. Until there is not, threads that wait may make calls.
pub fn set_active(active: bool) {
    ACTIVE.store(active, Ordering::Release);
}

/// See [`set_active`].
pub fn is_active() -> bool {
    ACTIVE.load(Ordering::Acquire)
}

/// A call has ended after which something may be made.
pub(crate) fn note() {
    NOTED.fetch_add(1, Ordering::SeqCst);
}

/// How many calls have ended after which something may be made.
pub fn noted() -> u64 {
    NOTED.load(Ordering::SeqCst)
}

/// Whether this thread may have something to make.
pub fn is_due() -> bool {
    is_active() && TAKEN.get() != NOTED.load(Ordering::Relaxed)
}

/// This thread makes all that it can make.
pub fn take() {
    TAKEN.set(noted());
}
