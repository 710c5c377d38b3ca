//! Collectives on GPU memory: NCCL moves the data, the engine watches the ranks.
//!
//! NCCL neither compares what ranks call nor reports a lost rank: ranks that disagree hang, and so do the survivors
//! of a death. So every call has a *consistency check* in the engine, an empty call of the same group with the same
//! signature: if ranks disagree, all get an error, and calls on both kinds of memory have one order. While a call is
//! under way on the GPU, a thread checks whether all ranks are alive and whether its time is over. On any failure the
//! communicator is aborted (or revoked, if the ranks that are left will shrink it), which ends what is stuck on the
//! GPU, and the error is the one that CPU tensors would have raised.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nccl_rs::{Communicator, Config, Cuda, Data, Event, Nccl, Pending, Shrinking, Stream, UniqueId};
use trigram_core::error::name_ranks;
use trigram_core::signature::{Collective, Signature};
use trigram_core::{DType, Error, ReduceOp, Result};

use crate::call::request::Request;
use crate::device::call::{DeviceCall, cause, wait_released};
use crate::device::failure::{Failure, POLL_INTERVAL, abort_others, blame, from_nccl};
use crate::device::nccl_call::{NcclCall, elements, raw_mut};
use crate::device::watch::{Deadline, WatchedCall, Watcher};
use crate::runtime::group::Group;
use crate::sys::completion::InterruptCheck;
use crate::sys::completion::{Completion, INTERRUPT_INTERVAL};
use crate::sys::fork;

/// A group's ranks, each with a GPU.
pub struct DeviceGroup {
    group: Group,
    abort_group: Group,
    nccl: Nccl,
    comm: Communicator,
    /// How many collectives it has made.
    made: AtomicU64,
    failure: Arc<Failure>,
}

/// One of several messages that are sent and received together.
#[derive(Clone, Copy, Debug)]
pub struct PeerMessage {
    /// Whether this rank sends it.
    pub sends: bool,
    /// The other rank's place.
    pub peer: u32,
    /// Its address in device memory.
    pub address: usize,
    /// How many values it has.
    pub len: usize,
    /// Their type.
    pub dtype: DType,
}

