//! A collective whose payload fits the operation slots, made by its caller's thread without a call under way.
//!
//! The payload goes into this rank's slot, the rank arrives, waits a moment for the others, folds what they show, and
//! leaves. Where anything else is to be done, or the others take longer, the call goes on as an ordinary one, which
//! does all this too, and has an error for what can go wrong.

use std::sync::Arc;

use trigram_core::Result;
use trigram_core::planner::{self, Opening};
use trigram_core::schedule::{Schedule, Step};
use trigram_core::wire::CallId;

use crate::call::body::Body;
use crate::call::request::{Request, Submission};
use crate::call::steps::TURN;
use crate::drive::progress::Progress;
use crate::sys::memory::Scratch;

/// What has become of a call.
pub(crate) enum OneShot {
    /// It has ended.
    Ended,
    /// It is not for this way, and has not begun.
    Ordinary(Submission),
    /// It has this number, and its payload is shown; it goes on as an ordinary call.
    Begun(CallId, Submission),
}

/// A call whose payload is shown.
pub(crate) struct ShownCall {
    body: Body,
    schedule: Arc<Schedule>,
    /// What the caller waits with, for the ordinary way.
    rest: Submission,
}

impl ShownCall {
    /// Whether all ranks have come.
    pub(crate) fn is_open(&self) -> bool {
        self.body.members.all_arrived(self.body.call_id, 0)
    }

    /// The ranks that have not come.
    pub(crate) fn absent(&self) -> Vec<u32> {
        let members = &self.body.members;
        members.ranks_of(&members.absent(self.body.call_id, 0))
    }

    /// Goes on as an ordinary call.
    pub(crate) fn hand_over(self) -> OneShot {
        OneShot::Begun(self.body.call_id, Submission { request: self.body.request, ..self.rest })
    }

    /// Carries out the steps before the barrier, or after it.
    fn run(&mut self, is_open: bool) -> Result<()> {
        let is_barrier = |step: &Step| matches!(step, Step::Barrier { .. });
        let mut parts = self.schedule.steps.split(is_barrier);
        for step in parts.nth(usize::from(is_open)).unwrap_or_default() {
            if let Step::Reduce { from, to, finish } = step {
                let mut next = Some(0);
                while let Some(at) = next {
                    self.body.turn = TURN;
                    next = self.body.fold(from, to, *finish, at)?;
                }
            }
        }
        Ok(())
    }
}

impl Progress {
    /// Shows the payload of a call to the ranks of this host, and arrives at its barrier. `Err`: it is no such call, or
    /// something else is to be done; nothing has happened.
    #[allow(clippy::result_large_err)] // it goes back to where it came from
    pub(crate) fn show(&mut self, submission: Submission) -> std::result::Result<ShownCall, Submission> {
        let Submission { members, request, .. } = &submission;
        let fits = request.message.is_none()
            && request.lists.is_none()
            && planner::opening(&request.call, &members.layout) == Opening::OneShot;
        if !fits || !self.helper.is_idle() || self.peers.first_lost(&members.ranks).is_some() {
            return Err(submission);
        }
        let Some(id) = self.calls.undisturbed(members).filter(|&id| members.busy(id).next().is_none()) else {
            return Err(submission);
        };
        let members = members.clone();
        let Submission { request, completion, made, limit, .. } = submission;
        let signature = request.signature();
        let body = Body::new(0, members.clone(), id, request, signature, Scratch::default());
        let schedule = self.schedules.schedule(&body, Opening::OneShot, None);
        let rest = Submission { members, request: Request::nothing(), completion, made, limit };
        let mut call = ShownCall { body, schedule: schedule.unwrap_or_else(|_| Schedule::empty()), rest };
        let copied = call.run(false);
        let members = &call.body.members;
        let (Some(slot), Ok(())) = (members.op_slot(members.me, id), copied) else {
            return Err(Submission { request: call.body.request, ..call.rest });
        };
        slot.describe_one_shot(&signature, id.0);
        members.arrive(id, 0);
        self.calls.number(members, None);
        Ok(call)
    }

    /// Ends a call to which all ranks have come, if they agree.
    pub(crate) fn fold_one_shot(&mut self, mut call: ShownCall) -> OneShot {
        let Body { members, call_id, signature, .. } = &call.body;
        let (members, id) = (members.clone(), *call_id);
        let slots = || members.local_places().filter_map(|place| members.op_slot(place, id));
        let agreed = slots().all(|slot| slot.signature() == *signature && !slot.has_failed(id.0));
        if !agreed || call.run(true).is_err() {
            return call.hand_over();
        }
        members.note_left(id);
        // Without a ring: a peer that waits for this slot, eight calls ahead, is rung when this rank arrives at the next
        // call, without which the peer cannot go on anyway.
        if let Some(slot) = members.op_slot(members.me, id) {
            slot.leave(id.0);
        }
        self.counters.events.record_ended(&call.body.made(call.rest.made));
        self.counters.count(1, call.body.direct_bytes);
        OneShot::Ended
    }
}
