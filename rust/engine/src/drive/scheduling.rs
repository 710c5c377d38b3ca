//! Moves the calls under way: takes them up, runs their schedules, ends them.
//!
//! Everything here happens under the progress lock, in one thread at a time.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use trigram_core::Result;
use trigram_core::planner::{self, Opening};
use trigram_core::schedule::Schedule;
use trigram_core::signature::Collective;
use trigram_core::wire::{CallId, Frame, Kind};

use crate::call::active_call::CallState;
use crate::call::body::Body;
use crate::call::calls::Calls;
use crate::call::mismatch::{agree, is_pairwise};
use crate::call::request::{Message, Submission};
use crate::call::schedule_cache::ScheduleCache;
use crate::drive::failures::{self, stop};
use crate::drive::matching::Matching;
use crate::group::world::World;
use crate::health::counters::Counters;
use crate::health::events::Phase;
use crate::health::peers::Peers;
use crate::link::frames::Token;
use crate::link::outbox::Outbox;
use crate::link::rate_meter::RateMeter;

/// What moving a call may change.
pub(crate) struct Scheduling<'a> {
    pub(crate) world: &'a World,
    pub(crate) counters: &'a Counters,
    pub(crate) peers: &'a mut Peers,
    pub(crate) calls: &'a mut Calls,
    pub(crate) out: &'a mut Outbox,
    pub(crate) schedules: &'a mut ScheduleCache,
    pub(crate) meter: &'a RateMeter,
}

