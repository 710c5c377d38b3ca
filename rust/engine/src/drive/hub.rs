//! The calls under way on this rank: taken up, moved on, ended.
//!
//! Everything here happens under the progress lock, in one thread at a time. What arrives is
//! matched with who waits for it in [`crate::drive::matching`]; failures are in [`crate::drive::failing`].

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use trigram_core::planner::{self, Opening};
use trigram_core::signature::{Collective, Signature};
use trigram_core::wire::{CallId, Frame, Kind};
use trigram_core::{Error, Result};

use crate::call::agreed_rates::Balance;
use crate::call::job::{Job, Message, Request, Stage};
use crate::call::schedules::Plans;
use crate::drive::failing::Told;
use crate::group::members::Members;
use crate::group::world::World;
use crate::health::counters::Counters;
use crate::health::wait_window::Window;
use crate::link::frames::{Token, Tx};
use crate::link::rate_meter::Meter;
use crate::sys::completion::Ticket;
use crate::sys::memory::Scratch;

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
pub(crate) struct Early {
    pub(crate) peer: u32,
    pub(crate) frame: Frame,
    pub(crate) payload: Vec<u8>,
}

/// A failure that came before its call.
pub(crate) struct Failure {
    pub(crate) group: u64,
    pub(crate) call: CallId,
    pub(crate) peer: u32,
    pub(crate) error: Error,
}

/// Where a group's numbering stands.
#[derive(Default)]
pub(crate) struct Book {
    pub(crate) next: u64,
    /// By world rank of the peer, user's tag, and whether we send.
    pub(crate) messages: HashMap<(u32, u32, bool), u64>,
    pub(crate) balance: Balance,
}

/// How long a failed call waits for peers to let go of its memory, beyond the silence that is forgiven.
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
    /// Those of the lost that did not leave in good order, and when they were lost.
    pub(crate) broken: BTreeMap<u32, Instant>,
    /// When this rank last showed that it lives, and when and after how long it last woke from not doing so.
    pub(crate) beaten: Instant,
    pub(crate) woke: Option<(Instant, Duration)>,
    /// Peers that take nothing more, and why.
    pub(crate) unwritable: Vec<(u32, Error)>,
    /// What was heard of peers and is not acted on yet.
    pub(crate) told: Vec<Told>,
    /// The way out to the rank that was given up last: what is left of the word that it is.
    pub(crate) farewell: Option<Tx>,
    /// The silence after which a rank is given up, as of the last beat.
    pub(crate) limit: Duration,
    /// Jobs whose memory must not be written to any more.
    pub dead: Vec<u64>,
    /// Counters for callers.
    pub counters: Arc<Counters>,
    pub(crate) deadlines: HashMap<u64, Instant>,
    pub(crate) early: Vec<Early>,
    pub(crate) early_bytes: usize,
    pub(crate) failures: Vec<Failure>,
    /// The group that this rank helps.
    pub helped: Option<Arc<Members>>,
    /// Whether it has not ended that yet, for other threads.
    pub(crate) helping: Arc<AtomicBool>,
    pub(crate) books: HashMap<u64, Book>,
    /// What this rank's link carries.
    pub meter: Meter,
    pub(crate) plans: Plans,
    scratch: Vec<Scratch>,
    pub(crate) done: Vec<Token>,
    next_job: u64,
    pub(crate) window: Window,
}

impl Hub {
    /// No jobs yet.
    pub fn new(world: Arc<World>, tx: Vec<Option<Tx>>) -> Self {
        let counters = Arc::new(Counters::new(world.size()));
        Self {
            world,
            tx,
            jobs: Vec::new(),
            lost: BTreeMap::new(),
            broken: BTreeMap::new(),
            beaten: Instant::now(),
            woke: None,
            unwritable: Vec::new(),
            told: Vec::new(),
            farewell: None,
            limit: Duration::ZERO,
            dead: Vec::new(),
            counters,
            deadlines: HashMap::new(),
            early: Vec::new(),
            early_bytes: 0,
            failures: Vec::new(),
            helped: None,
            helping: Arc::default(),
            books: HashMap::new(),
            meter: Meter::default(),
            plans: Plans::default(),
            scratch: Vec::new(),
            done: Vec::new(),
            next_job: 0,
            window: Window::default(),
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
        // Whose message has come may have left since.
        let has_come = self.early.iter().any(|e| {
            Some(e.peer) == peer
                && e.frame.group == members.id
                && e.frame.call == call_id
                && e.frame.kind == Kind::Data
        });
        let gone = match peer {
            None => self.first_lost(&members.ranks),
            Some(_) if has_come => None,
            Some(rank) => self.first_lost(&[rank]),
        };
        // Others may not know of a loss; of a failure that came here, they do.
        let error = match (failed, gone) {
            (Some(i), _) => {
                let failure = self.failures.swap_remove(i);
                self.counters.news().failed.remove(&members.id);
                if peer.is_none() {
                    self.failures.retain(|f| f.group != members.id || f.call != call_id);
                }
                Some((failure.error, false))
            }
            (None, Some(rank)) => Some((self.loss(rank, members.id, &signature(&request)), true)),
            _ => None,
        };
        let i = self.enter(members, call_id, request, ticket);
        if let Some((error, tell)) = error {
            return self.fail(i, error, tell);
        }
        if let Some(deadline) = deadline {
            self.deadlines.insert(self.jobs[i].body.id, deadline);
        }
        self.take_early(i);
        self.advance(i);
    }

    /// Which of these ranks was lost first.
    pub(crate) fn first_lost(&self, ranks: &[u32]) -> Option<u32> {
        if self.lost.is_empty() { None } else { self.counters.news().first(ranks) }
    }

    /// Whether there is nothing to do, and nothing may come to be done.
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty() && self.helped.is_none()
    }

