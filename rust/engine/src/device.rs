//! Collectives on GPU memory: NCCL carries the data, the engine watches over the ranks.
//!
//! NCCL neither compares what ranks call nor says who is gone: ranks that disagree hang, and so do
//! the survivors of a death. So every call has a *witness* in the engine, an empty call of the same
//! group that declares the same signature: ranks that disagree are told, all of them, and the order
//! of calls is one for both kinds of memory. And as long as a call is under way on the GPU a thread
//! looks whether all ranks are alive. Whatever is wrong, the communicator is aborted, which ends what
//! is stuck on the GPU, and the error is the one that CPU tensors would have raised.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use nccl_rs::{Communicator, Config, Cuda, Data, DataMut, DataType, Event, Nccl, Op, Stream, UniqueId};
use trigram_core::signature::{Collective, Signature};
use trigram_core::{DType, Error, ReduceOp, Result};

use crate::engine::Glance;
use crate::fork;
use crate::group::Group;
use crate::hub;
use crate::job::{Request, Tensors};
use crate::ticket::{GLANCE, Ticket};

/// How often the watching thread looks while something is under way.
const LOOK: Duration = Duration::from_millis(1);
/// How long an aborted call is given to end on the GPU before the error is told all the same.
const CLOSE: Duration = Duration::from_secs(5);
/// A rank that has left may have done its part of a call that is under way still; one that has died, too.
const LEAVING: Duration = Duration::from_secs(2);
const DYING: Duration = Duration::from_millis(30);
/// How long NCCL may take to accept a call; its end is not waited for.
const ACCEPT: Duration = Duration::from_secs(60);

/// A group's ranks, each with a GPU.
pub struct DeviceGroup {
    group: Group,
    alarm: Group,
    nccl: Nccl,
    comm: Communicator,
    failure: Arc<Failure>,
}

/// What has gone wrong with a device group; the first counts.
#[derive(Default)]
struct Failure(Mutex<Option<Error>>);

impl Failure {
    fn lock(&self) -> MutexGuard<'_, Option<Error>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self) -> Result<()> {
        self.lock().clone().map_or(Ok(()), Err)
    }

    /// This rank cannot go on, and neither can the others.
    fn tell(&self, error: &Error, comm: &Communicator, alarm: &Group) {
        self.lock().get_or_insert_with(|| error.clone());
        comm.abort();
        let members = alarm.members();
        let why = format!("rank {}: {error}", members.ranks[members.me as usize]);
        let _ = alarm.abort(alarm.next() + 1, &why);
    }
}

/// A call under way on a GPU.
pub struct DeviceCall {
    done: Event,
    witness: Option<Arc<Ticket>>,
    failure: Arc<Failure>,
}

/// One of several messages that travel together.
#[derive(Clone, Copy, Debug)]
pub struct Parcel {
    /// Whether this rank sends it.
    pub sends: bool,
    /// The other rank's place.
    pub peer: u32,
    /// Its address on the device.
    pub address: usize,
    /// Its values.
    pub len: usize,
    /// What they are.
    pub dtype: DType,
}

