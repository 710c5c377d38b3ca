//! The calls under way on this rank, and the numbers by which ranks know which call a message belongs to.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::Instant;

use trigram_core::Error;
use trigram_core::executor::Executor;
use trigram_core::planner::{self, Opening};
use trigram_core::schedule::Place;
use trigram_core::signature::Signature;
use trigram_core::wire::{CallId, Frame, Kind};

use crate::call::active_call::{ActiveCall, CallState};
use crate::call::agreed_rates::AgreedRates;
use crate::call::body::Body;
use crate::call::index::Index;
use crate::call::request::{Message, Request, Submission};
use crate::call::unexpected::{MOST_GROUPS, Unexpected, UnexpectedMessage};
use crate::group::members::Members;
use crate::health::events::EventRing;
use crate::host::control_segment::OP_SLOTS;
use crate::link::outbox::Outbox;
use crate::sys::clock;
use crate::sys::completion::Completion;
use crate::sys::memory::Scratch;

/// The fewest groups for which it is worth to look for deleted ones.
const SWEEP: usize = 256;

/// The state of a group.
#[derive(Default)]
struct GroupState {
    /// `None`: peers have mentioned it, and this rank has not made a call of it yet.
    members: Option<Weak<Members>>,
    /// The number of the next collective.
    next: u64,
    /// Messages so far, by world rank of the peer, user's tag, and whether we send.
    messages: HashMap<(u32, u32, bool), u64>,
    rates: AgreedRates,
    /// From which collective on the group can make no calls any more, and no messages at all; and why.
    aborted: Option<(CallId, Error)>,
    /// Calls that use rates and have not begun. Rates change with a call, so they begin in the order of their numbers.
    by_rates: BTreeSet<CallId>,
}

/// The calls under way, under the progress lock.
#[derive(Default)]
pub struct Calls {
    /// The calls, in no particular order.
    pub active: Vec<ActiveCall>,
    index: Index,
    /// What came before its call.
    pub(crate) unexpected: Unexpected,
    groups: HashMap<u64, GroupState>,
    /// Groups that this rank has deleted, and the number of their next collective: what still arrives is dropped.
    deleted: HashMap<u64, u64>,
    /// With so many groups, the next look for deleted ones is due.
    sweep_at: usize,
    /// Why this rank can make no calls any more: it has lost a message.
    pub(crate) broken: Option<Error>,
    /// Calls that have failed since this was last asked: frames must no longer arrive into their memory.
    failed: Vec<u64>,
    /// How many calls are [`CallState::Unmatched`].
    pub(crate) unmatched: usize,
    /// The memory of calls that have ended, for others.
    spare: Vec<(Scratch, Executor)>,
    /// The number in this process of the call that was taken up last.
    pub(crate) last_id: u64,
    /// Records of calls, for threads without the progress lock.
    pub(crate) events: Arc<EventRing>,
}

impl Calls {
    /// None yet; their records go into `events`.
    pub(crate) fn new(events: Arc<EventRing>) -> Self {
        Self { events, ..Self::default() }
    }

    /// The number of a call that is made now, and the other rank if it is a message. Each group numbers its
    /// collectives in the order in which they are made.
    pub(crate) fn number(
        &mut self,
        members: &Arc<Members>,
        message: Option<Message>,
    ) -> (CallId, Option<u32>) {
        let group = self.group(members);
        match message {
            None => {
                group.next += 1;
                (CallId::collective(group.next - 1), None)
            }
            Some(Message { peer, tag, sends, .. }) => {
                let rank = members.ranks.get(peer as usize).copied().unwrap_or(u32::MAX);
                let n = group.messages.entry((rank, tag, sends)).or_default();
                *n += 1;
                (CallId::message(tag, *n - 1), Some(rank))
            }
        }
    }