    pub(crate) fn enter(
        &mut self,
        members: Arc<Members>,
        call: CallId,
        request: Request,
        ticket: Arc<Ticket>,
    ) -> usize {
        let scratch = self.scratch.pop().unwrap_or_default();
        let signature = signature(&request);
        self.next_job += 1;
        let mut job = Job::new(self.next_job, members, call, request, signature, scratch);
        job.ticket = ticket;
        self.jobs.push(job);
        self.jobs.len() - 1
    }

    /// Moves one job on as far as it goes now; true if it moved.
    pub fn advance(&mut self, i: usize) -> bool {
        let mut moved = false;
        loop {
            let before = (self.jobs[i].stage, self.jobs[i].body.barrier);
            if let Err(error) = self.step(i) {
                self.stop(i, error);
                return true;
            }
            if before == (self.jobs[i].stage, self.jobs[i].body.barrier) {
                return moved;
            }
            self.jobs[i].stirred = true;
            moved = true;
        }
    }

    fn step(&mut self, i: usize) -> Result<()> {
        let job = &mut self.jobs[i];
        let call = job.body.call_id;
        let members = job.body.members.clone();
        match job.stage {
            Stage::Waiting if job.opening == Opening::Messages => {
                if planner::goes_by_rates(&job.body.request.call, &members.layout) && !self.settle(i) {
                    return Ok(());
                }
                self.jobs[i].stage = Stage::Running;
                let plan = self.plan(i)?;
                self.pace(i, &plan);
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
                    lane.describe(&job.body.signature, None, None);
                    job.stage = Stage::Meeting;
                    let plan = self.plan(i)?;
                    return self.jobs[i].run(plan, &mut self.tx, &mut self.done);
                }
                let input = self.world.arena.locate(tensors.input, lent);
                let mut stage = None;
                if planner::is_staged(&job.body.request.call, &members.layout)
                    && let Some(block) = members.stage(call, &self.world)
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
                self.jobs[i].body.lent = self.lend(i)?;
                let plan = self.plan(i)?;
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

    /// Steps whose frames have left since the last look; true if there were any.
    pub fn finish_sends(&mut self) -> bool {
        let mut moved = false;
        while let Some(token) = self.done.pop() {
            moved = true;
            self.complete(token);
        }
        moved
    }

    pub(crate) fn complete(&mut self, token: Token) {
        let Some(i) = self.jobs.iter().position(|j| j.body.id == token.job) else { return };
        if self.jobs[i].stage == Stage::Closing {
            return;
        }
        if let Err(error) = self.jobs[i].complete(token.step, &mut self.tx, &mut self.done) {
            self.stop(i, error);
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
                Err(e) => {
                    self.unwritable.push((rank as u32, e));
                    moved = true;
                }
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
                    // Who holds it may be stopped: that is forgiven up to the limit, and ends in a loss beyond.
                    held == 0 || now - job.moved > CLOSE + self.limit
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
}

/// What peers compare of a request.
pub(crate) fn signature(request: &Request) -> Signature {
    if let Some(declared) = request.declared {
        return declared;
    }
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

pub(crate) fn mismatch(members: &Members, call: CallId, sides: &[(u32, Signature)]) -> Error {
    let helps = |rank| members.place_of(rank).is_some_and(|p| p >= members.layout.workers());
    let did = |rank| if helps(rank) { "was asked to help in" } else { "called" };
    let sides: Vec<String> =
        sides.iter().map(|&(rank, s)| format!("rank {rank} {} {s}", did(rank))).collect();
    let call = call.0 & 0xffff_ffff;
    Error::Mismatch { group: members.name.clone(), call, sides: sides.join(", ") }
}
