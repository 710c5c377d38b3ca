//! Which thread drives the work, and how it sleeps.
//!
//! One thread at a time holds the progress lock and moves *all* calls. A synchronous caller that finds the lock free
//! drives in its own thread: on few cores, waking another thread costs more than a small collective. So does a caller
//! that waits for an asynchronous call. Otherwise the background thread drives, see [`crate::runtime::background`]; it
//! starts with the first asynchronous call. No thread sleeps without a doorbell that wakes it.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use trigram_core::{Error, Result};

use crate::call::request::Submission;
use crate::drive::one_shot::OneShot;
use crate::drive::progress::Progress;
use crate::group::members::Members;
use crate::group::world::World;
use crate::health::counters::Counters;
use crate::health::peers::HEARTBEAT;
use crate::lanes::pool::Lanes;
use crate::link::frames::{Rx, Tx};
use crate::runtime::background::{Background, Duty, QUIET};
use crate::sys::callers::Callers;
use crate::sys::clock;
use crate::sys::completion::{Completion, INTERRUPT_INTERVAL, InterruptCheck};
use crate::sys::cores::Cores;
use crate::sys::fork::GuardedFd;
use crate::sys::limits::refused;
use crate::sys::serving;

/// Rounds of progress at full speed, if every rank of the host has a core.
const SPINS: u32 = 16;
/// Looks at the operation slots of the peers that take about as long as a round of progress.
const LOOKS: u32 = 64;
/// Further rounds with a yield in between: where ranks share a core, the rank that has work gets it. On an idle core a
/// yield costs next to nothing; where others want the core, a rank neither looks nor yields, but sleeps at once, see
/// [`crate::sys::cores`].
const YIELDS: u32 = 40;
/// The same between hosts, where each round costs a system call, and waits are longer.
const SOCKET_YIELDS: u32 = 4;
/// Sleeps on the futex for this long; then in `epoll`, which reports deaths too.
const FUTEX_SLEEP: Duration = Duration::from_millis(2);

/// Where cores are wanted, the heartbeat thread gets one in this time to let go of the progress lock.
const MOMENT: Duration = Duration::from_micros(50);

const BELL: u64 = u64::MAX;
const SOCKET: u64 = 1 << 32;

/// On shutdown, a failed call waits this long for its peers to leave it.
const CLOSE: Duration = Duration::from_secs(1);

/// Why every call fails once a thread has panicked while it held the progress lock.
pub(crate) const ENGINE_FAILED: &str = "trigram stopped on this rank after an internal error; the first error in this rank's log says which. Restart the job";

/// What callers ask of the thread that drives.
pub(crate) enum Command {
    Submit(Submission),
    Abort(Arc<Members>, u64, Error),
    AbortGroup(Arc<Members>, Error),
    Help(Arc<Members>),
    SendAway(u32, Error),
    /// The caller has stopped waiting, for this reason: its call fails on all ranks and releases its memory.
    Stop(Arc<Completion>, Error),
}

/// What the threads of an engine share.
pub(crate) struct Driver {
    pub(crate) world: Arc<World>,
    pub(crate) progress: Mutex<Progress>,
    pub(crate) inbox: Mutex<Vec<Command>>,
    pub(crate) waiting: AtomicUsize,
    pub(crate) closed: AtomicBool,
    pub(crate) helping: Arc<AtomicBool>,
    /// It is time for a heartbeat.
    due: AtomicBool,
    /// The heartbeat thread holds the progress lock, for a moment.
    pub(crate) in_heartbeat: AtomicBool,
    pub(crate) epoll: OwnedFd,
    has_sockets: bool,
    pub(crate) spins: u32,
    cores: Cores,
    pub(crate) lanes: Arc<Lanes>,
    pub(crate) background: Background,
    pub(crate) counters: Arc<Counters>,
    pub(crate) callers: Arc<Callers>,
    _guard: GuardedFd,
}

