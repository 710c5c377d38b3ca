//! The failure of a device group, and how the other ranks learn of it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nccl_rs::Communicator;
use trigram_core::signature::Signature;
use trigram_core::{Error, Result};

use crate::runtime::group::Group;

/// How often the watching thread looks while a call is under way.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// A rank that has died may have finished its part of a call that is still under way here.
pub(crate) const DYING: Duration = Duration::from_millis(30);

/// How long a communicator may take to be revoked before it is aborted.
const REVOKING: Duration = Duration::from_secs(3);

/// The first failure of a device group, and how many of its collectives have ended before.
pub(crate) struct Failure {
    first: Mutex<Option<Error>>,
    /// Collectives end in the order of their stream, so the last one's number is enough.
    ended: AtomicU64,
    /// The communicator is revoked, not aborted, so that the ranks that are left can shrink it.
    revokes: bool,
}

impl Failure {
    pub(crate) fn new(revokes: bool) -> Self {
        Self { first: Mutex::default(), ended: AtomicU64::new(0), revokes }
    }

    /// The collective with this number, from 1, has ended well on this rank; 0 is none.
    pub(crate) fn note_end(&self, number: u64) {
        self.ended.fetch_max(number, Ordering::AcqRel);
    }

    /// How many collectives have ended well on this rank.
    pub(crate) fn ended(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Error>> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self) -> Result<()> {
        self.lock().clone().map_or(Ok(()), Err)
    }

    /// Records that this rank cannot go on, and aborts the others: once, however many calls find the failure.
    pub(crate) fn raise(&self, error: &Error, comm: &Communicator, abort_group: &Group) {
        let mut failure = self.lock();
        let is_first = failure.is_none();
        failure.get_or_insert_with(|| match error {
            Error::Stopped { why, .. } => Error::Aborted(why.clone()),
            error => error.clone(),
        });
        drop(failure);
        if is_first {
            abort_others(error, self.ended(), abort_group); // first: aborting takes its time
        }
        if !self.revokes || comm.revoke(REVOKING).is_err() {
            comm.abort();
        }
    }
}

/// Tells the other ranks that this one cannot go on, when it has ended this many collectives.
pub(crate) fn abort_others(error: &Error, done: u64, abort_group: &Group) {
    let members = abort_group.members();
    let why = match error {
        // It names the ranks that differ, and is the same on all ranks, whichever finds it first.
        Error::Mismatch { .. } => error.clone(),
        _ => Error::Stopped { done, why: format!("rank {}: {error}", members.ranks[members.me as usize]) },
    };
    let _ = abort_group.fail(abort_group.next() + 1, why);
}

/// The error to report: if a rank is lost, NCCL may notice before the engine does, and does not say which.
pub(crate) fn blame(error: Error, abort_group: &Group, what: &Signature) -> Error {
    let since = Instant::now();
    while since.elapsed() < DYING {
        if let Err(known @ Error::PeerLost { .. }) =
            abort_group.engine().check_peers(abort_group.members(), what)
        {
            return known;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    error
}

/// Converts NCCL's and CUDA's errors.
pub fn from_nccl(error: nccl_rs::Error) -> Error {
    use nccl_rs::Error as Theirs;
    let text = error.to_string();
    match error {
        Theirs::Misuse(text) => Error::Misuse(text),
        Theirs::Aborted(_) => Error::Aborted(text),
        Theirs::Timeout { call, after } => {
            let millis = after.as_millis() as u64;
            Error::Timeout { what: call.into(), millis, waiting_for: "NCCL to accept the call".into() }
        }
        Theirs::Nccl { call, .. } | Theirs::Cuda { call, .. } => Error::Io { what: call.into(), why: text },
        _ => Error::Unsupported(text),
    }
}
