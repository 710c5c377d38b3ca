//! Who drives the work, and how it sleeps.
//!
//! One thread at a time holds the progress lock and moves *all* jobs. A synchronous caller that
//! finds the lock free drives in its own thread: on few cores waking another costs more than a
//! small collective. Otherwise, and for asynchronous calls, the background thread drives; it
//! exists only once something asynchronous has been asked for, and sleeps when nothing is under
//! way. Nobody ever sleeps without a doorbell that wakes it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use trigram_core::signature::Signature;
use trigram_core::{Error, Result};

use crate::fork::{self, Watched};
use crate::hub::{Counters, Hub, Submission};
use crate::link::{Rx, Tx};
use crate::members::Members;
use crate::progress::Progress;
use crate::pulse::BEAT;
use crate::ticket::{GLANCE, Ticket};
use crate::world::World;

/// Looks for work this often at full speed, where every rank of the host has a core.
const SPINS: u32 = 16;
/// Then this often giving the core away in between: where ranks share a core, or something else
/// runs on it, the peer that has the work gets it. On an idle core that costs next to nothing.
const YIELDS: u32 = 40;
/// The same between hosts, where each look costs a system call, and what is waited for takes longer.
const SOCKET_YIELDS: u32 = 4;
/// Sleeps on the futex this long; then in `epoll`, which hears of deaths too.
const FUTEX_SLEEP: Duration = Duration::from_millis(2);

const BELL: u64 = u64::MAX;
const CONTROL: u64 = 1 << 32;

enum Command {
    Submit(Submission),
    Abort(Arc<Members>, u64, Error),
    Help(Arc<Members>),
}

struct Shared {
    world: Arc<World>,
    progress: Mutex<Progress>,
    inbox: Mutex<Vec<Command>>,
    waiting: AtomicUsize,
    closed: AtomicBool,
    helping: Arc<AtomicBool>,
    /// It is time for a sign of life.
    due: AtomicBool,
    /// The thread that gives it has the progress lock, for a moment.
    pulsing: AtomicBool,
    epoll: OwnedFd,
    has_sockets: bool,
    spins: u32,
    idle: Mutex<bool>,
    work: Condvar,
    counters: Arc<Counters>,
    _watched: Watched,
}

/// Runs calls. One per process and job.
pub struct Engine {
    shared: Arc<Shared>,
    background: Mutex<Option<JoinHandle<()>>>,
    pulse: Mutex<Option<JoinHandle<()>>>,
}

/// A caller's wish to stop waiting, asked for now and then: Ctrl-C.
pub type Glance<'a> = &'a mut dyn FnMut() -> Result<()>;

