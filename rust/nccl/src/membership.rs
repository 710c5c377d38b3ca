//! Ranks that leave a communicator and ranks that come: revoke, shrink, grow.
//!
//! A communicator whose rank is lost can be revoked, which ends what is stuck on the GPU, and the others can go on with
//! one that is made of it, without a new id. Each function came with another version of NCCL. Where one fails, abort
//! the communicator and make a new one: NCCL keeps an error that its network has seen, and makes nothing of a
//! communicator that has one.

use std::ffi::c_int;
use std::ptr::{null, null_mut};
use std::sync::PoisonError;
use std::time::Duration;

use crate::communicator::{BLOCKED, Communicator, Inner, Needs, Pending, refuse_in_group};
use crate::config::Config;
use crate::cuda::Stream;
use crate::error::{Error, Result};
use crate::ffi::{Comm, IN_PROGRESS, SUCCESS};
use crate::library::Nccl;
use crate::types::UniqueId;

const SHRINK: &str = "ncclCommShrink";
const REVOKE: &str = "ncclCommRevoke";
const GROW: &str = "ncclCommGrow";
const GROW_ID: &str = "ncclCommGetUniqueId";

impl Nccl {
    /// Whether it can revoke a communicator and shrink it then: from 2.28.7 on.
    pub fn can_shrink(&self) -> bool {
        self.table.comm_revoke.is_some() && self.table.comm_shrink.is_some()
    }
}

impl Communicator {
    /// Ends what is under way on the GPU, as an abort does, but leaves a communicator from which the ranks that are left can
    /// [`Communicator::shrink`]. All of them call it, also where nothing is under way. Nothing else can be given to it from
    /// now on.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] before 2.28.7; [`Error::Timeout`] if it is not over in `limit`, or if a call of another thread
    /// waits inside of NCCL; [`Error::Nccl`]. Abort it then.
    pub fn revoke(&self, limit: Duration) -> Result<()> {
        let Some(revoke) = self.0.nccl.table.comm_revoke else {
            return Err(self.0.nccl.too_old(REVOKE, "2.28.7"));
        };
        // A second thread waits for the first.
        let _revoking = self.0.revoking.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.0.retire(REVOKE)? {
            if !self.0.is_empty_soon() {
                return Err(Error::Timeout { call: REVOKE, after: limit });
            }
            // SAFETY: the communicator is alive, and no other thread is inside with it; 0 is the only flag.
            match self.0.inside(REVOKE, Needs::Alive, |_, comm| unsafe { revoke(comm, 0) })? {
                SUCCESS | IN_PROGRESS => self.0.set_revoked(),
                code => return Err(self.0.failed(REVOKE, code)),
            }
        }
        self.0.settle(REVOKE, limit)
    }

    /// The ranks that are left, in their order. All of them call it with the same `lost` ranks, which do not.
    ///
    /// `interrupt` ends what is under way first, on this communicator, which is of no use then; it was not revoked
    /// before. Without it, what is under way here goes on.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] before 2.27.3; [`Error::Misuse`] if `lost` is empty, has this rank or one that there is not, if the
    /// communicator has failed, and inside of [`Nccl::group`]; [`Error::Nccl`]; [`Error::Timeout`], also if it is to interrupt
    /// and a call of another thread waits inside of NCCL: abort it then.
    pub fn shrink(&self, lost: &[u32], interrupt: bool, config: Config) -> Result<Self> {
        self.begin_shrink(lost, interrupt, config)?.wait(self.0.timeout())
    }

