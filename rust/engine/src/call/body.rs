//! A call's memory and messages: everything of a call under way but its executor.
//!
//! The schedule names memory, and this file resolves the names to addresses. This file, [`crate::call::steps`] and
//! [`crate::link::frames`] hold all accesses to callers' memory.

use std::collections::VecDeque;
use std::sync::Arc;

use trigram_core::executor::Started;
use trigram_core::planner::{self, Lent};
use trigram_core::schedule::{Buf, Loc, Place, Schedule, Span};
use trigram_core::signature::{Collective, Signature};
use trigram_core::wire::{CallId, Frame, Kind};
use trigram_core::{Error, Result};

use crate::call::fold::Summing;
use crate::call::request::Request;
use crate::group::members::Members;
use crate::group::world::World;
use crate::health::events::Made;
use crate::host::control_segment::OpSlot;
use crate::lanes::task::Task;
use crate::link::frames::Token;
use crate::link::outbox::Outbox;
use crate::sys::memory::Scratch;
use crate::sys::runs::Runs;

/// A call sends messages of up to this many bytes per peer at once. For more, it waits until the peer is known to be
/// in the call too, so that no peer is flooded.
pub const EAGER: usize = 1 << 20;

/// Memory that a peer on this host shares for this call: its input, its output or its bounce buffer.
#[derive(Clone, Copy, Debug)]
pub struct Loan {
    /// The peer's place.
    pub place: Place,
    /// First byte of the memory.
    pub base: *mut u8,
    /// Bytes of it.
    pub len: usize,
}

/// A reduction that waits for its turn, or for its next one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingReduce {
    pub(crate) step: u32,
    /// Bytes of each operand that are done.
    pub(crate) at: usize,
}

/// Everything of a call but its executor.
pub struct Body {
    /// Its number in this process.
    pub id: u64,
    /// The group.
    pub members: Arc<Members>,
    /// The number of the call in its group.
    pub call_id: CallId,
    /// What was asked.
    pub request: Request,
    /// What the ranks compare.
    pub signature: Signature,
    /// The barrier at which it waits: step and ordinal.
    pub barrier: Option<(u32, u32)>,
    /// Places known to be in this call.
    pub inside: Vec<Place>,
    /// Messages held back until their receiver is known to be in this call.
    pub held: Vec<(u32, Place, u32, Span)>,
    /// Messages that came before their step: place, tag, payload.
    pub arrived: Vec<(Place, u32, Vec<u8>)>,
    /// Which memory the ranks of this host share for this call.
    pub lent: Lent,
    /// Peers' memory that the call may access.
    pub loans: Vec<Loan>,
    /// Peers' outputs, in an update, which writes into them.
    pub outputs: Vec<Loan>,
    /// Bytes moved directly through peers' memory.
    pub direct_bytes: u64,
    /// This rank's own bounce buffer.
    pub bounce: (*mut u8, usize),
    /// Whether its payload is in its operation slot already.
    pub(crate) shown: bool,
    /// Reductions that wait for their turn.
    pub(crate) pending: VecDeque<PendingReduce>,
    /// Sums that lanes make, by step.
    pub(crate) summing: Vec<(u32, Task<Summing>)>,
    /// Bytes that its reductions may still read and write in this turn.
    pub(crate) turn: usize,
    /// The schedule that it runs.
    pub(crate) schedule: Arc<Schedule>,
    scratch: Scratch,
    scratch_base: *mut u8,
    scratch_len: usize,
}

impl Body {
    pub(crate) fn new(
        id: u64,
        members: Arc<Members>,
        call_id: CallId,
        request: Request,
        signature: Signature,
        scratch: Scratch,
    ) -> Self {
        Self {
            id,
            members,
            call_id,
            request,
            signature,
            barrier: None,
            inside: Vec::new(),
            held: Vec::new(),
            arrived: Vec::new(),
            lent: Lent::Nothing,
            loans: Vec::new(),
            outputs: Vec::new(),
            direct_bytes: 0,
            bounce: (std::ptr::null_mut(), 0),
            shown: false,
            pending: VecDeque::new(),
            summing: Vec::new(),
            turn: 0,
            schedule: Schedule::empty(),
            scratch,
            scratch_base: std::ptr::null_mut(),
            scratch_len: 0,
        }
    }

