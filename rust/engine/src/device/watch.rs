//! One thread that watches all calls under way on GPUs: whether their ranks agree and are alive, and whether NCCL has
//! ended them in time.

use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nccl_rs::{Communicator, Event};
use trigram_core::signature::Signature;
use trigram_core::{Error, Result};

use crate::device::failure::{DYING, Failure, POLL_INTERVAL, blame, from_nccl};
use crate::runtime::group::Group;
use crate::sys::completion::Completion;

/// A rank that has left or stopped may have finished its part of a call that is still under way here.
const LEAVING: Duration = Duration::from_secs(2);

/// The calls under way on GPUs, and the thread that watches them.
#[derive(Default)]
pub(crate) struct Watcher {
    calls: Mutex<Vec<WatchedCall>>,
    more: Condvar,
}

/// When a call on a GPU fails because it has not ended.
pub(crate) struct Deadline {
    /// When it was given to NCCL.
    since: Instant,
    limit: Option<Duration>,
    waiting_for: String,
}

impl Deadline {
    /// `limit` from now on; `waiting_for` is what the error says that the call waits for.
    pub(crate) fn new(limit: Option<Duration>, waiting_for: String) -> Self {
        Self { since: Instant::now(), limit, waiting_for }
    }

    fn check(&self, what: &Signature) -> Result<()> {
        let waited = self.since.elapsed();
        if self.limit.is_none_or(|limit| waited <= limit) {
            return Ok(());
        }
        let (millis, waiting_for) = (waited.as_millis() as u64, self.waiting_for.clone());
        Err(Error::Timeout { what: what.to_string(), millis, waiting_for })
    }
}

pub(crate) struct WatchedCall {
    pub(crate) abort_group: Group,
    pub(crate) comm: Communicator,
    pub(crate) failure: Arc<Failure>,
    pub(crate) signature: Signature,
    /// Which collective of its communicator it is, from 1; 0 for what only some of the ranks make.
    pub(crate) number: u64,
    pub(crate) check: Option<Arc<Completion>>,
    pub(crate) deadline: Deadline,
    pub(crate) done: Arc<OnceLock<Event>>,
    /// Since when a peer is lost, or has stopped, that may have done its part of the call.
    pub(crate) gone: Option<Instant>,
}

impl WatchedCall {
    /// Whether the call has ended, successfully or not.
    fn poll(&mut self) -> bool {
        match self.state() {
            Ok(over) => over,
            Err(error) => {
                self.failure.raise(&error, &self.comm, &self.abort_group);
                true
            }
        }
    }

    fn state(&mut self) -> Result<bool> {
        if let Some(check) = &self.check
            && let Some(outcome) = check.outcome()
        {
            outcome?;
            self.check = None;
        }
        let given = self.done.get();
        let reached = given.map_or(Ok(false), Event::is_reached).map_err(from_nccl)?;
        self.failure.get()?; // after that look: an aborted call counts as reached too
        if reached && self.check.is_none() {
            self.failure.note_end(self.number);
            return Ok(true);
        }
        // A lost rank comes before what NCCL noticed of it.
        if let Err(error) = self.abort_group.engine().check_peers(self.abort_group.members(), &self.signature)
        {
            let grace = match &error {
                // An error in a collective that has ended there would be one in another backward pass than there.
                Error::Stopped { done, .. } if self.failure.ended() < *done => LEAVING,
                Error::PeerLost { why, .. } if self.check.is_none() && why.contains("left") => LEAVING,
                Error::PeerLost { .. } if self.check.is_none() => DYING,
                _ => return Err(error),
            };
            let since = *self.gone.get_or_insert_with(Instant::now);
            return if since.elapsed() < grace { Ok(false) } else { Err(error) };
        }
        match self.comm.check().map_err(from_nccl) {
            Err(error) => Err(blame(error, &self.abort_group, &self.signature)),
            // Until it has an outcome, the consistency check has a deadline of its own, and names the ranks that are
            // missing.
            Ok(()) if self.check.is_some() => Ok(false),
            Ok(()) => self.deadline.check(&self.signature).map(|()| false),
        }
    }
}

impl Watcher {
    /// Watches a call from now on, in one thread for all calls.
    pub(crate) fn over(call: WatchedCall) -> Result<()> {
        // Created at first use, and again if its thread could not be started.
        static WATCH: Mutex<Option<Arc<Watcher>>> = Mutex::new(None);
        let mut made = WATCH.lock().unwrap_or_else(PoisonError::into_inner);
        let watch = match &*made {
            Some(watch) => watch.clone(),
            None => {
                let watch = Arc::new(Watcher::default());
                let mine = watch.clone();
                let thread = std::thread::Builder::new().name("trigram-gpu".into());
                thread
                    .spawn(move || mine.run())
                    .map_err(|e| Error::io("starting a thread that watches GPU calls", e))?;
                made.insert(watch).clone()
            }
        };
        drop(made);
        watch.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
        watch.more.notify_one();
        Ok(())
    }

    fn run(&self) {
        let mut calls: Vec<WatchedCall> = Vec::new();
        loop {
            let mut new = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            while calls.is_empty() && new.is_empty() {
                new = self.more.wait(new).unwrap_or_else(PoisonError::into_inner);
            }
            calls.append(&mut new);
            drop(new);
            if let Some(call) = calls.first() {
                // Otherwise a graph that is captured meanwhile would forbid this thread to query events.
                let _ = call.comm.stream().device().ignore_captures();
            }
            // Not under the lock: an abort takes time, and callers must not wait for it.
            calls.retain_mut(|call| !call.poll());
            if !calls.is_empty() {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }
}