impl Driver {
    /// With one inward and one outward connection per world rank.
    pub(crate) fn new(world: Arc<World>, tx: Vec<Option<Tx>>, rx: Vec<Option<Rx>>) -> Result<Self> {
        let io = |e: rustix::io::Errno| refused("creating an epoll instance", e);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io)?;
        let add = |fd: BorrowedFd<'_>, data: u64, flags: epoll::EventFlags| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(data), flags).map_err(io)
        };
        let edge =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let mut has_sockets = false;
        for rx in rx.iter().flatten() {
            let mut added = Ok(());
            rx.each_socket(&mut |fd| {
                has_sockets = true;
                if added.is_ok() {
                    added = add(fd, u64::from(rx.peer), edge);
                }
            });
            added?;
        }
        for (&rank, neighbour) in &world.neighbours {
            if let Some(fd) = neighbour.socket() {
                add(fd, SOCKET | u64::from(rank), epoll::EventFlags::IN)?;
            }
        }
        add(world.bell.fd(), BELL, epoll::EventFlags::IN)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if world.neighbours.len() < cores { SPINS } else { 0 };
        let progress = Progress::new(world.clone(), tx, rx);
        let (counters, helping) = (progress.counters.clone(), progress.helping());
        let (callers, lanes) = (progress.callers.clone(), progress.lanes());
        Ok(Self {
            world,
            progress: Mutex::new(progress),
            inbox: Mutex::default(),
            waiting: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            helping,
            due: AtomicBool::new(false),
            in_heartbeat: AtomicBool::new(false),
            _guard: GuardedFd::new(&epoll),
            epoll,
            has_sockets,
            spins,
            cores: Cores::new(),
            lanes,
            background: Background::new(),
            counters,
            callers,
        })
    }

    /// The background thread, until the engine is closed.
    pub(crate) fn background(&self) {
        let _watch = self.lanes.watch();
        // What it has seen at its last look: the newest call, and how many times calls were left to it.
        let (mut newest, mut left, mut quiet) = (0, 0, 0);
        loop {
            let duty = self.background.next();
            if duty == Duty::End || self.closed.load(Ordering::Acquire) {
                return;
            }
            if duty == Duty::Look {
                let before = std::mem::replace(&mut left, self.background.left.load(Ordering::Relaxed));
                quiet = if before == left { quiet + 1 } else { 0 };
            }
            let locked = match self.try_lock() {
                // Another thread drives.
                Ok(None) if duty == Duty::Look && quiet < QUIET => continue,
                Ok(None) => {
                    // It asks anew when it leaves calls behind; if it has left meanwhile, the lock is free.
                    self.background.change(duty, Duty::Rest, || true);
                    self.try_lock()
                }
                other => other,
            };
            let progress = match locked {
                Ok(Some(progress)) => progress,
                Ok(None) => continue,
                Err(_) => return,
            };
            let waiting = self.waiting.load(Ordering::Acquire) > 0;
            if duty == Duty::Look && !waiting && progress.is_newer(newest) {
                newest = progress.newest();
                // The caller may have seen that this thread looks in before it went to rest.
                self.background.change(Duty::Rest, Duty::Look, || !progress.is_idle());
                self.background.change(Duty::Look, Duty::Rest, || quiet >= QUIET && progress.is_idle());
                continue;
            }
            self.background.wake();
            // This thread checks for no interrupts: only the end of the work or of the engine stops it.
            let Ok(Some(progress)) = self.drive(progress, None, 0, None, &mut || Ok(())) else { return };
            self.note_time();
            let next = if duty == Duty::Look { Duty::Look } else { Duty::Rest };
            let is_over = || progress.is_idle() && self.waiting.load(Ordering::Acquire) == 0;
            self.background.change(Duty::Drive, next, is_over);
            drop(progress);
            self.counters.log.write_out();
        }
    }

    /// The heartbeat thread, see [`crate::drive::heartbeat`].
    pub(crate) fn heartbeat(&self) {
        let _watch = self.lanes.watch();
        while !self.closed.load(Ordering::Acquire) {
            if let Some(control) = &self.world.control {
                control.count_heartbeat();
            }
            self.lanes.look_at_cores();
            self.due.store(true, Ordering::Release);
            // The thread that holds the lock checks `due`.
            self.in_heartbeat.store(true, Ordering::Release);
            match self.progress.try_lock() {
                Ok(mut progress) => {
                    self.events(&mut progress, Duration::ZERO);
                    self.take_inbox(&mut progress);
                    progress.poll();
                    self.send_heartbeat(&mut progress);
                    // A thread that found this lock held may have taken this one for a thread that drives.
                    self.pass_on(progress);
                }
                Err(TryLockError::WouldBlock) => {}
                // A rank that cannot go on must not claim to be alive.
                Err(TryLockError::Poisoned(poisoned)) => {
                    poisoned.into_inner().hang_up();
                    return;
                }
            }
            self.in_heartbeat.store(false, Ordering::Release);
            self.counters.log.write_out();
            std::thread::park_timeout(HEARTBEAT);
        }
    }

    fn send_heartbeat(&self, progress: &mut Progress) {
        if self.due.swap(false, Ordering::AcqRel) {
            progress.heartbeat();
        }
    }

    /// Records the processor time of the background thread; to be called in it.
    pub(crate) fn note_time(&self) {
        let spent = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let spent = spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64;
        self.counters.background.store(spent, Ordering::Relaxed);
    }

    /// Lets others have the core while this rank waits. The ranks of this host read whether they wanted it.
    fn give_way(&self) {
        let lost = self.cores.give_way();
        if let Some(control) = self.world.control.as_ref().filter(|_| lost) {
            control.count_lost_core();
        }
    }

    /// The progress lock, unless another thread drives.
    pub(crate) fn try_lock(&self) -> Result<Option<MutexGuard<'_, Progress>>> {
        let mut is_first = true;
        loop {
            match self.progress.try_lock() {
                Ok(progress) => return Ok(Some(progress)),
                // The heartbeat thread releases it in a moment.
                Err(TryLockError::WouldBlock) if self.in_heartbeat.load(Ordering::Acquire) => {
                    is_first = true;
                    match self.cores.are_wanted() {
                        true => std::thread::sleep(MOMENT),
                        false => self.give_way(),
                    }
                }
                // Perhaps it was the heartbeat thread, which has released it since.
                Err(TryLockError::WouldBlock) if is_first => is_first = false,
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Poisoned(_)) => {
                    self.lanes.close();
                    return Err(Error::Aborted(ENGINE_FAILED.into()));
                }
            }
        }
    }

    /// Lets go of the progress lock, and hands on what is to be logged.
    pub(crate) fn leave(&self, progress: MutexGuard<'_, Progress>) {
        self.pass_on(progress);
        self.counters.log.write_out();
    }

    /// Lets go of the progress lock. What is still under way passes to the background thread: at once if it is large or
    /// somebody waits for it, otherwise in a while, because the caller probably comes to wait for it.
    fn pass_on(&self, progress: MutexGuard<'_, Progress>) {
        let (urgent, soon) = (progress.is_urgent(), !progress.is_idle());
        drop(progress);
        // Only now: until then the background thread may have found this lock held, and gone to rest.
        fence(Ordering::SeqCst);
        let waiting = self.waiting.load(Ordering::Acquire) > 0;
        if urgent || waiting {
            self.background.wake();
        } else if soon {
            self.background.look_soon();
        }
    }

    /// Makes a small call of one host without the machinery of calls under way, if nothing else is to be done and the
    /// peers come in a moment.
    pub(crate) fn one_shot(&self, progress: &mut Progress, submission: Submission) -> OneShot {
        let is_needed = || self.due.load(Ordering::Relaxed) || self.waiting.load(Ordering::Acquire) > 0;
        if is_needed() || self.closed.load(Ordering::Acquire) {
            return OneShot::Ordinary(submission);
        }
        let call = match progress.show(submission) {
            Ok(shown) => shown,
            Err(submission) => return OneShot::Ordinary(submission),
        };
        let (spins, mut looks) = (if self.cores.are_wanted() { 0 } else { self.spins * LOOKS }, 0);
        let mut waiting = None;
        let opened = loop {
            if call.is_open() {
                break true;
            }
            looks += 1;
            if looks <= spins {
                std::hint::spin_loop();
            } else if looks <= spins + YIELDS && !is_needed() && !self.cores.are_wanted() {
                waiting.get_or_insert_with(|| (call.absent(), Instant::now()));
                self.give_way();
            } else {
                break false;
            }
        };
        if let Some((ranks, since)) = waiting {
            self.counters.note_wait(&ranks, since.elapsed());
        }
        if opened { progress.fold_one_shot(call) } else { call.hand_over() }
    }

    /// Moves everything until `until` has its outcome or `deadline` has passed, or all work is done. `None` if another
    /// thread has taken over.
    ///
    /// # Errors
    ///
    /// That of `check_interrupt`; the call stays under way.
    pub(crate) fn drive<'a>(
        &'a self,
        mut progress: MutexGuard<'a, Progress>,
        until: Option<&Arc<Completion>>,
        spins: u32,
        deadline: Option<Instant>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<Option<MutexGuard<'a, Progress>>> {
        let mut idle = 0;
        let mut idle_since: Option<Instant> = None;
        let mut checked = None;
        // For whom this rank waits, and since when: also while it yields, for on busy cores that is most of the time.
        let mut waiting: Option<(Vec<u32>, Instant)> = None;
        loop {
            self.take_inbox(&mut progress);
            let moved = progress.poll();
            if let Some((ranks, since)) = waiting.take_if(|_| moved) {
                self.counters.note_wait(&ranks, since.elapsed());
            }
            if self.due.load(Ordering::Relaxed) {
                self.events(&mut progress, Duration::ZERO);
                progress.poll();
                self.send_heartbeat(&mut progress);
            }
            let over = match until {
                Some(completion) => completion.is_done(),
                None => progress.is_idle() && self.waiting.load(Ordering::Acquire) == 0,
            };
            if over || deadline.is_some_and(|d| Instant::now() >= d) {
                return Ok(Some(progress));
            }
            if self.closed.load(Ordering::Acquire) {
                if let Some(completion) = until {
                    self.finish(&mut progress, completion);
                }
                return Ok(Some(progress));
            }
            if until.is_some() && serving::is_due() {
                match self.check_outside(progress, check_interrupt)? {
                    Some(lock) => progress = lock,
                    None => return Ok(None),
                }
                continue;
            }
            if moved {
                idle = 0;
                idle_since = None;
                // While one direction is busy, check whether the other has become writable: both must stay busy.
                if self.has_sockets && progress.is_sending() {
                    self.events(&mut progress, Duration::ZERO);
                }
                continue;
            }
            idle += 1;
            let wanted = self.cores.are_wanted();
            if self.has_sockets && idle % 8 == 1 && !wanted {
                self.events(&mut progress, Duration::ZERO);
            }
            if idle < spins && !wanted {
                std::hint::spin_loop();
                continue;
            }
            waiting.get_or_insert_with(|| (progress.awaited(), Instant::now()));
            if idle < spins + if self.has_sockets { SOCKET_YIELDS } else { YIELDS } && !wanted {
                self.give_way();
                continue;
            }
            let now = Instant::now();
            let since = *idle_since.get_or_insert(now);
            let limit = deadline.map_or(INTERRUPT_INTERVAL, |d| d.saturating_duration_since(now));
            self.sleep(&mut progress, now - since, limit.min(INTERRUPT_INTERVAL));
            if let Some((ranks, since)) = waiting.take() {
                self.counters.note_wait(&ranks, since.elapsed());
            }
            let now = Instant::now();
            if now - *checked.get_or_insert(since) >= INTERRUPT_INTERVAL {
                checked = Some(now);
                if until.is_none() {
                    self.note_time();
                    continue;
                }
                match self.check_outside(progress, check_interrupt)? {
                    Some(lock) => progress = lock,
                    None => return Ok(None),
                }
            }
        }
    }

    /// Checks for an interrupt, and does what is due for other ranks; `None` if another thread has taken over meanwhile.
    fn check_outside<'a>(
        &'a self,
        progress: MutexGuard<'a, Progress>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<Option<MutexGuard<'a, Progress>>> {
        // Not under the lock: it waits for the interpreter's lock, and may run a signal handler of the user's. That may
        // take long, so the background thread drives meanwhile.
        self.leave(progress);
        check_interrupt()?;
        self.try_lock()
    }

    /// Fails a call on all ranks whose caller has stopped waiting; the others are told why.
    pub(crate) fn abort_call(&self, progress: &mut Progress, completion: &Arc<Completion>, why: &Error) {
        let why = format!("rank {} stopped waiting for this call: {why}", self.world.rank);
        progress.stop(completion, Error::Aborted(why));
    }

    /// Moves everything until a failed call has ended. If the engine is closed, all calls fail, and peers that stay
    /// inside them lose their access after a while.
    pub(crate) fn finish(&self, progress: &mut Progress, completion: &Arc<Completion>) {
        let since = Instant::now();
        while !completion.is_done() {
            if self.due.load(Ordering::Relaxed) {
                self.send_heartbeat(progress);
            }
            if self.closed.load(Ordering::Acquire) {
                // Of earlier calls, one may have the operation slot that this call waits for.
                progress.fail_at_shutdown();
                if since.elapsed() > CLOSE {
                    progress.end_failed();
                }
            }
            if !progress.poll() {
                self.events(progress, Duration::from_millis(1));
            }
        }
    }

    pub(crate) fn take_inbox(&self, progress: &mut Progress) {
        if self.waiting.load(Ordering::Acquire) > 0 {
            self.empty_inbox(progress);
        }
    }

    /// The same, also while another thread is adding to the inbox.
    pub(crate) fn empty_inbox(&self, progress: &mut Progress) {
        let commands = {
            let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
            self.waiting.store(0, Ordering::Release);
            std::mem::take(&mut *inbox)
        };
        for command in commands {
            match command {
                Command::Submit(submission) => progress.admit(submission),
                Command::Abort(members, through, error) => progress.abort(&members, through, &error),
                Command::AbortGroup(members, error) => progress.abort_group(&members, &error),
                Command::Help(members) => progress.help(members),
                Command::SendAway(rank, why) => progress.send_away(rank, why),
                Command::Stop(completion, why) => self.abort_call(progress, &completion, &why),
            }
        }
    }

    /// Sleeps until something happens, for at most `limit`.
    fn sleep(&self, progress: &mut Progress, idle: Duration, limit: Duration) {
        let bell = &self.world.bell;
        let on_event = self.has_sockets || idle > FUTEX_SLEEP;
        let seen = bell.arm(on_event);
        let found = progress.poll() || self.waiting.load(Ordering::Acquire) > 0;
        if found || self.closed.load(Ordering::Acquire) {
            return bell.disarm();
        }
        let (before, ticks) = (Instant::now(), clock::ticks());
        if on_event {
            self.events(progress, limit);
            bell.disarm();
        } else {
            bell.sleep(seen, FUTEX_SLEEP.min(limit));
        }
        self.lanes.load.note_sleep(ticks);
        progress.note_wait(before.elapsed());
    }

    /// Takes note of events on sockets and doorbells, waiting up to `limit` for one.
    pub(crate) fn events(&self, progress: &mut Progress, limit: Duration) {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        let limit = rustix::time::Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        // Interrupted by a signal: the caller checks for it, and comes back.
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&limit)) else { return };
        for event in events {
            match event.data.u64() {
                BELL => self.world.bell.drain(),
                data if data & SOCKET != 0 => {
                    let rank = data as u32;
                    let Some(neighbour) = self.world.neighbours.get(&rank) else { continue };
                    let found = neighbour.collect();
                    if matches!(found, Ok(true)) {
                        continue;
                    }
                    if let Some(fd) = neighbour.socket() {
                        // A closed socket would be readable for ever. An error means that it is removed already.
                        let _ = epoll::delete(&self.epoll, fd);
                    }
                    progress.end_socket(rank, found.err());
                }
                data => progress.wake(data as u32),
            }
        }
    }
}