    /// Sets the schedule, and allocates its scratch memory.
    pub(crate) fn set_schedule(&mut self, schedule: Arc<Schedule>) -> Result<()> {
        self.scratch_len = schedule.scratch * self.request.call.dtype.size();
        self.scratch_base = self.scratch.reserve(self.scratch_len)?;
        self.schedule = schedule;
        Ok(())
    }

    pub(crate) fn into_scratch(self) -> Scratch {
        self.scratch
    }

    /// What the record of this call says, which was made at this moment.
    pub(crate) fn made(&self, at: u64) -> Made {
        let peer = |place: Place| self.members.ranks.get(place as usize).copied();
        let elements = match self.signature.count {
            0 => (self.request.nbytes() / self.request.call.dtype.size()) as u64,
            count => count,
        };
        Made {
            group: self.members.id,
            call: self.call_id,
            signature: self.signature,
            elements,
            message: self.request.message.map(|message| (peer(message.peer), message.sends)),
            at,
        }
    }

    /// A frame of this call.
    pub fn frame(&self, kind: Kind, tag: u32, len: u32) -> Frame {
        Frame { kind, group: self.members.id, call: self.call_id, tag, len, signature: self.signature }
    }

    /// The signature that a frame from a peer in the same call must have. Messages of an all-to-all with unequal
    /// lengths carry the length that the two ranks agree on, because no other rank knows it.
    pub fn expected(&self, peer: Place, kind: Kind) -> Signature {
        match kind {
            Kind::Data => self.pairwise(self.request.call.splits.as_ref().map(|s| &s.1), peer),
            _ => self.signature,
        }
    }

    /// The signature of a message whose length the two ranks know, of these by place.
    fn pairwise(&self, lengths: Option<&Vec<usize>>, peer: Place) -> Signature {
        let mut signature = self.signature;
        if let Some(lengths) = lengths.filter(|_| self.request.call.is_pairwise()) {
            signature.count = lengths.get(peer as usize).copied().unwrap_or_default() as u64;
            signature.extra &= !Signature::PAIRWISE;
        }
        signature
    }

    /// The memory that this rank shows to the ranks of its host in this call: its input or its output, and its bounce
    /// buffer, or its output in an update.
    pub(crate) fn shown(&self) -> [(*const u8, usize); 2] {
        let (call, tensors) = (&self.request.call, &self.request.tensors);
        let (kind, lent) = planner::lendable(call, &self.members.layout);
        let lent = lent * call.dtype.size();
        let output = (tensors.output.cast_const(), lent.min(tensors.output_len));
        let first = match kind {
            Lent::Outputs => output,
            _ => (tensors.input, lent.min(tensors.input_len)),
        };
        let second = match call.what {
            Collective::Update => output,
            _ => (self.bounce.0.cast_const(), self.bounce.1),
        };
        [first, second]
    }

    /// Finds the memory that the ranks of this host share for a call: their tensors if all are registered memory,
    /// otherwise their bounce buffers if all have one.
    pub(crate) fn lend(&mut self, world: &World) -> Result<Lent> {
        let members = self.members.clone();
        let size = self.request.call.dtype.size();
        if self.request.call.what == Collective::Update {
            return self.lend_both(world);
        }
        let (tensors, _) = planner::lendable(&self.request.call, &members.layout);
        for kind in [tensors, Lent::BounceBuffers] {
            self.loans.clear();
            let mut all = true;
            for place in members.local_places() {
                let mut layout = members.layout.clone();
                layout.me = place;
                let len = planner::lendable(&self.request.call, &layout).1 * size;
                if len == 0 && kind != Lent::BounceBuffers {
                    continue;
                }
                let op_slot = members.op_slot(place, self.call_id);
                let (at, len) = match kind {
                    Lent::BounceBuffers => (op_slot.and_then(OpSlot::bounce_buffer), planner::BOUNCE_BYTES),
                    _ => (op_slot.and_then(OpSlot::lent), len),
                };
                let Some(at) = at else {
                    all = false;
                    break;
                };
                if place != members.me {
                    let rank = members.ranks[place as usize];
                    let Some(neighbour) = world.neighbours.get(&rank) else { return Ok(Lent::Nothing) };
                    self.loans.push(Loan { place, base: neighbour.lent(at, len)?, len });
                }
            }
            if all {
                if kind == Lent::BounceBuffers {
                    members.use_bounce_buffer(self.call_id);
                }
                return Ok(kind);
            }
        }
        Ok(Lent::Nothing)
    }

