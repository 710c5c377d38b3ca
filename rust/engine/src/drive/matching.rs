//! Matches frames that arrive with the calls that wait for them.
//!
//! A message finds its call by group and number, and its step by sender and tag. If the step has begun, the payload
//! goes straight into the call's memory; otherwise it is kept until the step begins.

use trigram_core::schedule::{Place, Span, Step};
use trigram_core::signature::Signature;
use trigram_core::wire::{CallId, Frame, Kind};
use trigram_core::{Error, Result};

use crate::call::active_call::{ActiveCall, CallState};
use crate::call::calls::Calls;
use crate::call::mismatch::mismatch;
use crate::call::unexpected::{MESSAGE_COST, MOST_GROUPS, MOST_MESSAGE_BYTES};
use crate::drive::failures;
use crate::group::world::World;
use crate::health::losses::{LossEvent, LossKind};
use crate::health::peers::Peers;
use crate::health::stuck::{MOST_BYTES, StuckPeer};
use crate::link::frames::{AHEAD, Sink, Target, Token};
use crate::link::outbox::Outbox;

/// The most bytes of an error that a peer reports.
const MOST_ERROR_BYTES: usize = 1 << 20;

/// What a frame that arrives may change.
pub(crate) struct Matching<'a> {
    pub(crate) world: &'a World,
    pub(crate) peers: &'a mut Peers,
    pub(crate) calls: &'a mut Calls,
    pub(crate) out: &'a mut Outbox,
}

impl Matching<'_> {
    /// Passes messages that came before a call was made to the new call.
    pub(crate) fn take_unexpected(&mut self, i: usize) {
        let mut from = 0;
        while let Some((peer, frame, payload)) = self.calls.take_unexpected(i, &mut from) {
            if self.compare(i, peer, &frame) {
                self.accept(i, peer, &frame, payload);
            }
        }
    }

    /// A step has finished.
    pub(crate) fn complete(&mut self, token: Token) {
        let Some(i) = self.calls.position(token.call) else { return };
        let active = &mut self.calls.active[i];
        if active.state == CallState::Closing {
            return;
        }
        let completed = active.complete(token.step, self.out);
        self.calls.touch(i);
        if let Err(error) = completed {
            self.stop(i, error);
        }
    }

    fn stop(&mut self, i: usize, error: Error) {
        failures::stop(self.calls, i, error, self.out, self.peers, self.world.rank);
    }

    /// A peer has evicted a rank, and so does this rank. If the evicted rank is this one, it loses the peer.
    fn receive_loss(&mut self, peer: u32, rank: u32, payload: &[u8]) {
        let Ok(why) = postcard::from_bytes::<Error>(payload) else { return };
        if rank == self.world.rank {
            self.peers.note_eviction(why.clone());
            let why = Error::Aborted(format!("it evicted this rank, rank {rank}: {why}"));
            self.peers.report(LossEvent { rank: peer, why, kind: LossKind::Refused, reported_by: None });
        } else if (rank as usize) < self.world.size() {
            self.peers.report(LossEvent { rank, why, kind: LossKind::Silent, reported_by: Some(peer) });
        }
    }

    /// Whether a peer has made the same call as this rank; if not, the call fails.
    fn compare(&mut self, i: usize, peer: u32, frame: &Frame) -> bool {
        let body = &self.calls.active[i].body;
        let Some(place) = body.members.place_of(peer) else { return false };
        let mine = body.expected(place, frame.kind);
        if mine == frame.signature || frame.kind != Kind::Data && mine.agrees(&frame.signature) {
            return true;
        }
        if mine.extra & Signature::SHORTER != 0 && mine.agrees(&frame.signature) {
            self.calls.active[i].shorten(frame.signature, &self.calls.events);
            self.calls.touch(i);
            return true;
        }
        let mut sides = [(self.world.rank, mine), (peer, frame.signature)];
        sides.sort_by_key(|s| s.0);
        let error = mismatch(&body.members, body.call_id, &sides);
        self.calls.fail(i, error, true, self.out);
        false
    }

    fn accept(&mut self, i: usize, peer: u32, frame: &Frame, payload: Vec<u8>) {
        let active = &mut self.calls.active[i];
        let Some(place) = active.body.members.place_of(peer) else { return };
        if frame.kind == Kind::Data {
            active.note_first_byte(&self.calls.events);
        }
        let out = &mut *self.out;
        let go = || {
            active.release(place, out)?;
            if frame.kind == Kind::Data {
                let step = active.exec.schedule().recv_step(place, frame.tag);
                if !is_due(active, place, frame.tag, step, payload.len()) {
                    let what = format!("unexpected or duplicate message (tag {})", frame.tag);
                    return Err(Error::Corrupt { rank: peer, what });
                }
                active.body.arrived.push((place, frame.tag, payload));
                if let Some(step) = step.filter(|&s| active.exec.is_started(s)) {
                    return deliver(active, step, out);
                }
            }
            Ok(())
        };
        let accepted = go();
        self.calls.touch(i);
        if let Err(error) = accepted {
            self.stop(i, error);
        }
    }
}

