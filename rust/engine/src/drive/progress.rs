//! One round of everything that moves: what arrived, the calls under way, what waits to be sent.
//!
//! Whoever holds the progress lock (`crate::runtime::driver`) calls `Progress::poll` until nothing moves.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use trigram_core::Error;
use trigram_core::wire::Kind;

use crate::call::calls::Calls;
use crate::call::pacing::Pacing;
use crate::call::request::Submission;
use crate::call::schedule_cache::ScheduleCache;
use crate::drive::failures::{check_losses, check_time};
use crate::drive::heartbeat::Heartbeat;
use crate::drive::helper::{Helped, Helper};
use crate::drive::losses::{evict, lose};
use crate::drive::matching::Matching;
use crate::drive::scheduling::Scheduling;
use crate::group::members::Members;
use crate::group::world::World;
use crate::health::counters::Counters;
use crate::health::losses::{LossEvent, LossKind};
use crate::health::peers::Peers;
use crate::health::wait_window::WaitWindow;
use crate::link::frames::{ClosingConnection, Pumped, Rx, Tx};
use crate::link::outbox::{Outbox, control_frame};
use crate::sys::completion::{Completion, INTERRUPT_INTERVAL};

/// How long a rank that leaves waits for those that it gave up to take the word that they are.
const LEAVE_PATIENCE: Duration = Duration::from_millis(100);

/// Everything that moves, under the progress lock.
pub struct Progress {
    /// The call as this rank sees it.
    pub(crate) world: Arc<World>,
    /// Counters for callers.
    pub counters: Arc<Counters>,
    /// Which peers are alive.
    peers: Peers,
    /// The calls under way.
    pub calls: Calls,
    /// What waits to be sent.
    out: Outbox,
    /// Schedules of calls that were made before.
    schedules: ScheduleCache,
    pacing: Pacing,
    helper: Helper,
    /// By rank: what arrives from it; None for this rank, and for those that are lost.
    pub rx: Vec<Option<Rx>>,
    /// Neighbours whose control connection has ended.
    gone: Vec<u32>,
    closing: Vec<ClosingConnection>,
    heartbeat: Heartbeat,
    window: WaitWindow,
    ticked: Instant,
}

impl Progress {
    /// Nothing has moved yet.
    pub fn new(world: Arc<World>, tx: Vec<Option<Tx>>, rx: Vec<Option<Rx>>) -> Self {
        let counters = Arc::new(Counters::new(world.size()));
        Self {
            world,
            peers: Peers::new(counters.clone()),
            counters,
            calls: Calls::default(),
            out: Outbox::new(tx),
            schedules: ScheduleCache::default(),
            pacing: Pacing::default(),
            helper: Helper::default(),
            heartbeat: Heartbeat::new(rx.len()),
            rx,
            gone: Vec::new(),
            closing: Vec::new(),
            window: WaitWindow::default(),
            ticked: Instant::now(),
        }
    }

