//! Matches what arrives with who waits for it, and makes failures known.
//!
//! Everything here happens under the progress lock, in one thread at a time.
//!
//! The first failure of a call reaches every rank (invariant ERR-3): whoever finds it sends it to
//! all members, and each fails the same call with the same error. Other calls of the group go on;
//! a lost peer ends all calls that need it, and all later ones.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use trigram_core::error::name_ranks;
use trigram_core::planner::{self, Call, Opening};
use trigram_core::schedule::{Place, Schedule, Step};
use trigram_core::signature::{Collective, Signature};
use trigram_core::wire::{CallId, Frame, Kind};
use trigram_core::{Error, Result};

use crate::job::{Job, Lent, Message, Request, Stage};
use crate::link::{Sink, Target, Token, Tx};
use crate::members::Members;
use crate::memory::Scratch;
use crate::ticket::Ticket;
use crate::world::World;

/// A call, on its way from a caller's thread.
pub struct Submission {
    /// The group.
    pub members: Arc<Members>,
    /// What is asked.
    pub request: Request,
    /// Where the caller waits.
    pub ticket: Arc<Ticket>,
    /// When it is given up.
    pub deadline: Option<Instant>,
}

/// A message that came before its call.
struct Early {
    peer: u32,
    frame: Frame,
    payload: Vec<u8>,
}

/// A failure that came before its call.
struct Failure {
    group: u64,
    call: CallId,
    peer: u32,
    error: Error,
}

/// Where a group's numbering stands.
#[derive(Default)]
struct Book {
    next: u64,
    /// By world rank of the peer, user's tag, and whether we send.
    messages: HashMap<(u32, u32, bool), u64>,
}

/// Counters that may be read at any time.
#[derive(Debug, Default)]
pub struct Counters {
    /// Calls that ended well.
    pub calls: AtomicU64,
    /// Bytes moved through peers' memory.
    pub direct_bytes: AtomicU64,
    /// Payload bytes sent, by world rank.
    pub sent: Vec<AtomicU64>,
}

#[derive(PartialEq, Eq, Hash)]
struct PlanKey(u64, Call, bool, bool);

/// Payload bytes of messages that nobody has asked for yet, at most.
const MOST_EARLY: usize = 1 << 30;
/// After this long without progress a rank tells the others what it called.
const STALL: Duration = Duration::from_millis(100);
/// After this long a log line names those it waits for.
const NAME_AFTER: Duration = Duration::from_secs(10);
/// How long a failed call waits for peers to let go of its memory.
const CLOSE: Duration = Duration::from_secs(2);

/// The jobs of this rank and everything that is matched with them.
pub struct Hub {
    /// The job as this rank sees it.
    pub world: Arc<World>,
    /// The ways out, by world rank.
    pub tx: Vec<Option<Tx>>,
    /// The calls under way.
    pub jobs: Vec<Job>,
    /// Peers that are gone, and why.
    pub lost: BTreeMap<u32, Error>,
    /// Jobs whose memory must not be written to any more.
    pub dead: Vec<u64>,
    /// Counters for callers.
    pub counters: Arc<Counters>,
    deadlines: HashMap<u64, Instant>,
    early: Vec<Early>,
    early_bytes: usize,
    failures: Vec<Failure>,
    books: HashMap<u64, Book>,
    plans: HashMap<PlanKey, Arc<Schedule>>,
    scratch: Vec<Scratch>,
    done: Vec<Token>,
    next_job: u64,
}

impl Hub {
    /// No jobs yet.
    pub fn new(world: Arc<World>, tx: Vec<Option<Tx>>) -> Self {
        let sent = (0..world.size()).map(|_| AtomicU64::new(0)).collect();
        Self {
            world,
            tx,
            jobs: Vec::new(),
            lost: BTreeMap::new(),
            dead: Vec::new(),
            counters: Arc::new(Counters { sent, ..Counters::default() }),
            deadlines: HashMap::new(),
            early: Vec::new(),
            early_bytes: 0,
            failures: Vec::new(),
            books: HashMap::new(),
            plans: HashMap::new(),
            scratch: Vec::new(),
            done: Vec::new(),
            next_job: 0,
        }
    }