impl DeviceGroup {
    /// Meets the other ranks, each of which calls this with the same `id`. `alarm` is a group of the same
    /// ranks that nobody calls any more: what fails on one rank is told to all in it. Lower numbers of
    /// `priority` go first on the GPU.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] without the device; [`Error::Timeout`], [`Error::PeerLost`].
    #[allow(clippy::too_many_arguments)] // one call from one place
    pub fn join(
        group: &Group,
        alarm: &Group,
        nccl: &Nccl,
        device: i32,
        id: UniqueId,
        priority: i32,
        limit: Option<Duration>,
        glance: Glance<'_>,
    ) -> Result<Self> {
        let members = group.members();
        let size = members.ranks.len() as u32;
        let device = Cuda::load().and_then(|cuda| cuda.device(device)).map_err(told)?;
        let stream = Stream::new(&device, priority).map_err(told)?;
        let mut pending =
            Communicator::init(nccl, &stream, id, members.me, size, Config::new(), ACCEPT).map_err(told)?;
        let (since, mut glanced) = (Instant::now(), Instant::now());
        let what = hub::signature(&Request::nothing());
        let comm = loop {
            match pending.poll().map_err(told)? {
                Ok(comm) => break comm,
                Err(still) => pending = still,
            }
            // Dropping it on the way out aborts it.
            group.engine().look(alarm.members(), &what)?;
            if limit.is_some_and(|l| since.elapsed() > l) {
                let millis = since.elapsed().as_millis() as u64;
                let waiting_for = "NCCL to connect all ranks".into();
                return Err(Error::Timeout { what: format!("group {}", members.name), millis, waiting_for });
            }
            if glanced.elapsed() > GLANCE {
                glance()?;
                glanced = Instant::now();
            }
            std::thread::sleep(LOOK);
        };
        let (group, alarm, nccl) = (group.clone(), alarm.clone(), nccl.clone());
        Ok(Self { group, alarm, nccl, comm, failure: Arc::default() })
    }

    /// `CUstream` of its work.
    pub fn stream(&self) -> usize {
        self.comm.stream().raw() as usize
    }

    /// Makes a collective, after what was given to the stream `caller` so far. `witnessed` is false
    /// where a CUDA graph is being captured: it is replayed without us.
    ///
    /// # Errors
    ///
    /// What an earlier call has failed with; [`Error::Unsupported`] for what NCCL cannot do.
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
        witnessed: bool,
    ) -> Result<DeviceCall> {
        fork::check()?;
        self.failure.get()?;
        self.group.check(&request)?;
        let plan = Plan::of(&request, self.comm.rank(), self.comm.size())?;
        let mut signature = hub::signature(&request);
        signature.extra |= Signature::DEVICE;
        let witness = if witnessed { Some(self.group.witness(request, limit)?) } else { None };
        let run = || plan.run(&self.comm, &self.nccl);
        // SAFETY: passed on to the caller.
        unsafe { self.submit(signature, witness, caller, witnessed, run) }
    }

    /// Makes several messages that travel together, all sent and received at once. Only the ranks that
    /// they are between take part, so there is no witness; who is gone is noticed all the same.
    ///
    /// # Errors
    ///
    /// As for [`DeviceGroup::start`].
    ///
    /// # Safety
    ///
    /// As for [`DeviceGroup::start`].
    pub unsafe fn exchange(&self, parcels: &[Parcel], caller: usize) -> Result<DeviceCall> {
        fork::check()?;
        self.failure.get()?;
        let mut calls = Vec::with_capacity(parcels.len());
        for p in parcels {
            // SAFETY: passed on to the caller.
            calls.push((p, unsafe { Data::from_raw(p.address as u64, p.len, data_type(p.dtype)?) }));
        }
        let (dtype, count) = parcels.first().map_or((DType::U8, 0), |p| (p.dtype, p.len as u64));
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
        // SAFETY: passed on to the caller.
        unsafe { self.submit(signature, None, caller, true, run) }
    }

    /// # Safety
    ///
    /// `caller` is a stream of the device.
    unsafe fn submit(
        &self,
        signature: Signature,
        witness: Option<Arc<Ticket>>,
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
        let done = given().map_err(|e| {
            let error = told(e);
            self.fail(&error);
            error
        })?;
        if watched {
            let done = Event::record(stream).map_err(told)?;
            let (alarm, comm, failure) = (self.alarm.clone(), self.comm.clone(), self.failure.clone());
            Watch::over(Watched {
                alarm,
                comm,
                failure,
                signature,
                witness: witness.clone(),
                done,
                gone: None,
            })?;
        }
        Ok(DeviceCall { done, witness, failure: self.failure.clone() })
    }

    /// This rank cannot go on: neither can the others.
    fn fail(&self, error: &Error) {
        self.failure.tell(error, &self.comm, &self.alarm);
    }

    /// Ends it now, on all ranks.
    pub fn abort(&self, why: &str) {
        self.fail(&Error::Aborted(why.to_owned()));
    }
}