    /// The same for an update, which reads inputs and writes outputs: both are registered memory, or nothing is lent.
    fn lend_both(&mut self, world: &World) -> Result<Lent> {
        let members = self.members.clone();
        let len = planner::contribution(&self.request.call, &members.layout) * self.request.call.dtype.size();
        self.loans.clear();
        self.outputs.clear();
        for place in members.local_places() {
            let op_slot = members.op_slot(place, self.call_id);
            let shown = op_slot.and_then(|slot| Some((slot.lent()?, slot.bounce_buffer()?)));
            let Some((input, output)) = shown else { return Ok(Lent::Nothing) };
            if place != members.me {
                let rank = members.ranks[place as usize];
                let Some(neighbour) = world.neighbours.get(&rank) else { return Ok(Lent::Nothing) };
                self.loans.push(Loan { place, base: neighbour.lent(input, len)?, len });
                self.outputs.push(Loan { place, base: neighbour.lent(output, len)?, len });
            }
        }
        Ok(Lent::Inputs)
    }

    /// The list of tensors that a span of this rank's memory lies in, if it is one.
    fn list(&self, buf: Buf) -> Option<&Runs> {
        let lists = self.request.lists.as_deref()?;
        match buf {
            Buf::In => Some(&lists.0),
            Buf::Out => Some(&lists.1),
            Buf::Scratch | Buf::Bounce => None,
        }
    }

    /// The places of a span that lies in several tensors of a list; `None` if it lies in one place.
    fn places(&self, span: Span) -> Result<Option<Vec<(*mut u8, usize)>>> {
        let Some(list) = self.list(span.buf) else { return Ok(None) };
        let size = self.request.call.dtype.size();
        let (at, len) = (span.start * size, span.len * size);
        match list.find(at) {
            Some((_, have)) if len <= have => Ok(None),
            _ => list.cut(at, len).map(Some).ok_or_else(|| outside(span, list.len())),
        }
    }

