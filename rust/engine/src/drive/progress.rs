//! One round of progress: reads what has arrived, advances the calls under way, and writes what waits to be sent.
//!
//! Whichever thread holds the progress lock (`crate::runtime::driver`) calls `Progress::poll` until nothing moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use trigram_core::wire::{Frame, Kind};
use trigram_core::{Error, Result};

use crate::call::active_call::ActiveCall;
use crate::call::calls::Calls;
use crate::call::request::Submission;
use crate::call::schedule_cache::ScheduleCache;
use crate::drive::cross_waits::CrossWaits;
use crate::drive::failures::{check_losses, check_time};
use crate::drive::heartbeat::{Heartbeat, Silence};
use crate::drive::helper::{Helped, Helper};
use crate::drive::losses::{evict, lose};
use crate::drive::matching::Matching;
use crate::drive::scheduling::Scheduling;
use crate::group::members::Members;
use crate::group::world::{Neighbour, World};
use crate::health::counters::Counters;
use crate::health::log_lines::LogLine;
use crate::health::losses::{LossEvent, LossKind};
use crate::health::peers::Peers;
use crate::health::wait_window::WaitWindow;
use crate::lanes::pool::{Lanes, Ticket};
use crate::link::closing::{ClosingConnection, Farewell};
use crate::link::frames::{Pumped, Rx, Token, Tx};
use crate::link::outbox::{Outbox, control_frame};
use crate::link::rate_meter::RateMeter;
use crate::sys::callers::Callers;
use crate::sys::completion::{Completion, INTERRUPT_INTERVAL, InterruptCheck};

/// On shutdown, how long to keep delivering LOST notices to evicted peers.
const LEAVE_PATIENCE: Duration = Duration::from_millis(100);

/// On shutdown, how long to wait for peers to leave calls that have failed, before they lose their access to its memory.
const LEAVING: Duration = Duration::from_secs(1);

/// A rank whose connection passes through another is lost this long after it has closed. If that other one is gone, calls
/// have failed for it by then.
const CUT: Duration = Duration::from_secs(1);

/// The most calls for which it is noted what they wait for.
const MOST_NOTED: usize = 8;

/// Everything that the progress lock protects.
pub struct Progress {
    /// The job as this rank sees it.
    pub(crate) world: Arc<World>,
    /// Counters for callers.
    pub counters: Arc<Counters>,
    /// Which peers are alive.
    pub(crate) peers: Peers,
    /// The calls under way.
    pub calls: Calls,
    /// What waits to be sent.
    out: Outbox,
    /// The threads that move much. [`Outbox`] and the driver have them too.
    lanes: Arc<Lanes>,
    /// Schedules of calls that were made before.
    pub(crate) schedules: ScheduleCache,
    meter: RateMeter,
    pub(crate) helper: Helper,
    /// The inward connections, by rank; `None` for this rank and for lost ones.
    pub rx: Vec<Option<Rx>>,
    /// Ranks of this host whose socket has closed.
    gone: Vec<u32>,
    closing: Vec<ClosingConnection>,
    /// Connections through another rank that have closed, and when: perhaps that rank is lost.
    cut: Vec<(Instant, LossEvent)>,
    /// Losses of ranks that this one hears: when they were reported, by the heartbeat's clock, and by whom.
    hearsay: Vec<(Duration, u32, LossEvent)>,
    /// The threads that make calls.
    pub(crate) callers: Arc<Callers>,
    cross_waits: CrossWaits,
    heartbeat: Heartbeat,
    window: WaitWindow,
    ticked: Instant,
}

impl Progress {
    /// For the start of a job.
    pub fn new(world: Arc<World>, tx: Vec<Option<Tx>>, rx: Vec<Option<Rx>>) -> Self {
        let counters = Arc::new(Counters::new(world.size()));
        let lanes = Lanes::new(world.lanes, world.neighbours.len() + 1, world.bell.clone());
        let lanes = Arc::new(lanes);
        Self {
            peers: Peers::new(counters.clone(), world.patience.limit),
            schedules: ScheduleCache::new(world.far.contains(&true)),
            world,
            calls: Calls::new(counters.events.clone()),
            counters,
            out: Outbox::new(tx, lanes.clone()),
            lanes,
            meter: RateMeter::default(),
            helper: Helper::default(),
            callers: Callers::new(),
            cross_waits: CrossWaits::default(),
            heartbeat: Heartbeat::new(rx.len()),
            rx,
            gone: Vec::new(),
            closing: Vec::new(),
            cut: Vec::new(),
            hearsay: Vec::new(),
            window: WaitWindow::default(),
            ticked: Instant::now(),
        }
    }