impl Drop for DeviceGroup {
    fn drop(&mut self) {
        // Ending well takes all ranks.
        let what = hub::signature(&Request::nothing());
        if self.alarm.engine().look(self.alarm.members(), &what).is_err() {
            self.comm.abort();
        }
    }
}

impl DeviceCall {
    /// Whether it has ended, well or not.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] where the GPU has failed.
    pub fn is_done(&self) -> Result<bool> {
        Ok(self.failure.get().is_err() || self.is_agreed()? && self.done.is_reached().map_err(told)?)
    }

    /// Whether all ranks are known to have made the same call: where they have not, NCCL may have
    /// ended it with numbers all the same.
    fn is_agreed(&self) -> Result<bool> {
        match self.witness.as_ref().map(|w| w.outcome()) {
            Some(Some(outcome)) => outcome.map(|()| true),
            Some(None) => Ok(false),
            None => Ok(true),
        }
    }

    /// What is given to the stream `caller` from now on comes after it.
    ///
    /// # Errors
    ///
    /// What it has failed with, if that is known.
    ///
    /// # Safety
    ///
    /// `caller` is a stream of its device.
    pub unsafe fn order(&self, caller: usize) -> Result<()> {
        self.failure.get().inspect_err(|_| self.let_go())?;
        // SAFETY: passed on to the caller.
        let theirs = unsafe { Stream::from_raw(self.done.device(), caller) };
        theirs.wait_for(&self.done).map_err(told)
    }

    /// Sleeps until it has ended; false if `deadline` came first.
    ///
    /// # Errors
    ///
    /// What it has failed with.
    pub fn wait(&self, deadline: Option<Instant>, glance: Glance<'_>) -> Result<bool> {
        let (mut glanced, mut looks) = (Instant::now(), 0u32);
        loop {
            let reached = self.done.is_reached().map_err(told)?;
            // An aborted call is reached too.
            let state = self.failure.get().and_then(|()| self.is_agreed());
            match state {
                Ok(agreed) if agreed && reached => return Ok(true),
                Ok(_) => {}
                Err(error) => {
                    self.let_go();
                    return Err(error);
                }
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                return Ok(false);
            }
            if glanced.elapsed() > GLANCE {
                glance()?;
                glanced = Instant::now();
            }
            looks += 1;
            if looks < 200 { std::thread::yield_now() } else { std::thread::sleep(LOOK / 20) }
        }
    }

    /// Waits until the GPU no longer touches the memory of a call that has failed, and was aborted.
    fn let_go(&self) {
        let since = Instant::now();
        while since.elapsed() < CLOSE && matches!(self.done.is_reached(), Ok(false)) {
            std::thread::sleep(LOOK);
        }
    }
}

/// What one rank gives to NCCL for a request.
struct Plan<'a> {
    what: Collective,
    op: Op,
    root: u32,
    inp: Data<'a>,
    out: Data<'a>,
    /// Parts sent to and received from each rank, for those that NCCL has no call for.
    parts: Vec<(bool, u32, Data<'a>)>,
}

