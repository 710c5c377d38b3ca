//! One call under way on this rank.
//!
//! A job goes through stages: it waits for its lane, meets the ranks of its host, walks its
//! schedule, and leaves. Memory is named by the schedule and resolved here; this file and
//! [`crate::link::frames`] hold all accesses to memory that belongs to callers.

use std::sync::Arc;
use std::time::Instant;

use trigram_core::executor::{Executor, Started};
use trigram_core::planner::{self, Call, Lent, Opening};
use trigram_core::schedule::{Buf, Loc, Place, Schedule, Span};
use trigram_core::signature::{Collective, Signature, Via};
use trigram_core::wire::{CallId, Frame, Kind};
use trigram_core::{DType, Error, ReduceOp, Result};

use crate::call::steps::Wire;
use crate::group::members::Members;
use crate::link::frames::{Token, Tx};
use crate::sys::completion::Ticket;
use crate::sys::memory::Scratch;

/// Messages to one peer of up to this many bytes in a call are sent before the peer has said that
/// it is in the call too. Above, the sender waits for that: nobody is flooded.
pub const EAGER: usize = 1 << 20;

/// A caller's memory. The caller keeps it valid until its ticket is resolved.
#[derive(Clone, Copy, Debug)]
pub struct Tensors {
    /// What the call reads.
    pub input: *const u8,
    /// Bytes of it.
    pub input_len: usize,
    /// What it writes; the same memory for in-place collectives.
    pub output: *mut u8,
    /// Bytes of it.
    pub output_len: usize,
}

// SAFETY: addresses only; they are followed while the progress lock is held.
unsafe impl Send for Tensors {}

/// What a caller asks for.
#[derive(Debug)]
pub struct Request {
    /// The collective and its sizes.
    pub call: Call,
    /// How contributions combine.
    pub op: ReduceOp,
    /// The memory.
    pub tensors: Tensors,
    /// For messages between two ranks: the peer, the user's tag, and whether we send.
    pub message: Option<Message>,
    /// What peers compare in place of this call: that of a call elsewhere, which this one stands for.
    pub declared: Option<Signature>,
}

impl Request {
    /// A call that touches no memory.
    pub fn nothing() -> Self {
        let tensors =
            Tensors { input: std::ptr::null(), input_len: 0, output: std::ptr::null_mut(), output_len: 0 };
        let call = Call {
            what: Collective::Barrier,
            dtype: DType::U8,
            len: 0,
            root: 0,
            via: Via::Auto,
            splits: None,
        };
        Self { call, op: ReduceOp::Sum, tensors, message: None, declared: None }
    }
}

/// A message between two ranks.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// The other rank's place in the group.
    pub peer: Place,
    /// The user's tag.
    pub tag: u32,
    /// Whether this rank sends.
    pub sends: bool,
}

/// How far a job has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// An earlier call still uses its lane.
    Waiting,
    /// Not everyone on this host has entered the call.
    Meeting,
    /// Its schedule runs.
    Running,
    /// It has failed; peers may still be at our memory.
    Closing,
}

/// Memory of a peer on this host, as far as it lent it for this call: its input, or its stage.
#[derive(Clone, Copy, Debug)]
pub struct Loan {
    /// Whose.
    pub place: Place,
    /// First byte of its input.
    pub base: *mut u8,
    /// Bytes of it.
    pub len: usize,
}

/// All of a job but its executor.
pub struct Body {
    /// Its number in this process.
    pub id: u64,
    /// The group.
    pub members: Arc<Members>,
    /// Which call of the group.
    pub call_id: CallId,
    /// What was asked.
    pub request: Request,
    /// What peers compare.
    pub signature: Signature,
    /// The barrier that it waits at: step and ordinal.
    pub barrier: Option<(u32, u32)>,
    /// Places known to be in this call.
    pub inside: Vec<Place>,
    /// Messages kept until their receiver is known to be in this call.
    pub held: Vec<(u32, Place, u32, Span)>,
    /// Messages that came before their step: place, tag, payload.
    pub mail: Vec<(Place, u32, Vec<u8>)>,
    /// What the ranks of this host lend each other.
    pub lent: Lent,
    /// Peers' memory that may be touched.
    pub loans: Vec<Loan>,
    /// Bytes moved through peers' memory.
    pub direct_bytes: u64,
    /// This rank's own stage.
    pub stage: (*mut u8, usize),
    /// What it walks.
    pub(crate) schedule: Arc<Schedule>,
    scratch: Scratch,
    scratch_base: *mut u8,
    scratch_len: usize,
}