    pub(crate) fn scheduling(&mut self) -> Scheduling<'_> {
        Scheduling {
            world: &self.world,
            counters: &self.counters,
            peers: &mut self.peers,
            calls: &mut self.calls,
            out: &mut self.out,
            schedules: &mut self.schedules,
            meter: &self.meter,
        }
    }

    /// Takes up a call.
    pub fn admit(&mut self, submission: Submission) {
        self.scheduling().admit(submission);
    }

    /// Takes up a small call in the thread of its caller.
    pub(crate) fn begin(&mut self, submission: Submission) {
        self.admit(submission);
        if self.calls.active.len() == 1 {
            self.poll(); // perhaps this is all that it takes
        } else {
            // The others may be large, and they have a thread.
            self.scheduling().pump_out();
        }
    }

    /// Aborts the collectives of a group before the `through`-th, on all ranks.
    pub(crate) fn abort(&mut self, members: &Arc<Members>, through: u64, error: &Error) {
        self.calls.abort(members, through, error, &mut self.out);
    }

    /// Aborts a group for good, on all ranks.
    pub(crate) fn abort_group(&mut self, members: &Arc<Members>, error: &Error) {
        let call = self.calls.first_open(members);
        self.calls.abort_group(members.id, call, error, &mut self.out);
        let Ok(payload) = postcard::to_stdvec(error) else { return };
        let frame = Frame { group: members.id, call, ..control_frame(Kind::Abort, 0, payload.len() as u32) };
        for &rank in members.ranks.iter().filter(|&&rank| rank != self.world.rank) {
            self.out.give(rank, &frame, payload.clone());
        }
    }

    /// Evicts a rank that may be well, because who runs the job says so.
    pub(crate) fn send_away(&mut self, rank: u32, why: Error) {
        if rank != self.world.rank && (rank as usize) < self.world.size() {
            self.report(rank, why, LossKind::Silent);
        }
    }

    /// Fails one call on all ranks, if it is still under way.
    pub(crate) fn stop(&mut self, completion: &Arc<Completion>, error: Error) {
        if let Some(i) = self.calls.active.iter().position(|j| Arc::ptr_eq(&j.completion, completion)) {
            self.calls.fail(i, error, true, &mut self.out);
        }
    }

    /// Fails all calls under way; with `tell`, also tells the other members.
    pub fn fail_all(&mut self, error: &Error, tell: bool) {
        self.calls.fail_all(error, tell, &mut self.out);
    }

    /// Fails all calls under way, on all ranks: this one shuts down.
    pub(crate) fn fail_at_shutdown(&mut self) {
        let rank = self.world.rank;
        let error = Error::Aborted(format!("rank {rank} shut down while this call was under way"));
        self.fail_all(&error, true);
    }

    /// Helps a group from now on.
    pub fn help(&mut self, members: Arc<Members>) {
        self.helper.begin(members);
    }

    /// Whether this rank helps a group, for other threads.
    pub(crate) fn helping(&self) -> Arc<AtomicBool> {
        self.helper.active()
    }

    /// Whether no call is under way, and none can come without a caller.
    pub fn is_idle(&self) -> bool {
        self.calls.active.is_empty() && self.helper.is_idle() && !self.out.holds_back()
    }

    /// Whether what is under way needs a thread that moves it at once: somebody waits for it, or it is large.
    pub(crate) fn is_urgent(&self) -> bool {
        let urgent = |call: &ActiveCall| call.completion.is_urgent() || !call.body.request.is_small();
        !self.helper.is_idle() || self.out.holds_back() || self.calls.active.iter().any(urgent)
    }

    /// The number of the call that was taken up last.
    pub(crate) fn newest(&self) -> u64 {
        self.calls.last_id
    }

    /// Whether all that is under way was taken up after the call with this number.
    pub(crate) fn is_newer(&self, than: u64) -> bool {
        self.calls.active.iter().all(|call| call.body.id > than)
    }

    /// Whether anything waits to be sent.
    pub(crate) fn is_sending(&self) -> bool {
        !self.out.is_idle()
    }

    /// The socket of a peer has become readable or writable.
    pub(crate) fn wake(&mut self, rank: u32) {
        if let Some(rx) = self.rx.get_mut(rank as usize).and_then(Option::as_mut) {
            rx.wake();
        }
        if let Some(tx) = self.out.to(rank) {
            tx.wake();
        }
    }

    /// The socket of a rank of this host has closed, or failed with `error`.
    pub(crate) fn end_socket(&mut self, rank: u32, error: Option<Error>) {
        match error {
            // The rank lives, but the memory that it shares cannot be used.
            Some(why) => self.report(rank, why, LossKind::Silent),
            None => self.gone.push(rank),
        }
    }

    fn report(&mut self, rank: u32, why: Error, kind: LossKind) {
        self.peers.report(LossEvent { rank, why, kind, reported_by: None });
    }

    /// The ranks that the oldest call with a waiting caller waits for.
    pub(crate) fn awaited(&self) -> Vec<u32> {
        let active = self.calls.active.iter().find(|active| active.completion.is_awaited());
        active.map_or_else(Vec::new, |active| active.body.members.ranks_of(&active.absent()))
    }

    /// This rank has slept: notes for which ranks the oldest calls have waited meanwhile.
    pub(crate) fn note_wait(&mut self, slept: Duration) {
        let Calls { active, events, .. } = &mut self.calls;
        active.iter_mut().take(MOST_NOTED).for_each(|call| call.note_wait(slept, events));
    }

    /// Moves everything once; true if anything moved.
    pub fn poll(&mut self) -> bool {
        let mut moved = self.take_back_finished();
        moved |= self.read(true);
        moved |= self.match_receives();
        // Only now: frames that a peer sent before its connection closed come first.
        let mut events = self.peers.take_events();
        if events.iter().any(|event| event.kind == LossKind::Left) {
            // A rank often leaves because another is lost, whose connection has closed before: that one is named.
            self.look_everywhere();
            events.extend(self.peers.take_events());
            events.sort_by_key(|event| event.kind == LossKind::Left);
        }
        for event in events {
            if let Some(event) = self.keep_if_cut(event) {
                self.act_on(event);
            }
            moved = true;
        }
        moved |= self.act_on_cuts();
        moved |= self.act_on_hearsay();
        if moved {
            self.meter.sample(&self.rx, self.out.connections());
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
        let mut from = 0;
        while let Some(i) = scheduling.calls.next_due(from) {
            moved |= scheduling.advance(i);
            from = i + 1;
        }
        moved |= scheduling.pump_out();
        self.redirect_failed();
        moved |= self.scheduling().reap(false);
        // Only when nothing is left to decide: until this is done, nothing is decided.
        moved = moved || self.lanes.help();
        if !moved {
            let now = Instant::now();
            if now - self.ticked > INTERRUPT_INTERVAL / 2 {
                self.ticked = now;
                self.check_time(now);
            }
        }
        moved
    }

    /// Ends all calls that have failed, although peers may still be inside: they lose their access to its memory.
    pub fn end_failed(&mut self) {
        self.redirect_failed();
        self.scheduling().reap(true);
    }

    /// Fails calls that have timed out, announces stalled calls, queues log lines about long waits, and looks for ranks
    /// that wait for each other.
    pub fn check_time(&mut self, now: Instant) {
        check_time(&mut self.calls, &mut self.out, &self.peers, self.world.rank, now);
        self.cross_waits.look(&mut self.calls, &mut self.out, &mut self.peers, &self.callers, now);
    }

    /// Sends heartbeats and checks those of the peers. What has arrived has just been read.
    pub(crate) fn heartbeat(&mut self) {
        self.closing.retain_mut(ClosingConnection::lingers);
        // A slow link may have brought less than a rank wakes for.
        self.rx.iter_mut().flatten().for_each(Rx::wake);
        let silent = self.heartbeat.send_and_check(&self.world, &mut self.peers, &mut self.out, &mut self.rx);
        self.window.name_straggler(&self.counters, &self.world);
        for Silence { rank, silent, why } in silent {
            let mut text = format!("no heartbeat from it for {:.1} s", silent.as_secs_f64());
            if !why.is_empty() {
                text = format!("{text}: {why}");
            }
            let why = Error::Aborted(text);
            let event = LossEvent { rank, why, kind: LossKind::Silent, reported_by: None };
            // If the rank is silent that passes on what this one sends, nothing is known of this one.
            let is_heard =
                |relay| !self.peers.is_lost(relay) && self.heartbeat.hears(relay, self.peers.limit());
            match self.world.relay_of(rank).is_none_or(is_heard) {
                true => self.act_on(event),
                false => drop(self.keep_if_cut(event)),
            }
        }
    }

    /// Reads what has arrived, and reports peers that are lost; true if anything arrived.
    fn read(&mut self, may_hand_over: bool) -> bool {
        let mut moved = false;
        let lanes = may_hand_over.then_some(&*self.lanes);
        let (peers, calls, out) = (&mut self.peers, &mut self.calls, &mut self.out);
        let mut sink = Matching { world: &self.world, peers, calls, out };
        for (rank, slot) in (0..).zip(&mut self.rx) {
            let Some(rx) = slot else { continue };
            let (kind, why) = match rx.has_input().then(|| rx.pump(&mut sink, lanes)) {
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
            // What it sent before it closed is still to be read, and may be the reason.
            let Some(rx) = self.rx[rank as usize].as_mut() else { continue };
            let (kind, why) = match read_to_end(rx, &mut sink) {
                Err(e) => (LossKind::Silent, e),
                Ok(_) if matches!(error, Error::Aborted(_)) => closed(rx, "its connection has closed"),
                Ok(_) => (LossKind::Silent, error),
            };
            sink.peers.report(LossEvent { rank, why, kind, reported_by: None });
        }
        for rank in std::mem::take(&mut self.gone) {
            let Some(rx) = self.rx[rank as usize].as_mut() else { continue };
            // Its last words may be that it leaves.
            let _ = read_to_end(rx, &mut sink);
            let (mine, theirs) =
                (self.world.index_on_host(self.world.rank), self.world.neighbours.get(&rank));
            let (kind, why) = match theirs.is_some_and(|n| n.control.has_evicted(mine)) {
                true => {
                    let why = "it evicted this rank, which had sent no heartbeat for too long";
                    (LossKind::Refused, Error::Aborted(why.into()))
                }
                false => closed(rx, "its process has ended"),
            };
            sink.peers.report(LossEvent { rank, why, kind, reported_by: None });
        }
        moved
    }

    /// Takes note of what lanes have done; true if there was anything. Connections find theirs by themselves, when they
    /// are asked to go on.
    fn take_back_finished(&mut self) -> bool {
        if !self.lanes.has_tickets() {
            return false;
        }
        for ticket in self.lanes.tickets() {
            let Ticket::Summed(call, step) = ticket else { continue };
            self.scheduling().take_sum(Token { call, step });
        }
        true
    }

    /// Reads from all peers, also from those of whom epoll has not told yet that there is something.
    fn look_everywhere(&mut self) {
        self.rx.iter_mut().flatten().for_each(Rx::wake);
        let hung_up = self.world.neighbours.iter().filter(|(_, neighbour)| neighbour.has_hung_up());
        self.gone.extend(hung_up.map(|(&rank, _)| rank));
        for rx in self.rx.iter_mut().flatten() {
            rx.recall();
        }
        self.read(false);
    }

    /// Matches receives from any source with what has arrived; true if there were any.
    fn match_receives(&mut self) -> bool {
        if self.calls.unmatched == 0 {
            return false;
        }
        let (peers, calls, out) = (&mut self.peers, &mut self.calls, &mut self.out);
        Matching { world: &self.world, peers, calls, out }.match_receives()
    }

    /// A connection has closed that passes through another rank: that one may be lost, and is named then. The event back, if
    /// it is none of that kind.
    fn keep_if_cut(&mut self, event: LossEvent) -> Option<LossEvent> {
        let is_cut = self.world.relay_of(event.rank).is_some() && self.rx[event.rank as usize].is_some();
        let may_live = matches!(event.kind, LossKind::Dead | LossKind::Silent);
        if !is_cut || event.reported_by.is_some() || !may_live || event.why.is_final() {
            return Some(event);
        }
        self.rx[event.rank as usize] = None;
        // Nobody evicts a rank for what happened to another.
        self.cut.push((Instant::now(), LossEvent { kind: LossKind::Dead, ..event }));
        None
    }

    /// Handles what was cut long enough ago; true if there was any.
    fn act_on_cuts(&mut self) -> bool {
        let due = self.cut.iter().position(|(since, _)| since.elapsed() > CUT);
        let due = due.map(|i| self.cut.swap_remove(i));
        let Some((_, mut event)) = due else { return false };
        if let Some(relay) = self.world.relay_of(event.rank).filter(|relay| self.peers.is_lost(*relay)) {
            event.why = Error::Aborted(format!("its connection passes through rank {relay}, which is gone"));
        }
        self.act_on(event);
        true
    }

    /// Handles what others have reported long enough ago; true if there was any. By now this rank would not hear who is
    /// silent. So the two only do not hear each other: one of them has to go, or ranks would go on with different others and
    /// wait for each other. All ranks that hear both choose the higher, whichever has reported first, and take several such
    /// pairs in the same order.
    fn act_on_hearsay(&mut self) -> bool {
        let long_enough = 3 * Heartbeat::heard(self.peers.limit()) / 2;
        let now = self.heartbeat.clock();
        if !self.hearsay.iter().any(|(since, ..)| now - *since > long_enough) {
            return false;
        }
        let mut told = std::mem::take(&mut self.hearsay);
        told.sort_by_key(|(_, reporter, event)| (*reporter.min(&event.rank), *reporter.max(&event.rank)));
        for (_, reporter, event) in told {
            if self.peers.is_lost(reporter) || self.peers.is_lost(event.rank) {
                continue;
            }
            if !self.hears(event.rank) {
                self.lose(event);
                continue;
            }
            let rank = reporter.max(event.rank);
            let why = format!(
                "ranks {} and {rank} have lost each other, and others hear both; the higher has to leave ({})",
                reporter.min(event.rank),
                event.why
            );
            self.lose(LossEvent {
                rank,
                why: Error::Aborted(why),
                kind: LossKind::Silent,
                reported_by: None,
            });
        }
        true
    }

    /// Whether this rank hears a peer that another has lost.
    fn hears(&self, rank: u32) -> bool {
        self.rx[rank as usize].is_some() && self.heartbeat.hears(rank, self.peers.limit())
    }

    /// Handles the loss of a peer.
    fn act_on(&mut self, event: LossEvent) {
        // A rank that has evicted this one, or is evicted, evicts nobody else here.
        let kind_of = |rank| self.peers.kind(rank);
        let reporter = event.reported_by;
        if reporter.and_then(kind_of).is_some_and(|k| matches!(k, LossKind::Silent | LossKind::Refused)) {
            return;
        }
        if let Some(reporter) = reporter
            && !event.why.is_final()
            && self.hears(event.rank)
        {
            self.hearsay.push((self.heartbeat.clock(), reporter, event));
            return;
        }
        self.lose(event);
    }

    /// Why a peer is lost, with the loss of another that it has told of: it may have ended because of that one, whose
    /// connection to this rank may close later.
    fn with_what_it_told(&self, rank: u32, why: Error, kind: LossKind) -> Error {
        let has_told = |(_, reporter, told): &&(Duration, u32, LossEvent)| {
            *reporter == rank && !self.peers.is_lost(told.rank)
        };
        match self.hearsay.iter().find(has_told) {
            Some((_, _, told)) if matches!(kind, LossKind::Left | LossKind::Dead) => Error::Aborted(format!(
                "{why}; it reported that rank {} was lost before: {}",
                told.rank, told.why
            )),
            _ => why,
        }
    }

    /// A peer is lost.
    fn lose(&mut self, event: LossEvent) {
        let LossEvent { rank, why, kind, reported_by } = event;
        let why = self.with_what_it_told(rank, why, kind);
        // Its connection is gone from here on, and calls under way have not counted yet what they sent.
        if let (Some(counter), Some(tx)) = (self.counters.sent.get(rank as usize), self.out.to(rank)) {
            counter.store(tx.bytes, Ordering::Relaxed);
        }
        let (calls, out, peers) = (&mut self.calls, &mut self.out, &mut self.peers);
        let unsent = match kind {
            LossKind::Silent if reported_by.is_none() => evict(calls, out, peers, &self.world, rank, why),
            kind => lose(calls, out, peers, &self.world, rank, why, kind),
        };
        let rx = self.rx[rank as usize].take();
        if let Some((tx, rx)) = unsent.zip(rx) {
            self.closing.push(ClosingConnection::new(tx, rx, self.world.relay_of(rank).is_some()));
        }
    }

    /// Tells the peers that this rank leaves, and waits until they have what it has sent.
    ///
    /// # Errors
    ///
    /// That of `check_interrupt`, which ends the wait.
    pub(crate) fn announce_leave(&mut self, check_interrupt: InterruptCheck<'_>) -> Result<()> {
        let (mut leaving, world) = (Vec::new(), self.world.clone());
        for (rank, slot) in (0..).zip(&mut self.rx) {
            let Some((rx, mut tx)) = slot.take().zip(self.out.remove(rank)) else { continue };
            tx.give(&control_frame(Kind::Leave, 0, 0), Vec::new());
            leaving.push(ClosingConnection::new(tx, rx, world.relay_of(rank).is_some()));
        }
        let waited = self.take_leave(leaving, check_interrupt);
        let patience = Instant::now() + LEAVE_PATIENCE;
        while self
            .closing
            .iter_mut()
            .filter_map(|p| p.lingers().then_some(&*p))
            .any(ClosingConnection::is_due)
            && Instant::now() < patience
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.closing.clear();
        // Peers that are inside a call have just been told that it has failed.
        self.redirect_failed();
        let patience = Instant::now() + LEAVING;
        while !self.calls.active.is_empty() && Instant::now() < patience {
            if !self.scheduling().reap(false) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.end_failed();
        waited
    }

    /// Waits until every peer has all that this rank has sent, or is gone, or takes nothing any more.
    fn take_leave(
        &mut self,
        mut leaving: Vec<ClosingConnection>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<()> {
        let (me, limit) = (self.world.rank, self.peers.limit());
        let mut checked = Instant::now();
        loop {
            leaving.retain_mut(|connection| {
                let rank = connection.peer();
                match connection.take_leave(limit) {
                    Farewell::Over => false,
                    // A rank of this host reads from memory, which does not tell that its process has ended.
                    Farewell::Waiting => {
                        !self.world.neighbours.get(&rank).is_some_and(Neighbour::has_hung_up)
                    }
                    Farewell::Stuck(waited, bytes) => {
                        self.peers.log(LogLine::Undelivered { me, rank, bytes, waited });
                        false
                    }
                }
            });
            if leaving.is_empty() {
                return Ok(());
            }
            if checked.elapsed() > INTERRUPT_INTERVAL {
                checked = Instant::now();
                check_interrupt()?;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The lanes, for other threads.
    pub(crate) fn lanes(&self) -> Arc<Lanes> {
        self.lanes.clone()
    }

    /// Closes the connections of an engine that cannot go on: its peers learn at once that this rank is lost.
    pub(crate) fn hang_up(&mut self) {
        self.lanes.close();
        self.out.all().for_each(|(_, tx)| tx.close());
        self.world.neighbours.values().for_each(Neighbour::dismiss);
    }

    /// Redirects what still arrives for failed calls, because their memory is about to be returned to the callers.
    fn redirect_failed(&mut self) {
        for active in self.calls.take_failed() {
            self.rx.iter_mut().flatten().for_each(|rx| rx.redirect(active));
        }
    }
}

/// Reads all that has arrived from a peer.
fn read_to_end(rx: &mut Rx, sink: &mut Matching<'_>) -> Result<Pumped> {
    rx.recall();
    rx.wake();
    loop {
        match rx.pump(sink, None) {
            Ok(Pumped::Moved) => {}
            end => return end,
        }
    }
}

/// How a peer was lost whose connection has closed.
fn closed(rx: &Rx, why: &str) -> (LossKind, Error) {
    match rx.is_leaving {
        true => (LossKind::Left, Error::Aborted("it has left the job".into())),
        false => (LossKind::Dead, Error::Aborted(why.into())),
    }
}