    /// The number of the next collective of a group, for a call that needs nothing but its operation slot; `None` while
    /// anything else is under way or has come, or has failed.
    pub(crate) fn undisturbed(&mut self, members: &Arc<Members>) -> Option<CallId> {
        if !self.active.is_empty() || !self.unexpected.is_empty() || self.broken.is_some() {
            return None;
        }
        let group = self.group(members);
        group.aborted.is_none().then(|| CallId::collective(group.next))
    }

    /// The next receive that can be matched: its index, and the peer whose next message with its tag it takes.
    ///
    /// A message goes to the receive that was made first, of those with its tag that are from its sender or from any
    /// source. Messages count in the order in which they came.
    pub(crate) fn next_match(&self) -> Option<(usize, u32)> {
        if self.unmatched == 0 {
            return None;
        }
        let is_next = |peer: u32, group: u64, call: CallId| {
            let Some((tag, n)) = call.as_message() else { return false };
            let Some(state) = self.groups.get(&group) else { return false };
            n == state.messages.get(&(peer, tag, false)).copied().unwrap_or_default() & 0xffff_ffff
        };
        let receive = |peer: u32, group: u64, call: CallId| {
            let (tag, _) = call.as_message().filter(|_| is_next(peer, group, call))?;
            self.first_unmatched(group, tag, |m, ranks| {
                m.is_from_any() && ranks.contains(&peer) || ranks.get(m.peer as usize) == Some(&peer)
            })
        };
        let came = self.unexpected.messages().filter(|m| matches!(m.frame.kind, Kind::Data | Kind::Offer));
        let matching =
            came.filter_map(|m| Some((m.arrival, receive(m.peer, m.frame.group, m.frame.call)?, m.peer)));
        if let Some((_, i, peer)) = matching.min_by_key(|(arrival, ..)| *arrival) {
            return Some((i, peer));
        }
        for (peer, group, call) in self.unexpected.failed_messages() {
            if let Some(i) = receive(peer, group, call) {
                return Some((i, peer));
            }
        }
        // A receive from a known rank waits only for those from any source that were made before it. Of several, the one
        // that was made first has the next number.
        let free = self.active.iter().enumerate().filter_map(|(i, active)| {
            let message = active.body.request.message.filter(|m| !m.is_from_any())?;
            let from_any = self.first_unmatched(active.body.members.id, message.tag, |m, _| m.is_from_any());
            let waits = from_any.is_some_and(|j| self.active[j].body.id < active.body.id);
            let rank = *active.body.members.ranks.get(message.peer as usize)?;
            (active.state == CallState::Unmatched && !waits).then_some((active.body.id, i, rank))
        });
        free.min().map(|(_, i, rank)| (i, rank))
    }

    /// The unmatched receive of a group with this tag that was made first, of those that fit.
    fn first_unmatched(
        &self,
        group: u64,
        tag: u32,
        fits: impl Fn(&Message, &[u32]) -> bool,
    ) -> Option<usize> {
        let fits = |active: &ActiveCall| {
            let body = &active.body;
            active.state == CallState::Unmatched
                && body.members.id == group
                && body.request.message.is_some_and(|m| m.tag == tag && fits(&m, &body.members.ranks))
        };
        let fitting = self.active.iter().enumerate().filter(|(_, active)| fits(active));
        fitting.min_by_key(|(_, active)| active.body.id).map(|(i, _)| i)
    }

    /// Whether a receive must wait for its message to know its number: it is from any source, or made after one that
    /// still waits.
    pub(crate) fn is_unmatched(&self, members: &Members, message: Message) -> bool {
        let behind = || self.first_unmatched(members.id, message.tag, |m, _| m.is_from_any()).is_some();
        message.is_from_any() || !message.sends && self.unmatched > 0 && behind()
    }

    /// Adds a receive that has no number yet, and returns its index.
    pub(crate) fn enter_unmatched(&mut self, submission: Submission, message: Message) -> usize {
        let Submission { members, request, completion, made, .. } = submission;
        self.group(&members);
        let i = self.enter(members, CallId::message(message.tag, u64::MAX), request, completion, made);
        self.active[i].pass_to(CallState::Unmatched, &self.events);
        self.unmatched += 1;
        i
    }

