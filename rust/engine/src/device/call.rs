//! A collective or message under way on a GPU.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_rs::{Event, Stream};
use trigram_core::{Error, Result};

use crate::device::failure::{Failure, POLL_INTERVAL, from_nccl};
use crate::sys::completion::{Completion, INTERRUPT_INTERVAL, InterruptCheck};

/// How long an aborted call may take to end on the GPU before its error is returned all the same.
const CLOSE: Duration = Duration::from_secs(5);
/// How long the error of an aborted call waits for the outcome of its consistency check.
const OUTCOME: Duration = Duration::from_secs(1);

/// A call under way on a GPU.
pub struct DeviceCall {
    pub(crate) done: Event,
    /// Which collective of its communicator it is, from 1; 0 for what only some of the ranks make.
    pub(crate) number: u64,
    pub(crate) check: Option<Arc<Completion>>,
    pub(crate) failure: Arc<Failure>,
}

impl DeviceCall {
    /// Whether it has ended, successfully or not.
    ///
    /// # Errors
    ///
    /// [`trigram_core::Error::Io`] if the GPU has failed.
    pub fn is_done(&self) -> Result<bool> {
        Ok(self.failure.get().is_err() || self.is_agreed()? && self.done.is_reached().map_err(from_nccl)?)
    }

    /// Whether all ranks are known to have made the same call. If they have not, NCCL may have ended it with wrong
    /// numbers all the same.
    fn is_agreed(&self) -> Result<bool> {
        match self.check.as_ref().map(|w| w.outcome()) {
            Some(Some(outcome)) => outcome.map(|()| true),
            Some(None) => Ok(false),
            None => Ok(true),
        }
    }

    /// Orders work given to the stream `caller` from now on after this call.
    ///
    /// # Errors
    ///
    /// The call's error, if it is known to have failed.
    ///
    /// # Safety
    ///
    /// `caller` is a stream of its device.
    pub unsafe fn order(&self, caller: usize) -> Result<()> {
        self.failure.get().map_err(|error| self.end(error))?;
        // SAFETY: passed on to the caller.
        let theirs = unsafe { Stream::from_raw(self.done.device(), caller) };
        theirs.wait_for(&self.done).map_err(from_nccl)
    }

    /// Waits until it has ended; false if `deadline` came first.
    ///
    /// # Errors
    ///
    /// The call's error.
    pub fn wait(&self, deadline: Option<Instant>, check_interrupt: InterruptCheck<'_>) -> Result<bool> {
        let (mut checked, mut looks) = (Instant::now(), 0u32);
        loop {
            let reached = self.done.is_reached().map_err(from_nccl)?;
            // An aborted call counts as reached too.
            let state = self.failure.get().and_then(|()| self.is_agreed());
            match state {
                Ok(agreed) if agreed && reached => {
                    self.failure.note_end(self.number);
                    return Ok(true);
                }
                Ok(_) => {}
                // It was seen to end before the failure.
                Err(_) if self.number > 0 && self.number <= self.failure.ended() => return Ok(true),
                Err(error) => return Err(self.end(error)),
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return Ok(false);
            }
            if checked.elapsed() > INTERRUPT_INTERVAL {
                check_interrupt()?;
                checked = Instant::now();
            }
            looks += 1;
            if looks < 200 { std::thread::yield_now() } else { std::thread::sleep(POLL_INTERVAL / 20) }
        }
    }

    /// Waits until it no longer accesses its memory; the error to report.
    fn end(&self, error: Error) -> Error {
        wait_released(&self.done);
        cause(self.check.as_ref(), error)
    }
}

/// The error to report of a call that has failed. If ranks disagree on a call, the abort by another rank may arrive before
/// the outcome of this rank's own consistency check, which names what differs: also before the call is given to NCCL.
pub(crate) fn cause(check: Option<&Arc<Completion>>, error: Error) -> Error {
    let Some(check) = check.filter(|_| matches!(error, Error::Aborted(_))) else {
        return error;
    };
    let since = Instant::now();
    loop {
        match check.outcome() {
            Some(Err(cause)) => return cause,
            None if since.elapsed() < OUTCOME => std::thread::sleep(POLL_INTERVAL),
            _ => return error,
        }
    }
}

/// Waits until the GPU no longer accesses the memory of an aborted call, after which it reaches `done`.
pub(crate) fn wait_released(done: &Event) {
    let since = Instant::now();
    while since.elapsed() < CLOSE && matches!(done.is_reached(), Ok(false)) {
        std::thread::sleep(POLL_INTERVAL);
    }
}
