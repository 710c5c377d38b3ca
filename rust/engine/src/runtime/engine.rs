//! The engine: takes calls of any thread, and runs the background and heartbeat threads.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use trigram_core::signature::Signature;
use trigram_core::{Error, Result};

use crate::call::request::Submission;
use crate::drive::one_shot::OneShot;
use crate::drive::progress::Progress;
use crate::group::members::Members;
use crate::group::world::World;
use crate::health::counters::Counters;
use crate::link::frames::{Rx, Tx};
use crate::runtime::driver::{Command, Driver, ENGINE_FAILED};
use crate::sys::callers::Callers;
use crate::sys::completion::{Completion, InterruptCheck};
use crate::sys::fork;

/// How long a rank that leaves goes on passing on what others send each other.
const PASSING: Duration = Duration::from_secs(3);

fn shut_down() -> Error {
    Error::misuse("trigram has been shut down; call trigram.init again")
}

/// Runs the calls of one job. A process has one per job.
pub struct Engine {
    driver: Arc<Driver>,
    /// The group that this rank helps, or has helped last.
    helped: Mutex<Option<u64>>,
    background: Mutex<Option<JoinHandle<()>>>,
    heartbeat: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// With one inward and one outward connection per world rank.
    pub fn new(world: Arc<World>, tx: Vec<Option<Tx>>, rx: Vec<Option<Rx>>) -> Result<Self> {
        let driver = Arc::new(Driver::new(world, tx, rx)?);
        let alone = driver.world.size() == 1;
        let heartbeat = (!alone).then(|| {
            let driver = driver.clone();
            let thread = std::thread::Builder::new().name("trigram-live".into());
            thread
                .spawn(move || driver.heartbeat())
                .map_err(|e| Error::io("starting a thread of the engine", e))
        });
        let heartbeat = Mutex::new(heartbeat.transpose()?);
        fork::engine_began();
        Ok(Self { driver, helped: Mutex::default(), background: Mutex::default(), heartbeat })
    }

    /// The job as this rank sees it.
    pub fn world(&self) -> &Arc<World> {
        &self.driver.world
    }

    /// What has been done so far.
    pub fn counters(&self) -> &Counters {
        &self.driver.counters
    }

    /// The threads that make calls.
    pub fn callers(&self) -> &Callers {
        &self.driver.callers
    }

    fn check_open(&self) -> Result<()> {
        fork::check()?;
        self.driver.callers.count();
        if self.driver.closed.load(Ordering::Acquire) {
            return Err(shut_down());
        }
        Ok(())
    }

    /// Whether the engine can go on.
    ///
    /// # Errors
    ///
    /// [`Error::Aborted`] after an internal error.
    pub fn check_sound(&self) -> Result<()> {
        match self.driver.progress.is_poisoned() {
            true => {
                self.driver.lanes.close(); // callers' memory goes when they hear of it
                Err(Error::Aborted(ENGINE_FAILED.into()))
            }
            false => Ok(()),
        }
    }

    /// Makes a call and waits for its end, driving the work in this thread if nobody else does.
    ///
    /// # Errors
    ///
    /// The call's, or that of `check_interrupt`, which ends the call.
    pub fn run(&self, submission: Submission, check_interrupt: InterruptCheck<'_>) -> Result<()> {
        let _watch = self.driver.lanes.watch();
        self.check_open()?;
        let completion = submission.completion.clone();
        completion.set_awaited();
        let driver = &self.driver;
        let mut check_interrupt = || self.check_sound().and_then(|()| check_interrupt());
        let waited = match self.driver.try_lock()? {
            Some(mut progress) => {
                // Calls are numbered in the order of submission: those that wait in the inbox come first.
                self.driver.take_inbox(&mut progress);
                match self.driver.one_shot(&mut progress, submission) {
                    OneShot::Ended => {
                        self.leave(progress);
                        return Ok(());
                    }
                    OneShot::Begun(call, submission) => {
                        progress.scheduling().enter(submission, call, None, true)
                    }
                    OneShot::Ordinary(submission) => progress.admit(submission),
                }
                driver.callers.wait(&completion, true, &mut check_interrupt, |check_interrupt| {
                    self.drive(progress, &completion, None, check_interrupt)
                })
            }
            None => {
                self.start_now(submission)?;
                driver.callers.wait(&completion, true, &mut check_interrupt, |check_interrupt| {
                    completion.wait(None, check_interrupt)
                })
            }
        };
        match waited {
            Ok(outcome) => outcome.unwrap_or(Ok(())),
            Err(stop) => {
                // Return only when nobody uses the caller's memory any more. If there is no other thread to see to that,
                // this one does.
                if self.command(Command::Stop(completion.clone(), stop.clone())).is_err()
                    && let Ok(mut progress) = driver.progress.lock()
                {
                    driver.take_inbox(&mut progress);
                    driver.abort_call(&mut progress, &completion, &stop);
                    driver.finish(&mut progress, &completion);
                }
                let _ = completion.wait(None, &mut || self.check_sound());
                Err(stop)
            }
        }
    }