    /// Matches a receive with the next message of a peer: gives it its number.
    pub(crate) fn bind(&mut self, i: usize, peer: u32) {
        let members = self.active[i].body.members.clone();
        let (Some(mut message), Some(place)) = (self.active[i].body.request.message, members.place_of(peer))
        else {
            return;
        };
        message.peer = place;
        let (call, _) = self.number(&members, Some(message));
        let active = &mut self.active[i];
        active.body.request.message = Some(message);
        let before = std::mem::replace(&mut active.body.call_id, call);
        active.pass_to(CallState::Waiting, &self.events);
        self.events.set_call(active.event, call);
        self.events.note_wait(active.event, peer, 0);
        active.completion.set_sender(peer);
        self.index.rename(active.body.id, (members.id, before), (members.id, call));
        self.touch(i);
        self.unmatched -= 1;
    }

    /// The state of a group of this rank.
    fn group(&mut self, members: &Arc<Members>) -> &mut GroupState {
        if !self.groups.contains_key(&members.id) {
            self.sweep();
        }
        let group = self.groups.entry(members.id).or_default();
        if group.members.is_none() {
            group.members = Some(Arc::downgrade(members));
            group.next = self.deleted.remove(&members.id).unwrap_or_default();
        }
        group
    }

    /// Forgets groups that nobody has any more, all but their numbers.
    fn sweep(&mut self) {
        if self.groups.len() < self.sweep_at.max(SWEEP) {
            return;
        }
        let gone = |group: &GroupState| group.members.as_ref().is_some_and(|m| m.strong_count() == 0);
        for (id, group) in self.groups.extract_if(|_, group| gone(group)) {
            self.deleted.insert(id, group.next);
        }
        self.sweep_at = 2 * self.groups.len();
    }

    /// The number of the next collective of a group.
    pub(crate) fn next(&mut self, group: u64) -> CallId {
        CallId::collective(self.groups.entry(group).or_default().next)
    }

    /// What the ranks of a group have agreed on about their links.
    pub(crate) fn rates(&mut self, group: u64) -> &mut AgreedRates {
        &mut self.groups.entry(group).or_default().rates
    }

    /// See [`Calls::rates`]; `None` for an unknown group.
    pub(crate) fn known_rates(&self, group: u64) -> Option<&AgreedRates> {
        self.groups.get(&group).map(|g| &g.rates)
    }

    /// A peer declares its rate, perhaps in a group that this rank has not created yet.
    pub(crate) fn receive_rate(&mut self, group: u64, call: CallId, peer: u32, rate: f64) {
        let is_new = !self.groups.contains_key(&group);
        let mentioned = || self.groups.values().filter(|g| g.members.is_none()).count();
        if is_new && (self.deleted.contains_key(&group) || mentioned() >= MOST_GROUPS) {
            return;
        }
        self.rates(group).receive(call.0, peer, Some(rate));
    }

    /// A collective has failed on some rank: voids the rates that were declared up to it.
    pub(crate) fn void_rates(&mut self, group: u64, call: CallId) {
        if let Some(group) = self.groups.get_mut(&group).filter(|_| !call.is_message()) {
            group.rates.void(call.0);
        }
    }

    /// Adds a call that has a number, and returns its index; `made`: when its caller made it, in ticks.
    pub(crate) fn enter(
        &mut self,
        members: Arc<Members>,
        call: CallId,
        request: Request,
        completion: Arc<Completion>,
        made: u64,
    ) -> usize {
        let (scratch, exec) = self.spare.pop().unwrap_or_default();
        let signature = request.signature();
        self.last_id += 1;
        let mut active = ActiveCall::new(self.last_id, members, call, request, signature, scratch, exec);
        active.completion = completion;
        active.event = self.events.begin(&active.body.made(made));
        if goes_by_rates(&active)
            && let Some(group) = self.groups.get_mut(&active.body.members.id)
        {
            group.by_rates.insert(call);
        }
        self.index.add(self.active.len(), self.last_id, active.body.members.id, call);
        self.active.push(active);
        self.active.len() - 1
    }