impl Plan<'_> {
    fn of(request: &Request, me: u32, size: u32) -> Result<Self> {
        let Request { call, op, tensors, .. } = request;
        let kind = data_type(call.dtype)?;
        let (what, len, root) = (call.what, call.len, call.root);
        let Tensors { input, input_len, output, output_len } = *tensors;
        let width = call.dtype.size();
        // SAFETY: whoever made the request answers for its memory.
        let data = |at: usize, count: usize| unsafe { Data::from_raw(at as u64, count, kind) };
        let (inp, out) = (data(input as usize, input_len / width), data(output as usize, output_len / width));
        let part = |base: usize, k: usize| data(base + k * len * width, len);
        let mut parts = Vec::new();
        match what {
            Collective::Gather => {
                parts.push((true, root, inp));
                if me == root {
                    parts.extend((0..size).map(|r| (false, r, part(output as usize, r as usize))));
                }
            }
            Collective::Scatter => {
                if me == root {
                    parts.extend((0..size).map(|r| (true, r, part(input as usize, r as usize))));
                }
                parts.push((false, root, out));
            }
            Collective::AllToAll => {
                let equal = vec![len; size as usize];
                let (sent, received) = call.splits.clone().unwrap_or((equal.clone(), equal));
                for (sends, base, lengths) in
                    [(true, input as usize, sent), (false, output as usize, received)]
                {
                    let mut at = base;
                    for (r, count) in (0..size).zip(lengths) {
                        parts.push((sends, r, data(at, count)));
                        at += count * width;
                    }
                }
            }
            // Unequal parts, each reduced by its owner, or given by it to all.
            Collective::ReduceScatter | Collective::AllGather if call.splits.is_some() => {
                let base = if what == Collective::AllGather { output as usize } else { input as usize };
                let mut at = base;
                for (r, count) in (0..size).zip(call.splits.iter().flat_map(|s| s.0.clone())) {
                    parts.push((false, r, data(at, count)));
                    at += count * width;
                }
            }
            Collective::Barrier | Collective::SendRecv => {
                return Err(Error::Unsupported(format!("{} is not for GPU memory", what.name())));
            }
            _ => {}
        }
        let op = operator(*op, call.dtype)?;
        Ok(Self { what, op, root, inp, out, parts })
    }

    fn run(&self, comm: &Communicator, nccl: &Nccl) -> nccl_rs::Result<()> {
        let in_place = self.inp.address() == self.out.address();
        let inp = (!in_place).then_some(self.inp);
        // SAFETY: as for the plan; what is read and written at once is the same.
        let out = unsafe { raw_mut(&self.out) };
        match self.what {
            Collective::AllReduce => comm.all_reduce(inp, out, self.op),
            // Elsewhere than on the root there is no output, and none is written.
            // SAFETY: as above.
            Collective::Reduce => comm.reduce(None, unsafe { raw_mut(&self.inp) }, self.op, self.root),
            Collective::Broadcast => comm.broadcast(out, self.root),
            Collective::ReduceScatter if !self.parts.is_empty() => nccl.group(|| {
                self.parts.iter().try_for_each(|(_, owner, data)| {
                    // SAFETY: as above.
                    comm.reduce(None, unsafe { raw_mut(data) }, self.op, *owner)
                })
            }),
            Collective::AllGather if !self.parts.is_empty() => nccl.group(|| {
                self.parts.iter().try_for_each(|(_, owner, data)| {
                    // SAFETY: as above.
                    comm.broadcast(unsafe { raw_mut(data) }, *owner)
                })
            }),
            Collective::AllGather => comm.all_gather(self.inp, out),
            Collective::ReduceScatter => comm.reduce_scatter(self.inp, out, self.op),
            _ => nccl.group(|| {
                self.parts.iter().try_for_each(|(sends, peer, data)| match sends {
                    true => comm.send(*data, *peer),
                    // SAFETY: as above.
                    false => comm.recv(unsafe { raw_mut(data) }, *peer),
                })
            }),
        }
    }
}

/// The same memory, to be written.
///
/// # Safety
///
/// As for [`DataMut::from_raw`].
unsafe fn raw_mut<'a>(data: &Data<'a>) -> DataMut<'a> {
    // SAFETY: passed on to the caller.
    unsafe { DataMut::from_raw(data.address(), data.count(), data.data_type()) }
}

fn data_type(dtype: DType) -> Result<DataType> {
    Ok(match dtype {
        DType::F32 => DataType::Float32,
        DType::F64 => DataType::Float64,
        DType::F16 => DataType::Float16,
        DType::BF16 => DataType::Bfloat16,
        DType::I8 => DataType::Int8,
        DType::U8 | DType::Bool => DataType::Uint8,
        DType::I32 => DataType::Int32,
        DType::I64 => DataType::Int64,
    })
}