/// One call under way.
pub struct Job {
    /// How far it has come.
    pub stage: Stage,
    /// Everything but the executor.
    pub body: Body,
    /// The run of its schedule.
    pub exec: Executor,
    /// How it begins.
    pub opening: Opening,
    /// Where its caller waits.
    pub ticket: Arc<Ticket>,
    /// Whether it has entered its lane, so that peers can see it there.
    pub entered: bool,
    /// Why it fails, in [`Stage::Closing`].
    pub error: Option<Error>,
    /// When it was started.
    pub began: Instant,
    /// Whether something has happened to it since the last look at the clock.
    pub stirred: bool,
    /// When something last happened to it, as of that look.
    pub moved: Instant,
    /// Whether peers have been told what we called, after a stall.
    pub announced: bool,
    /// Whether a log line has named those it waits for.
    pub named: bool,
}

// SAFETY: addresses of callers' and peers' memory are followed while the progress lock is held.
unsafe impl Send for Job {}

impl Job {
    /// A job that has not begun.
    pub fn new(
        id: u64,
        members: Arc<Members>,
        call_id: CallId,
        request: Request,
        signature: Signature,
        scratch: Scratch,
    ) -> Self {
        let opening = match request.message {
            Some(_) => Opening::Messages,
            None => planner::opening(&request.call, &members.layout),
        };
        let now = Instant::now();
        Self {
            stage: Stage::Waiting,
            exec: Executor::new(Arc::default()),
            opening,
            ticket: Arc::default(),
            entered: false,
            error: None,
            began: now,
            moved: now,
            stirred: false,
            announced: false,
            named: false,
            body: Body {
                id,
                members,
                call_id,
                request,
                signature,
                barrier: None,
                inside: Vec::new(),
                held: Vec::new(),
                mail: Vec::new(),
                lent: Lent::Nothing,
                loans: Vec::new(),
                direct_bytes: 0,
                stage: (std::ptr::null_mut(), 0),
                schedule: Arc::default(),
                scratch,
                scratch_base: std::ptr::null_mut(),
                scratch_len: 0,
            },
        }
    }

    /// Begins to walk a schedule.
    pub fn run(
        &mut self,
        schedule: Arc<Schedule>,
        tx: &mut [Option<Tx>],
        done: &mut Vec<Token>,
    ) -> Result<()> {
        let size = self.body.request.call.dtype.size();
        self.body.scratch_len = schedule.scratch * size;
        self.body.scratch_base = self.body.scratch.reserve(self.body.scratch_len)?;
        // Tell those who will send us much that we are here.
        for t in schedule.traffic().iter().filter(|t| t.received * size > EAGER) {
            let frame = self.body.frame(Kind::Ready, 0, 0);
            if let Some(tx) = self.body.members.link(t.peer, tx) {
                tx.give(&frame, Vec::new());
            }
        }
        self.body.schedule = schedule.clone();
        self.exec.reset(schedule);
        self.exec.start(&mut Wire { body: &mut self.body, tx, done })
    }

    /// A step has finished.
    pub fn complete(&mut self, step: u32, tx: &mut [Option<Tx>], done: &mut Vec<Token>) -> Result<()> {
        self.stirred = true;
        self.exec.complete(step, &mut Wire { body: &mut self.body, tx, done })
    }

    /// A peer is in this call too: what was kept for it may go.
    pub fn release(&mut self, place: Place, tx: &mut [Option<Tx>], done: &mut Vec<Token>) -> Result<()> {
        if self.body.inside.contains(&place) {
            return Ok(());
        }
        self.body.inside.push(place);
        let mut finished = Vec::new();
        let held = std::mem::take(&mut self.body.held);
        for (step, to, tag, span) in held {
            if to != place {
                self.body.held.push((step, to, tag, span));
            } else if self.body.transmit(step, to, tag, span, tx, done)? == Started::Done {
                finished.push(step);
            }
        }
        finished.into_iter().try_for_each(|step| self.complete(step, tx, done))
    }

