//! Moves the calls under way: takes them up, walks their schedules, ends them.
//!
//! Everything here happens under the progress lock, in one thread at a time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use trigram_core::Result;
use trigram_core::planner::{self, Opening};
use trigram_core::schedule::Schedule;
use trigram_core::wire::{Frame, Kind};

use crate::call::body::Body;
use crate::call::calls::Calls;
use crate::call::job::{Job, Stage};
use crate::call::mismatch::agree;
use crate::call::pacing::Pacing;
use crate::call::request::Submission;
use crate::call::schedule_cache::ScheduleCache;
use crate::drive::failing::{self, stop};
use crate::drive::matching::Matching;
use crate::group::world::World;
use crate::health::counters::Counters;
use crate::health::peers::Peers;
use crate::link::frames::Token;
use crate::link::outbox::Outbox;

/// How long a failed call waits for peers to let go of its memory, beyond the silence that is forgiven.
const CLOSE: Duration = Duration::from_secs(2);

/// What moving a call may touch.
pub(crate) struct Scheduling<'a> {
    pub(crate) world: &'a World,
    pub(crate) counters: &'a Counters,
    pub(crate) peers: &'a mut Peers,
    pub(crate) calls: &'a mut Calls,
    pub(crate) out: &'a mut Outbox,
    pub(crate) schedules: &'a mut ScheduleCache,
    pub(crate) pacing: &'a mut Pacing,
}