    /// Sets the time at which a call times out.
    pub(crate) fn set_deadline(&mut self, i: usize, deadline: Instant) {
        self.active[i].deadline = Some(deadline);
    }

    /// Whether a call has timed out.
    pub(crate) fn is_late(&self, i: usize, now: Instant) -> bool {
        self.active[i].deadline.is_some_and(|d| now >= d)
    }

    /// The index of the call with this id.
    pub(crate) fn position(&self, id: u64) -> Option<usize> {
        self.index.position(id)
    }

    /// A call has changed: the next round of progress looks at it.
    pub(crate) fn touch(&mut self, i: usize) {
        self.index.set_due(i, true);
    }

    /// The first call from index `from` on that may move or end without a message.
    pub(crate) fn next_due(&self, from: usize) -> Option<usize> {
        self.index.next_due(from)
    }

    /// A call has been moved as far as possible: whether to look at it again before something touches it.
    pub(crate) fn settle_due(&mut self, i: usize) {
        let Some(active) = self.active.get(i) else { return };
        let body = &active.body;
        let is_due = match active.state {
            CallState::Waiting if goes_by_rates(active) && active.opening == Opening::Messages => {
                self.may_begin(body.members.id, body.call_id)
            }
            // While an earlier call of this rank is under way that uses the same operation slot, nothing can change.
            CallState::Waiting => {
                let before = body.call_id.0.checked_sub(OP_SLOTS as u64).map(CallId);
                before.is_none_or(|call| self.index.with(body.members.id, call).next().is_none())
            }
            CallState::Running => active.exec.is_done() || body.barrier.is_some() || !body.pending.is_empty(),
            CallState::Unmatched => false,
            CallState::Opening | CallState::Closing => true,
        };
        self.index.set_due(i, is_due);
    }

    /// Whether no call that uses rates waits to begin before this one.
    pub(crate) fn may_begin(&self, group: u64, call: CallId) -> bool {
        let first = self.groups.get(&group).and_then(|group| group.by_rates.first());
        first.is_none_or(|&first| first >= call)
    }

    /// A call that uses rates has begun or failed: the next one may begin.
    pub(crate) fn note_begun(&mut self, i: usize) {
        let Body { members, call_id, .. } = &self.active[i].body;
        let Some(group) = self.groups.get_mut(&members.id) else { return };
        if group.by_rates.remove(call_id)
            && let Some(&next) = group.by_rates.first()
        {
            let next = self.index.with(members.id, next).next();
            next.into_iter().for_each(|i| self.index.set_due(i, true));
        }
    }

    /// The index of the call that a frame from a peer belongs to.
    pub(crate) fn find(&self, peer: u32, frame: &Frame) -> Option<usize> {
        self.index.with(frame.group, frame.call).find(|&i| takes(&self.active[i], peer, frame))
    }

    /// Whether this rank has already finished or skipped the call of a frame that belongs to no call under way.
    pub(crate) fn is_over(&self, peer: u32, frame: &Frame) -> bool {
        let Some(group) = self.groups.get(&frame.group) else {
            return self.deleted.contains_key(&frame.group);
        };
        match frame.call.as_message() {
            _ if aborted_at(group, frame.call).is_some() => true,
            None => frame.call.0 < group.next,
            Some((tag, _)) => {
                let tells_direction = matches!(frame.kind, Kind::Fail | Kind::Stuck);
                let sends = frame.kind == Kind::Ready || tells_direction && frame.tag == 0;
                group.messages.get(&(peer, tag, sends)).is_some_and(|&next| frame.call.is_before(next))
            }
        }
    }

    /// Takes out a message that came before call `i` was made. `from` is where to look, and where to go on looking.
    pub(crate) fn take_unexpected(&mut self, i: usize, from: &mut usize) -> Option<(u32, Frame, Vec<u8>)> {
        let active = &self.active[i];
        let (group, call) = (active.body.members.id, active.body.call_id);
        let is_its = |e: &UnexpectedMessage| takes(active, e.peer, &e.frame);
        let (at, message) = self.unexpected.take(group, call, *from, is_its)?;
        *from = at;
        Some((message.peer, message.frame, message.payload))
    }

