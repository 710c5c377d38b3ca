//! The members of a group, and the operation slots and bounce buffers that those of one host share.

use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use trigram_core::planner::{BOUNCE_BYTES, Layout};
use trigram_core::schedule::Place;
use trigram_core::wire::CallId;
use trigram_core::{Error, Result};

use crate::group::retired::{Retired, RetiredBuffer};
use crate::group::world::World;
use crate::host::control_segment::{ControlSegment, LastCall, OP_SLOTS, OpSlot};
use crate::sys::memory::RegisteredBuffer;

/// A member on this host; this rank is one too.
#[derive(Debug)]
struct Local {
    place: Place,
    control: ControlSegment,
    /// The group's index in the member's directory, once it has been found.
    found: AtomicUsize,
    /// The member is known to have left all calls before this one.
    left_before: AtomicU64,
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
    /// What each member's link carries, in bytes per second, as all ranks agreed; empty if shares are equal.
    rates: Mutex<Vec<f64>>,
    /// Collectives that this rank has made or skipped.
    pub made: AtomicU64,
    /// The backward pass that new calls belong to, see [`trigram_core::signature::Signature::in_pass`].
    pub pass: AtomicU16,
    locals: Vec<Local>,
    /// This rank's bounce buffers, one for each operation slot, allocated at first use.
    bounce_buffers: [OnceLock<Option<RegisteredBuffer>>; OP_SLOTS],
    /// By operation slot, one more than the last call that used the bounce buffer.
    bounce_buffer_used: [AtomicU64; OP_SLOTS],
    retired: Arc<Retired>,
}