    /// As [`Communicator::shrink`], without waiting for the other ranks.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::shrink`].
    pub fn begin_shrink(&self, lost: &[u32], interrupt: bool, config: Config) -> Result<Shrinking> {
        let Some(shrink) = self.0.nccl.table.comm_shrink else {
            return Err(self.0.nccl.too_old(SHRINK, "2.27.3"));
        };
        refuse_in_group(SHRINK)?;
        let mut excluded = self.excluded(lost)?;
        let (sound, revoked) = self.0.is_sound();
        let flags: c_int = match (sound, revoked) {
            (_, true) => 0, // what was under way has ended
            (true, false) => c_int::from(interrupt),
            (false, false) if interrupt => 1,
            (false, false) => {
                return Err(Error::Misuse(format!(
                    "{SHRINK}: the communicator has failed; interrupt or abort it"
                )));
            }
        };
        if flags == 1 {
            self.0.retire(SHRINK)?;
            // A call that waits inside of NCCL for room in a stream has the turn, and only an abort ends it.
            if !self.0.is_empty_soon() {
                return Err(Error::Timeout { call: SHRINK, after: BLOCKED });
            }
        }
        let config = Box::new(config);
        let mut raw = config.raw(self.0.nccl.version());
        let place = kept();
        let count = excluded.len() as c_int;
        // SAFETY: the list and the structure are copied; the place lives until the call is over.
        let code = self.0.inside(SHRINK, Needs::Alive, |_, comm| unsafe {
            shrink(comm, excluded.as_mut_ptr(), count, place, &mut raw, flags)
        })?;
        if !matches!(code, SUCCESS | IN_PROGRESS) {
            return Err(self.0.failed(SHRINK, code));
        }
        if flags == 1 {
            self.0.set_revoked(); // as good as
        }
        Ok(Shrinking { parent: self.clone(), place, config: Some(config) })
    }

    /// As NCCL takes them: sorted, each once.
    fn excluded(&self, lost: &[u32]) -> Result<Vec<c_int>> {
        let mut excluded: Vec<c_int> = lost.iter().map(|&rank| rank as c_int).collect();
        excluded.sort_unstable();
        excluded.dedup();
        let (me, size) = (self.rank(), self.size());
        if lost.is_empty() || lost.contains(&me) || lost.iter().any(|&rank| rank >= size) {
            return Err(Error::Misuse(format!(
                "{SHRINK}: ranks {lost:?} cannot leave rank {me} of {size}: name others, and at least one"
            )));
        }
        Ok(excluded)
    }

    /// An id for ranks that come, from one of the ranks that are there; it goes to the others by other means, and serves
    /// once. Only then do the ranks that are there call [`Communicator::grow`], which waits for it inside of NCCL.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] before 2.29.2; [`Error::Misuse`] inside of [`Nccl::group`]; [`Error::Nccl`], while an earlier id was
    /// not used among others.
    pub fn grow_id(&self) -> Result<UniqueId> {
        let Some(get) = self.0.nccl.table.comm_get_unique_id else {
            return Err(self.0.nccl.too_old(GROW_ID, "2.29.2"));
        };
        refuse_in_group(GROW_ID)?;
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: it writes as many bytes.
        match self.0.inside(GROW_ID, Needs::Sound, |_, comm| unsafe { get(comm, &mut id) })? {
            SUCCESS => Ok(id),
            code => Err(self.0.nccl.error(GROW_ID, code)),
        }
    }

    /// The same ranks, and new ones behind them: `size` in all. The rank that made `id` gives it, the others None; the
    /// ranks that come call [`Communicator::join_grown`]. This communicator stays as it is.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] before 2.29.2; [`Error::Misuse`] if there would be no new rank, and inside of [`Nccl::group`];
    /// [`Error::Nccl`].
    pub fn grow(&self, size: u32, id: Option<UniqueId>, config: Config) -> Result<Pending> {
        let Some(grow) = self.0.nccl.table.comm_grow else {
            return Err(self.0.nccl.too_old(GROW, "2.29.2"));
        };
        refuse_in_group(GROW)?;
        let count = whole(size)?;
        if size <= self.size() {
            return Err(Error::Misuse(format!(
                "{GROW}: {size} ranks are not more than the {} there are",
                self.size()
            )));
        }
        let config = Box::new(config);
        let mut raw = config.raw(self.0.nccl.version());
        let place = kept();
        let id = id.as_ref().map_or(null(), std::ptr::from_ref);
        // SAFETY: the id and the structure are copied; the place is never freed.
        let code = self
            .0
            .inside(GROW, Needs::Sound, |_, comm| unsafe { grow(comm, count, id, -1, place, &mut raw) })?;
        // SAFETY: it is written before the call returns.
        let comm = unsafe { place.read() };
        if !matches!(code, SUCCESS | IN_PROGRESS) || comm.is_null() {
            return Err(self.0.nccl.error(GROW, code));
        }
        let (nccl, stream, parent) = (self.0.nccl.clone(), self.0.stream.clone(), Some(self.0.clone()));
        let inner = Inner::new(nccl, stream, comm, (self.rank(), size), self.0.timeout(), config, parent);
        Ok(Pending(Self(inner)))
    }

