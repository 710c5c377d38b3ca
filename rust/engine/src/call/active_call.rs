//! One call under way on this rank.
//!
//! A call waits for its operation slot, passes the opening barrier of the ranks of its host, runs its schedule, and
//! ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use trigram_core::executor::{Executor, Started};
use trigram_core::planner::{self, Opening};
use trigram_core::schedule::{Place, Schedule, Step};
use trigram_core::signature::Signature;
use trigram_core::wire::{CallId, Kind};
use trigram_core::{Error, Result};

use crate::call::body::{Body, EAGER};
use crate::call::request::{Message, Request};
use crate::call::steps::{StepRunner, TURN};
use crate::group::members::Members;
use crate::health::events::{EventRing, Phase};
use crate::link::outbox::Outbox;
use crate::sys::completion::Completion;
use crate::sys::memory::Scratch;

/// The state of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallState {
    /// A receive that does not know yet which message it takes, see `drive::receives`.
    Unmatched,
    /// An earlier call still uses its operation slot.
    Waiting,
    /// Not all ranks of this host have entered the call.
    Opening,
    /// Its schedule runs.
    Running,
    /// It has failed; peers may still access its memory.
    Closing,
}

/// One call under way.
pub struct ActiveCall {
    /// Its state; it changes only in `ActiveCall::pass_to`.
    pub state: CallState,
    /// The number of its record.
    pub(crate) event: u64,
    /// By world rank, the nanoseconds that this rank slept while the call waited for it.
    waited: Vec<(u32, u64)>,
    /// Whether anything of a peer has come.
    heard: bool,
    /// Its memory and messages: everything but the executor.
    pub body: Body,
    /// The executor of its schedule.
    pub exec: Executor,
    /// How it begins.
    pub opening: Opening,
    /// The handle on which its caller waits.
    pub completion: Arc<Completion>,
    /// Whether it has entered its operation slot, where peers can see it.
    pub entered: bool,
    /// Why it failed, in [`CallState::Closing`].
    pub error: Option<Error>,
    /// When it was started.
    pub began: Instant,
    /// When it times out.
    pub deadline: Option<Instant>,
    /// Whether it has progressed since the last look at the clock.
    pub stirred: bool,
    /// When it last progressed, as of that look.
    pub moved: Instant,
    /// Whether this rank has told the others what it called, after a stall.
    pub announced: bool,
    /// Whether a log line has named the ranks that it waits for.
    pub named: bool,
}

// SAFETY: addresses of callers' and peers' memory are used only while the progress lock is held.
unsafe impl Send for ActiveCall {}

impl ActiveCall {
    /// A call that has not begun.
    pub fn new(
        id: u64,
        members: Arc<Members>,
        call_id: CallId,
        request: Request,
        signature: Signature,
        scratch: Scratch,
        exec: Executor,
    ) -> Self {
        let opening = match request.message {
            Some(_) => Opening::Messages,
            None => planner::opening(&request.call, &members.layout),
        };
        let now = Instant::now();
        Self {
            state: CallState::Waiting,
            event: u64::MAX,
            waited: Vec::new(),
            heard: false,
            exec,
            opening,
            completion: Arc::default(),
            entered: false,
            error: None,
            began: now,
            deadline: None,
            moved: now,
            stirred: false,
            announced: false,
            named: false,
            body: Body::new(id, members, call_id, request, signature, scratch),
        }
    }

    /// Passes to another state, and notes that in its record: every change of a state passes here.
    pub(crate) fn pass_to(&mut self, state: CallState, events: &EventRing) {
        let before = std::mem::replace(&mut self.state, state);
        match state {
            CallState::Unmatched | CallState::Waiting => {}
            CallState::Opening => events.note(self.event, Phase::Started),
            CallState::Running if before == CallState::Opening => self.note_first_byte(events),
            CallState::Running => events.note(self.event, Phase::Started),
            CallState::Closing => events.note(self.event, Phase::Failed),
        }
    }