    /// Fails a call; with `tell`, also tells the other members.
    pub(crate) fn fail(&mut self, i: usize, error: Error, tell: bool, out: &mut Outbox) {
        let told = tell.then(|| error.clone());
        self.fail_as(i, error, told, out);
    }

    /// Fails a call, and tells the other members what `told` is.
    pub(crate) fn fail_as(&mut self, i: usize, error: Error, told: Option<Error>, out: &mut Outbox) {
        let active = &mut self.active[i];
        if active.state == CallState::Closing {
            return;
        }
        let unmatched = active.state == CallState::Unmatched;
        self.unmatched -= usize::from(unmatched);
        active.pass_to(CallState::Closing, &self.events);
        active.error = Some(error.clone());
        active.moved = Instant::now();
        let (id, call, signature) = (active.body.id, active.body.call_id, active.body.signature);
        let members = active.body.members.clone();
        let message = active.body.request.message;
        let entered = active.entered;
        active.body.pending.clear();
        active.body.summing.clear(); // from here on no lane touches its memory
        self.touch(i);
        self.note_begun(i);
        self.void_rates(members.id, call);
        if let Some(op_slot) = members.op_slot(members.me, call).filter(|_| entered) {
            op_slot.fail(call.0);
            // From here on, this rank accesses no peer's memory for this call.
            op_slot.leave(call.0);
            members.ring();
        }
        self.events.note_failure(members.id, call, &error);
        out.take_back(id);
        self.failed.push(id);
        let peer = message.and_then(|m| members.ranks.get(m.peer as usize).copied());
        self.unexpected.drop_messages(members.id, call, peer);
        // A receive that has found no message has a number that means nothing to others.
        if let Some(told) = told.filter(|_| !unmatched) {
            announce(&members, call, message, signature, &told, out);
        }
    }

    /// Fails all calls.
    pub(crate) fn fail_all(&mut self, error: &Error, tell: bool, out: &mut Outbox) {
        (0..self.active.len()).for_each(|i| self.fail(i, error.clone(), tell, out));
    }

    /// Aborts the collectives of a group before the `through`-th, on all ranks: those under way fail, the others are
    /// skipped.
    pub(crate) fn abort(&mut self, members: &Arc<Members>, through: u64, error: &Error, out: &mut Outbox) {
        for i in 0..self.active.len() {
            let body = &self.active[i].body;
            if body.members.id == members.id && !body.call_id.is_message() && body.call_id.0 < through {
                self.fail(i, error.clone(), true, out);
            }
        }
        let group = self.group(members);
        let skipped = group.next..through;
        group.next = group.next.max(through);
        for call in skipped.map(CallId::collective) {
            self.unexpected.drop_failures(members.id, call);
            // A skipped call is entered and fails at once, so that its operation slot is passed on to the next call.
            let i = self.enter(members.clone(), call, Request::nothing(), Arc::default(), clock::ticks());
            self.fail(i, error.clone(), true, out);
        }
    }

    /// The first collective of a group that this rank has not ended.
    pub(crate) fn first_open(&mut self, members: &Arc<Members>) -> CallId {
        let of_group = self.active.iter().filter(|active| active.body.members.id == members.id);
        let open = of_group.map(|active| active.body.call_id).filter(|call| !call.is_message()).min();
        open.unwrap_or(CallId::collective(self.group(members).next))
    }

