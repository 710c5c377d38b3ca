//! Makes failures known, and names those waited for.
//!
//! The first failure of a call reaches every rank (invariant ERR-3): whoever finds it sends it to
//! all members, and each fails the same call with the same error. Other calls of the group go on;
//! a lost peer ends all calls that need it, and all later ones.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use trigram_core::error::name_ranks;
use trigram_core::planner::Opening;
use trigram_core::schedule::Place;
use trigram_core::signature::Signature;
use trigram_core::wire::{CallId, Frame, Kind};
use trigram_core::{Error, Result};

use crate::call::job::{Message, Request, Stage};
use crate::drive::heartbeat::dismiss;
use crate::drive::hub::Hub;
use crate::group::members::Members;

/// After this long without progress a rank tells the others what it called.
const STALL: Duration = Duration::from_millis(100);
/// After a loss a call of the group that does not need the lost rank has so long to get on.
const GRACE: Duration = Duration::from_millis(500);
/// After this long a log line names those it waits for.
const NAME_AFTER: Duration = Duration::from_secs(10);

/// How a peer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// It said that it leaves.
    Left,
    /// Its connection has closed: the process is gone. Or it has sent what no correct peer sends.
    Dead,
    /// It is silent, or cannot be reached: it may live on.
    Silent,
    /// It has given this rank up.
    Refused,
}

/// What this rank has heard of another, in the order in which it came.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) rank: u32,
    pub(crate) why: Error,
    pub(crate) how: How,
    /// The rank that says so of a third; `None` for what this rank has seen itself.
    pub(crate) by: Option<u32>,
}

/// Bad news, to be read by threads that do not drive the work.
#[derive(Debug, Default)]
pub struct News {
    /// Why each lost peer is lost.
    pub(crate) lost: BTreeMap<u32, Error>,
    /// And how.
    pub(crate) how: BTreeMap<u32, How>,
    /// In which order: those that left have done so because of the others, and come last.
    pub(crate) order: Vec<u32>,
    /// By group, the last failure of a call that this rank has not made.
    pub(crate) failed: HashMap<u64, Error>,
}

impl News {
    /// The peers lost so far, and how.
    pub fn losses(&self) -> Vec<(u32, How)> {
        self.how.iter().map(|(&rank, &how)| (rank, how)).collect()
    }

    /// Which of these ranks was lost first.
    pub(crate) fn first(&self, ranks: &[u32]) -> Option<u32> {
        self.order.iter().copied().find(|rank| ranks.contains(rank))
    }

    /// Why a group cannot go on: a member is lost, or has given up a call that is yet to be made here.
    ///
    /// # Errors
    ///
    /// That.
    pub fn of(&self, members: &Members, what: &Signature) -> Result<()> {
        if let Some(rank) = self.first(&members.ranks) {
            return Err(loss(rank, self.lost.get(&rank), what));
        }
        self.failed.get(&members.id).map_or(Ok(()), |error| Err(error.clone()))
    }
}

/// The error of a call that needs a lost peer.
fn loss(rank: u32, why: Option<&Error>, signature: &Signature) -> Error {
    match why {
        Some(Error::Corrupt { rank, what }) => Error::Corrupt { rank: *rank, what: what.clone() },
        why => Error::PeerLost {
            rank,
            what: signature.to_string(),
            why: why.map_or_else(String::new, ToString::to_string),
        },
    }
}

impl Hub {
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
        self.forget_rates(members.id, call);
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

    /// Fails a job that could not go on here. If that is for want of a peer, then for the reason why it was lost.
    pub(crate) fn stop(&mut self, i: usize, error: Error) {
        let error = match error {
            Error::PeerLost { rank, .. } if self.lost.contains_key(&rank) => {
                self.loss(rank, self.jobs[i].body.members.id, &self.jobs[i].body.signature)
            }
            error => error,
        };
        self.fail(i, error, true);
    }

    /// What was declared up to a failed call is void, see [`crate::call::agreed_rates`].
    pub(crate) fn forget_rates(&mut self, group: u64, call: CallId) {
        if let Some(book) = self.books.get_mut(&group).filter(|_| !call.is_message()) {
            book.balance.forget(call.0);
            self.plans.forget(group);
        }
    }

