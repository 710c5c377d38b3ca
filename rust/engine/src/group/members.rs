//! Who is in a group, and how each member is reached.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use trigram_core::planner::{Layout, STAGE_BYTES};
use trigram_core::schedule::Place;
use trigram_core::wire::CallId;
use trigram_core::{Error, Result};

use crate::group::retired::{Retired, Stage};
use crate::group::world::World;
use crate::host::control_segment::{Board, LANES, Lane};
use crate::sys::memory::Block;

/// A member on this host, this rank included.
#[derive(Debug)]
struct Local {
    place: Place,
    board: Board,
    /// Where its directory has the group, once found.
    found: AtomicUsize,
}

const NOT_FOUND: usize = usize::MAX;

/// A group, as its calls need it.
#[derive(Debug)]
pub struct Members {
    /// The same on all members.
    pub id: u64,
    /// What users call it.
    pub name: String,
    /// World ranks by place.
    pub ranks: Vec<u32>,
    /// This rank's place.
    pub me: Place,
    /// The group as schedules see it.
    pub layout: Layout,
    /// What each member's link carries in bytes per second, as all go by now; empty if equal shares.
    rates: Mutex<Vec<f64>>,
    /// Collectives that this rank has made, or skipped.
    pub made: AtomicU64,
    locals: Vec<Local>,
    /// This rank's stages, one for each lane, once used.
    stages: [OnceLock<Option<Block>>; LANES],
    /// By lane, one more than the last call that used the stage.
    staged: [AtomicU64; LANES],
    retired: Arc<Retired>,
}

impl Members {
    /// The group of these world ranks, of which the last `helpers` only help; this rank is one of them.
    pub fn new(id: u64, name: String, ranks: Vec<u32>, helpers: u32, world: &World) -> Result<Self> {
        let Some(me) = ranks.iter().position(|&r| r == world.rank) else {
            return Err(Error::misuse(format!("rank {} is not in group {name} {ranks:?}", world.rank)));
        };
        let mut hosts: Vec<(usize, Vec<Place>)> = Vec::new();
        for (place, &rank) in (0..).zip(&ranks) {
            let host = *world.host_of.get(rank as usize).ok_or_else(|| {
                Error::misuse(format!(
                    "group {name}: rank {rank} is outside of the world of {}",
                    world.size()
                ))
            })?;
            match hosts.iter_mut().find(|(h, _)| *h == host) {
                Some((_, places)) => places.push(place),
                None => hosts.push((host, vec![place])),
            }
        }
        let hosts: Vec<Vec<Place>> = hosts.into_iter().map(|(_, places)| places).collect();
        let me = me as Place;
        let here = hosts.iter().find(|h| h.contains(&me)).cloned().unwrap_or_default();
        let mut locals = Vec::new();
        if here.len() > 1 && helpers == 0 {
            for &place in &here {
                let rank = ranks[place as usize];
                let board = world.board(rank).ok_or_else(|| {
                    Error::misuse(format!("group {name}: no shared memory with rank {rank}"))
                })?;
                let found = if place == me { board.enter_group(id)? } else { NOT_FOUND };
                locals.push(Local { place, board: board.clone(), found: AtomicUsize::new(found) });
            }
        }
        let layout = Layout { me, world: ranks.len() as u32, hosts, helpers };
        Ok(Self {
            id,
            name,
            ranks,
            me,
            layout,
            made: AtomicU64::new(0),
            rates: Mutex::default(),
            locals,
            stages: Default::default(),
            staged: Default::default(),
            retired: world.retired.clone(),
        })
    }

    /// What each member's link carries, in bytes per second, as schedules go by; empty while nobody
    /// knows.
    pub fn rates(&self) -> Vec<f64> {
        self.rates.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// See [`Members::rates`].
    pub(crate) fn set_rates(&self, rates: &[f64]) {
        *self.rates.lock().unwrap_or_else(PoisonError::into_inner) = rates.to_vec();
    }

    /// The place of a world rank.
    pub fn place_of(&self, rank: u32) -> Option<Place> {
        self.ranks.iter().position(|&r| r == rank).map(|p| p as Place)
    }

    /// World ranks of places.
    pub fn ranks_of(&self, places: &[Place]) -> Vec<u32> {
        places.iter().filter_map(|&p| self.ranks.get(p as usize).copied()).collect()
    }

    /// Whether calls of this group meet on the board.
    pub fn has_lanes(&self) -> bool {
        !self.locals.is_empty()
    }

    /// The places on this host that share memory with this rank, itself included.
    pub fn local_places(&self) -> impl Iterator<Item = Place> + '_ {
        self.locals.iter().map(|l| l.place)
    }