    /// The places that this job waits for.
    pub fn waiting_for(&self) -> Vec<Place> {
        let body = &self.body;
        let mut places = match self.stage {
            Stage::Waiting => body.members.busy(body.call_id).collect(),
            Stage::Meeting => body.members.absent(body.call_id, 0),
            Stage::Running => {
                let mut places = self.exec.waiting_for();
                // What has come before its step is not waited for: its sender may have left since.
                for (from, ..) in &body.mail {
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
            Stage::Closing => Vec::new(),
        };
        places.retain(|&p| p != body.members.me);
        places.sort_unstable();
        places.dedup();
        places
    }

    /// Whom to blame for a wait: members that have not entered the call, as far as this rank has
    /// heard (ranks that stall tell all others that they are inside), else those it waits for.
    pub fn absent(&self) -> Vec<Place> {
        let body = &self.body;
        let members = &body.members;
        let here = members.absent(body.call_id, 0);
        let entered = |p: Place| match members.lane(p, body.call_id) {
            Some(_) => !here.contains(&p),
            None => body.inside.contains(&p),
        };
        let absent: Vec<Place> = (0..members.ranks.len() as Place)
            .filter(|&p| p != members.me && body.request.message.is_none() && !entered(p))
            .collect();
        if absent.is_empty() { self.waiting_for() } else { absent }
    }

    /// Gives the scratch memory back for another job.
    pub fn into_scratch(self) -> Scratch {
        self.body.scratch
    }
}

impl Body {
    /// A frame of this call.
    pub fn frame(&self, kind: Kind, tag: u32, len: u32) -> Frame {
        Frame { kind, group: self.members.id, call: self.call_id, tag, len, signature: self.signature }
    }

    /// What a frame of a peer in the same call must say. Messages of uneven exchanges carry the
    /// length that the two agree on, for no other rank knows it.
    pub fn expected(&self, peer: Place, kind: Kind) -> Signature {
        let mut expected = self.signature;
        if let (Some((_, lengths)), Kind::Data) = (&self.request.call.splits, kind) {
            expected.count = lengths.get(peer as usize).copied().unwrap_or_default() as u64;
        }
        expected
    }

    /// The address of a span of this rank's own memory, checked.
    pub fn own(&self, span: Span) -> Result<*mut u8> {
        let size = self.request.call.dtype.size();
        let tensors = &self.request.tensors;
        let (base, have) = match span.buf {
            Buf::In => (tensors.input.cast_mut(), tensors.input_len),
            Buf::Out => (tensors.output, tensors.output_len),
            Buf::Scratch => (self.scratch_base, self.scratch_len),
            Buf::Slot if self.lent == Lent::Stages => (self.stage.0, self.stage.1),
            Buf::Slot => match self.members.lane(self.members.me, self.call_id) {
                Some(lane) => (lane.slot(), planner::SLOT_BYTES),
                None => (std::ptr::null_mut(), 0),
            },
        };
        inside(base, have, span, size)
    }

    /// The address of a span of anyone's memory on this host, checked.
    pub(crate) fn at(&self, loc: Loc) -> Result<*mut u8> {
        if loc.place == self.members.me {
            return self.own(loc.span);
        }
        let size = self.request.call.dtype.size();
        if loc.span.buf == Buf::Slot && self.lent != Lent::Stages {
            let lane = self.members.lane(loc.place, self.call_id);
            let slot = lane.map_or(std::ptr::null_mut(), |lane| lane.slot());
            let have = if slot.is_null() { 0 } else { planner::SLOT_BYTES };
            return inside(slot, have, loc.span, size);
        }
        let loan = self.loans.iter().find(|l| l.place == loc.place);
        inside(loan.map_or(std::ptr::null_mut(), |l| l.base), loan.map_or(0, |l| l.len), loc.span, size)
    }

    /// Hands a message to the peer's connection.
    pub(crate) fn transmit(
        &mut self,
        step: u32,
        to: Place,
        tag: u32,
        span: Span,
        tx: &mut [Option<Tx>],
        done: &mut Vec<Token>,
    ) -> Result<Started> {
        let len = span.len * self.request.call.dtype.size();
        let at = if len == 0 { std::ptr::dangling() } else { self.own(span)?.cast_const() };
        let mut frame = self.frame(Kind::Data, tag, len as u32);
        if let Some((lengths, _)) = &self.request.call.splits {
            frame.signature.count = lengths.get(to as usize).copied().unwrap_or_default() as u64;
        }
        let rank = self.members.ranks[to as usize];
        let what = || self.signature.to_string();
        let Some(tx) = self.members.link(to, tx) else {
            let why = "no connection".to_string();
            return Err(Error::PeerLost { rank, what: what(), why });
        };
        let token = Token { job: self.id, step };
        // SAFETY: the span is checked; a job takes its frames back before its memory goes.
        let sent = unsafe { tx.lend(&frame, at, len, token, done) };
        match sent {
            Ok(true) => Ok(Started::Done),
            Ok(false) => Ok(Started::Later),
            Err(e) => Err(Error::PeerLost { rank, what: what(), why: e.to_string() }),
        }
    }
}

/// The address of `span` in `have` bytes from `base`.
fn inside(base: *mut u8, have: usize, span: Span, size: usize) -> Result<*mut u8> {
    let (from, len) = (span.start * size, span.len * size);
    match from.checked_add(len) {
        // SAFETY: the offset is inside the memory.
        Some(end) if end <= have => Ok(unsafe { base.add(from) }),
        _ => Err(Error::misuse(format!("{span:?} lies outside of {have} bytes of memory"))),
    }
}