/// Whether a call may keep a message. Each message comes once, and once the schedule is known, so are its messages.
/// So peers can make this rank keep only what the call was to receive anyway.
fn is_due(active: &ActiveCall, place: Place, tag: u32, step: Option<u32>, len: usize) -> bool {
    let arrived = &active.body.arrived;
    // A call may turn out to need messages when all ranks of the host have shown what they call.
    let may_change = active.state == CallState::Opening;
    let known = !may_change && !active.exec.schedule().steps.is_empty() || active.state == CallState::Running;
    let held = if known { 0 } else { arrived.iter().map(|m| m.2.len() + MESSAGE_COST).sum() };
    held + len <= MOST_MESSAGE_BYTES
        && (!known || step.is_some_and(|s| !active.exec.is_finished(s)))
        && !arrived.iter().any(|m| m.0 == place && m.1 == tag)
}

/// Copies the last message that arrived into the memory of the step that waits for it.
fn deliver(active: &mut ActiveCall, step: u32, out: &mut Outbox) -> Result<()> {
    let Some((place, _, bytes)) = active.body.arrived.pop() else { return Ok(()) };
    let (span, len) = destination(active, step)?;
    if bytes.len() != len {
        let rank = active.body.members.ranks[place as usize];
        return Err(Error::Corrupt {
            rank,
            what: format!("it sent {} bytes in a message of {len}", bytes.len()),
        });
    }
    active.body.put(span, &bytes)?;
    active.complete(step, out)
}

/// Where a `Recv` step puts what it receives, and its length in bytes.
fn destination(active: &ActiveCall, step: u32) -> Result<(Span, usize)> {
    match &active.exec.schedule().steps[step as usize] {
        Step::Recv { span, .. } => Ok((*span, span.len * active.body.request.call.dtype.size())),
        _ => Err(Error::misuse("internal error: a message for a step that receives none; please report it")),
    }
}

