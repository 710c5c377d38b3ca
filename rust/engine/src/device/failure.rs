//! What has gone wrong with a device group, and how the other ranks hear of it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nccl_rs::Communicator;
use trigram_core::signature::Signature;
use trigram_core::{Error, Result};

use crate::runtime::group::Group;

/// How often the watching thread looks while something is under way.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// A rank that has died may have done its part of a call that is under way still.
pub(crate) const DYING: Duration = Duration::from_millis(30);

/// What has gone wrong with a device group; the first counts.
#[derive(Default)]
pub(crate) struct Failure(Mutex<Option<Error>>);

impl Failure {
    fn lock(&self) -> MutexGuard<'_, Option<Error>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self) -> Result<()> {
        self.lock().clone().map_or(Ok(()), Err)
    }

    /// This rank cannot go on, and neither can the others.
    pub(crate) fn raise(&self, error: &Error, comm: &Communicator, abort_group: &Group) {
        self.lock().get_or_insert_with(|| error.clone());
        abort_others(error, abort_group); // first: aborting takes its time
        comm.abort();
    }
}

/// Tells the other ranks that this one cannot go on.
pub(crate) fn abort_others(error: &Error, abort_group: &Group) {
    let members = abort_group.members();
    let why = match error {
        // It says of itself who differs, and is the same on all ranks, whoever sees it first.
        Error::Mismatch { .. } => error.clone(),
        _ => Error::Aborted(format!("rank {}: {error}", members.ranks[members.me as usize])),
    };
    let _ = abort_group.fail(abort_group.next() + 1, why);
}

/// What to blame: where a rank is gone, NCCL may notice before the engine does, and not say which.
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

/// NCCL's and CUDA's errors in this library's terms.
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