impl Members {
    /// The group of these world ranks, of which the last `helpers` have no data; this rank is one of them.
    pub fn new(id: u64, name: String, ranks: Vec<u32>, helpers: u32, world: &World) -> Result<Self> {
        let Some(me) = ranks.iter().position(|&r| r == world.rank) else {
            return Err(Error::misuse(format!(
                "rank {} cannot create group {name}: it is not one of its ranks {ranks:?}",
                world.rank
            )));
        };
        let mut hosts: Vec<(usize, Vec<Place>)> = Vec::new();
        for (place, &rank) in (0..).zip(&ranks) {
            let host = *world.host_of.get(rank as usize).ok_or_else(|| {
                Error::misuse(format!(
                    "group {name}: there is no rank {rank} in a world of {} ranks",
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
                let control = world.control(rank).ok_or_else(|| {
                    Error::misuse(format!(
                        "group {name}: this rank shares no memory with rank {rank} of the same host"
                    ))
                })?;
                let found = if place == me { control.enter_group(id)? } else { NOT_FOUND };
                let (control, found) = (control.clone(), AtomicUsize::new(found));
                locals.push(Local { place, control, found, left_before: AtomicU64::new(0) });
            }
        }
        let world_size = ranks.len() as u32;
        let tuned = world.tuning.iter().find(|tuned| tuned.world == world_size && hosts.len() == ranks.len());
        // Only two ranks know of a link, so only what they do alone may depend on it.
        let is_far = |rank: &u32| world.far.get(*rank as usize) == Some(&true);
        let far = ranks.len() == 2 && ranks.iter().any(is_far);
        let layout = Layout { me, world: world_size, hosts, helpers, tuned: tuned.copied(), far };
        Ok(Self {
            id,
            name,
            ranks,
            me,
            layout,
            made: AtomicU64::new(0),
            pass: AtomicU16::new(0),
            rates: Mutex::default(),
            locals,
            bounce_buffers: Default::default(),
            bounce_buffer_used: Default::default(),
            retired: world.retired.clone(),
        })
    }

    /// The most that each member's link has carried of late, in bytes per second, as all ranks agreed; empty while
    /// nobody knows.
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

    /// Whether calls of this group use operation slots.
    pub fn has_op_slots(&self) -> bool {
        !self.locals.is_empty()
    }

    /// The places on this host that share memory with this rank, itself included.
    pub fn local_places(&self) -> impl Iterator<Item = Place> + '_ {
        self.locals.iter().map(|l| l.place)
    }

    /// The operation slot of a member on this host for a collective, once the member has created the group. Messages
    /// between two ranks have none.
    pub fn op_slot(&self, place: Place, call: CallId) -> Option<&OpSlot> {
        self.locals.iter().find(|l| l.place == place)?.op_slot(self.id, call)
    }

    /// This rank's bounce buffer for a call: larger payloads in private memory pass through it. `None` if there is no
    /// shared memory left.
    pub fn bounce_buffer(&self, call: CallId, world: &World) -> Option<&RegisteredBuffer> {
        let buffer = &self.bounce_buffers[call.0 as usize % OP_SLOTS];
        buffer.get_or_init(|| world.allocate(BOUNCE_BYTES).ok()).as_ref()
    }

    /// Records that a call uses the bounce buffers: peers may read from this rank's until they have left the call.
    pub fn use_bounce_buffer(&self, call: CallId) {
        self.bounce_buffer_used[call.0 as usize % OP_SLOTS].store(call.0 + 1, Ordering::Relaxed);
    }

    /// This rank arrives at a barrier. Nobody can pass it before all have come, so only who finds that they have wakes the
    /// others.
    pub fn arrive(&self, call: CallId, ordinal: u32) {
        if let Some(op_slot) = self.op_slot(self.me, call) {
            op_slot.arrive(call.0, ordinal);
            // Of those who arrive at the same time at least one sees all others.
            fence(Ordering::SeqCst);
            if self.all_arrived(call, ordinal) {
                self.ring();
            }
        }
    }

    /// Wakes the members on this host.
    pub fn ring(&self) {
        self.locals.iter().filter(|l| l.place != self.me).for_each(|l| l.control.bell().ring());
    }

    /// Whether all members on this host have arrived at a barrier.
    pub fn all_arrived(&self, call: CallId, ordinal: u32) -> bool {
        self.locals.iter().all(|l| l.has_arrived(self.id, call, ordinal))
    }

    /// Notes which calls the members on this host have left, as they say in one at which all have arrived. So the next
    /// calls need not look at the slots of earlier ones.
    pub fn note_left(&self, call: CallId) {
        for local in &self.locals {
            if let Some(op_slot) = local.op_slot(self.id, call) {
                local.left_before.fetch_max(op_slot.left_before(), Ordering::Relaxed);
            }
        }
    }

    /// Whether a member on this host has aborted a call. To be asked after arriving.
    pub fn has_failed(&self, call: CallId) -> bool {
        self.locals.iter().any(|l| l.op_slot(self.id, call).is_some_and(|op_slot| op_slot.has_failed(call.0)))
    }

    /// The members on this host that have not arrived at a barrier.
    pub fn absent(&self, call: CallId, ordinal: u32) -> Vec<Place> {
        let absent = self.locals.iter().filter(|l| !l.has_arrived(self.id, call, ordinal));
        absent.map(|l| l.place).collect()
    }

    /// Members on this host that have not left the call that used the operation slot before.
    pub fn busy(&self, call: CallId) -> impl Iterator<Item = Place> + '_ {
        let busy = self.locals.iter().filter(move |l| {
            l.left_before.load(Ordering::Relaxed) + OP_SLOTS as u64 <= call.0
                && !l.is_past(self.id)
                && l.op_slot(self.id, call).is_some_and(|op_slot| !op_slot.is_free_for(call.0))
        });
        busy.map(|l| l.place)
    }

    /// Whether a member on this host, other than this rank, has not left a call: it is inside, or may still enter it.
    pub(crate) fn may_be_inside(&self, place: Place, call: CallId) -> bool {
        self.locals
            .iter()
            .filter(|l| l.place == place && l.place != self.me)
            .any(|l| !l.is_past(self.id) && l.op_slot(self.id, call).is_none_or(|slot| slot.left() <= call.0))
    }

    /// Members on this host, other than this rank, that are inside a call.
    pub fn inside(&self, call: CallId) -> Vec<Place> {
        let inside = self.locals.iter().filter(|l| {
            l.place != self.me
                && !l.is_past(self.id)
                && l.op_slot(self.id, call).is_some_and(|x| x.is_inside(call.0))
        });
        inside.map(|l| l.place).collect()
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        let buffers = std::mem::take(&mut self.bounce_buffers);
        let buffers =
            buffers.into_iter().enumerate().filter_map(|(i, buffer)| Some((i, buffer.into_inner()??)));
        if crate::sys::fork::is_child() {
            return buffers.for_each(|(_, buffer)| std::mem::forget(buffer)); // they are the parent's
        }
        // A peer that is leaving the last call may still be reading from a bounce buffer, or look for this rank's slot.
        let last = |call: u64| {
            let peers = self.locals.iter().filter(|l| l.place != self.me);
            let peers = peers.map(|l| (l.control.clone(), l.found.load(Ordering::Relaxed)));
            let peers = peers.filter(|(_, found)| *found != NOT_FOUND).collect();
            LastCall { group: self.id, call, peers }
        };
        for (i, buffer) in buffers {
            let call = self.bounce_buffer_used[i].load(Ordering::Relaxed);
            self.retired.add(RetiredBuffer { _buffer: buffer, last: last(call) });
        }
        let made = self.made.load(Ordering::Relaxed);
        for local in self.locals.iter().filter(|l| l.place == self.me) {
            local.control.leave_group(local.found.load(Ordering::Relaxed), last(made));
        }
    }
}

impl Local {
    fn op_slot(&self, id: u64, call: CallId) -> Option<&OpSlot> {
        if call.is_message() {
            return None;
        }
        let mut found = self.found.load(Ordering::Relaxed);
        if found == NOT_FOUND {
            found = self.control.find_group(id)?;
            self.found.store(found, Ordering::Relaxed);
        }
        Some(self.control.op_slot(found, call.0))
    }

    /// Whether the member has deleted the group, after its last call.
    fn is_past(&self, id: u64) -> bool {
        let found = self.found.load(Ordering::Relaxed);
        found != NOT_FOUND && !self.control.has_group(found, id)
    }

    fn has_arrived(&self, id: u64, call: CallId, ordinal: u32) -> bool {
        self.op_slot(id, call).is_some_and(|op_slot| op_slot.has_arrived(call.0, ordinal)) || self.is_past(id)
    }
}
