//! Communicators: made, watched, split, ended.
//!
//! None of them blocks inside NCCL: where a call is not over when it returns, it is polled here, with
//! a deadline. Calls take turns. A call can block nevertheless, where a stream has no room for more work
//! because what it runs is stuck: an abort, which may come from any thread, does not wait for it then,
//! for nothing else ends what is stuck.

use std::cell::RefCell;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::cuda::Stream;
use crate::error::{Error, Result};
use crate::ffi::{Code, Comm, IN_PROGRESS, SUCCESS, Table};
use crate::library::Nccl;
use crate::types::UniqueId;

/// How long a healthy communicator may take to end when it is dropped.
const FAREWELL: Duration = Duration::from_secs(10);
/// Looks at a call under way this often before sleeping in between.
const SPINS: u32 = 64;
const NAP: Duration = Duration::from_micros(100);
/// A call that takes longer waits for something that may never end. NCCL expects to be aborted by another
/// thread then.
pub(crate) const BLOCKED: Duration = Duration::from_millis(100);

/// Refuses a call that is not one of a group: NCCL would begin it at the group's end only, and write its result then.
pub(crate) fn refuse_in_group(what: &'static str) -> Result<()> {
    match GROUP.with_borrow(Option::is_some) {
        true => {
            Err(Error::Misuse(format!("{what}: this thread has an open group, and it cannot be part of one")))
        }
        false => Ok(()),
    }
}

/// What NCCL made, and what it was made with.
pub(crate) struct Inner {
    pub(crate) nccl: Nccl,
    pub(crate) stream: Stream,
    /// Held during calls, one at a time.
    turn: Mutex<()>,
    /// Held for moments only.
    state: Mutex<State>,
    /// Held while it is revoked.
    pub(crate) revoking: Mutex<()>,
    /// Threads inside of NCCL with it.
    inside: AtomicU32,
    timeout: Duration,
    rank: u32,
    size: u32,
    /// Until it has ended; it may share resources with its parent, and may point into the config.
    _parent: Option<Arc<Inner>>,
    _config: Box<Config>,
}

#[derive(Clone, Copy)]
struct State {
    comm: Comm,
    /// It may be used; otherwise it can only be aborted.
    sound: bool,
    /// NCCL has calls of an open group, which point to it.
    grouped: bool,
    /// It is to be aborted when that group has ended.
    doomed: bool,
    /// It was revoked: only what makes another communicator of it goes on.
    revoked: bool,
}

impl State {
    fn new(comm: Comm) -> Self {
        Self { comm, sound: true, grouped: false, doomed: false, revoked: false }
    }
}

/// Whether a call goes on where a communicator has failed or was revoked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Sound,
    Alive,
}

// SAFETY: NCCL allows calls from any thread, one at a time, which the turns see to.
unsafe impl Send for State {}

thread_local! {
    /// Communicators with calls in this thread's group, if there is one.
    static GROUP: RefCell<Option<Vec<Arc<Inner>>>> = const { RefCell::new(None) };
}

