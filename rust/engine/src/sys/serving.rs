//! What this process does for other ranks while its threads wait for them.
//!
//! Some of a rank's calls are made only when calls before them have ended: second phases, answers to offers. Other ranks
//! may wait for these, so whoever waits here makes them first ([`crate::sys::completion::InterruptCheck`] does so, and is
//! called when there may be one). Otherwise two ranks would wait for each other for ever: this one in a call,
//! the other in what this one has not got round to.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often a thread that sleeps until another one has ended its call looks whether something is due.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Whether there is anything that may become due.
static ACTIVE: AtomicBool = AtomicBool::new(false);
/// Whether a call has ended since the last [`take`] after which something may be made: [`note`].
static DUE: AtomicBool = AtomicBool::new(false);

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
    DUE.store(true, Ordering::SeqCst);
}

/// Whether something may be made.
pub fn is_due() -> bool {
    DUE.load(Ordering::Relaxed) && is_active()
}

/// The caller makes all that can be made.
pub fn take() {
    DUE.store(false, Ordering::SeqCst);
}