    pub(crate) fn tell(
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
    pub fn lose(&mut self, rank: u32, why: Error, how: How) {
        if self.lost.contains_key(&rank) {
            return;
        }
        let slept = if how == How::Dead { self.has_slept() } else { None };
        let why = match slept {
            Some(slept) => Error::Aborted(format!(
                "it has given up this rank, which had been silent for {:.1} s",
                slept.as_secs_f64()
            )),
            None => why,
        };
        let mut news = self.counters.news();
        // Who has been refused by one is refused by all: a connection that closes then is no death.
        let refused =
            slept.is_some() || how == How::Dead && news.how.values().any(|&how| how == How::Refused);
        let how = if refused { How::Refused } else { how };
        news.lost.insert(rank, why.clone());
        news.how.insert(rank, how);
        let at =
            news.order.iter().take_while(|r| how == How::Left || news.how.get(r) != Some(&How::Left)).count();
        news.order.insert(at, rank);
        drop(news);
        if how != How::Left {
            self.broken.insert(rank, Instant::now());
        }
        if let Some(tx) =
            self.tx.get_mut(rank as usize).and_then(Option::as_mut).filter(|_| how == How::Silent)
        {
            dismiss(tx, rank, &why);
            // Only what fits now: it may never take it.
            let _ = tx.pump(&mut self.done);
        }
        self.lost.insert(rank, why);
        let mut tx = self.tx.get_mut(rank as usize).and_then(Option::take);
        for i in 0..self.jobs.len() {
            let id = self.jobs[i].body.id;
            if let Some(tx) = tx.as_mut().filter(|tx| tx.holds(id)) {
                tx.take_back(id);
                let error = self.loss(rank, self.jobs[i].body.members.id, &self.jobs[i].body.signature);
                self.fail(i, error, true);
            }
        }
        self.farewell = tx.filter(|_| how == How::Silent && !self.world.neighbours.contains_key(&rank));
        if how == How::Silent {
            self.fence(rank);
        }
    }

    /// A rank of this host that is given up may only be stopped, in the middle of a call that lets it write
    /// to our memory. It must never wake up to do so: so it is ended, and known to be dead.
    fn fence(&mut self, rank: u32) {
        let Some(neighbour) = self.world.neighbours.get(&rank) else { return };
        if neighbour.end() {
            let me = self.world.rank;
            eprintln!("trigram: rank {me}: ended the process of rank {rank}, which has access to its memory");
            self.counters.news().how.insert(rank, How::Dead);
        }
        neighbour.dismiss();
        // What that took was no sleep of this rank.
        self.beaten = Instant::now();
    }

    pub(crate) fn loss(&self, rank: u32, group: u64, signature: &Signature) -> Error {
        // Who leaves for another's death has told of the call that it failed. That death is the reason here too,
        // even where it is not known yet: the kernel closes a dead rank's connections one after another.
        let said = self.failures.iter().filter(|f| f.peer == rank && f.group == group).map(|f| &f.error);
        let mut deaths =
            said.filter(|e| matches!(e, Error::PeerLost { rank, .. } if *rank != self.world.rank));
        deaths.next().cloned().unwrap_or_else(|| loss(rank, self.lost.get(&rank), signature))
    }

    /// Fails jobs that need a lost peer.
    pub fn check_losses(&mut self) {
        for i in 0..self.jobs.len() {
            let job = &self.jobs[i];
            if self.lost.is_empty() || job.stage == Stage::Closing {
                continue;
            }
            let members = &job.body.members;
            // Before its schedule begins a call waits for what any member may have to say.
            let all = job.stage == Stage::Waiting && job.opening == Opening::Messages;
            let ranks = if all { members.ranks.clone() } else { members.ranks_of(&job.waiting_for()) };
            if let Some(rank) = self.first_lost(&ranks) {
                // A helper need not say so then: who has left may have had its result without it.
                let tell = !all || members.me < members.layout.workers();
                let error = self.loss(rank, job.body.members.id, &job.body.signature);
                self.fail(i, error, tell);
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
            if std::mem::take(&mut job.stirred) {
                job.moved = now;
            }
            let broken =
                job.body.members.ranks.iter().find(|r| {
                    self.broken.get(r).is_some_and(|&at| now - at > GRACE) && now - job.moved > GRACE
                });
            if let Some(&rank) = broken {
                // It waits for the living, who have heard of the loss in another call and will not come.
                let error = self.loss(rank, self.jobs[i].body.members.id, &self.jobs[i].body.signature);
                self.fail(i, error, true);
                continue;
            }
            let waited = now - job.began;
            let late = self.deadlines.get(&job.body.id).is_some_and(|d| now >= *d);
            // Who has said that it is in the call is sent everything: not before it can take it.
            let ready = job.stage != Stage::Waiting || job.opening != Opening::Messages;
            let stalled = now - job.moved > STALL && !job.announced && ready;
            let name = waited > NAME_AFTER && !job.named && job.ticket.is_awaited();
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
}