impl Scheduling<'_> {
    /// Takes up a call.
    pub(crate) fn admit(&mut self, submission: Submission) {
        let Submission { members, request, .. } = &submission;
        if let Some(message) = request.message.filter(|m| self.calls.is_unmatched(members, *m)) {
            return self.enter_unmatched(submission, message);
        }
        let (call_id, peer) = self.calls.number(members, request.message);
        self.enter(submission, call_id, peer, false);
    }

    /// Takes up a receive that has no number yet.
    fn enter_unmatched(&mut self, submission: Submission, message: Message) {
        let deadline = submission.deadline();
        let calls = &mut *self.calls;
        let i = calls.enter_unmatched(submission, message);
        let body = &calls.active[i].body;
        if let Some(error) = calls.aborted(body.members.id, body.call_id).or_else(|| calls.broken.clone()) {
            calls.fail(i, error, true, self.out);
        } else if let Some(deadline) = deadline {
            calls.set_deadline(i, deadline);
        }
    }

    /// Takes up a call that has a number; `shown`: its payload is in its operation slot, and it has arrived there.
    pub(crate) fn enter(&mut self, submission: Submission, call_id: CallId, peer: Option<u32>, shown: bool) {
        let deadline = submission.deadline();
        let Submission { members, request, completion, made, .. } = submission;
        let calls = &mut *self.calls;
        let failed = calls.unexpected.take_failure(members.id, call_id, peer);
        // A sender whose message has arrived may have left since.
        let has_come = calls
            .unexpected
            .frames_of(members.id, call_id)
            .any(|(from, frame)| Some(from) == peer && frame.kind == Kind::Data);
        let gone = match peer {
            None => self.peers.first_lost(&members.ranks),
            Some(_) if has_come => None,
            Some(rank) => self.peers.first_lost(&[rank]),
        };
        // Other ranks may not know of a loss; of a failure that was reported to this rank, they do.
        let aborted = calls.aborted(members.id, call_id);
        let error = match (failed, gone) {
            _ if aborted.is_some() => aborted.map(|error| (error, None)),
            _ if calls.broken.is_some() => calls.broken.clone().map(|error| (error.clone(), Some(error))),
            (Some(error), _) => {
                self.peers.remove_failed_call(members.id);
                Some((error, None))
            }
            (None, Some(rank)) => {
                let (peers, me, signature) = (&*self.peers, self.world.rank, request.signature());
                let error = failures::reason(calls, peers, me, rank, members.id, &signature);
                let told = peers.told(rank, me, &signature, &error);
                Some((error, Some(told)))
            }
            _ => None,
        };
        if let Some(rank) = peer {
            completion.set_sender(rank);
        }
        let i = calls.enter(members, call_id, request, completion, made);
        calls.active[i].entered = shown;
        calls.active[i].body.shown = shown;
        if let Some((error, told)) = error {
            return calls.fail_as(i, error, told, self.out);
        }
        if let Some(deadline) = deadline {
            calls.set_deadline(i, deadline);
        }
        let (peers, out) = (&mut *self.peers, &mut *self.out);
        Matching { world: self.world, peers, calls: self.calls, out }.take_unexpected(i);
        self.advance(i);
    }

    /// Advances one call as far as possible; true if it moved.
    pub(crate) fn advance(&mut self, i: usize) -> bool {
        let moved = self.advance_far(i);
        self.calls.settle_due(i);
        moved
    }

    fn advance_far(&mut self, i: usize) -> bool {
        let active = &mut self.calls.active[i];
        let mut moved = match active.take_turn(self.out) {
            Ok(moved) => moved,
            Err(error) => {
                stop(self.calls, i, error, self.out, self.peers, self.world.rank);
                return true;
            }
        };
        loop {
            let active = &self.calls.active[i];
            let before = (active.state, active.body.barrier);
            if let Err(error) = self.step(i) {
                stop(self.calls, i, error, self.out, self.peers, self.world.rank);
                return true;
            }
            let active = &mut self.calls.active[i];
            if before == (active.state, active.body.barrier) {
                return moved;
            }
            active.stirred = true;
            moved = true;
        }
    }

    fn step(&mut self, i: usize) -> Result<()> {
        let active = &mut self.calls.active[i];
        let call = active.body.call_id;
        let members = active.body.members.clone();
        match active.state {
            CallState::Waiting if active.opening == Opening::Messages => {
                if planner::goes_by_rates(&active.body.request.call, &members.layout) && !self.settle(i) {
                    return Ok(());
                }
                self.calls.active[i].pass_to(CallState::Running, &self.calls.events);
                self.calls.note_begun(i);
                let schedule = self.schedule(i)?;
                let active = &mut self.calls.active[i];
                active.run(schedule, self.out)
            }
            CallState::Waiting => {
                if members.busy(call).next().is_some() {
                    return Ok(());
                }
                active.entered = true;
                let Some(op_slot) = members.op_slot(members.me, call) else { return Ok(()) };
                if active.opening == Opening::OneShot {
                    op_slot.describe(&active.body.signature, None, None);
                    active.pass_to(CallState::Opening, &self.calls.events);
                    let schedule = self.schedule(i)?;
                    return self.calls.active[i].run(schedule, self.out);
                }
                let [(lent, len), (output, written)] = active.body.shown();
                let lent = self.world.arena.locate(lent, len);
                let mut bounce_buffer = None;
                if active.body.request.call.what == Collective::Update {
                    bounce_buffer = self.world.arena.locate(output, written);
                }
                if planner::uses_bounce_buffers(&active.body.request.call, &members.layout)
                    && let Some(buffer) = members.bounce_buffer(call, self.world)
                {
                    active.body.bounce = (buffer.as_ptr(), buffer.len());
                    bounce_buffer = self.world.arena.locate(buffer.as_ptr(), buffer.len());
                }
                op_slot.describe(&active.body.signature, lent, bounce_buffer);
                members.arrive(call, 0);
                active.pass_to(CallState::Opening, &self.calls.events);
                Ok(())
            }
            CallState::Opening => {
                // A rank that has aborted the call has sent the reason, which is on its way.
                if !members.all_arrived(call, 0) || members.has_failed(call) {
                    return Ok(());
                }
                agree(&members, call, &active.body.signature)?;
                active.pass_to(CallState::Running, &self.calls.events);
                let body = &mut active.body;
                if body.request.call.what == Collective::AllToAll
                    && body.request.call.splits.is_none()
                    && is_pairwise(&members, call)
                {
                    // Other ranks have lengths that this one does not know: all exchange messages.
                    let equal = vec![body.request.call.len; members.ranks.len()];
                    body.request.call.splits = Some((equal.clone(), equal));
                    body.barrier = None;
                    active.opening = Opening::Barrier;
                }
                if active.opening == Opening::OneShot {
                    return Ok(());
                }
                if planner::may_lend(&active.body.request.call, &members.layout) {
                    active.body.lent = active.body.lend(self.world)?;
                }
                let schedule = self.schedule(i)?;
                self.calls.active[i].run(schedule, self.out)
            }
            CallState::Running => {
                if let Some((step, ordinal)) = active.body.barrier
                    && members.all_arrived(call, ordinal)
                {
                    active.body.barrier = None;
                    return active.complete(step, self.out);
                }
                Ok(())
            }
            CallState::Unmatched | CallState::Closing => Ok(()),
        }
    }

    /// The schedule of a call whose shared memory is known.
    fn schedule(&mut self, i: usize) -> Result<Arc<Schedule>> {
        let active = &self.calls.active[i];
        let members = &active.body.members;
        let by_rates = planner::goes_by_rates(&active.body.request.call, &members.layout);
        let rates = if by_rates { self.calls.known_rates(members.id) } else { None };
        self.schedules.schedule(&active.body, active.opening, rates)
    }

    /// Brings the rates that a call uses up to date; false if the call must wait for its turn, or for a peer's
    /// declaration. Rates change with a call, so no call before or after it may overtake it.
    fn settle(&mut self, i: usize) -> bool {
        let Body { members, call_id, .. } = &self.calls.active[i].body;
        let (members, call) = (members.clone(), *call_id);
        if !self.calls.may_begin(members.id, call) {
            return false;
        }
        let body = &self.calls.active[i].body;
        if !planner::is_balanced(&body.request.call, &members.layout) {
            return true;
        }
        let frame = Frame { len: 8, ..body.frame(Kind::Rate, 0, 0) };
        let rates = self.calls.rates(members.id);
        if rates.is_first(call.0) {
            let measured = self.meter.rate(rates.since());
            let rate = rates.declare(call.0, self.world.rank, measured, members.layout.helpers > 0);
            for &rank in members.ranks.iter().filter(|&&rank| rank != self.world.rank) {
                self.out.give(rank, &frame, rate.unwrap_or(0.0).to_le_bytes().to_vec());
            }
        }
        let Some(changed) = rates.settle(&members.ranks, members.layout.helpers as usize) else {
            return false;
        };
        if changed {
            members.set_rates(&rates.measured());
        }
        true
    }

    /// Completes steps whose frames have left; true if there were any.
    pub(crate) fn finish_sends(&mut self) -> bool {
        let mut moved = false;
        while let Some(token) = self.out.next_finished() {
            moved = true;
            self.complete(token);
        }
        moved
    }

    /// A lane has made a sum, unless the call has failed meanwhile.
    pub(crate) fn take_sum(&mut self, token: Token) {
        let Some(i) = self.calls.position(token.call) else { return };
        let summing = &mut self.calls.active[i].body.summing;
        let its = summing.iter().position(|(step, task)| *step == token.step && task.is_finished());
        let Some(work) = its.and_then(|at| summing.swap_remove(at).1.recall()) else { return };
        match work.outcome {
            Ok(()) => self.complete(token),
            Err(error) => stop(self.calls, i, error, self.out, self.peers, self.world.rank),
        }
    }

    fn complete(&mut self, token: Token) {
        let (peers, out) = (&mut *self.peers, &mut *self.out);
        Matching { world: self.world, peers, calls: self.calls, out }.complete(token);
    }

    /// Writes what waits to be sent; true if anything moved.
    pub(crate) fn pump_out(&mut self) -> bool {
        let moved = self.out.pump();
        self.finish_sends() | moved
    }

    /// Ends the calls that are done, successfully or not; true if there were any. A failed call waits until no peer can
    /// write into its memory any more; with `at_once`, such peers lose their access instead.
    pub(crate) fn reap(&mut self, at_once: bool) -> bool {
        let mut moved = false;
        let mut from = 0;
        while let Some(i) = self.calls.next_due(from) {
            from = i;
            let active = &self.calls.active[i];
            let call = active.body.call_id;
            let members = &active.body.members;
            let over = match active.state {
                CallState::Running => active.exec.is_done(),
                // It has not got its operation slot yet: an earlier call of this rank still uses it.
                CallState::Closing if !active.entered => !members.busy(call).any(|p| p == members.me),
                CallState::Closing => {
                    let held = members.inside(call).into_iter();
                    // A rank that is lost has ended, or has lost its access.
                    let held = held.filter(|&p| !self.peers.is_lost(members.ranks[p as usize])).count();
                    if held > 0 && at_once {
                        for (at, len) in active.body.shown() {
                            let _ = self.world.arena.revoke(at, len);
                        }
                    }
                    held == 0 || at_once
                }
                _ => false,
            };
            if !over || self.calls.is_written(active.body.id) {
                from = i + 1;
                continue;
            }
            moved = true;
            self.end(i);
        }
        moved
    }

    fn end(&mut self, i: usize) {
        let mut active = self.calls.remove(i);
        let body = &active.body;
        if let Some(op_slot) = body.members.op_slot(body.members.me, body.call_id) {
            op_slot.leave(body.call_id.0);
            body.members.ring();
        }
        let outcome = active.error.take().map_or(Ok(()), Err);
        self.counters.count(u64::from(outcome.is_ok()), body.direct_bytes);
        for (counter, tx) in self.counters.sent.iter().zip(self.out.connections()) {
            // A peer that has left had its bytes all the same.
            if let Some(tx) = tx {
                counter.store(tx.bytes, Ordering::Relaxed);
            }
        }
        self.calls.events.note(active.event, Phase::Ended);
        let completion = active.completion.clone();
        self.calls.recycle(active);
        completion.resolve(outcome);
    }
}
