//! What a call goes by: the memory that is lent, the rates of the links, and so its schedule.
//!
//! Schedules are kept: a training loop makes the same calls again and again.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use trigram_core::Error;
use trigram_core::planner::{self, Call, Lent, Opening};
use trigram_core::schedule::{Place, Schedule};
use trigram_core::signature::Collective;
use trigram_core::topology::direct;
use trigram_core::wire::{Frame, Kind};

use crate::call::agreed_rates;
use crate::call::job::{Body, Job, Loan, Message, Request, Stage};
use crate::drive::hub::Hub;
use crate::host::control_segment::Lane;

/// The group, the call, what is lent in it, and whether its payload fits the slot.
#[derive(PartialEq, Eq, Hash)]
struct PlanKey(u64, Call, Lent, bool);

/// Schedules at most: lengths that change with every call must not fill the memory.
const KEPT: usize = 1024;

/// The schedules of calls that have been made.
#[derive(Default)]
pub(crate) struct Plans {
    kept: HashMap<PlanKey, Arc<Schedule>>,
    /// The last one found. Most loops repeat one call, and comparing is faster than hashing.
    last: Option<(PlanKey, Arc<Schedule>)>,
    /// Large calls so far, and when the connections were last told to pace themselves.
    large: u64,
    paced: Option<Instant>,
}

impl Plans {
    /// The schedule of a call, or its key back.
    fn find(&mut self, key: PlanKey) -> Result<Arc<Schedule>, PlanKey> {
        if let Some((_, plan)) = self.last.as_ref().filter(|(last, _)| *last == key) {
            return Ok(plan.clone());
        }
        let Some(plan) = self.kept.get(&key).cloned() else { return Err(key) };
        self.last = Some((key, plan.clone()));
        Ok(plan)
    }

    fn keep(&mut self, key: PlanKey, plan: &Arc<Schedule>) {
        if self.kept.len() >= KEPT {
            self.kept.clear();
        }
        self.kept.insert(key, plan.clone());
    }

    /// The group's rates have changed.
    pub(crate) fn forget(&mut self, group: u64) {
        self.kept.retain(|key, _| key.0 != group);
        self.last = None;
    }
}

impl Hub {
    /// Finds the memory that the ranks of this host lend for a call: their inputs, else their stages,
    /// if each does.
    pub(crate) fn lend(&mut self, i: usize) -> Result<Lent, Error> {
        let body = &mut self.jobs[i].body;
        let members = body.members.clone();
        let size = body.request.call.dtype.size();
        for kind in [Lent::Inputs, Lent::Stages] {
            body.loans.clear();
            let mut all = true;
            for place in members.local_places() {
                let mut layout = members.layout.clone();
                layout.me = place;
                let len = planner::contribution(&body.request.call, &layout) * size;
                if len == 0 && kind == Lent::Inputs {
                    continue;
                }
                let lane = members.lane(place, body.call_id);
                let (at, len) = match kind {
                    Lent::Inputs => (lane.and_then(Lane::input), len),
                    _ => (lane.and_then(Lane::stage), planner::STAGE_BYTES),
                };
                let Some(at) = at else {
                    all = false;
                    break;
                };
                if place != members.me {
                    let rank = members.ranks[place as usize];
                    let Some(neighbour) = self.world.neighbours.get(&rank) else { return Ok(Lent::Nothing) };
                    body.loans.push(Loan { place, base: neighbour.lent(at, len)?, len });
                }
            }
            if all {
                if kind == Lent::Stages {
                    members.use_stage(body.call_id);
                }
                return Ok(kind);
            }
        }
        Ok(Lent::Nothing)
    }

    /// Brings the rates that a call goes by up to date; false if it must wait for its turn, or for
    /// what a peer has to say. Rates change with a call, so the calls before and after it must not overtake it.
    pub(crate) fn settle(&mut self, i: usize) -> bool {
        let Body { members, call_id, .. } = &self.jobs[i].body;
        let (members, call) = (members.clone(), *call_id);
        let before = |j: &Job| {
            j.stage == Stage::Waiting
                && j.body.members.id == members.id
                && j.body.call_id < call
                && planner::goes_by_rates(&j.body.request.call, &members.layout)
        };
        if self.jobs.iter().any(before) {
            return false;
        }
        if !planner::is_balanced(&self.jobs[i].body.request.call, &members.layout) {
            return true;
        }
        let balance = &mut self.books.entry(members.id).or_default().balance;
        if balance.is_first(call.0) {
            let measured = self.meter.rate(balance.since());
            let rate = balance.declare(call.0, self.world.rank, measured, members.layout.helpers > 0);
            let frame = Frame { len: 8, ..self.jobs[i].body.frame(Kind::Rate, 0, 0) };
            for place in (0..members.ranks.len() as Place).filter(|&p| p != members.me) {
                if let Some(tx) = members.link(place, &mut self.tx) {
                    tx.give(&frame, rate.unwrap_or(0.0).to_le_bytes().to_vec());
                }
            }
        }
        let Some(changed) = balance.settle(&members.ranks, members.layout.helpers as usize) else {
            return false;
        };
        if changed {
            members.set_rates(balance.measured());
            self.plans.forget(members.id);
        }
        true
    }

    /// Now and then, before a large AllReduce among several hosts, tells the connections what this
    /// rank's link carries, so that they queue no more than keeps it busy. Not where one of them carries most of
    /// it, as to a fast helper: then nobody shares the link, and what is acknowledged waits behind what is not paced.
    pub(crate) fn pace(&mut self, i: usize, plan: &Schedule) {
        let Body { members, request: Request { call, .. }, .. } = &self.jobs[i].body;
        let bytes = call.len * call.dtype.size();
        if call.what != Collective::AllReduce || members.ranks.len() < 3 || bytes < planner::BALANCED_BYTES {
            return;
        }
        if plan.traffic().iter().any(|t| 4 * t.sent.max(t.received) > 3 * call.len) {
            return;
        }
        self.plans.large += 1;
        if !self.plans.large.is_multiple_of(agreed_rates::EPOCH) {
            return;
        }
        let Some(rate) = self.meter.rate(self.plans.paced.replace(Instant::now())) else { return };
        for peer in plan.traffic().iter().filter(|t| t.sent > 0) {
            if let Some(tx) = members.link(peer.peer, &mut self.tx) {
                tx.pace(rate);
            }
        }
    }

    /// The schedule of a call that knows what it may touch.
    pub(crate) fn plan(&mut self, i: usize) -> Result<Arc<Schedule>, Error> {
        let job = &self.jobs[i];
        let (members, request) = (&job.body.members, &job.body.request);
        let one_shot = job.opening == Opening::OneShot;
        if let Some(Message { peer, sends, .. }) = request.message {
            let piece = (planner::PIECE_BYTES / request.call.dtype.size()).max(1);
            let make = if sends { direct::send } else { direct::recv };
            return Ok(Arc::new(make(members.me, peer, request.call.len, piece)));
        }
        let key = PlanKey(members.id, request.call.clone(), job.body.lent, one_shot);
        let key = match self.plans.find(key) {
            Ok(plan) => return Ok(plan),
            Err(key) => key,
        };
        let plan = Arc::new(match one_shot {
            true => planner::one_shot(&request.call, &members.layout),
            false => {
                let links = self.books.get(&members.id).map(|b| b.balance.links()).unwrap_or_default();
                planner::schedule(&request.call, &members.layout, job.body.lent, links)?
            }
        });
        self.plans.keep(key, &plan);
        Ok(plan)
    }
}