fn operator(op: ReduceOp, dtype: DType) -> Result<Op> {
    Ok(match (op, dtype) {
        // Of zeros and ones the largest is whether any is one, the smallest whether all are.
        (ReduceOp::Bor, DType::Bool) => Op::MAX,
        (ReduceOp::Band, DType::Bool) => Op::MIN,
        (ReduceOp::Sum, _) => Op::SUM,
        (ReduceOp::Avg, _) => Op::AVG,
        (ReduceOp::Min, _) => Op::MIN,
        (ReduceOp::Max, _) => Op::MAX,
        (ReduceOp::Prod, _) => Op::PROD,
        (ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor, _) => {
            let (op, dtype) = (op.name(), dtype.name());
            return Err(Error::Unsupported(format!("NCCL has no {op} of {dtype}; reduce a CPU tensor")));
        }
    })
}

/// NCCL's and CUDA's errors in this library's terms.
pub fn told(error: nccl_rs::Error) -> Error {
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

/// What is under way on GPUs, and the thread that looks after it.
#[derive(Default)]
struct Watch {
    calls: Mutex<Vec<Watched>>,
    more: Condvar,
}

struct Watched {
    alarm: Group,
    comm: Communicator,
    failure: Arc<Failure>,
    signature: Signature,
    witness: Option<Arc<Ticket>>,
    done: Event,
    /// Since when a peer is gone that had made the call: what it had to do with it may be done.
    gone: Option<Instant>,
}

impl Watched {
    /// Whether it is over, well or not.
    fn look(&mut self) -> bool {
        match self.state() {
            Ok(over) => over,
            Err(error) => {
                self.failure.tell(&error, &self.comm, &self.alarm);
                true
            }
        }
    }

    fn state(&mut self) -> Result<bool> {
        self.failure.get()?;
        if let Some(witness) = &self.witness
            && let Some(outcome) = witness.outcome()
        {
            outcome?;
            self.witness = None;
        }
        let reached = self.done.is_reached().map_err(told)?;
        if reached && self.witness.is_none() {
            return Ok(true);
        }
        // Who is gone is told before what NCCL noticed of it.
        if let Err(error) = self.alarm.engine().look(self.alarm.members(), &self.signature) {
            let grace = match &error {
                Error::PeerLost { why, .. } if why.contains("left") => LEAVING,
                Error::PeerLost { .. } => DYING,
                _ => return Err(error),
            };
            let entered = self.witness.is_none();
            let since = *self.gone.get_or_insert_with(Instant::now);
            return if entered && since.elapsed() < grace { Ok(false) } else { Err(error) };
        }
        self.comm.check().map_err(told)?;
        Ok(false)
    }
}

impl Watch {
    /// Looks after a call from now on, in one thread for all.
    fn over(call: Watched) -> Result<()> {
        static WATCH: OnceLock<Arc<Watch>> = OnceLock::new();
        let mut started = Ok(());
        let watch = WATCH.get_or_init(|| {
            let watch = Arc::new(Watch::default());
            let mine: Weak<Watch> = Arc::downgrade(&watch);
            let thread = std::thread::Builder::new().name("trigram-gpu".into());
            started = thread.spawn(move || mine.upgrade().map(|watch| watch.run())).map(drop);
            watch
        });
        started.map_err(|e| Error::io("starting a thread", e))?;
        watch.calls.lock().unwrap_or_else(PoisonError::into_inner).push(call);
        watch.more.notify_one();
        Ok(())
    }

    fn run(&self) {
        let mut calls: Vec<Watched> = Vec::new();
        loop {
            let mut new = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            while calls.is_empty() && new.is_empty() {
                new = self.more.wait(new).unwrap_or_else(PoisonError::into_inner);
            }
            calls.append(&mut new);
            drop(new);
            if let Some(call) = calls.first() {
                // Or a graph that is captured meanwhile would forbid this thread to ask for events.
                let _ = call.comm.stream().device().ignore_captures();
            }
            // Not under the lock: an abort takes its time, and callers must not wait for it.
            calls.retain_mut(|call| !call.look());
            if !calls.is_empty() {
                std::thread::sleep(LOOK);
            }
        }
    }
}