    /// Takes a call up. Collectives of a group are numbered in the order in which they come.
    pub fn admit(&mut self, submission: Submission) {
        let Submission { members, request, ticket, deadline } = submission;
        let book = self.books.entry(members.id).or_default();
        let (call_id, peer) = match request.message {
            None => {
                book.next += 1;
                (CallId::collective(book.next - 1), None)
            }
            Some(Message { peer, tag, sends }) => {
                let rank = members.ranks.get(peer as usize).copied().unwrap_or(u32::MAX);
                let n = book.messages.entry((rank, tag, sends)).or_default();
                *n += 1;
                (CallId::message(tag, *n - 1), Some(rank))
            }
        };
        let failed = self
            .failures
            .iter()
            .position(|f| f.group == members.id && f.call == call_id && peer.is_none_or(|p| p == f.peer));
        let gone = members.ranks.iter().find(|r| self.lost.contains_key(r) && peer.is_none_or(|p| p == **r));
        let error = match (failed, gone) {
            (Some(i), _) => Some(self.failures.swap_remove(i).error),
            (None, Some(&rank)) => Some(self.loss(rank, &signature(&request))),
            _ => None,
        };
        let i = self.enter(members, call_id, request, ticket);
        if let Some(error) = error {
            return self.fail(i, error, false);
        }
        if let Some(deadline) = deadline {
            self.deadlines.insert(self.jobs[i].body.id, deadline);
        }
        self.take_early(i);
        self.advance(i);
    }

    fn enter(&mut self, members: Arc<Members>, call: CallId, request: Request, ticket: Arc<Ticket>) -> usize {
        let scratch = self.scratch.pop().unwrap_or_default();
        let signature = signature(&request);
        self.next_job += 1;
        let mut job = Job::new(self.next_job, members, call, request, signature, scratch);
        job.ticket = ticket;
        self.jobs.push(job);
        self.jobs.len() - 1
    }

    /// Skips calls of a group up to `through`, failing those under way, here and on all ranks.
    pub fn abort(&mut self, members: &Arc<Members>, through: u64, error: &Error) {
        for i in 0..self.jobs.len() {
            let body = &self.jobs[i].body;
            if body.members.id == members.id && !body.call_id.is_message() && body.call_id.0 < through {
                self.fail(i, error.clone(), true);
            }
        }
        let book = self.books.entry(members.id).or_default();
        let skipped = book.next..through;
        book.next = book.next.max(through);
        for call in skipped.map(CallId::collective) {
            self.failures.retain(|f| f.group != members.id || f.call != call);
            // A call like any other, that fails before it begins: its lane must be passed on.
            let i = self.enter(members.clone(), call, Request::nothing(), Arc::default());
            self.fail(i, error.clone(), true);
        }
    }

    /// Moves one job on as far as it goes now; true if it moved.
    pub fn advance(&mut self, i: usize) -> bool {
        let mut moved = false;
        loop {
            let before = (self.jobs[i].stage, self.jobs[i].body.barrier);
            if let Err(error) = self.step(i) {
                self.fail(i, error, true);
                return true;
            }
            if before == (self.jobs[i].stage, self.jobs[i].body.barrier) {
                return moved;
            }
            self.jobs[i].moved = Instant::now();
            moved = true;
        }
    }