    /// Moves everything until a call has ended or `deadline` has passed (then `None`).
    fn drive(
        &self,
        progress: MutexGuard<'_, Progress>,
        completion: &Arc<Completion>,
        deadline: Option<Instant>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<Option<Result<()>>> {
        match self.driver.drive(progress, Some(completion), self.driver.spins, deadline, check_interrupt)? {
            Some(progress) => {
                self.leave(progress);
                Ok(completion.outcome())
            }
            None => completion.wait(deadline, check_interrupt),
        }
    }

    /// Lets go of the progress lock, and passes on what is still under way.
    fn leave(&self, progress: MutexGuard<'_, Progress>) {
        if !progress.is_idle() || self.driver.waiting.load(Ordering::Acquire) > 0 {
            // Without a thread the heartbeat thread moves them, ten times a second.
            let _ = self.start_background();
        }
        self.driver.leave(progress);
    }

    /// Waits until an asynchronous call has ended, or `deadline` has passed (then `None`). Drives the work in this thread
    /// if nobody else does. An error of `check_interrupt` ends the wait, not the call.
    pub fn wait(
        &self,
        completion: &Arc<Completion>,
        deadline: Option<Instant>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<Option<Result<()>>> {
        let _watch = self.driver.lanes.watch();
        if completion.is_done() {
            return Ok(completion.outcome());
        }
        fork::check()?;
        completion.set_awaited();
        let callers = &self.driver.callers;
        callers.count();
        let mut check_interrupt = || self.check_sound().and_then(|()| check_interrupt());
        let progress = self.driver.try_lock()?;
        let wait = |check_interrupt: InterruptCheck<'_>| match progress {
            Some(progress) => self.drive(progress, completion, deadline, check_interrupt),
            None => completion.wait(deadline, check_interrupt),
        };
        let waited = callers.wait(completion, deadline.is_none(), &mut check_interrupt, wait);
        if waited.is_err() {
            self.driver.background.wake(); // the call goes on
        }
        waited
    }

    /// Whether a call has ended. Moves what can be moved, for callers that ask again and again.
    pub fn test(&self, completion: &Arc<Completion>) -> bool {
        let _watch = self.driver.lanes.watch();
        if !completion.is_done()
            && !fork::is_child()
            && let Ok(Some(mut progress)) = self.driver.try_lock()
        {
            self.driver.callers.count();
            self.driver.take_inbox(&mut progress);
            progress.poll();
            self.leave(progress);
        }
        completion.is_done()
    }

    /// A call has got a listener, which nobody waits for: the background thread moves it from now on.
    pub fn hurry(&self) {
        self.driver.background.wake();
    }

    /// Reads what has arrived, and checks whether the group can go on: for calls whose data travels over NCCL, where
    /// nothing here would notice that they have stopped.
    pub fn check_peers(&self, members: &Members, what: &Signature) -> Result<()> {
        let _watch = self.driver.lanes.watch();
        self.check_open()?;
        // If another thread drives, it reads what arrives.
        if let Ok(mut progress) = self.driver.progress.try_lock() {
            self.driver.take_inbox(&mut progress);
            self.driver.events(&mut progress, Duration::ZERO);
            progress.poll();
            self.leave(progress);
        }
        self.driver.counters.failures().check(members, what)
    }

    /// Starts a call for which the caller will wait with [`Engine::wait`]. If it is small and no other thread drives, it
    /// is begun here, and left to the one who waits; if that takes long, to the background thread.
    pub fn start(&self, submission: Submission) -> Result<()> {
        let _watch = self.driver.lanes.watch();
        if !submission.request.is_small() {
            return self.start_now(submission);
        }
        self.check_open()?;
        self.start_background()?;
        let driver = &self.driver;
        match driver.try_lock()? {
            // After it is closed, its calls fail under this lock, once. What waits in the inbox may be large.
            Some(mut progress)
                if !driver.closed.load(Ordering::Acquire) && driver.waiting.load(Ordering::Acquire) == 0 =>
            {
                progress.begin(submission);
                driver.leave(progress);
                Ok(())
            }
            _ => self.command(Command::Submit(submission)),
        }
    }

    /// Starts a call that the background thread drives from now on.
    pub fn start_now(&self, submission: Submission) -> Result<()> {
        self.check_open()?;
        self.command(Command::Submit(submission))
    }

    /// Aborts the collectives of a group before the `through`-th, on all ranks.
    pub fn abort(&self, members: Arc<Members>, through: u64, error: Error) -> Result<()> {
        self.check_open()?;
        self.command(Command::Abort(members, through, error))
    }

    /// Aborts a group for good, on all ranks: calls under way and later ones fail.
    pub fn abort_group(&self, members: Arc<Members>, error: Error) -> Result<()> {
        self.check_open()?;
        self.command(Command::AbortGroup(members, error))
    }

    /// Takes a rank for lost, on all ranks, though it may be well: who runs the job says so.
    pub fn send_away(&self, rank: u32, why: String) -> Result<()> {
        self.check_open()?;
        self.command(Command::SendAway(rank, Error::SentAway(why)))
    }

    /// Takes part in all calls of a group that this rank helps.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] if it helps another group already.
    pub fn help(&self, members: Arc<Members>) -> Result<()> {
        self.check_open()?;
        let mut helped = self.helped.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_helping() {
            return match *helped == Some(members.id) {
                true => Ok(()),
                false => Err(Error::misuse(format!(
                    "group {}: this rank helps another group already; a rank helps one group at a time",
                    members.name
                ))),
            };
        }
        *helped = Some(members.id);
        self.driver.helping.store(true, Ordering::Release);
        let asked = self.command(Command::Help(members));
        if asked.is_err() {
            self.driver.helping.store(false, Ordering::Release);
        }
        asked
    }

    /// Whether this rank still helps; not after a member is lost or the engine has failed.
    pub fn is_helping(&self) -> bool {
        let over = self.driver.closed.load(Ordering::Acquire) || self.driver.progress.is_poisoned();
        self.driver.helping.load(Ordering::Acquire) && !over
    }

    /// Leaves a command for the thread that drives. First the thread: if there can be none, nothing is left behind that
    /// would run later, on memory that the caller no longer has.
    fn command(&self, command: Command) -> Result<()> {
        self.start_background()?;
        let mut inbox = self.driver.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        // Under the inbox's lock: after it is closed, the inbox is emptied once more and then never again.
        if self.driver.closed.load(Ordering::Acquire) {
            return Err(shut_down());
        }
        inbox.push(command);
        self.driver.waiting.store(inbox.len(), Ordering::Release);
        drop(inbox);
        self.driver.world.bell.ring();
        self.driver.background.wake();
        Ok(())
    }

    fn start_background(&self) -> Result<()> {
        let mut background = self.background.lock().unwrap_or_else(PoisonError::into_inner);
        if background.is_none() {
            let driver = self.driver.clone();
            let thread = std::thread::Builder::new().name("trigram".into());
            let thread = thread
                .spawn(move || driver.background())
                .map_err(|e| Error::io("starting a thread of the engine", e))?;
            *background = Some(thread);
        }
        Ok(())
    }

    /// Hands what is noted for the log to the logger, which the threads that drive do a moment later.
    pub fn write_out_log(&self) {
        self.driver.counters.log.write_out();
    }

    /// Shuts down: calls under way fail, and the peers are told that this rank leaves. Returns when they have all that it has
    /// sent.
    ///
    /// # Errors
    ///
    /// That of `check_interrupt`, which ends the wait for slow peers; the engine is shut down all the same.
    pub fn shutdown(&self, check_interrupt: InterruptCheck<'_>) -> Result<()> {
        let _watch = self.driver.lanes.watch();
        if fork::is_child() || self.driver.closed.swap(true, Ordering::AcqRel) {
            self.driver.lanes.close(); // also if the first call has failed
            return Ok(());
        }
        self.driver.world.bell.ring();
        self.driver.background.end();
        if let Some(thread) = self.background.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // It releases the progress lock at its next check.
            let _ = thread.join();
        }
        if let Some(thread) = self.heartbeat.lock().unwrap_or_else(PoisonError::into_inner).take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
        let mut waited = Ok(());
        if let Ok(mut progress) = self.driver.progress.lock() {
            self.driver.empty_inbox(&mut progress);
            progress.fail_at_shutdown();
            waited = progress.announce_leave(check_interrupt);
        }
        self.driver.lanes.close(); // also after an internal error
        if let Some(passing) = self.driver.world.passing.as_ref().filter(|_| waited.is_ok()) {
            // The ranks leave together: those whose bytes pass here are about to close.
            waited = passing.wait(PASSING, check_interrupt);
        }
        self.driver.counters.log.write_out();
        self.driver.counters.events.close();
        fork::engine_ended();
        waited
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Nothing interrupts this wait, whose end is near.
        let _ = self.shutdown(&mut || Ok(()));
    }
}

impl AsFd for Engine {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.driver.epoll.as_fd()
    }
}