    /// Something of a peer has come.
    pub(crate) fn note_first_byte(&mut self, events: &EventRing) {
        if !std::mem::replace(&mut self.heard, true) {
            events.note(self.event, Phase::FirstByte);
        }
    }

    /// This rank has slept while the call waited.
    pub(crate) fn note_wait(&mut self, slept: Duration, events: &EventRing) {
        let body = &self.body;
        for rank in body.members.ranks_of(&self.absent()) {
            match self.waited.iter_mut().find(|(other, _)| *other == rank) {
                Some((_, sum)) => *sum += slept.as_nanos() as u64,
                None => self.waited.push((rank, slept.as_nanos() as u64)),
            }
        }
        if let Some((rank, waited)) = self.waited.iter().max_by_key(|(_, waited)| waited) {
            events.note_wait(self.event, *rank, *waited);
        }
    }

    /// Begins to run a schedule.
    pub fn run(&mut self, schedule: Arc<Schedule>, out: &mut Outbox) -> Result<()> {
        let size = self.body.request.call.dtype.size();
        // Of the schedule before, if ranks found out that they need another: this one does everything itself, and its steps
        // have the same numbers.
        self.body.pending.clear();
        self.body.summing.clear();
        self.body.set_schedule(schedule.clone())?;
        // Peers that will send much wait until they know that this rank is in the call.
        for t in schedule.traffic().iter().filter(|t| t.received * size > EAGER) {
            let frame = self.body.frame(Kind::Ready, 0, 0);
            let rank = self.body.members.ranks[t.peer as usize];
            out.give(rank, &frame, Vec::new());
            out.pump_to(rank); // now, and not after the reductions that this schedule begins with
        }
        if let Some(Message { peer, sends: true, .. }) = self.body.request.message
            && schedule.sent_to(peer) * size > EAGER
            && !self.body.inside.contains(&peer)
        {
            let rank = self.body.members.ranks[peer as usize];
            out.give(rank, &self.body.frame(Kind::Offer, 0, 0), Vec::new());
        }
        self.exec.reset(schedule);
        self.exec.start(&mut StepRunner { body: &mut self.body, out })
    }

    /// The message of a receive that also takes shorter ones has come: what it is. If it is as long as was expected, the
    /// schedule goes on; else there is another one, and nothing has been received by the first.
    pub(crate) fn shorten(&mut self, signature: Signature, events: &EventRing) {
        let call = &mut self.body.request.call;
        let before = (call.len, call.dtype.size());
        call.len = signature.count as usize;
        call.dtype = signature.dtype().unwrap_or(call.dtype);
        let now = (call.len, call.dtype.size());
        self.body.signature = signature;
        if self.state == CallState::Running && before != now {
            self.exec.rest();
            self.pass_to(CallState::Waiting, events);
        }
    }

    /// Carries on with the reductions that wait, for one turn; true if there were any.
    pub(crate) fn take_turn(&mut self, out: &mut Outbox) -> Result<bool> {
        self.body.turn = TURN; // also for the steps that follow
        if self.body.pending.is_empty() {
            return Ok(false);
        }
        let lanes = out.lanes.clone();
        let mut moved = false;
        while let Some(next) = self.body.pending.front().copied().filter(|_| self.body.turn > 0) {
            // Lanes have enough to do, and this thread helps them when it has nothing to decide.
            if self.body.summing.len() >= lanes.most_sums() {
                break;
            }
            moved = true;
            let schedule = self.body.schedule.clone();
            let Some(Step::Reduce { from, to, finish }) = schedule.steps.get(next.step as usize) else {
                return Err(Error::misuse(
                    "internal error: a step that is no reduction waits for a turn; please report it",
                ));
            };
            let len = from.first().map_or(0, |loc| loc.span.len) * self.body.request.call.dtype.size();
            if next.at == 0
                && lanes.want(len, len)
                && self.body.hand_over(next.step, from, to, *finish, &lanes)?
            {
                self.body.pending.pop_front();
                continue;
            }
            let at = self.body.fold(from, to, *finish, next.at)?;
            match (at, self.body.pending.front_mut()) {
                (Some(at), Some(front)) if at > next.at => front.at = at,
                (Some(_), _) => break,
                (None, _) => {
                    self.body.pending.pop_front();
                    self.complete(next.step, out)?;
                }
            }
        }
        self.stirred |= moved;
        Ok(moved)
    }