impl Sink for Matching<'_> {
    fn begin(&mut self, peer: u32, frame: &Frame) -> Result<Target> {
        let heap = || Target::Heap(vec![0; AHEAD.min(frame.len as usize)]);
        if frame.kind != Kind::Data {
            let most = match frame.kind {
                Kind::Fail | Kind::Lost | Kind::Abort => MOST_ERROR_BYTES,
                Kind::Rate => size_of::<f64>(),
                Kind::Stuck => MOST_BYTES,
                _ => 0,
            };
            if frame.len as usize > most {
                let what =
                    format!("it sent a control message of {} bytes, at most {most} are allowed", frame.len);
                return Err(Error::Corrupt { rank: peer, what });
            }
            return Ok(heap());
        }
        let Some(i) = self.calls.find(peer, frame) else {
            return Ok(if self.calls.is_over(peer, frame) { Target::Nowhere } else { heap() });
        };
        if self.calls.active[i].state == CallState::Closing || !self.compare(i, peer, frame) {
            return Ok(Target::Nowhere);
        }
        let active = &mut self.calls.active[i];
        active.note_first_byte(&self.calls.events);
        let Some(place) = active.body.members.place_of(peer) else { return Ok(Target::Nowhere) };
        let step = active.exec.schedule().recv_step(place, frame.tag);
        let Some(step) = step.filter(|&s| active.exec.is_started(s)) else { return Ok(heap()) };
        let (span, len) = destination(active, step)?;
        if len != frame.len as usize {
            let what = format!("it sent {} bytes in a message of {len}", frame.len);
            self.calls.fail(i, Error::Corrupt { rank: peer, what }, true, self.out);
            return Ok(Target::Nowhere);
        }
        if len > 0 && !active.body.is_in_one_place(span)? {
            return Ok(heap());
        }
        let to = if len == 0 { std::ptr::dangling_mut() } else { active.body.own(span)? };
        Ok(Target::Memory(to, Token { call: active.body.id, step }))
    }

    fn end(&mut self, peer: u32, frame: &Frame, target: Target) -> Result<()> {
        match (frame.kind, target) {
            (_, Target::Nowhere) | (Kind::Leave | Kind::Heartbeat, _) => {}
            (_, Target::Memory(_, token)) => {
                if let Some(i) = self.calls.position(token.call) {
                    self.accept(i, peer, &Frame { kind: Kind::Ready, ..*frame }, Vec::new());
                }
                self.complete(token);
            }
            (Kind::Fail, Target::Heap(payload)) => {
                let rank = peer;
                let error: Error = postcard::from_bytes(&payload)
                    .map_err(|_| Error::Corrupt { rank, what: "it reported a failure that this rank cannot decode; do all ranks run the same version of trigram?".into() })?;
                match self.calls.find(peer, frame) {
                    Some(i) => self.calls.fail(i, error, false, self.out),
                    None if self.calls.is_over(peer, frame) => self.calls.void_rates(frame.group, frame.call),
                    None => {
                        let unexpected = &mut self.calls.unexpected;
                        if !unexpected.keep_failure(frame.group, frame.call, peer, error.clone()) {
                            let what = format!(
                                "it reported failures of more than {MOST_GROUPS} calls that this rank has not made"
                            );
                            return Err(Error::Corrupt { rank, what });
                        }
                        self.calls.events.note_failure(frame.group, frame.call, &error);
                        if !frame.call.is_message() {
                            self.peers.add_failed_call(frame.group, error);
                        }
                    }
                }
            }
            (Kind::Lost, Target::Heap(payload)) => {
                self.receive_loss(peer, frame.tag, &payload);
            }
            (Kind::Abort, Target::Heap(payload)) => {
                if let Ok(error) = postcard::from_bytes(&payload) {
                    let from = CallId::collective(frame.call.0);
                    self.calls.abort_group(frame.group, from, &error, self.out);
                }
            }
            (Kind::Stuck, Target::Heap(payload)) => {
                if let Some(wait) = StuckPeer::decode(frame, &payload) {
                    self.peers.note_stuck(peer, wait);
                }
            }
            (Kind::Rate, Target::Heap(payload)) => {
                if let Ok(rate) = payload.as_slice().try_into().map(f64::from_le_bytes) {
                    self.calls.receive_rate(frame.group, frame.call, peer, rate);
                }
            }
            (_, Target::Heap(payload)) => match self.calls.find(peer, frame) {
                Some(i) if self.calls.active[i].state == CallState::Closing => {}
                Some(i) => {
                    if self.compare(i, peer, frame) {
                        self.accept(i, peer, frame, payload);
                    }
                }
                None if self.calls.is_over(peer, frame) => {}
                None => {
                    if let Err(error) = self.calls.unexpected.keep(peer, frame, payload) {
                        // It is this rank that lacks memory, so its calls fail: the sender has done no wrong.
                        self.calls.broken.get_or_insert(error);
                    }
                }
            },
        }
        Ok(())
    }
}