impl Inner {
    /// A communicator that NCCL has made, or is making; `parent` lives as long.
    pub(crate) fn new(
        nccl: Nccl,
        stream: Stream,
        comm: Comm,
        (rank, size): (u32, u32),
        timeout: Duration,
        config: Box<Config>,
        parent: Option<Arc<Self>>,
    ) -> Arc<Self> {
        let (turn, inside) = (Mutex::default(), AtomicU32::new(0));
        let state = Mutex::new(State::new(comm));
        Arc::new(Self {
            nccl,
            stream,
            turn,
            state,
            revoking: Mutex::default(),
            inside,
            timeout,
            rank,
            size,
            _parent: parent,
            _config: config,
        })
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters NCCL with the communicator.
    fn enter(&self, what: &'static str, needs: Needs) -> Result<Comm> {
        let mut state = self.lock();
        if state.comm.is_null() || state.doomed {
            return Err(Error::Aborted(what));
        }
        state.grouped |= GROUP.with_borrow(Option::is_some);
        if !state.sound && needs == Needs::Sound {
            let how = if state.revoked { "was revoked" } else { "has failed; abort it and make a new one" };
            return Err(Error::Misuse(format!("{what}: the communicator {how}")));
        }
        self.inside.fetch_add(1, Ordering::AcqRel);
        Ok(state.comm)
    }

    fn leave(&self) {
        self.inside.fetch_sub(1, Ordering::AcqRel);
    }

    /// Makes a call, and waits until NCCL has taken it; in a group, the group's end does.
    pub(crate) fn call(
        self: &Arc<Self>,
        what: &'static str,
        call: impl FnOnce(&Table, Comm) -> Code,
    ) -> Result<()> {
        let code = self.inside(what, Needs::Sound, call)?;
        let grouped = GROUP.with_borrow_mut(|group| {
            group.as_mut().map(|members| {
                if !members.iter().any(|m| Arc::ptr_eq(m, self)) {
                    members.push(self.clone());
                }
            })
        });
        match code {
            SUCCESS => Ok(()),
            IN_PROGRESS if grouped.is_some() => Ok(()),
            IN_PROGRESS => self.settle(what, self.timeout),
            code => Err(self.failed(what, code)),
        }
    }

    /// Makes a call; what NCCL returns.
    pub(crate) fn inside(
        &self,
        what: &'static str,
        needs: Needs,
        call: impl FnOnce(&Table, Comm) -> Code,
    ) -> Result<Code> {
        let _entered = self.stream.device().enter()?;
        let _turn = self.take_turn();
        let comm = self.enter(what, needs)?;
        let code = call(&self.nccl.table, comm);
        self.leave();
        Ok(code)
    }

    pub(crate) fn failed(&self, what: &'static str, code: Code) -> Error {
        self.lock().sound = false;
        self.nccl.error(what, code)
    }

    /// From now on nothing is given to it but what makes another communicator of it; whether it was revoked before.
    pub(crate) fn retire(&self, what: &'static str) -> Result<bool> {
        let mut state = self.lock();
        if state.comm.is_null() || state.doomed {
            return Err(Error::Aborted(what));
        }
        if state.grouped {
            return Err(Error::Misuse(format!("{what}: the communicator has calls in an open group")));
        }
        state.sound = false;
        Ok(state.revoked)
    }

    /// What was under way has ended, or ends.
    pub(crate) fn set_revoked(&self) {
        self.lock().revoked = true;
    }

    /// Whether it may be given work, and whether it was revoked.
    pub(crate) fn is_sound(&self) -> (bool, bool) {
        let state = self.lock();
        (state.sound, state.revoked)
    }

    /// Waits for threads inside of NCCL with it, for a moment; whether none is left.
    pub(crate) fn is_empty_soon(&self) -> bool {
        let since = Instant::now();
        while self.inside.load(Ordering::Acquire) > 0 && since.elapsed() < BLOCKED {
            std::thread::sleep(NAP);
        }
        self.inside.load(Ordering::Acquire) == 0
    }

    /// How it is: done, under way, or failed.
    pub(crate) fn poll(&self, what: &'static str) -> Result<bool> {
        let mut out = SUCCESS;
        let code = {
            let state = self.lock();
            if state.comm.is_null() {
                return Err(Error::Aborted(what));
            }
            // SAFETY: the communicator is alive, and nobody aborts it while the lock is held.
            unsafe { (self.nccl.table.comm_get_async_error)(state.comm, &mut out) }
        };
        match (code, out) {
            (SUCCESS, SUCCESS) => Ok(true),
            (SUCCESS, IN_PROGRESS) => Ok(false),
            (SUCCESS, out) => Err(self.failed(what, out)),
            (code, _) => Err(self.failed(what, code)),
        }
    }

    /// Waits until what is under way has been taken.
    pub(crate) fn settle(&self, what: &'static str, limit: Duration) -> Result<()> {
        let (since, mut looks) = (Instant::now(), 0);
        while !self.poll(what)? {
            if since.elapsed() > limit {
                self.lock().sound = false;
                return Err(Error::Timeout { call: what, after: limit });
            }
            looks += 1;
            if looks < SPINS { std::thread::yield_now() } else { std::thread::sleep(NAP) }
        }
        Ok(())
    }

    /// Aborting blocks, in NCCL, for as long as graphs hold the communicator: so it is done in a thread,
    /// outside of the lock, and waited for only so long.
    fn abort(&self) {
        let comm = {
            let mut state = self.lock();
            state.sound = false;
            if state.grouped {
                state.doomed = true;
                return;
            }
            std::mem::replace(&mut state.comm, null_mut())
        };
        if comm.is_null() {
            return;
        }
        self.is_empty_soon(); // nobody enters any more
        let (abort, device) = (self.nccl.table.comm_abort, self.stream.device().clone());
        let comm = comm as usize; // it is this thread's alone from now on
        let thread = std::thread::Builder::new().name("nccl-abort".into()).spawn(move || {
            if let Ok(_entered) = device.enter() {
                // SAFETY: it is alive, and nobody else has it any more but a call that waits inside for room in
                // a stream: NCCL ends what that waits for, and the call with it, before it frees anything.
                unsafe { abort(comm as Comm) };
            }
        });
        let Ok(thread) = thread else { return };
        let since = Instant::now();
        while !thread.is_finished() && since.elapsed() < FAREWELL {
            std::thread::sleep(NAP);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let state = *self.lock();
        if state.comm.is_null() {
            return;
        }
        let ended = state.sound && {
            let Ok(_entered) = self.stream.device().enter() else { return };
            // SAFETY: nobody else has it any more. Finalize once, and destroy only what is quiet:
            // destroying something under way frees nothing.
            let code = unsafe { (self.nccl.table.comm_finalize)(state.comm) };
            let quiet = match code {
                SUCCESS => Ok(()),
                IN_PROGRESS => self.settle("ncclCommFinalize", FAREWELL),
                code => Err(self.nccl.error("ncclCommFinalize", code)),
            };
            // SAFETY: as above.
            quiet.is_ok() && unsafe { (self.nccl.table.comm_destroy)(state.comm) } == SUCCESS
        };
        if !ended {
            self.abort();
        }
    }
}

/// Ranks that communicate, as seen by one of them; tied to a stream, and with it to a device.
///
/// Ends when it is dropped, after everything given to it; after an error or [`Communicator::abort`]
/// at once.
#[derive(Clone)]
pub struct Communicator(pub(crate) Arc<Inner>);

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Inner { rank, size, stream, .. } = &*self.0;
        write!(f, "Communicator(rank {rank} of {size} on {:?})", stream.device())
    }
}