    /// Joins ranks that [`Communicator::grow`], as `rank` of `size` behind them; otherwise as [`Communicator::init`].
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] before 2.29.2; [`Error::Misuse`] for a rank that is none; [`Error::Nccl`].
    pub fn join_grown(
        nccl: &Nccl,
        stream: &Stream,
        id: UniqueId,
        rank: u32,
        size: u32,
        config: Config,
        timeout: Duration,
    ) -> Result<Pending> {
        let Some(grow) = nccl.table.comm_grow else {
            return Err(nccl.too_old(GROW, "2.29.2"));
        };
        let (count, mine) = (whole(size)?, whole(rank)?);
        if rank >= size {
            return Err(Error::Misuse(format!("{GROW}: there is no rank {rank} among {size} ranks")));
        }
        let config = Box::new(config);
        let mut raw = config.raw(nccl.version());
        let _entered = stream.device().enter()?;
        let place = kept();
        // SAFETY: the id and the structure are copied; the place is never freed; the device is current.
        let code = unsafe { grow(null_mut(), count, &id, mine, place, &mut raw) };
        // SAFETY: it is written before the call returns.
        let comm = unsafe { place.read() };
        if !matches!(code, SUCCESS | IN_PROGRESS) || comm.is_null() {
            return Err(nccl.error(GROW, code));
        }
        let inner = Inner::new(nccl.clone(), stream.clone(), comm, (rank, size), timeout, config, None);
        Ok(Pending(Self(inner)))
    }
}

/// A communicator of the ranks that are left, which is not ready yet. If it is dropped, the one that it is made of is aborted, and the
/// others wait in vain.
#[derive(Debug)]
#[must_use]
pub struct Shrinking {
    parent: Communicator,
    place: *mut Comm,
    /// None: it is ready.
    config: Option<Box<Config>>,
}

// SAFETY: the place is NCCL's until the communicator is ready, and then this one's.
unsafe impl Send for Shrinking {}

impl Shrinking {
    /// The communicator, if all ranks that are left have come.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`] where it could not be made.
    pub fn poll(mut self) -> Result<std::result::Result<Communicator, Self>> {
        // It says success while it is under way.
        if !self.parent.0.poll(SHRINK)? {
            return Ok(Err(self));
        }
        self.ready().map(Ok)
    }

    /// Waits until all ranks that are left have come.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] if they have not in `limit`, [`Error::Nccl`] where it could not be made.
    pub fn wait(mut self, limit: Duration) -> Result<Communicator> {
        self.parent.0.settle(SHRINK, limit)?;
        self.ready()
    }

    fn ready(&mut self) -> Result<Communicator> {
        // SAFETY: the parent is quiet, so nobody writes it any more.
        let comm = unsafe { self.place.read() };
        match self.config.take() {
            Some(config) if !comm.is_null() => self.parent.child(SHRINK, comm, config, None),
            _ => Err(Error::Misuse(format!("{SHRINK}: NCCL has made no communicator"))),
        }
    }
}

impl Drop for Shrinking {
    fn drop(&mut self) {
        if self.config.is_some() {
            self.parent.abort();
        }
    }
}

fn whole(count: u32) -> Result<c_int> {
    c_int::try_from(count).map_err(|_| Error::Misuse(format!("{count} ranks are more than NCCL supports")))
}

/// A place for a handle that NCCL writes from a thread of its own, when it has one, and may write again until the communicator is
/// ready: eight bytes that stay.
fn kept() -> *mut Comm {
    Box::into_raw(Box::new(null_mut()))
}
