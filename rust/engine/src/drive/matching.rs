//! Matches what arrives with who waits for it.
//!
//! A message finds its job by group and call, and its step by sender and tag. If the step has
//! begun, the payload goes straight into the job's memory; if not, it is kept until it does.

use trigram_core::schedule::{Place, Step};
use trigram_core::wire::{CallId, Frame, Kind};
use trigram_core::{Error, Result};

use crate::call::job::{Job, Stage};
use crate::drive::failing::{How, Told};
use crate::drive::hub::{Early, Failure, Hub, mismatch};
use crate::link::frames::{AHEAD, Sink, Target, Token, Tx};

/// Payload bytes of messages that nobody has asked for yet, at most.
const MOST_EARLY: usize = 1 << 30;

/// What a message that nobody has asked for yet counts at least: many without a payload take memory too, and time to
/// look through.
const EARLY_COST: usize = 1 << 10;

/// Bytes of an error that a peer tells, at most.
const MOST_WORDS: usize = 1 << 20;

/// Groups that peers may speak of before we know them, at most; and failures of calls that we have not made.
const MOST_GROUPS: usize = 4096;

impl Hub {
    pub(crate) fn find(&self, peer: u32, frame: &Frame) -> Option<usize> {
        self.jobs.iter().position(|j| {
            j.body.members.id == frame.group && j.body.call_id == frame.call && {
                match j.body.request.message {
                    None => true,
                    Some(m) => {
                        let from = j.body.members.ranks.get(m.peer as usize) == Some(&peer);
                        let sends = match frame.kind {
                            Kind::Data => false,
                            Kind::Ready => true,
                            _ => frame.tag == 0, // the peer received, so we send
                        };
                        from && m.sends == sends
                    }
                }
            }
        })
    }

    /// Whether this rank is past a call that it has no job for.
    pub(crate) fn is_over(&self, peer: u32, frame: &Frame) -> bool {
        let Some(book) = self.books.get(&frame.group) else { return false };
        match frame.call.as_message() {
            None => frame.call.0 < book.next,
            Some((tag, n)) => {
                let sends = frame.kind == Kind::Ready || frame.kind == Kind::Fail && frame.tag == 0;
                book.messages.get(&(peer, tag, sends)).is_some_and(|&next| n < next)
            }
        }
    }

    pub(crate) fn keep_early(&mut self, peer: u32, frame: &Frame, payload: Vec<u8>) -> Result<()> {
        self.early_bytes += payload.len() + EARLY_COST;
        if self.early_bytes > MOST_EARLY {
            return Err(Error::io("receiving", "more than 1 GiB of messages that nobody asks for"));
        }
        self.early.push(Early { peer, frame: *frame, payload });
        Ok(())
    }

    pub(crate) fn drop_early(&mut self, group: u64, call: CallId) {
        let dropped = |e: &Early| e.frame.group == group && e.frame.call == call && !call.is_message();
        self.early_bytes -=
            self.early.iter().filter(|e| dropped(e)).map(|e| e.payload.len() + EARLY_COST).sum::<usize>();
        self.early.retain(|e| !dropped(e));
    }

    /// Hands a new job what came before it.
    pub(crate) fn take_early(&mut self, i: usize) {
        let mut k = 0;
        while k < self.early.len() {
            if self.find(self.early[k].peer, &self.early[k].frame) != Some(i) {
                k += 1;
                continue;
            }
            let Early { peer, frame, payload } = self.early.remove(k);
            self.early_bytes -= payload.len() + EARLY_COST;
            if self.compare(i, peer, &frame) {
                self.accept(i, peer, &frame, payload);
            }
        }
    }

    /// Whether a peer is in the same call as we; if not, the call fails.
    pub(crate) fn compare(&mut self, i: usize, peer: u32, frame: &Frame) -> bool {
        let body = &self.jobs[i].body;
        let Some(place) = body.members.place_of(peer) else { return false };
        let mine = body.expected(place, frame.kind);
        if mine == frame.signature {
            return true;
        }
        let mut sides = [(self.world.rank, mine), (peer, frame.signature)];
        sides.sort_by_key(|s| s.0);
        let error = mismatch(&body.members, body.call_id, &sides);
        self.fail(i, error, true);
        false
    }

    pub(crate) fn accept(&mut self, i: usize, peer: u32, frame: &Frame, payload: Vec<u8>) {
        let job = &mut self.jobs[i];
        let Some(place) = job.body.members.place_of(peer) else { return };
        let go = || {
            job.release(place, &mut self.tx, &mut self.done)?;
            if frame.kind == Kind::Data {
                let step = job.exec.schedule().recv_step(place, frame.tag);
                if !is_due(job, place, frame.tag, step, payload.len()) {
                    let what = format!("message {} of a call that has none, or has had it", frame.tag);
                    return Err(Error::Corrupt { rank: peer, what });
                }
                job.body.mail.push((place, frame.tag, payload));
                if let Some(step) = step.filter(|&s| job.exec.is_started(s)) {
                    return deliver(job, step, &mut self.tx, &mut self.done);
                }
            }
            Ok(())
        };
        if let Err(error) = go() {
            self.stop(i, error);
        }
    }
}

impl Hub {
    /// A peer says what its link carries. It may be ahead of us by a few calls, and even by a group.
    fn hear_rate(&mut self, peer: u32, frame: &Frame, payload: &[u8]) {
        let Ok(rate) = payload.try_into().map(f64::from_le_bytes) else { return };
        if self.books.len() < MOST_GROUPS || self.books.contains_key(&frame.group) {
            self.books.entry(frame.group).or_default().balance.hear(frame.call.0, peer, Some(rate));
        }
    }
}