impl DeviceGroup {
    /// Connects to the other ranks, each of which calls this with the same `id`. `abort_group` is a group of the same
    /// ranks in which no calls are made: a rank that fails aborts it to tell the others. Lower numbers of `priority`
    /// go first on the GPU. `revokes`: after a failure the ranks that are left will [`DeviceGroup::shrink`].
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] without the device; [`Error::Timeout`]; [`Error::PeerLost`].
    #[allow(clippy::too_many_arguments)] // one call from one place
    pub fn join(
        group: &Group,
        abort_group: &Group,
        nccl: &Nccl,
        device: i32,
        id: UniqueId,
        priority: i32,
        revokes: bool,
        limit: Option<Duration>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<Self> {
        let joined =
            Self::meet(group, abort_group, nccl, device, id, priority, revokes, limit, check_interrupt);
        joined.inspect_err(|error| abort_others(error, 0, abort_group)) // the others wait for this rank
    }

    #[allow(clippy::too_many_arguments)] // see above
    fn meet(
        group: &Group,
        abort_group: &Group,
        nccl: &Nccl,
        device: i32,
        id: UniqueId,
        priority: i32,
        revokes: bool,
        limit: Option<Duration>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<Self> {
        let members = group.members();
        let size = members.ranks.len() as u32;
        let device = Cuda::load().and_then(|cuda| cuda.device(device)).map_err(from_nccl)?;
        let stream = Stream::new(&device, priority).map_err(from_nccl)?;
        // Leaked: PyTorch's allocator records events on the stream when tensors used on it are freed, however late.
        std::mem::forget(stream.clone());
        let patience = limit.unwrap_or(Duration::MAX);
        let pending = Communicator::init(nccl, &stream, id, members.me, size, Config::new(), patience)
            .map_err(from_nccl)?;
        let comm = all_come(pending, Pending::poll, group, abort_group, limit, check_interrupt)?;
        let (group, abort_group, nccl) = (group.clone(), abort_group.clone(), nccl.clone());
        let failure = Arc::new(Failure::new(revokes && nccl.can_shrink()));
        Ok(Self { group, abort_group, nccl, comm, made: AtomicU64::new(0), failure })
    }

    /// Ends what is under way, so that the ranks that are left can [`DeviceGroup::shrink`].
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] before NCCL 2.28.7; [`Error::Aborted`]; [`Error::Io`] if NCCL keeps an error, one of its
    /// network for example: it cannot shrink then.
    pub fn revoke(&self, limit: Duration) -> Result<()> {
        self.comm.revoke(limit).map_err(from_nccl)
    }

    /// The ranks that are left, after `lost` ranks of this group have gone: members of the new `group`, in the same order. This
    /// group is of no use then. All of them call it; a rank for which it fails has aborted the communicator, and its
    /// caller aborts the first call of the group `attempt`, which has no others: that ends the others' wait.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] before NCCL 2.28.7; [`Error::Io`] if NCCL cannot, because its network has seen an error for
    /// one; [`Error::Timeout`]; [`Error::PeerLost`]; [`Error::Aborted`] if another rank could not.
    #[allow(clippy::too_many_arguments)] // one call from one place
    pub fn shrink(
        &self,
        group: &Group,
        abort_group: &Group,
        attempt: &Group,
        lost: &[u32],
        limit: Duration,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<Self> {
        let mut shrunk = || {
            self.revoke(limit)?; // once more does no harm
            let pending = self.comm.begin_shrink(lost, false, Config::new()).map_err(from_nccl)?;
            all_come(pending, Shrinking::poll, group, attempt, Some(limit), check_interrupt)
        };
        let comm = shrunk().inspect_err(|_| self.comm.abort())?;
        let (group, abort_group, nccl) = (group.clone(), abort_group.clone(), self.nccl.clone());
        let (made, failure) = (AtomicU64::new(0), Arc::new(Failure::new(true)));
        Ok(Self { group, abort_group, nccl, comm, made, failure })
    }

    /// The `CUstream` of its work.
    pub fn stream(&self) -> usize {
        self.comm.stream().raw() as usize
    }

    /// Starts a collective after the work given to the stream `caller` so far. `checked` is false while a CUDA graph
    /// is captured, because the engine takes no part in its replays.
    ///
    /// # Errors
    ///
    /// The error of an earlier call; [`Error::Unsupported`] for what NCCL cannot do.
    ///
    /// # Safety
    ///
    /// The request's addresses are valid on the device, and used by nobody else until the call is
    /// done; `caller` is a stream of the device.
    pub unsafe fn start(
        &self,
        request: Request,
        limit: Option<Duration>,
        caller: usize,
        checked: bool,
    ) -> Result<DeviceCall> {
        fork::check()?;
        self.group.check(&request)?;
        let nccl_call = NcclCall::of(&request, self.comm.rank(), self.comm.size())?;
        let mut signature = request.signature();
        signature.extra |= Signature::DEVICE;
        // Also after a failure: other ranks may have made this call before they learned of it, and the calls that
        // follow must have the same numbers on all ranks.
        let check = if checked { Some(self.group.consistency_check(request, limit)?) } else { None };
        self.failure.get().map_err(|error| cause(check.as_ref(), error))?;
        let number = if checked { self.made.fetch_add(1, Ordering::AcqRel) + 1 } else { 0 };
        let run = || nccl_call.run(&self.comm, &self.nccl);
        let deadline = Deadline::new(limit, "NCCL, after all ranks have made the call".into());
        // SAFETY: passed on to the caller.
        unsafe { self.submit(signature, number, check, deadline, caller, checked, run) }
    }

    /// Starts several messages that are sent and received together. Only the ranks that they are between take part,
    /// so there is no consistency check; lost ranks are noticed all the same, and after `limit` the call fails if the
    /// others have not come.
    ///
    /// # Errors
    ///
    /// As for [`DeviceGroup::start`].
    ///
    /// # Safety
    ///
    /// As for [`DeviceGroup::start`].
    pub unsafe fn send_recv(
        &self,
        messages: &[PeerMessage],
        limit: Option<Duration>,
        caller: usize,
    ) -> Result<DeviceCall> {
        fork::check()?;
        self.failure.get()?;
        let mut calls = Vec::with_capacity(messages.len());
        for p in messages {
            let (kind, units) = elements(Collective::SendRecv, p.dtype)?;
            // SAFETY: passed on to the caller.
            calls.push((p, unsafe { Data::from_raw(p.address as u64, p.len * units, kind) }));
        }
        let (dtype, count) = messages.first().map_or((DType::U8, 0), |p| (p.dtype, p.len as u64));
        let mut signature =
            Signature::new(Collective::SendRecv, dtype, ReduceOp::Sum, Default::default(), 0, count);
        signature.extra = Signature::DEVICE;
        let run = || {
            self.nccl.group(|| {
                calls.iter().try_for_each(|(p, data)| match p.sends {
                    true => self.comm.send(*data, p.peer),
                    // SAFETY: passed on to the caller.
                    false => self.comm.recv(unsafe { raw_mut(data) }, p.peer),
                })
            })
        };
        let ranks = &self.abort_group.members().ranks;
        let peers: BTreeSet<u32> =
            messages.iter().filter_map(|p| ranks.get(p.peer as usize).copied()).collect();
        let deadline = Deadline::new(limit, name_ranks(&Vec::from_iter(peers)));
        // SAFETY: passed on to the caller.
        unsafe { self.submit(signature, 0, None, deadline, caller, true, run) }
    }

    /// `number`: which collective of this communicator it is, from 1; 0 for what only some of the ranks make.
    ///
    /// # Safety
    ///
    /// `caller` is a stream of the device.
    #[allow(clippy::too_many_arguments)] // two calls from here
    unsafe fn submit(
        &self,
        signature: Signature,
        number: u64,
        check: Option<Arc<Completion>>,
        deadline: Deadline,
        caller: usize,
        watched: bool,
        run: impl FnOnce() -> nccl_rs::Result<()>,
    ) -> Result<DeviceCall> {
        let stream = self.comm.stream();
        let given = || -> nccl_rs::Result<Event> {
            // SAFETY: passed on to the caller.
            let theirs = unsafe { Stream::from_raw(stream.device(), caller) };
            stream.wait_for(&Event::record(&theirs)?)?;
            run()?;
            Event::record(stream)
        };
        // Watch it before it is given to NCCL, whose first call of a kind waits for all ranks.
        let end: Arc<OnceLock<Event>> = Arc::default();
        if watched {
            let (abort_group, comm, failure) =
                (self.abort_group.clone(), self.comm.clone(), self.failure.clone());
            let (done, check) = (end.clone(), check.clone());
            let call = WatchedCall {
                abort_group,
                comm,
                failure,
                signature,
                number,
                check,
                deadline,
                done,
                gone: None,
            };
            Watcher::over(call)?;
        }
        let done = given().and_then(|done| {
            if watched {
                let _ = end.set(Event::record(stream)?);
            }
            Ok(done)
        });
        let done = done.map_err(|e| {
            let error = self.failure.get().err().unwrap_or_else(|| {
                let error = blame(from_nccl(e), &self.abort_group, &signature);
                self.fail(&error);
                error
            });
            // NCCL may have given the call to the stream before it was aborted.
            if let Ok(released) = Event::record(stream) {
                wait_released(&released);
            }
            cause(check.as_ref(), error)
        })?;
        Ok(DeviceCall { done, number, check, failure: self.failure.clone() })
    }

    /// Records that this rank cannot go on, and aborts the others.
    fn fail(&self, error: &Error) {
        self.failure.raise(error, &self.comm, &self.abort_group);
    }

    /// Aborts the group now, on all ranks.
    pub fn abort(&self, why: &str) {
        self.fail(&Error::Aborted(why.to_owned()));
    }
}

/// Waits until all ranks of a group have come to a communicator.
fn all_come<P>(
    mut pending: P,
    poll: impl Fn(P) -> nccl_rs::Result<std::result::Result<Communicator, P>>,
    group: &Group,
    abort_group: &Group,
    limit: Option<Duration>,
    check_interrupt: InterruptCheck<'_>,
) -> Result<Communicator> {
    let (since, mut checked) = (Instant::now(), Instant::now());
    let what = Request::nothing().signature();
    loop {
        match poll(pending).map_err(from_nccl)? {
            Ok(comm) => return Ok(comm),
            Err(still) => pending = still,
        }
        // Returning drops the communicator, which aborts it.
        group.engine().check_peers(abort_group.members(), &what)?;
        if limit.is_some_and(|l| since.elapsed() > l) {
            let millis = since.elapsed().as_millis() as u64;
            return Err(Error::Timeout {
                what: format!("connecting group {} over NCCL", group.members().name),
                millis,
                waiting_for: "NCCL to connect all ranks".into(),
            });
        }
        if checked.elapsed() > INTERRUPT_INTERVAL {
            check_interrupt()?;
            checked = Instant::now();
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

impl Drop for DeviceGroup {
    fn drop(&mut self) {
        // A regular end needs all ranks.
        let what = Request::nothing().signature();
        if self.abort_group.engine().check_peers(self.abort_group.members(), &what).is_err() {
            self.comm.abort();
        }
    }
}