    /// The lane of a member on this host for a collective, once the member has made the group.
    /// Messages between two ranks have none.
    pub fn lane(&self, place: Place, call: CallId) -> Option<&Lane> {
        self.locals.iter().find(|l| l.place == place)?.lane(self.id, call)
    }

    /// This rank's stage for a call: what larger payloads pass through that only their owner can see.
    /// `None` where there is no shared memory to be had.
    pub fn stage(&self, call: CallId, world: &World) -> Option<&Block> {
        let stage = &self.stages[call.0 as usize % LANES];
        stage.get_or_init(|| world.allocate(STAGE_BYTES).ok()).as_ref()
    }

    /// A call uses the stages: peers may read from this rank's until they have left it.
    pub fn use_stage(&self, call: CallId) {
        self.staged[call.0 as usize % LANES].store(call.0 + 1, Ordering::Relaxed);
    }

    /// This rank arrives at a barrier.
    pub fn arrive(&self, call: CallId, ordinal: u32) {
        if let Some(lane) = self.lane(self.me, call) {
            lane.arrive(call.0, ordinal);
            self.ring();
        }
    }

    /// Wakes the members on this host.
    pub fn ring(&self) {
        self.locals.iter().filter(|l| l.place != self.me).for_each(|l| l.board.bell().ring());
    }

    /// Whether all members on this host have arrived at a barrier.
    pub fn all_arrived(&self, call: CallId, ordinal: u32) -> bool {
        self.locals.iter().all(|l| l.has_arrived(self.id, call, ordinal))
    }

    /// Whether a member on this host has given up a call. To be asked after arriving.
    pub fn has_failed(&self, call: CallId) -> bool {
        self.locals.iter().any(|l| l.lane(self.id, call).is_some_and(|lane| lane.has_failed(call.0)))
    }

    /// The members on this host that have not arrived at a barrier.
    pub fn absent(&self, call: CallId, ordinal: u32) -> Vec<Place> {
        let absent = self.locals.iter().filter(|l| !l.has_arrived(self.id, call, ordinal));
        absent.map(|l| l.place).collect()
    }

    /// Members on this host that are not done with the call that used the lane before.
    pub fn busy(&self, call: CallId) -> impl Iterator<Item = Place> + '_ {
        let busy = self.locals.iter().filter(move |l| {
            !l.is_past(self.id) && l.lane(self.id, call).is_some_and(|lane| !lane.is_free_for(call.0))
        });
        busy.map(|l| l.place)
    }

    /// Members on this host, other than this rank, that are inside a call.
    pub fn inside(&self, call: CallId) -> Vec<Place> {
        let inside = self.locals.iter().filter(|l| {
            l.place != self.me
                && !l.is_past(self.id)
                && l.lane(self.id, call).is_some_and(|x| x.is_inside(call.0))
        });
        inside.map(|l| l.place).collect()
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        let stages = std::mem::take(&mut self.stages);
        let blocks = stages.into_iter().enumerate().filter_map(|(i, stage)| Some((i, stage.into_inner()??)));
        if crate::sys::fork::is_child() {
            return blocks.for_each(|(_, block)| std::mem::forget(block)); // they are the parent's
        }
        // A peer may still be reading from a stage, on its way out of the last call that used it.
        for (i, block) in blocks {
            let call = self.staged[i].load(Ordering::Relaxed);
            let readers = self.locals.iter().filter(|l| l.place != self.me);
            let readers = readers.map(|l| (l.board.clone(), l.found.load(Ordering::Relaxed)));
            let readers = readers.filter(|(_, found)| *found != NOT_FOUND).collect();
            self.retired.add(Stage { _block: block, group: self.id, call, readers });
        }
        for local in self.locals.iter().filter(|l| l.place == self.me) {
            local.board.leave_group(local.found.load(Ordering::Relaxed));
        }
    }
}

impl Local {
    fn lane(&self, id: u64, call: CallId) -> Option<&Lane> {
        if call.is_message() {
            return None;
        }
        let mut found = self.found.load(Ordering::Relaxed);
        if found == NOT_FOUND {
            found = self.board.find_group(id)?;
            self.found.store(found, Ordering::Relaxed);
        }
        Some(self.board.lane(found, call.0))
    }

    /// Whether the member has let the group go, after its last call.
    fn is_past(&self, id: u64) -> bool {
        let found = self.found.load(Ordering::Relaxed);
        found != NOT_FOUND && !self.board.has_group(found, id)
    }

    fn has_arrived(&self, id: u64, call: CallId, ordinal: u32) -> bool {
        self.lane(id, call).is_some_and(|lane| lane.has_arrived(call.0, ordinal)) || self.is_past(id)
    }
}