/// Whether a call may keep a message: each comes once, and once its schedule is known it says which come. So what
/// peers can make us keep is what the call was to receive anyway.
fn is_due(job: &Job, place: Place, tag: u32, step: Option<u32>, len: usize) -> bool {
    let mail = &job.body.mail;
    let known = !job.exec.schedule().steps.is_empty() || job.stage == Stage::Running;
    let held = if known { 0 } else { mail.iter().map(|m| m.2.len() + EARLY_COST).sum() };
    held + len <= MOST_EARLY
        && (!known || step.is_some_and(|s| !job.exec.is_finished(s)))
        && !mail.iter().any(|m| m.0 == place && m.1 == tag)
}

/// Puts the last letter of the mail where its step, which waits for it, wants it.
fn deliver(job: &mut Job, step: u32, tx: &mut [Option<Tx>], done: &mut Vec<Token>) -> Result<()> {
    let Some((place, _, bytes)) = job.body.mail.pop() else { return Ok(()) };
    let (to, len) = destination(job, step)?;
    if bytes.len() != len {
        let rank = job.body.members.ranks[place as usize];
        return Err(Error::Corrupt { rank, what: format!("{} bytes where {len} belong", bytes.len()) });
    }
    // SAFETY: `destination` has checked that the span lies in the job's memory.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, len) };
    job.complete(step, tx, done)
}

/// Where a `Recv` step puts what it receives, and how many bytes.
fn destination(job: &Job, step: u32) -> Result<(*mut u8, usize)> {
    match &job.exec.schedule().steps[step as usize] {
        Step::Recv { span, .. } if span.len == 0 => Ok((std::ptr::dangling_mut(), 0)),
        Step::Recv { span, .. } => Ok((job.body.own(*span)?, span.len * job.body.request.call.dtype.size())),
        _ => Err(Error::misuse("a message for a step that receives none")),
    }
}

impl Sink for Hub {
    fn begin(&mut self, peer: u32, frame: &Frame) -> Result<Target> {
        let heap = || Target::Heap(vec![0; AHEAD.min(frame.len as usize)]);
        if frame.kind != Kind::Data {
            let most = match frame.kind {
                Kind::Fail | Kind::Lost => MOST_WORDS,
                Kind::Rate => size_of::<f64>(),
                _ => 0,
            };
            if frame.len as usize > most {
                let what = format!("{} bytes where at most {most} belong", frame.len);
                return Err(Error::Corrupt { rank: peer, what });
            }
            return Ok(heap());
        }
        let Some(i) = self.find(peer, frame) else {
            return Ok(if self.is_over(peer, frame) { Target::Nowhere } else { heap() });
        };
        if self.jobs[i].stage == Stage::Closing || !self.compare(i, peer, frame) {
            return Ok(Target::Nowhere);
        }
        let job = &mut self.jobs[i];
        let Some(place) = job.body.members.place_of(peer) else { return Ok(Target::Nowhere) };
        let step = job.exec.schedule().recv_step(place, frame.tag);
        let Some(step) = step.filter(|&s| job.exec.is_started(s)) else { return Ok(heap()) };
        let (to, len) = destination(job, step)?;
        if len != frame.len as usize {
            let what = format!("a message of {} bytes where {len} belong", frame.len);
            self.fail(i, Error::Corrupt { rank: peer, what }, true);
            return Ok(Target::Nowhere);
        }
        Ok(Target::Memory(to, Token { job: job.body.id, step }))
    }

    fn end(&mut self, peer: u32, frame: &Frame, target: Target) -> Result<()> {
        match (frame.kind, target) {
            (_, Target::Nowhere) | (Kind::Bye | Kind::Beat, _) => {}
            (_, Target::Memory(_, token)) => {
                if let Some(i) = self.jobs.iter().position(|j| j.body.id == token.job) {
                    self.accept(i, peer, &Frame { kind: Kind::Ready, ..*frame }, Vec::new());
                }
                self.complete(token);
            }
            (Kind::Fail, Target::Heap(payload)) => {
                let rank = peer;
                let error: Error = postcard::from_bytes(&payload)
                    .map_err(|_| Error::Corrupt { rank, what: "a failure that cannot be read".into() })?;
                match self.find(peer, frame) {
                    Some(i) => self.fail(i, error, false),
                    None if self.is_over(peer, frame) => self.forget_rates(frame.group, frame.call),
                    None if self.failures.len() >= MOST_GROUPS => {
                        let what = format!("more than {MOST_GROUPS} failures of calls that nobody made");
                        return Err(Error::Corrupt { rank, what });
                    }
                    None => {
                        if !frame.call.is_message() {
                            self.counters.news().failed.insert(frame.group, error.clone());
                        }
                        self.failures.push(Failure { group: frame.group, call: frame.call, peer, error });
                    }
                }
            }
            (Kind::Lost, Target::Heap(payload)) => {
                let how = if frame.tag == self.world.rank { How::Refused } else { How::Silent };
                let told = self.hear_lost(peer, frame.tag, &payload);
                let by = (how == How::Silent).then_some(peer);
                self.told.extend(told.map(|(rank, why)| Told { rank, why, how, by }));
            }
            (Kind::Rate, Target::Heap(payload)) => self.hear_rate(peer, frame, &payload),
            (_, Target::Heap(payload)) => match self.find(peer, frame) {
                Some(i) if self.jobs[i].stage == Stage::Closing => {}
                Some(i) => {
                    if self.compare(i, peer, frame) {
                        self.accept(i, peer, frame, payload);
                    }
                }
                None if self.is_over(peer, frame) => {}
                None => self.keep_early(peer, frame, payload)?,
            },
        }
        Ok(())
    }
}