    fn scheduling(&mut self) -> Scheduling<'_> {
        Scheduling {
            world: &self.world,
            counters: &self.counters,
            peers: &mut self.peers,
            calls: &mut self.calls,
            out: &mut self.out,
            schedules: &mut self.schedules,
            pacing: &mut self.pacing,
        }
    }

    /// Takes a call up.
    pub fn admit(&mut self, submission: Submission) {
        self.scheduling().admit(submission);
    }

    /// Skips the collectives of a group up to `through`, failing those under way, here and on all ranks.
    pub(crate) fn abort(&mut self, members: &Arc<Members>, through: u64, error: &Error) {
        self.calls.abort(members, through, error, &mut self.out);
    }

    /// Fails one call on all ranks, if it is still under way.
    pub(crate) fn stop(&mut self, completion: &Arc<Completion>, error: Error) {
        if let Some(i) = self.calls.active.iter().position(|j| Arc::ptr_eq(&j.completion, completion)) {
            self.calls.fail(i, error, true, &mut self.out);
        }
    }

    /// Fails everything under way, and tells the other members if they may not know.
    pub fn fail_all(&mut self, error: &Error, tell: bool) {
        self.calls.fail_all(error, tell, &mut self.out);
    }

    /// Takes part in the calls of a group from now on.
    pub fn help(&mut self, members: Arc<Members>) {
        self.helper.begin(members);
    }

    /// Whether this rank helps a group, for other threads.
    pub(crate) fn helping(&self) -> Arc<AtomicBool> {
        self.helper.active()
    }

    /// Whether there is nothing to do, and nothing may come to be done.
    pub fn is_idle(&self) -> bool {
        self.calls.active.is_empty() && self.helper.is_idle()
    }

    /// Whether anything waits to be sent.
    pub(crate) fn is_sending(&self) -> bool {
        !self.out.is_idle()
    }

    /// The socket of a peer may be read from and written to again.
    pub(crate) fn wake(&mut self, rank: u32) {
        if let Some(rx) = self.rx.get_mut(rank as usize).and_then(Option::as_mut) {
            rx.wake();
        }
        if let Some(tx) = self.out.to(rank) {
            tx.wake();
        }
    }

    /// The control connection of a rank of this host has ended, or `error`: what came over it cannot be used.
    pub(crate) fn end_socket(&mut self, rank: u32, error: Option<Error>) {
        match error {
            // It lives on, and what it lent cannot be used.
            Some(why) => self.report(rank, why, LossKind::Silent),
            None => self.gone.push(rank),
        }
    }

    fn report(&mut self, rank: u32, why: Error, kind: LossKind) {
        self.peers.report(LossEvent { rank, why, kind, reported_by: None });
    }

    /// The ranks that the oldest call with a waiting caller waits for, before this rank sleeps.
    pub(crate) fn awaited(&self) -> Vec<u32> {
        let active = self.calls.active.iter().find(|active| active.completion.is_awaited());
        active.map_or_else(Vec::new, |active| active.body.members.ranks_of(&active.absent()))
    }

    /// Moves everything once; true if anything moved.
    pub fn poll(&mut self) -> bool {
        let mut moved = self.read();
        // Only now: what a peer said before its connection closed is acted on before that.
        for event in self.peers.take_events() {
            self.act_on(event);
            moved = true;
        }
        if moved {
            self.pacing.sample(&self.rx, &self.out);
        }
        check_losses(&mut self.calls, &mut self.out, &self.peers, self.world.rank);
        match self.helper.look(&mut self.calls, &mut self.out, &self.peers) {
            Helped::Nothing => {}
            Helped::Ended => moved = true,
            Helped::Call(submission) => {
                self.admit(submission);
                moved = true;
            }
        }
        let mut scheduling = self.scheduling();
        moved |= scheduling.finish_sends();
        for i in 0..scheduling.calls.active.len() {
            moved |= scheduling.advance(i);
        }
        moved |= scheduling.pump_out();
        self.redirect_failed();
        let now = self.ticked;
        moved |= self.reap(now);
        if !moved {
            let now = Instant::now();
            if now - self.ticked > INTERRUPT_INTERVAL / 2 {
                self.ticked = now;
                self.check_time(now);
            }
        }
        moved
    }

    /// Ends the calls that are done, well or not; true if there were any.
    pub fn reap(&mut self, now: Instant) -> bool {
        self.scheduling().reap(now)
    }

    /// Deadlines, stalls and the naming of those waited for.
    pub fn check_time(&mut self, now: Instant) {
        check_time(&mut self.calls, &mut self.out, &self.peers, self.world.rank, now);
    }

    /// Shows that this rank is alive, and looks who else is. What has arrived has just been read.
    pub(crate) fn heartbeat(&mut self) {
        self.closing.retain_mut(ClosingConnection::pump);
        let silent = self.heartbeat.beat(&self.world, &mut self.peers, &mut self.out, &self.rx);
        self.window.name_straggler(&self.counters, self.world.rank);
        for (rank, silent) in silent {
            let why = Error::Aborted(format!("no heartbeat from it for {:.1} s", silent.as_secs_f64()));
            self.act_on(LossEvent { rank, why, kind: LossKind::Silent, reported_by: None });
        }
    }

    /// Reads what has arrived, and takes note of who is gone; true if anything has.
    fn read(&mut self) -> bool {
        let mut moved = false;
        let (peers, calls, out) = (&mut self.peers, &mut self.calls, &mut self.out);
        let mut sink = Matching { world: &self.world, peers, calls, out };
        for (rank, slot) in (0..).zip(&mut self.rx) {
            let Some(rx) = slot else { continue };
            let (kind, why) = match rx.has_input().then(|| rx.pump(&mut sink)) {
                None if rx.is_leaving => closed(rx, ""),
                None | Some(Ok(Pumped::Nothing)) => continue,
                Some(Ok(Pumped::Moved)) => {
                    moved = true;
                    continue;
                }
                Some(Ok(Pumped::Closed)) => closed(rx, "its connection has closed"),
                Some(Err(e)) => (LossKind::Silent, e),
            };
            sink.peers.report(LossEvent { rank, why, kind, reported_by: None });
        }
        for (rank, error) in sink.out.take_unwritable() {
            // What it said before it closed is still to be read, and may be why.
            let Some(rx) = self.rx[rank as usize].as_mut() else { continue };
            rx.wake();
            let end = loop {
                match rx.pump(&mut sink) {
                    Ok(Pumped::Moved) => {}
                    end => break end,
                }
            };
            let (kind, why) = match end {
                Err(e) => (LossKind::Silent, e),
                Ok(_) if matches!(error, Error::Aborted(_)) => closed(rx, "its connection has closed"),
                Ok(_) => (LossKind::Silent, error),
            };
            sink.peers.report(LossEvent { rank, why, kind, reported_by: None });
        }
        for rank in std::mem::take(&mut self.gone) {
            let Some(rx) = self.rx[rank as usize].as_ref() else { continue };
            let (kind, why) = closed(rx, "its process has ended");
            sink.peers.report(LossEvent { rank, why, kind, reported_by: None });
        }
        moved
    }

    /// Acts on what was heard of a rank.
    fn act_on(&mut self, event: LossEvent) {
        let LossEvent { rank, why, kind, reported_by } = event;
        // Two that are cut off from each other accuse each other: who comes second is not heard.
        let kind_of = |rank| self.peers.kind(rank);
        if reported_by.and_then(kind_of).is_some_and(|k| matches!(k, LossKind::Silent | LossKind::Refused)) {
            return;
        }
        let (calls, out, peers) = (&mut self.calls, &mut self.out, &mut self.peers);
        let unsent = match kind {
            LossKind::Silent if reported_by.is_none() => evict(calls, out, peers, &self.world, rank, why),
            kind => lose(calls, out, peers, &self.world, rank, why, kind),
        };
        let rx = self.rx[rank as usize].take();
        if let Some((tx, rx)) = unsent.zip(rx) {
            self.closing.push(ClosingConnection::new(tx, rx));
        }
    }

    /// Tells the peers that this rank leaves, and sees that what it sent gets through.
    pub(crate) fn announce_leave(&mut self) {
        let leave = control_frame(Kind::Leave, 0, 0);
        self.out.all().for_each(|(_, tx)| tx.give(&leave, Vec::new()));
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.is_sending() && Instant::now() < deadline {
            self.out.all().for_each(|(_, tx)| tx.wake());
            if !self.scheduling().pump_out() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let patience = Instant::now() + LEAVE_PATIENCE;
        while self.closing.iter_mut().filter_map(|p| p.pump().then_some(&*p)).any(ClosingConnection::is_due)
            && Instant::now() < patience
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.closing.clear();
        self.out.all().for_each(|(_, tx)| tx.close());
        // Read what is there: closing over unread bytes would tear down what we have just sent.
        let (peers, calls, out) = (&mut self.peers, &mut self.calls, &mut self.out);
        let mut sink = Matching { world: &self.world, peers, calls, out };
        for rx in self.rx.iter_mut().flatten() {
            rx.wake();
            while matches!(rx.pump(&mut sink), Ok(Pumped::Moved)) {}
        }
        self.redirect_failed();
        self.reap(Instant::now() + Duration::from_secs(60));
    }

    /// What still arrives for failed calls goes nowhere: their memory is about to be given back.
    fn redirect_failed(&mut self) {
        for active in self.calls.take_failed() {
            self.rx.iter_mut().flatten().for_each(|rx| rx.redirect(active));
        }
    }
}

/// What the end of a connection means.
fn closed(rx: &Rx, why: &str) -> (LossKind, Error) {
    match rx.is_leaving {
        true => (LossKind::Left, Error::Aborted("it has left the job".into())),
        false => (LossKind::Dead, Error::Aborted(why.into())),
    }
}