    /// Copies what was received for a span of this rank's memory, of as many bytes.
    pub(crate) fn put(&self, span: Span, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if let Some(places) = self.places(span)? {
            let mut rest = bytes;
            for (place, n) in places {
                let (now, later) = rest.split_at(n.min(rest.len()));
                // SAFETY: `places` has checked that these lie in our memory.
                unsafe { std::ptr::copy_nonoverlapping(now.as_ptr(), place, now.len()) };
                rest = later;
            }
            return Ok(());
        }
        let to = self.own(span)?;
        // SAFETY: `own` has checked that the span, which is as long as `bytes`, lies in our memory.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    /// Whether a span of this rank's memory lies in one place.
    pub(crate) fn is_in_one_place(&self, span: Span) -> Result<bool> {
        Ok(self.places(span)?.is_none())
    }

    /// How many bytes from byte `at` of a span on lie in one place.
    pub(crate) fn run_length(&self, loc: Loc, at: usize) -> usize {
        let list = self.list(loc.span.buf).filter(|_| loc.place == self.members.me);
        let start = loc.span.start * self.request.call.dtype.size() + at;
        list.map_or(usize::MAX, |list| list.find(start).map_or(usize::MAX, |(_, have)| have))
    }

    /// The address of byte `at` of a span of any rank's memory on this host, checked. The bytes of
    /// [`Body::run_length`] follow there.
    pub(crate) fn at_byte(&self, loc: Loc, at: usize) -> Result<*mut u8> {
        match self.list(loc.span.buf).filter(|_| loc.place == self.members.me) {
            Some(list) => {
                let start = loc.span.start * self.request.call.dtype.size() + at;
                list.find(start).map(|found| found.0).ok_or_else(|| outside(loc.span, list.len()))
            }
            // SAFETY: `at` has checked the span, of which `at` is at most the end.
            None => Ok(unsafe { self.at(loc)?.add(at) }),
        }
    }

    /// The address of a span of this rank's own memory, checked; of a list, a span that lies in one place.
    pub fn own(&self, span: Span) -> Result<*mut u8> {
        let size = self.request.call.dtype.size();
        let tensors = &self.request.tensors;
        if let Some(list) = self.list(span.buf) {
            return match list.find(span.start * size) {
                Some((at, have)) if span.len * size <= have => Ok(at),
                _ => Err(outside(span, list.len())),
            };
        }
        let (base, have) = match span.buf {
            Buf::In => (tensors.input.cast_mut(), tensors.input_len),
            Buf::Out => (tensors.output, tensors.output_len),
            Buf::Scratch => (self.scratch_base, self.scratch_len),
            Buf::Bounce if self.lent == Lent::BounceBuffers => (self.bounce.0, self.bounce.1),
            Buf::Bounce => self.inline(self.members.me),
        };
        inside(base, have, span, size)
    }

    /// The memory for a small payload in the operation slot of a rank of this host, and its bytes.
    fn inline(&self, place: Place) -> (*mut u8, usize) {
        let len = planner::inline_bytes(&self.request.call, &self.members.layout);
        let op_slot = self.members.op_slot(place, self.call_id);
        op_slot.map_or((std::ptr::null_mut(), 0), |op_slot| op_slot.inline(len))
    }

    /// The address of a span of any rank's memory on this host, checked.
    pub(crate) fn at(&self, loc: Loc) -> Result<*mut u8> {
        if loc.place == self.members.me {
            return self.own(loc.span);
        }
        let size = self.request.call.dtype.size();
        if loc.span.buf == Buf::Bounce && self.lent != Lent::BounceBuffers {
            let (inline, have) = self.inline(loc.place);
            return inside(inline, have, loc.span, size);
        }
        let written = self.request.call.what == Collective::Update && loc.span.buf == Buf::Out;
        let loans = if written { &self.outputs } else { &self.loans };
        let loan = loans.iter().find(|l| l.place == loc.place);
        inside(loan.map_or(std::ptr::null_mut(), |l| l.base), loan.map_or(0, |l| l.len), loc.span, size)
    }

    /// Passes a message to the peer's connection.
    pub(crate) fn transmit(
        &mut self,
        step: u32,
        to: Place,
        tag: u32,
        span: Span,
        out: &mut Outbox,
    ) -> Result<Started> {
        let len = span.len * self.request.call.dtype.size();
        let places = if len == 0 { None } else { self.places(span)? };
        let at = match places {
            None if len > 0 => self.own(span)?.cast_const(),
            _ => std::ptr::dangling(),
        };
        let mut frame = self.frame(Kind::Data, tag, len as u32);
        frame.signature = self.pairwise(self.request.call.splits.as_ref().map(|s| &s.0), to);
        let rank = self.members.ranks[to as usize];
        let what = || self.signature.to_string();
        let token = Token { call: self.id, step };
        if let Some(places) = places {
            let mut bytes = Vec::with_capacity(len);
            for (place, n) in places {
                // SAFETY: `places` has checked that these lie in our memory.
                bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(place, n) });
            }
            let Some(tx) = out.to(rank) else {
                let why = "there is no connection to it".to_string();
                return Err(Error::PeerLost { rank, what: what(), why });
            };
            tx.bytes += len as u64;
            tx.give(&frame, bytes);
            return Ok(Started::Done);
        }
        // SAFETY: the span is checked; a call takes its frames back before its memory goes.
        match unsafe { out.lend(rank, &frame, at, len, token) } {
            Some(Ok(true)) => Ok(Started::Done),
            Some(Ok(false)) => Ok(Started::Later),
            Some(Err(e)) => Err(Error::PeerLost { rank, what: what(), why: e.to_string() }),
            None => {
                Err(Error::PeerLost { rank, what: what(), why: "there is no connection to it".to_string() })
            }
        }
    }
}

/// The address of `span` in `have` bytes from `base`.
fn inside(base: *mut u8, have: usize, span: Span, size: usize) -> Result<*mut u8> {
    let (from, len) = (span.start * size, span.len * size);
    match from.checked_add(len) {
        // SAFETY: the offset is inside the memory.
        Some(end) if end <= have => Ok(unsafe { base.add(from) }),
        _ => Err(outside(span, have)),
    }
}

fn outside(span: Span, have: usize) -> Error {
    Error::misuse(format!(
        "internal error: a call touches {span:?}, outside of its {have} bytes of memory; please report it"
    ))
}