    /// A step has finished.
    pub fn complete(&mut self, step: u32, out: &mut Outbox) -> Result<()> {
        self.stirred = true;
        self.exec.complete(step, &mut StepRunner { body: &mut self.body, out })
    }

    /// A peer is in this call too: sends the messages that were held back for it.
    pub fn release(&mut self, place: Place, out: &mut Outbox) -> Result<()> {
        if self.body.inside.contains(&place) {
            return Ok(());
        }
        self.body.inside.push(place);
        let mut finished = Vec::new();
        let held = std::mem::take(&mut self.body.held);
        for (step, to, tag, span) in held {
            if to != place {
                self.body.held.push((step, to, tag, span));
            } else if self.body.transmit(step, to, tag, span, out)? == Started::Done {
                finished.push(step);
            }
        }
        finished.into_iter().try_for_each(|step| self.complete(step, out))
    }

    /// The places that this call waits for.
    pub fn waiting_for(&self) -> Vec<Place> {
        let body = &self.body;
        let mut places = match self.state {
            CallState::Unmatched => match body.request.message {
                Some(Message { peer, .. }) if peer != Message::ANY => vec![peer],
                _ => (0..body.members.ranks.len() as Place).collect(),
            },
            CallState::Waiting => body.members.busy(body.call_id).collect(),
            CallState::Opening => body.members.absent(body.call_id, 0),
            CallState::Running => {
                let mut places = self.exec.waiting_for();
                // Do not wait for a message that came before its step: its sender may have left since.
                for (from, ..) in &body.arrived {
                    if let Some(i) = places.iter().position(|p| p == from) {
                        places.swap_remove(i);
                    }
                }
                if let Some((_, ordinal)) = body.barrier {
                    places.extend(body.members.absent(body.call_id, ordinal));
                }
                places.extend(body.held.iter().map(|h| h.1));
                places
            }
            CallState::Closing => Vec::new(),
        };
        places.retain(|&p| p != body.members.me);
        places.sort_unstable();
        places.dedup();
        places
    }

    /// The ranks to name when a call waits: members that have not entered the call as far as this rank knows (ranks
    /// that stall tell all others that they are in it), otherwise the ranks whose data it waits for.
    pub fn absent(&self) -> Vec<Place> {
        let absent = self.not_entered();
        if absent.is_empty() { self.waiting_for() } else { absent }
    }

    /// The ranks to name when a call is late: the same, otherwise those that do not take what it sends. While this rank
    /// has sums to make nobody else need be the reason, and a rank that takes what comes slowly is not late itself: so
    /// time that this rank sleeps does not count as theirs.
    pub(crate) fn late(&self) -> Vec<Place> {
        let absent = self.absent();
        let is_sending = self.body.pending.is_empty() && self.body.summing.is_empty();
        if !absent.is_empty() || !is_sending || self.state != CallState::Running {
            return absent;
        }
        let mut places = self.exec.sending_to();
        places.dedup();
        places
    }

    /// The members that have not made this collective, as far as this rank knows.
    pub(crate) fn not_entered(&self) -> Vec<Place> {
        let body = &self.body;
        let members = &body.members;
        let here = members.absent(body.call_id, 0);
        let entered = |p: Place| match members.op_slot(p, body.call_id) {
            Some(_) => !here.contains(&p),
            None => body.inside.contains(&p),
        };
        (0..members.ranks.len() as Place)
            .filter(|&p| p != members.me && body.request.message.is_none() && !entered(p))
            .collect()
    }

    /// Returns the memory that another call can use.
    pub fn into_spare(mut self) -> (Scratch, Executor) {
        self.exec.rest();
        (self.body.into_scratch(), self.exec)
    }
}