impl Engine {
    /// An engine over connections, one of each way per world rank.
    pub fn new(world: Arc<World>, tx: Vec<Option<Tx>>, rx: Vec<Option<Rx>>) -> Result<Self> {
        let io = |e: rustix::io::Errno| Error::io("preparing epoll", e);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io)?;
        let add = |fd: BorrowedFd<'_>, data: u64, flags: epoll::EventFlags| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(data), flags).map_err(io)
        };
        let edge =
            epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        let mut has_sockets = false;
        for rx in rx.iter().flatten() {
            if let Some(fd) = rx.fd() {
                add(fd, u64::from(rx.peer), edge)?;
                has_sockets = true;
            }
        }
        for (&rank, neighbour) in &world.neighbours {
            if let Some(fd) = neighbour.control() {
                add(fd, CONTROL | u64::from(rank), epoll::EventFlags::IN)?;
            }
        }
        add(world.board.bell().fd(), BELL, epoll::EventFlags::IN)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let spins = if world.neighbours.len() < cores { SPINS } else { 0 };
        let hub = Hub::new(world.clone(), tx);
        let (counters, helping) = (hub.counters.clone(), hub.helping.clone());
        let progress = Progress::new(hub, rx);
        let shared = Shared {
            world,
            progress: Mutex::new(progress),
            inbox: Mutex::default(),
            waiting: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            helping,
            due: AtomicBool::new(false),
            pulsing: AtomicBool::new(false),
            _watched: Watched::new(&epoll),
            epoll,
            has_sockets,
            spins,
            idle: Mutex::new(true),
            work: Condvar::new(),
            counters,
        };
        let shared = Arc::new(shared);
        let alone = shared.world.size() == 1;
        let pulse = (!alone).then(|| {
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name("trigram-pulse".into());
            thread.spawn(move || shared.pulse()).map_err(|e| Error::io("starting a thread", e))
        });
        let pulse = Mutex::new(pulse.transpose()?);
        Ok(Self { shared, background: Mutex::default(), pulse })
    }

    /// The job as this rank sees it.
    pub fn world(&self) -> &Arc<World> {
        &self.shared.world
    }

    /// What has been done so far.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    fn check_open(&self) -> Result<()> {
        fork::check()?;
        if self.shared.closed.load(Ordering::Acquire) {
            return Err(Error::misuse("trigram has been shut down; call trigram.init again"));
        }
        Ok(())
    }

    /// Makes a call and waits for its end, driving the work in this thread if nobody else does.
    pub fn run(&self, submission: Submission, glance: Glance<'_>) -> Result<()> {
        self.check_open()?;
        let ticket = submission.ticket.clone();
        ticket.set_awaited();
        let mut lock = self.shared.progress.try_lock();
        while matches!(lock, Err(TryLockError::WouldBlock)) && self.shared.pulsing.load(Ordering::Acquire) {
            std::thread::yield_now();
            lock = self.shared.progress.try_lock();
        }
        match lock {
            Ok(mut progress) => {
                // Calls are numbered in the order of submission: those that wait come first.
                self.shared.take_inbox(&mut progress);
                progress.hub.admit(submission);
                let outcome = self.shared.drive(&mut progress, Some(&ticket), self.shared.spins, glance);
                let more = !progress.hub.jobs.is_empty() || self.shared.waiting.load(Ordering::Acquire) > 0;
                drop(progress);
                if more {
                    self.wake_background()?;
                }
                outcome?;
                ticket.outcome().unwrap_or(Ok(()))
            }
            Err(TryLockError::WouldBlock) => {
                self.start(submission)?;
                ticket.wait(None, glance)?.unwrap_or(Ok(()))
            }
            Err(TryLockError::Poisoned(_)) => Err(Error::Aborted("the engine has failed; see above".into())),
        }
    }

    /// Hears what there is to hear, and tells whether the group can go on: for calls whose data travels
    /// elsewhere, so that nobody here notices that it has stopped.
    pub fn look(&self, members: &Members, what: &Signature) -> Result<()> {
        self.check_open()?;
        // If another thread is at work, that one hears it.
        if let Ok(mut progress) = self.shared.progress.try_lock() {
            self.shared.take_inbox(&mut progress);
            self.shared.events(&mut progress, Duration::ZERO);
            progress.poll();
            let more = !progress.hub.jobs.is_empty();
            drop(progress);
            if more {
                self.wake_background()?;
            }
        }
        self.shared.counters.news().of(members, what)
    }

    /// Makes a call that the background thread carries out.
    pub fn start(&self, submission: Submission) -> Result<()> {
        self.check_open()?;
        self.command(Command::Submit(submission))
    }

    /// Gives up the collectives of a group up to the `through`-th, on all ranks.
    pub fn abort(&self, members: Arc<Members>, through: u64, error: Error) -> Result<()> {
        self.check_open()?;
        self.command(Command::Abort(members, through, error))
    }

    /// Takes part in all calls of a group that this rank helps.
    pub fn help(&self, members: Arc<Members>) -> Result<()> {
        self.check_open()?;
        self.shared.helping.store(true, Ordering::Release);
        self.command(Command::Help(members))
    }

    /// Whether it does; not any more once a member is gone, or the engine has failed.
    pub fn is_helping(&self) -> bool {
        let over = self.shared.closed.load(Ordering::Acquire) || self.shared.progress.is_poisoned();
        self.shared.helping.load(Ordering::Acquire) && !over
    }

    fn command(&self, command: Command) -> Result<()> {
        let mut inbox = self.shared.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        inbox.push(command);
        self.shared.waiting.store(inbox.len(), Ordering::Release);
        drop(inbox);
        self.shared.world.board.bell().ring();
        self.wake_background()
    }

    fn wake_background(&self) -> Result<()> {
        let mut background = self.background.lock().unwrap_or_else(PoisonError::into_inner);
        if background.is_none() {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new().name("trigram".into());
            let thread =
                thread.spawn(move || shared.background()).map_err(|e| Error::io("starting a thread", e))?;
            *background = Some(thread);
        }
        drop(background);
        let mut idle = self.shared.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if *idle {
            *idle = false;
            self.shared.work.notify_one();
        }
        Ok(())
    }

    /// Ends everything: what is under way fails, peers are told that this rank leaves.
    pub fn shutdown(&self) {
        if fork::is_child() || self.shared.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        let rank = self.shared.world.rank;
        self.shared.world.board.bell().ring();
        if let Ok(mut idle) = self.shared.idle.lock() {
            *idle = false;
            self.shared.work.notify_all();
        }
        if let Some(thread) = self.background.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It drops the progress lock at its next glance.
            let _ = thread.join();
        }
        if let Some(thread) = self.pulse.lock().unwrap_or_else(PoisonError::into_inner).take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
        let Ok(mut progress) = self.shared.progress.lock() else { return };
        self.shared.take_inbox(&mut progress);
        let error = Error::Aborted(format!("rank {rank} has shut down with work in flight"));
        progress.hub.fail_all(&error, true);
        progress.say_bye();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    fn background(&self) {
        loop {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            while *idle && !self.closed.load(Ordering::Acquire) {
                idle = self.work.wait(idle).unwrap_or_else(PoisonError::into_inner);
            }
            drop(idle);
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let Ok(mut progress) = self.progress.lock() else { return };
            // Nothing stops this thread but the end of the work and of the engine.
            let _ = self.drive(&mut progress, None, 0, &mut || Ok(()));
            self.note_time();
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            *idle = progress.hub.is_idle() && self.waiting.load(Ordering::Acquire) == 0;
        }
    }

    /// Shows that this rank is alive, see [`crate::pulse`].
    fn pulse(&self) {
        while !self.closed.load(Ordering::Acquire) {
            self.world.board.beat();
            self.due.store(true, Ordering::Release);
            // Whoever holds the lock looks at `due`.
            self.pulsing.store(true, Ordering::Release);
            if let Ok(mut progress) = self.progress.try_lock() {
                self.events(&mut progress, Duration::ZERO);
                progress.poll();
                self.beat(&mut progress);
            }
            self.pulsing.store(false, Ordering::Release);
            std::thread::park_timeout(BEAT);
        }
    }

    fn beat(&self, progress: &mut Progress) {
        if self.due.swap(false, Ordering::AcqRel) {
            progress.beat();
        }
    }

    /// What the background thread has spent so far; to be called in it.
    fn note_time(&self) {
        let spent = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let spent = spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64;
        self.counters.background.store(spent, Ordering::Relaxed);
    }

    /// Moves everything until `until` has its outcome, or all work is done.
    fn drive(
        &self,
        progress: &mut MutexGuard<'_, Progress>,
        until: Option<&Arc<Ticket>>,
        spins: u32,
        glance: Glance<'_>,
    ) -> Result<()> {
        let mut idle = 0;
        let mut idle_since: Option<Instant> = None;
        let mut glanced = None;
        loop {
            self.take_inbox(progress);
            let moved = progress.poll();
            if self.due.load(Ordering::Relaxed) {
                self.events(progress, Duration::ZERO);
                progress.poll();
                self.beat(progress);
            }
            let over = match until {
                Some(ticket) => ticket.is_done(),
                None => progress.hub.is_idle() && self.waiting.load(Ordering::Acquire) == 0,
            };
            if over {
                return Ok(());
            }
            if self.closed.load(Ordering::Acquire) {
                let Some(ticket) = until else { return Ok(()) };
                self.give_up(progress, ticket, "has shut down");
                return Ok(());
            }
            if moved {
                idle = 0;
                idle_since = None;
                // While one way is busy, hear that the other has room again: both must stay full.
                if self.has_sockets && progress.hub.tx.iter().flatten().any(|tx| !tx.is_idle()) {
                    self.events(progress, Duration::ZERO);
                }
                continue;
            }
            idle += 1;
            if self.has_sockets && idle % 8 == 1 {
                self.events(progress, Duration::ZERO);
            }
            if idle < spins {
                std::hint::spin_loop();
                continue;
            }
            if idle < spins + if self.has_sockets { SOCKET_YIELDS } else { YIELDS } {
                std::thread::yield_now();
                continue;
            }
            let now = Instant::now();
            let since = *idle_since.get_or_insert(now);
            self.sleep(progress, now - since);
            let now = Instant::now();
            if now - *glanced.get_or_insert(since) >= GLANCE {
                glanced = Some(now);
                if until.is_none() {
                    self.note_time();
                }
                if let (Err(stop), Some(ticket)) = (glance(), until) {
                    self.give_up(progress, ticket, "was interrupted");
                    return Err(stop);
                }
            }
        }
    }

    /// The caller stops waiting: its call fails everywhere, and lets go of its memory.
    fn give_up(&self, progress: &mut Progress, ticket: &Arc<Ticket>, why: &str) {
        let rank = self.world.rank;
        if let Some(i) = progress.hub.jobs.iter().position(|j| Arc::ptr_eq(&j.ticket, ticket)) {
            let error = Error::Aborted(format!("rank {rank} {why}"));
            progress.hub.fail(i, error, true);
        }
        while !ticket.is_done() {
            if !progress.poll() {
                self.events(progress, Duration::from_millis(1));
            }
        }
    }

    fn take_inbox(&self, progress: &mut Progress) {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return;
        }
        let commands = {
            let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
            self.waiting.store(0, Ordering::Release);
            std::mem::take(&mut *inbox)
        };
        for command in commands {
            match command {
                Command::Submit(submission) => progress.hub.admit(submission),
                Command::Abort(members, through, error) => progress.hub.abort(&members, through, &error),
                Command::Help(members) => progress.hub.helped = Some(members),
            }
        }
    }

    /// Sleeps until something happens, or it is time to look up.
    fn sleep(&self, progress: &mut Progress, idle: Duration) {
        let bell = self.world.board.bell();
        let on_event = self.has_sockets || idle > FUTEX_SLEEP;
        let seen = bell.arm(on_event);
        let found = progress.poll() || self.waiting.load(Ordering::Acquire) > 0;
        if found || self.closed.load(Ordering::Acquire) {
            return bell.disarm();
        }
        let (awaited, before) = (progress.hub.awaited(), Instant::now());
        if on_event {
            self.events(progress, GLANCE);
            bell.disarm();
        } else {
            bell.sleep(seen, FUTEX_SLEEP);
        }
        progress.hub.note_wait(&awaited, before.elapsed());
    }

    /// Takes note of what sockets and bells have to say, waiting up to `limit` for it.
    fn events(&self, progress: &mut Progress, limit: Duration) {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        let limit = rustix::time::Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        // Interrupted by a signal: the caller looks up, and comes back.
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, Some(&limit)) else { return };
        for event in events {
            match event.data.u64() {
                BELL => self.world.board.bell().drain(),
                data if data & CONTROL != 0 => {
                    let rank = data as u32;
                    let Some(neighbour) = self.world.neighbours.get(&rank) else { continue };
                    if !neighbour.collect().unwrap_or(false) {
                        if let Some(fd) = neighbour.control() {
                            // It would be readable for ever. That it is gone already is as good.
                            let _ = epoll::delete(&self.epoll, fd);
                        }
                        progress.gone.push(rank);
                    }
                }
                data => {
                    if let Some(rx) = progress.rx.get_mut(data as usize).and_then(Option::as_mut) {
                        rx.wake();
                    }
                    if let Some(tx) = progress.hub.tx.get_mut(data as usize).and_then(Option::as_mut) {
                        tx.wake();
                    }
                }
            }
        }
    }
}

impl AsFd for Engine {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }
}