    fn step(&mut self, i: usize) -> Result<()> {
        let job = &mut self.jobs[i];
        let call = job.body.call_id;
        let members = job.body.members.clone();
        match job.stage {
            Stage::Waiting if job.opening == Opening::Messages => {
                job.stage = Stage::Running;
                let plan = self.plan(i, false)?;
                self.jobs[i].run(plan, &mut self.tx, &mut self.done)
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
                    lane.describe(&job.body.signature, None);
                    job.stage = Stage::Meeting;
                    let plan = self.plan(i, true)?;
                    return self.jobs[i].run(plan, &mut self.tx, &mut self.done);
                }
                lane.describe(&job.body.signature, self.world.arena.locate(tensors.input, lent));
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
                let registered = self.lend(i)?;
                let plan = self.plan(i, registered)?;
                self.jobs[i].run(plan, &mut self.tx, &mut self.done)
            }
            Stage::Running => {
                if let Some((step, ordinal)) = job.body.barrier
                    && members.all_arrived(call, ordinal)
                {
                    job.body.barrier = None;
                    return job.complete(step, &mut self.tx, &mut self.done);
                }
                Ok(())
            }
            Stage::Closing => Ok(()),
        }
    }

    /// Finds the memory that the ranks of this host lend for a call; false unless all do.
    fn lend(&mut self, i: usize) -> Result<bool> {
        let body = &mut self.jobs[i].body;
        let members = body.members.clone();
        let size = body.request.call.dtype.size();
        for place in members.local_places() {
            let mut layout = members.layout.clone();
            layout.me = place;
            let len = planner::contribution(&body.request.call, &layout) * size;
            if len == 0 {
                continue;
            }
            let Some(lane) = members.lane(place, body.call_id) else { return Ok(false) };
            let Some(at) = lane.input() else { return Ok(false) };
            if place != members.me {
                let rank = members.ranks[place as usize];
                let Some(neighbour) = self.world.neighbours.get(&rank) else { return Ok(false) };
                body.lent.push(Lent { place, base: neighbour.lent(at, len)?, len });
            }
        }
        Ok(true)
    }

    fn plan(&mut self, i: usize, flag: bool) -> Result<Arc<Schedule>> {
        let job = &self.jobs[i];
        let (members, request) = (&job.body.members, &job.body.request);
        let one_shot = job.opening == Opening::OneShot;
        if let Some(Message { peer, sends, .. }) = request.message {
            let piece = (planner::PIECE_BYTES / request.call.dtype.size()).max(1);
            let make = if sends {
                trigram_core::topology::direct::send
            } else {
                trigram_core::topology::direct::recv
            };
            return Ok(Arc::new(make(members.me, peer, request.call.len, piece)));
        }
        let key = PlanKey(members.id, request.call.clone(), flag, one_shot);
        if let Some(plan) = self.plans.get(&key) {
            return Ok(plan.clone());
        }
        let plan = Arc::new(match one_shot {
            true => planner::one_shot(&request.call, &members.layout),
            false => planner::schedule(&request.call, &members.layout, flag)?,
        });
        if self.plans.len() >= 1024 {
            self.plans.clear(); // lengths that change with every call must not fill the memory
        }
        self.plans.insert(key, plan.clone());
        Ok(plan)
    }

    /// Steps whose frames have left since the last look; true if there were any.
    pub fn finish_sends(&mut self) -> bool {
        let mut moved = false;
        while let Some(token) = self.done.pop() {
            moved = true;
            self.complete(token);
        }
        moved
    }

    fn complete(&mut self, token: Token) {
        let Some(i) = self.jobs.iter().position(|j| j.body.id == token.job) else { return };
        if self.jobs[i].stage == Stage::Closing {
            return;
        }
        if let Err(error) = self.jobs[i].complete(token.step, &mut self.tx, &mut self.done) {
            self.fail(i, error, true);
        }
    }

    /// Writes what waits; true if anything moved.
    pub fn pump_out(&mut self) -> bool {
        let mut moved = false;
        for rank in 0..self.tx.len() {
            let Some(tx) = &mut self.tx[rank] else { continue };
            if tx.is_idle() {
                continue;
            }
            match tx.pump(&mut self.done) {
                Ok(any) => moved |= any,
                Err(e) => self.lose(rank as u32, e),
            }
        }
        self.finish_sends() | moved
    }

    /// Ends the jobs that are done, well or not; true if there were any.
    pub fn reap(&mut self, now: Instant) -> bool {
        let mut moved = false;
        let mut i = 0;
        while i < self.jobs.len() {
            let job = &self.jobs[i];
            let call = job.body.call_id;
            let members = &job.body.members;
            let over = match job.stage {
                Stage::Running => job.exec.is_done(),
                // Its turn in the lane has not come: the call before is still under way here.
                Stage::Closing if !job.entered => !members.busy(call).any(|p| p == members.me),
                Stage::Closing => {
                    let held = members.inside(call).into_iter();
                    let held = held.filter(|&p| !self.lost.contains_key(&members.ranks[p as usize])).count();
                    held == 0 || now - job.moved > CLOSE
                }
                _ => false,
            };
            if !over || self.dead.contains(&job.body.id) {
                i += 1;
                continue;
            }
            moved = true;
            self.end(i);
        }
        moved
    }

    fn end(&mut self, i: usize) {
        let mut job = self.jobs.swap_remove(i);
        let body = &job.body;
        if let Some(lane) = body.members.lane(body.members.me, body.call_id) {
            lane.leave(body.call_id.0);
            body.members.ring();
        }
        self.deadlines.remove(&body.id);
        let outcome = match job.error.take() {
            Some(error) => Err(error),
            None => {
                self.counters.calls.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        };
        self.counters.direct_bytes.fetch_add(body.direct_bytes, Ordering::Relaxed);
        for (counter, tx) in self.counters.sent.iter().zip(&self.tx) {
            counter.store(tx.as_ref().map_or(0, |tx| tx.bytes), Ordering::Relaxed);
        }
        let ticket = job.ticket.clone();
        self.scratch.push(job.into_scratch());
        ticket.resolve(outcome);
    }

    /// Fails a job, and tells the other members if they may not know.
    pub fn fail(&mut self, i: usize, error: Error, tell: bool) {
        let job = &mut self.jobs[i];
        if job.stage == Stage::Closing {
            return;
        }
        job.stage = Stage::Closing;
        job.error = Some(error.clone());
        job.moved = Instant::now();
        let (id, call, signature) = (job.body.id, job.body.call_id, job.body.signature);
        let members = job.body.members.clone();
        let peer = job.body.request.message;
        let entered = job.entered;
        if let Some(lane) = members.lane(members.me, call).filter(|_| entered) {
            lane.fail(call.0);
            // From here on we touch nobody's memory for this call.
            lane.leave(call.0);
            members.ring();
        }
        self.tx.iter_mut().flatten().for_each(|tx| tx.take_back(id));
        self.dead.push(id);
        self.drop_early(members.id, call);
        if tell {
            self.tell(&members, call, peer, signature, &error);
        }
    }

    fn tell(
        &mut self,
        members: &Members,
        call: CallId,
        peer: Option<Message>,
        signature: Signature,
        error: &Error,
    ) {
        let Ok(payload) = postcard::to_stdvec(error) else { return };
        let places: Vec<Place> = match peer {
            Some(message) => vec![message.peer],
            None => (0..members.ranks.len() as u32).collect(),
        };
        // For messages the tag tells which of the two directions failed: 1 if we were the sender.
        let tag = u32::from(peer.is_some_and(|m| m.sends));
        let len = payload.len() as u32;
        let frame = Frame { kind: Kind::Fail, group: members.id, call, tag, len, signature };
        for place in places.into_iter().filter(|&p| p != members.me) {
            if let Some(tx) = members.link(place, &mut self.tx) {
                tx.give(&frame, payload.clone());
            }
        }
    }

    /// A peer is gone. Jobs that need it fail now; later calls of its groups fail at once.
    pub fn lose(&mut self, rank: u32, why: Error) {
        if self.lost.contains_key(&rank) {
            return;
        }
        self.lost.insert(rank, why);
        let Some(tx) = self.tx.get_mut(rank as usize).and_then(Option::take) else { return };
        for i in 0..self.jobs.len() {
            if tx.holds(self.jobs[i].body.id) {
                let error = self.loss(rank, &self.jobs[i].body.signature);
                self.fail(i, error, true);
            }
        }
    }

    fn loss(&self, rank: u32, signature: &Signature) -> Error {
        match self.lost.get(&rank) {
            Some(Error::Corrupt { rank, what }) => Error::Corrupt { rank: *rank, what: what.clone() },
            why => Error::PeerLost {
                rank,
                what: signature.to_string(),
                why: why.map_or_else(String::new, ToString::to_string),
            },
        }
    }

    /// Fails jobs that need a lost peer.
    pub fn check_losses(&mut self) {
        for i in 0..self.jobs.len() {
            let job = &self.jobs[i];
            if self.lost.is_empty() || job.stage == Stage::Closing {
                continue;
            }
            let ranks = job.body.members.ranks_of(&job.waiting_for());
            if let Some(&rank) = ranks.iter().find(|r| self.lost.contains_key(r)) {
                let error = self.loss(rank, &job.body.signature);
                self.fail(i, error, true);
            }
        }
    }

    /// Deadlines, stalls and the naming of those waited for.
    pub fn tick(&mut self, now: Instant) {
        for i in 0..self.jobs.len() {
            let job = &mut self.jobs[i];
            if job.stage == Stage::Closing {
                continue;
            }
            let waited = now - job.began;
            let late = self.deadlines.get(&job.body.id).is_some_and(|d| now >= *d);
            let stalled = now - job.moved > STALL && !job.announced;
            let name = waited > NAME_AFTER && !job.named;
            if !(late || stalled || name) {
                continue;
            }
            let waiting_for = name_ranks(&job.body.members.ranks_of(&job.absent()));
            if name {
                job.named = true;
                let (me, what) = (self.world.rank, job.body.signature);
                eprintln!(
                    "trigram: rank {me} has waited {:.0} s in {what} for {waiting_for}",
                    waited.as_secs_f64()
                );
            }
            if stalled {
                job.announced = true;
                let (members, message) = (job.body.members.clone(), job.body.request.message);
                let frame = job.body.frame(Kind::Ready, 0, 0);
                for place in (0..members.ranks.len() as u32).filter(|&p| p != members.me && message.is_none())
                {
                    if let Some(tx) = members.link(place, &mut self.tx) {
                        tx.give(&frame, Vec::new());
                    }
                }
            }
            if late {
                let what = self.jobs[i].body.signature.to_string();
                let millis = waited.as_millis() as u64;
                self.fail(i, Error::Timeout { what, millis, waiting_for }, true);
            }
        }
    }

    /// Fails everything under way.
    pub fn fail_all(&mut self, error: &Error, tell: bool) {
        (0..self.jobs.len()).for_each(|i| self.fail(i, error.clone(), tell));
    }

    fn find(&self, peer: u32, frame: &Frame) -> Option<usize> {
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
    fn is_over(&self, peer: u32, frame: &Frame) -> bool {
        let Some(book) = self.books.get(&frame.group) else { return false };
        match frame.call.as_message() {
            None => frame.call.0 < book.next,
            Some((tag, n)) => {
                let sends = frame.kind == Kind::Ready || frame.kind == Kind::Fail && frame.tag == 0;
                book.messages.get(&(peer, tag, sends)).is_some_and(|&next| n < next)
            }
        }
    }

    fn keep_early(&mut self, peer: u32, frame: &Frame, payload: Vec<u8>) -> Result<()> {
        self.early_bytes += payload.len();
        if self.early_bytes > MOST_EARLY {
            return Err(Error::io("receiving", "more than 1 GiB of messages that nobody asks for"));
        }
        self.early.push(Early { peer, frame: *frame, payload });
        Ok(())
    }

    fn drop_early(&mut self, group: u64, call: CallId) {
        let dropped = |e: &Early| e.frame.group == group && e.frame.call == call && !call.is_message();
        self.early_bytes -= self.early.iter().filter(|e| dropped(e)).map(|e| e.payload.len()).sum::<usize>();
        self.early.retain(|e| !dropped(e));
    }

    /// Hands a new job what came before it.
    fn take_early(&mut self, i: usize) {
        let mut k = 0;
        while k < self.early.len() {
            if self.find(self.early[k].peer, &self.early[k].frame) != Some(i) {
                k += 1;
                continue;
            }
            let Early { peer, frame, payload } = self.early.remove(k);
            self.early_bytes -= payload.len();
            if self.compare(i, peer, &frame) {
                self.accept(i, peer, &frame, payload);
            }
        }
    }

    /// Whether a peer is in the same call as we; if not, the call fails.
    fn compare(&mut self, i: usize, peer: u32, frame: &Frame) -> bool {
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

    fn accept(&mut self, i: usize, peer: u32, frame: &Frame, payload: Vec<u8>) {
        let job = &mut self.jobs[i];
        let Some(place) = job.body.members.place_of(peer) else { return };
        let go = || {
            job.release(place, &mut self.tx, &mut self.done)?;
            if frame.kind == Kind::Data {
                job.body.mail.push((place, frame.tag, payload));
                let step = job.exec.schedule().recv_step(place, frame.tag);
                if let Some(step) = step.filter(|&s| job.exec.is_started(s)) {
                    return deliver(job, step, &mut self.tx, &mut self.done);
                }
            }
            Ok(())
        };
        if let Err(error) = go() {
            self.fail(i, error, true);
        }
    }
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
        let heap = || Target::Heap(vec![0; frame.len as usize]);
        if frame.kind != Kind::Data {
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
            (_, Target::Nowhere) | (Kind::Bye, _) => {}
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
                    None if self.is_over(peer, frame) => {}
                    None => {
                        self.failures.push(Failure { group: frame.group, call: frame.call, peer, error });
                    }
                }
            }
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

/// What peers compare of a request.
fn signature(request: &Request) -> Signature {
    let call = &request.call;
    let mut signature =
        Signature::new(call.what, call.dtype, request.op, call.via, call.root, call.len as u64);
    if call.what == Collective::AllToAll && call.splits.is_some() {
        signature.count = 0; // lengths differ by rank; each message is checked by its own
        signature.extra = 1;
    }
    signature
}

/// Compares what the ranks of this host have called.
fn agree(members: &Members, call: CallId, mine: &Signature) -> Result<()> {
    let mut sides: Vec<(u32, Signature)> = Vec::new();
    for place in members.local_places() {
        let theirs = match members.lane(place, call) {
            Some(lane) => lane.signature(),
            None => *mine,
        };
        if sides.iter().all(|s| s.1 != theirs) {
            sides.push((members.ranks[place as usize], theirs));
        }
    }
    if sides.len() < 2 { Ok(()) } else { Err(mismatch(members, call, &sides)) }
}

fn mismatch(members: &Members, call: CallId, sides: &[(u32, Signature)]) -> Error {
    let sides: Vec<String> = sides.iter().map(|(rank, s)| format!("rank {rank} called {s}")).collect();
    let call = call.0 & 0xffff_ffff;
    Error::Mismatch { group: members.name.clone(), call, sides: sides.join(", ") }
}