/// A communicator that is not ready yet: it can only be waited for, or dropped.
#[derive(Debug)]
#[must_use]
pub struct Pending(pub(crate) Communicator);

impl Pending {
    /// The communicator, if all ranks have come.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`] where it could not be made.
    pub fn poll(self) -> Result<std::result::Result<Communicator, Self>> {
        Ok(if self.0.0.poll("ncclCommInitRankConfig")? { Ok(self.0) } else { Err(self) })
    }

    /// Waits until all ranks have come.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] if they have not in `limit`, [`Error::Nccl`] where it could not be made.
    pub fn wait(self, limit: Duration) -> Result<Communicator> {
        self.0.0.settle("ncclCommInitRankConfig", limit).map(|()| self.0)
    }

    /// What can end the wait from another thread.
    pub fn aborter(&self) -> Aborter {
        self.0.aborter()
    }
}

/// Ends a communicator from any thread; what is under way on the GPU ends too.
#[derive(Clone)]
pub struct Aborter(std::sync::Weak<Inner>);

impl Aborter {
    /// See [`Communicator::abort`].
    pub fn abort(&self) {
        if let Some(inner) = self.0.upgrade() {
            inner.abort();
        }
    }
}

impl Communicator {
    /// Joins the ranks that have `id`: `rank` of `size`, with its work on `stream`. Every call that
    /// NCCL does not end at once may take `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] for a rank that is none, [`Error::Nccl`].
    pub fn init(
        nccl: &Nccl,
        stream: &Stream,
        id: UniqueId,
        rank: u32,
        size: u32,
        config: Config,
        timeout: Duration,
    ) -> Result<Pending> {
        const CALL: &str = "ncclCommInitRankConfig";
        let (Ok(nranks), Ok(place)) = (c_int::try_from(size), c_int::try_from(rank)) else {
            return Err(Error::Misuse(format!("{size} ranks are more than NCCL supports")));
        };
        if rank >= size {
            return Err(Error::Misuse(format!("there is no rank {rank} among {size} ranks")));
        }
        let config = Box::new(config);
        let mut raw = config.raw(nccl.version());
        let _entered = stream.device().enter()?;
        // Old versions follow the pointer where they fail.
        let mut comm = null_mut();
        // SAFETY: the structure is as long as it says, and copied; the device is current.
        let code = unsafe { (nccl.table.comm_init_rank_config)(&mut comm, nranks, id, place, &mut raw) };
        if !matches!(code, SUCCESS | IN_PROGRESS) || comm.is_null() {
            let error = nccl.error(CALL, code);
            // From 2.23 on a failure leaves this thread in a group; elsewhere this is refused.
            // SAFETY: it takes nothing.
            unsafe { (nccl.table.group_end)() };
            return Err(error);
        }
        let inner = Inner::new(nccl.clone(), stream.clone(), comm, (rank, size), timeout, config, None);
        Ok(Pending(Self(inner)))
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.0.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> u32 {
        self.0.size
    }

    /// Where its work goes.
    pub fn stream(&self) -> &Stream {
        &self.0.stream
    }

    /// Whether something that it was given has failed meanwhile: a rank was lost, say.
    ///
    /// # Errors
    ///
    /// What has failed. Abort it then, on all ranks.
    pub fn check(&self) -> Result<()> {
        self.0.poll("ncclCommGetAsyncError").map(drop)
    }

    /// Ends it now, with what is under way on the GPU. All ranks do it.
    pub fn abort(&self) {
        self.0.abort();
    }

    /// What can abort it from another thread, without keeping it alive.
    pub fn aborter(&self) -> Aborter {
        Aborter(Arc::downgrade(&self.0))
    }

    /// Divides the ranks: those that give the same `color` are together, in the order of `key`;
    /// None: in no new one. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] inside of [`Nccl::group`]; [`Error::Nccl`], [`Error::Timeout`].
    pub fn split(&self, color: Option<u32>, key: u32, config: Config) -> Result<Option<Self>> {
        const CALL: &str = "ncclCommSplit";
        refuse_in_group(CALL)?;
        const NO_COLOR: c_int = -1;
        let (color, key) =
            (color.map_or(NO_COLOR, |c| (c & 0x7fff_ffff) as c_int), (key & 0x7fff_ffff) as c_int);
        let config = Box::new(config);
        let mut raw = config.raw(self.0.nccl.version());
        // NCCL writes the handle from a thread of its own, when it has one: it needs a fixed place,
        // which is given up only if that thread may still be at work.
        let place: *mut Comm = Box::into_raw(Box::new(null_mut()));
        // SAFETY: the structure is copied; the place lives until the split is over.
        let made = self.0.call(CALL, |t, comm| unsafe { (t.comm_split)(comm, color, key, place, &mut raw) });
        // A split says success while it is under way.
        made.and_then(|()| self.0.settle(CALL, self.0.timeout))?;
        // SAFETY: the parent is quiet, so nobody writes it any more.
        let comm = *unsafe { Box::from_raw(place) };
        if comm.is_null() {
            return Ok(None);
        }
        self.child(CALL, comm, config, Some(self.0.clone())).map(Some)
    }

    /// A communicator that NCCL has made of this one, and that is ready; `parent` if it may share what that has.
    pub(crate) fn child(
        &self,
        what: &'static str,
        comm: Comm,
        config: Box<Config>,
        parent: Option<Arc<Inner>>,
    ) -> Result<Self> {
        let (mut rank, mut size) = (0, 0);
        let table = &self.0.nccl.table;
        // SAFETY: the communicator is ready; each writes one integer.
        let codes = unsafe { [(table.comm_user_rank)(comm, &mut rank), (table.comm_count)(comm, &mut size)] };
        let place = (rank.unsigned_abs(), size.unsigned_abs());
        let (nccl, stream) = (self.0.nccl.clone(), self.0.stream.clone());
        let inner = Inner::new(nccl, stream, comm, place, self.0.timeout, config, parent);
        match codes.iter().find(|&&code| code != SUCCESS) {
            Some(&code) => Err(inner.failed(what, code)),
            None => Ok(Self(inner)),
        }
    }
}

impl Nccl {
    /// Calls made inside of `calls` begin together, when it returns: sends and receives between the
    /// same ranks must be grouped, and the calls of several communicators of one thread.
    ///
    /// # Errors
    ///
    /// What failed inside: then the communicators with calls in the group are aborted, for NCCL can
    /// take nothing back. Else what failed when the group began.
    pub fn group<T>(&self, calls: impl FnOnce() -> Result<T>) -> Result<T> {
        const CALL: &str = "ncclGroupEnd";
        if GROUP.with_borrow(Option::is_some) {
            return calls(); // it ends with the group around it
        }
        // SAFETY: it takes nothing.
        self.check("ncclGroupStart", unsafe { (self.table.group_start)() })?;
        GROUP.set(Some(Vec::new()));
        // Ends the group where `calls` panics too.
        let guard = Guard(self);
        let made = calls();
        let (members, code) = guard.end();
        let timeout = members.iter().map(|m| m.timeout).max().unwrap_or_default();
        let began = match code {
            SUCCESS | IN_PROGRESS => members.iter().try_for_each(|m| m.settle(CALL, timeout)),
            code => Err(members.first().map_or_else(|| self.error(CALL, code), |m| m.failed(CALL, code))),
        };
        if made.is_err() {
            members.iter().for_each(|m| m.abort());
        }
        made.and_then(|out| began.map(|()| out))
    }
}

struct Guard<'a>(&'a Nccl);