    /// Aborts a group for good: its messages, and its collectives from `from` on, under way and later ones, fail. Those
    /// before it have ended on the rank that aborts, so a slower rank ends them too. For an unknown group, what is kept
    /// is bounded.
    pub(crate) fn abort_group(&mut self, group: u64, from: CallId, error: &Error, out: &mut Outbox) {
        let mentioned = || self.groups.values().filter(|g| g.members.is_none()).count();
        if !self.groups.contains_key(&group)
            && (self.deleted.contains_key(&group) || mentioned() >= MOST_GROUPS)
        {
            return;
        }
        let state = self.groups.entry(group).or_default();
        match &mut state.aborted {
            Some((first, _)) => *first = from.min(*first),
            none => *none = Some((from, error.clone())),
        }
        for i in 0..self.active.len() {
            let body = &self.active[i].body;
            if body.members.id == group && (body.call_id.is_message() || body.call_id >= from) {
                self.fail(i, error.clone(), false, out);
            }
        }
        self.unexpected.drop_from(group, from);
    }

    /// Why a call of a group cannot be made any more, if it cannot.
    pub(crate) fn aborted(&self, group: u64, call: CallId) -> Option<Error> {
        aborted_at(self.groups.get(&group)?, call).cloned()
    }

    /// Whether frames may still arrive into the memory of a failed call.
    pub(crate) fn is_written(&self, id: u64) -> bool {
        self.failed.contains(&id)
    }

    /// The calls that have failed since this was asked last.
    pub(crate) fn take_failed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.failed)
    }

    /// Takes out a call that has ended.
    pub(crate) fn remove(&mut self, i: usize) -> ActiveCall {
        let (len, last) = (self.active.len(), self.active.last().map_or(0, |active| active.body.id));
        let active = self.active.swap_remove(i);
        let Body { id, members, call_id, .. } = &active.body;
        self.index.remove(i, len, *id, (members.id, *call_id), last);
        // Its operation slot is free for the call that has waited for it.
        if !call_id.is_message() {
            let next = self.index.with(members.id, CallId(call_id.0 + OP_SLOTS as u64)).next();
            next.into_iter().for_each(|i| self.index.set_due(i, true));
        }
        active
    }

    /// Keeps a call's memory for the next call (invariant MEM-1).
    pub(crate) fn recycle(&mut self, active: ActiveCall) {
        self.spare.push(active.into_spare());
    }
}

/// Why a call of a group fails, if the group is aborted for it.
fn aborted_at(group: &GroupState, call: CallId) -> Option<&Error> {
    let (first, error) = group.aborted.as_ref()?;
    (call.is_message() || call >= *first).then_some(error)
}

/// Whether a call uses the rates of links.
fn goes_by_rates(active: &ActiveCall) -> bool {
    let body = &active.body;
    body.request.message.is_none() && planner::goes_by_rates(&body.request.call, &body.members.layout)
}

/// Whether a frame from a peer is for this call, whose group and number it has.
fn takes(active: &ActiveCall, peer: u32, frame: &Frame) -> bool {
    match active.body.request.message {
        _ if active.state == CallState::Unmatched => false, // it has no number yet
        None => true,
        Some(m) => {
            let from = active.body.members.ranks.get(m.peer as usize) == Some(&peer);
            let sends = match frame.kind {
                Kind::Data | Kind::Offer => false,
                Kind::Ready => true,
                _ => frame.tag == 0, // the peer received, so we send
            };
            from && m.sends == sends
        }
    }
}

/// Tells the members of a group that a call has failed.
fn announce(
    members: &Members,
    call: CallId,
    message: Option<Message>,
    signature: Signature,
    error: &Error,
    out: &mut Outbox,
) {
    let Ok(payload) = postcard::to_stdvec(error) else { return };
    let places: Vec<Place> = match message {
        Some(message) => vec![message.peer],
        None => (0..members.ranks.len() as u32).collect(),
    };
    // For messages the tag tells which of the two directions failed: 1 if we were the sender.
    let tag = u32::from(message.is_some_and(|m| m.sends));
    let len = payload.len() as u32;
    let frame = Frame { kind: Kind::Fail, group: members.id, call, tag, len, signature };
    for place in places.into_iter().filter(|&p| p != members.me) {
        if let Some(&rank) = members.ranks.get(place as usize) {
            out.give(rank, &frame, payload.clone());
        }
    }
}