impl Scheduling<'_> {
    /// Takes a call up.
    pub(crate) fn admit(&mut self, submission: Submission) {
        let Submission { members, request, ticket, deadline } = submission;
        let calls = &mut *self.calls;
        let (call_id, peer) = calls.number(&members, request.message);
        let failed = calls.unexpected.take_failure(members.id, call_id, peer);
        // Whose message has come may have left since.
        let has_come = calls.unexpected.frames().any(|(from, frame)| {
            Some(from) == peer
                && frame.group == members.id
                && frame.call == call_id
                && frame.kind == Kind::Data
        });
        let gone = match peer {
            None => self.peers.first_lost(&members.ranks),
            Some(_) if has_come => None,
            Some(rank) => self.peers.first_lost(&[rank]),
        };
        // Others may not know of a loss; of a failure that came here, they do.
        let error = match (failed, gone) {
            (Some(error), _) => {
                self.peers.remove_failed_call(members.id);
                Some((error, false))
            }
            (None, Some(rank)) => Some((
                failing::reason(calls, self.peers, self.world.rank, rank, members.id, &request.signature()),
                true,
            )),
            _ => None,
        };
        let i = calls.enter(members, call_id, request, ticket);
        if let Some((error, tell)) = error {
            return calls.fail(i, error, tell, self.out);
        }
        if let Some(deadline) = deadline {
            calls.set_deadline(i, deadline);
        }
        let (peers, out) = (&mut *self.peers, &mut *self.out);
        Matching { world: self.world, peers, calls: self.calls, out }.take_early(i);
        self.advance(i);
    }

    /// Moves one call on as far as it goes now; true if it moved.
    pub(crate) fn advance(&mut self, i: usize) -> bool {
        let mut moved = false;
        loop {
            let job = &self.calls.jobs[i];
            let before = (job.stage, job.body.barrier);
            if let Err(error) = self.step(i) {
                stop(self.calls, i, error, self.out, self.peers, self.world.rank);
                return true;
            }
            let job = &mut self.calls.jobs[i];
            if before == (job.stage, job.body.barrier) {
                return moved;
            }
            job.stirred = true;
            moved = true;
        }
    }

    fn step(&mut self, i: usize) -> Result<()> {
        let job = &mut self.calls.jobs[i];
        let call = job.body.call_id;
        let members = job.body.members.clone();
        match job.stage {
            Stage::Waiting if job.opening == Opening::Messages => {
                if planner::goes_by_rates(&job.body.request.call, &members.layout) && !self.settle(i) {
                    return Ok(());
                }
                self.calls.jobs[i].stage = Stage::Running;
                let schedule = self.schedule(i)?;
                let job = &mut self.calls.jobs[i];
                self.pacing.pace(&job.body, &schedule, self.out);
                job.run(schedule, self.out)
            }
            Stage::Waiting => {
                if members.busy(call).next().is_some() {
                    return Ok(());
                }
                job.entered = true;
                let Some(lane) = members.lane(members.me, call) else { return Ok(()) };
                let tensors = &job.body.request.tensors;
                let lent = planner::contribution(&job.body.request.call, &members.layout)
                    * job.body.request.call.dtype.size();
                let lent = lent.min(tensors.input_len);
                if job.opening == Opening::OneShot {
                    lane.describe(&job.body.signature, None, None);
                    job.stage = Stage::Meeting;
                    let schedule = self.schedule(i)?;
                    return self.calls.jobs[i].run(schedule, self.out);
                }
                let input = self.world.arena.locate(tensors.input, lent);
                let mut stage = None;
                if planner::is_staged(&job.body.request.call, &members.layout)
                    && let Some(block) = members.stage(call, self.world)
                {
                    job.body.stage = (block.as_ptr(), block.len());
                    stage = self.world.arena.locate(block.as_ptr(), block.len());
                }
                lane.describe(&job.body.signature, input, stage);
                members.arrive(call, 0);
                job.stage = Stage::Meeting;
                Ok(())
            }
            Stage::Meeting => {
                // Who gave the call up has sent word of why; it is on its way.
                if !members.all_arrived(call, 0) || members.has_failed(call) {
                    return Ok(());
                }
                agree(&members, call, &job.body.signature)?;
                job.stage = Stage::Running;
                if job.opening == Opening::OneShot {
                    return Ok(());
                }
                job.body.lent = job.body.lend(self.world)?;
                let schedule = self.schedule(i)?;
                self.calls.jobs[i].run(schedule, self.out)
            }
            Stage::Running => {
                if let Some((step, ordinal)) = job.body.barrier
                    && members.all_arrived(call, ordinal)
                {
                    job.body.barrier = None;
                    return job.complete(step, self.out);
                }
                Ok(())
            }
            Stage::Closing => Ok(()),
        }
    }

    /// The schedule of a call that knows what it may touch.
    fn schedule(&mut self, i: usize) -> Result<Arc<Schedule>> {
        let job = &self.calls.jobs[i];
        let members = &job.body.members;
        let by_rates = planner::goes_by_rates(&job.body.request.call, &members.layout);
        let rates = if by_rates { self.calls.known_rates(members.id) } else { None };
        self.schedules.schedule(&job.body, job.opening, rates)
    }

    /// Brings the rates that a call goes by up to date; false if it must wait for its turn, or for
    /// what a peer has to say. Rates change with a call, so the calls before and after it must not overtake it.
    fn settle(&mut self, i: usize) -> bool {
        let Body { members, call_id, .. } = &self.calls.jobs[i].body;
        let (members, call) = (members.clone(), *call_id);
        let before = |j: &Job| {
            j.stage == Stage::Waiting
                && j.body.members.id == members.id
                && j.body.call_id < call
                && planner::goes_by_rates(&j.body.request.call, &members.layout)
        };
        if self.calls.jobs.iter().any(before) {
            return false;
        }
        let body = &self.calls.jobs[i].body;
        if !planner::is_balanced(&body.request.call, &members.layout) {
            return true;
        }
        let frame = Frame { len: 8, ..body.frame(Kind::Rate, 0, 0) };
        let rates = self.calls.rates(members.id);
        if rates.is_first(call.0) {
            let measured = self.pacing.rate(rates.since());
            let rate = rates.declare(call.0, self.world.rank, measured, members.layout.helpers > 0);
            for &rank in members.ranks.iter().filter(|&&rank| rank != self.world.rank) {
                self.out.give(rank, &frame, rate.unwrap_or(0.0).to_le_bytes().to_vec());
            }
        }
        let Some(changed) = rates.settle(&members.ranks, members.layout.helpers as usize) else {
            return false;
        };
        if changed {
            members.set_rates(rates.measured());
        }
        true
    }

    /// Steps whose frames have left since the last look; true if there were any.
    pub(crate) fn finish_sends(&mut self) -> bool {
        let mut moved = false;
        while let Some(token) = self.out.next_finished() {
            moved = true;
            self.complete(token);
        }
        moved
    }

    fn complete(&mut self, token: Token) {
        let (peers, out) = (&mut *self.peers, &mut *self.out);
        Matching { world: self.world, peers, calls: self.calls, out }.complete(token);
    }

    /// Writes what waits; true if anything moved.
    pub(crate) fn pump_out(&mut self) -> bool {
        let moved = self.out.pump();
        self.finish_sends() | moved
    }

    /// Ends the calls that are done, well or not; true if there were any.
    pub(crate) fn reap(&mut self, now: Instant) -> bool {
        let mut moved = false;
        let mut i = 0;
        while i < self.calls.jobs.len() {
            let job = &self.calls.jobs[i];
            let call = job.body.call_id;
            let members = &job.body.members;
            let over = match job.stage {
                Stage::Running => job.exec.is_done(),
                // Its turn in the lane has not come: the call before is still under way here.
                Stage::Closing if !job.entered => !members.busy(call).any(|p| p == members.me),
                Stage::Closing => {
                    let held = members.inside(call).into_iter();
                    let held = held.filter(|&p| !self.peers.is_lost(members.ranks[p as usize])).count();
                    // Who holds it may be stopped: that is forgiven up to the limit, and ends in a loss beyond.
                    held == 0 || now - job.moved > CLOSE + self.peers.limit()
                }
                _ => false,
            };
            if !over || self.calls.is_written(job.body.id) {
                i += 1;
                continue;
            }
            moved = true;
            self.end(i);
        }
        moved
    }

    fn end(&mut self, i: usize) {
        let mut job = self.calls.remove(i);
        let body = &job.body;
        if let Some(lane) = body.members.lane(body.members.me, body.call_id) {
            lane.leave(body.call_id.0);
            body.members.ring();
        }
        let outcome = match job.error.take() {
            Some(error) => Err(error),
            None => {
                self.counters.calls.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        };
        self.counters.direct_bytes.fetch_add(body.direct_bytes, Ordering::Relaxed);
        for (counter, tx) in self.counters.sent.iter().zip(self.out.connections()) {
            counter.store(tx.as_ref().map_or(0, |tx| tx.bytes), Ordering::Relaxed);
        }
        let ticket = job.ticket.clone();
        self.calls.recycle(job);
        ticket.resolve(outcome);
    }
}