impl Guard<'_> {
    fn end(self) -> (Vec<Arc<Inner>>, Code) {
        let ended = self.finish();
        std::mem::forget(self);
        ended
    }

    fn finish(&self) -> (Vec<Arc<Inner>>, Code) {
        let mut members = GROUP.take().unwrap_or_default();
        // All turns, in one order, so that two threads do not wait for each other.
        members.sort_by_key(|m| Arc::as_ptr(m) as usize);
        let turns: Vec<_> = members.iter().map(|m| m.take_turn()).collect();
        let mut doomed = Vec::new();
        for m in &members {
            let mut state = m.lock();
            state.grouped = false;
            m.inside.fetch_add(1, Ordering::AcqRel);
            if state.doomed {
                doomed.push(m.clone());
            }
        }
        let aborting = (!doomed.is_empty()).then(|| {
            // Beside the group's end, which may wait for what only the abort ends.
            let doomed = doomed.clone();
            let thread = std::thread::Builder::new().name("nccl-abort".into());
            thread.spawn(move || doomed.iter().for_each(|m| m.abort()))
        });
        // SAFETY: the group was begun on this thread.
        let code = unsafe { (self.0.table.group_end)() };
        members.iter().for_each(|m| m.leave());
        drop(turns);
        match aborting {
            Some(Ok(thread)) => drop(thread.join()),
            Some(Err(_)) => doomed.iter().for_each(|m| m.abort()),
            None => {}
        }
        (members, code)
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let (members, _) = self.finish();
        members.iter().for_each(|m| m.abort());
    }
}
