//! The control segment: what each rank shows to the other ranks of its host.
//!
//! There is one segment per rank. Only its owner writes to it, except for the pipes (each has one writer, a peer) and
//! the doorbell (whoever rings it clears the sleeper's mark). It holds
//!
//! * the doorbell, a count of heartbeats, and one of time slices that other processes had,
//! * a pipe from each other rank of the host,
//! * for each group and each call in flight an *operation slot*: how far the owner has come, what it called,
//!   where its memory is, and an inline buffer for small payloads.
//!
//! An operation slot is reused every [`OP_SLOTS`] calls, once all ranks have left the earlier call.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use trigram_core::{Error, Result};

use crate::host::doorbell::Doorbell;
use crate::host::doorbell_words::Words;
pub use crate::host::op_slot::{OP_SLOTS, OpSlot};
use crate::host::pipe::{PIPE, Pipe};
use crate::sys::memory::Segment;

/// The most ranks of one host.
pub const MAX_LOCAL: usize = 64;
/// The most groups of one process with members on one host.
pub const MAX_GROUPS: usize = 4096;
/// With so many deleted groups in the directory, a new group takes the entry of an old one whose last call all ranks have
/// left: the memory that operation slots have touched is used again.
const KEPT_ENTRIES: usize = 512;
/// How many of the oldest entries are looked at for that.
const LOOKS: usize = 64;

const MAGIC: u64 = u64::from_le_bytes(*b"TGMBRD\x07\0");

/// Directory entries that are no group's id.
const NO_GROUP: u64 = 0;
const CLAIMED: u64 = u64::MAX;

#[repr(C)]
struct Layout {
    magic: AtomicU64,
    bell: Words,
    heartbeats: AtomicU64,
    /// How often the owner has found that somebody else wanted its core.
    lost_cores: AtomicU64,
    /// By index on the host: whether the owner has evicted that rank.
    evicted: [AtomicU32; MAX_LOCAL],
    pipes: [Pipe; MAX_LOCAL],
    groups: [AtomicU64; MAX_GROUPS],
    op_slots: [[OpSlot; OP_SLOTS]; MAX_GROUPS],
    rings: [[u8; PIPE]; MAX_LOCAL],
}

/// A control segment, this rank's own or a peer's.
#[derive(Clone, Debug)]
pub struct ControlSegment {
    segment: Arc<Segment>,
    bell: Doorbell,
    /// Directory entries of groups that the owner has deleted, the oldest first.
    left: Arc<Mutex<VecDeque<(usize, LastCall)>>>,
}

/// The last call of a group that this rank has deleted, and the other ranks of this host that may still be inside.
#[derive(Debug, Default)]
pub struct LastCall {
    /// The group's id.
    pub(crate) group: u64,
    /// One more than the call's number; 0: there was none.
    pub(crate) call: u64,
    /// Their control segments, and the group's index in each.
    pub(crate) peers: Vec<(ControlSegment, usize)>,
}

impl LastCall {
    /// Whether all of them have left the call.
    pub(crate) fn is_over(&self) -> bool {
        let has_left = |(control, found): &(ControlSegment, usize)| {
            !control.has_group(*found, self.group)
                || control.op_slot(*found, self.call - 1).left() >= self.call
        };
        self.call == 0 || self.peers.iter().all(has_left)
    }
}

impl ControlSegment {
    /// A new control segment for this rank.
    pub fn create() -> Result<Self> {
        let segment = Arc::new(Segment::create(size_of::<Layout>())?);
        let control = Self::on(segment, Doorbell::event()?)?;
        control.layout().magic.store(MAGIC, Ordering::Release);
        Ok(control)
    }

    /// A peer's control segment, from the descriptors that it passed.
    pub fn map(control: OwnedFd, event: OwnedFd) -> Result<Self> {
        let control = Self::on(Arc::new(Segment::map(&control)?), event)?;
        if control.layout().magic.load(Ordering::Acquire) != MAGIC {
            return Err(Error::Auth(
                "a peer's control segment has another layout; do all ranks run the same version of trigram?"
                    .into(),
            ));
        }
        Ok(control)
    }

    fn on(segment: Arc<Segment>, event: OwnedFd) -> Result<Self> {
        if segment.at(0, size_of::<Layout>()).is_none() {
            return Err(Error::Auth(
                "a peer's control segment has the wrong size; do all ranks run the same version of trigram?"
                    .into(),
            ));
        }
        let bell = Doorbell::new(segment.clone(), std::mem::offset_of!(Layout, bell), event);
        Ok(Self { segment, bell, left: Arc::default() })
    }

    fn layout(&self) -> &Layout {
        let at = self.segment.at(0, size_of::<Layout>()).map_or(NonNull::dangling(), NonNull::cast);
        // SAFETY: `on` has checked the size; the mapping is page-aligned and lives as long as `self`; every shared
        // field is an atomic, inline buffers and rings are reached by raw pointers only.
        unsafe { at.as_ref() }
    }

    /// The segment's descriptor, to pass it to a peer.
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// The owner's doorbell.
    pub fn bell(&self) -> &Doorbell {
        &self.bell
    }

    /// Counts one more heartbeat of the owner.
    pub fn count_heartbeat(&self) {
        self.layout().heartbeats.fetch_add(1, Ordering::Relaxed);
    }

    /// How many heartbeats the owner has sent.
    pub fn heartbeats(&self) -> u64 {
        self.layout().heartbeats.load(Ordering::Relaxed)
    }

    /// The owner has found that somebody else wanted the core that it waited on.
    pub fn count_lost_core(&self) {
        self.layout().lost_cores.fetch_add(1, Ordering::Relaxed);
    }

    /// How often the owner has found that.
    pub fn lost_cores(&self) -> u64 {
        self.layout().lost_cores.load(Ordering::Relaxed)
    }

    /// The owner evicts the rank at `index` of its host. That rank reads it when its connection closes: it may have
    /// been stopped, and must not take the owner for dead.
    pub fn mark_evicted(&self, index: usize) {
        self.layout().evicted[index % MAX_LOCAL].store(1, Ordering::Release);
    }

    /// Whether the owner has evicted the rank at `index` of its host.
    pub fn has_evicted(&self, index: usize) -> bool {
        self.layout().evicted[index % MAX_LOCAL].load(Ordering::Acquire) != 0
    }

    /// The pipe to the owner from the rank at `index` of its host, and its ring's first byte.
    pub fn pipe(&self, index: usize) -> (&Pipe, *mut u8) {
        let ring = std::mem::offset_of!(Layout, rings) + index % MAX_LOCAL * PIPE;
        let ring = self.segment.at(ring, PIPE).map_or(std::ptr::dangling_mut(), |p| p.as_ptr());
        (&self.layout().pipes[index % MAX_LOCAL], ring)
    }

    /// Enters a group into the owner's directory and returns its index there. Entries are taken from the first on, so
    /// that a free one ends the directory. Entries of deleted groups are reused when there are many, or no free one, the
    /// oldest first, but for those in whose last call another rank still is: it may not have looked the group up yet.
    pub fn enter_group(&self, id: u64) -> Result<usize> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let layout = self.layout();
        let over = |left: &VecDeque<(usize, LastCall)>, looks: usize| {
            left.iter().take(looks).position(|(_, last)| last.is_over())
        };
        let many = left.len() >= KEPT_ENTRIES;
        let old = if many { over(&left, LOOKS).and_then(|i| left.remove(i)) } else { None };
        let free = || layout.groups.iter().position(|g| g.load(Ordering::Relaxed) == NO_GROUP);
        let mut last = || over(&left, MAX_GROUPS).and_then(|i| left.remove(i)).or_else(|| left.pop_front());
        let place = old.map(|(place, _)| place).or_else(free).or_else(|| Some(last()?.0)).ok_or_else(|| {
            Error::Unsupported(format!(
                "more than {MAX_GROUPS} groups at once on one host; delete those no longer used, or set TRIGRAM_TRANSPORT=tcp"
            ))
        })?;
        layout.groups[place].store(CLAIMED, Ordering::Release);
        for op_slot in &layout.op_slots[place] {
            op_slot.begin_anew();
        }
        layout.groups[place].store(id, Ordering::Release);
        Ok(place)
    }

    /// The index of a group in the owner's directory, if the owner has created it already.
    pub fn find_group(&self, id: u64) -> Option<usize> {
        let ids = self.layout().groups.iter().map(|g| g.load(Ordering::Acquire));
        ids.take_while(|found| *found != NO_GROUP).position(|found| found == id)
    }

    /// Whether the owner still has the group that was found at `place`. It deletes a group only after its last call,
    /// so a peer that finds the group gone may take the owner to have finished all calls.
    pub fn has_group(&self, place: usize, id: u64) -> bool {
        self.layout().groups[place % MAX_GROUPS].load(Ordering::Acquire) == id
    }

    /// The owner deletes a group. The directory keeps the entry until another group needs it: a peer that is leaving
    /// the last call may not have looked the group up yet.
    pub fn leave_group(&self, place: usize, last: LastCall) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).push_back((place, last));
    }

    /// The operation slot for a call of the group at index `place`.
    pub fn op_slot(&self, place: usize, call: u64) -> &OpSlot {
        &self.layout().op_slots[place % MAX_GROUPS][call as usize % OP_SLOTS]
    }
}

#[cfg(test)]
mod tests {
    use trigram_core::signature::{Collective, Signature, Via};
    use trigram_core::{DType, ReduceOp};

    use super::*;
    use crate::sys::memory::SegmentOffset;

    #[test]
    fn a_peer_reads_what_the_owner_shows() {
        let mine = ControlSegment::create().unwrap();
        let fd = |f: std::os::fd::BorrowedFd<'_>| f.try_clone_to_owned().unwrap();
        let seen = ControlSegment::map(fd(mine.segment().fd().unwrap()), fd(mine.bell().fd())).unwrap();
        mine.mark_evicted(3);
        assert!(seen.has_evicted(3) && !seen.has_evicted(2));
        let place = mine.enter_group(42).unwrap();
        assert_eq!(seen.find_group(42), Some(place));
        let s = Signature::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, Via::Auto, 0, 9);
        let op_slot = mine.op_slot(place, 3);
        assert!(!seen.op_slot(place, 3).has_arrived(3, 0));
        op_slot.describe(&s, Some(SegmentOffset { segment: 0, offset: 4096 }), None);
        op_slot.arrive(3, 0);
        let theirs = seen.op_slot(place, 3);
        assert!(theirs.has_arrived(3, 0) && !theirs.has_arrived(3, 1) && theirs.is_inside(3));
        assert_eq!(theirs.signature(), s);
        assert_eq!(theirs.lent(), Some(SegmentOffset { segment: 0, offset: 4096 }));
        assert_eq!(theirs.bounce_buffer(), None);
        op_slot.leave(3);
        assert!(theirs.is_free_for(3 + OP_SLOTS as u64) && !theirs.is_free_for(3 + 2 * OP_SLOTS as u64));
        assert!(seen.has_group(place, 42));
        mine.leave_group(place, LastCall::default());
        assert_eq!(seen.find_group(42), Some(place), "a late peer still finds it");
        let others = (0..MAX_GROUPS as u64 - 1).map(|i| mine.enter_group(100 + i).unwrap());
        assert!(others.into_iter().all(|p| p != place));
        assert_eq!(mine.enter_group(43), Ok(place), "the last place left");
        assert!(!seen.has_group(place, 42));
        assert!(!theirs.has_arrived(0, 0), "a place taken again starts anew");
        assert!(mine.enter_group(44).is_err());
    }

    #[test]
    fn entries_of_deleted_groups_are_used_again() {
        let control = ControlSegment::create().unwrap();
        let kept = control.enter_group(1).unwrap();
        let mut most = 0;
        for id in 2..20_000 {
            let place = control.enter_group(id).unwrap();
            assert!(place != kept);
            most = most.max(place);
            assert_eq!(control.find_group(id), Some(place));
            control.leave_group(place, LastCall::default());
        }
        assert!(most <= KEPT_ENTRIES + 1, "{most}");
        assert!(control.find_group(19_900).is_some(), "a late peer still finds it");
        assert!(control.find_group(2).is_none());
    }

    #[test]
    fn an_entry_stays_while_a_peer_is_in_its_last_call() {
        let (mine, theirs) = (ControlSegment::create().unwrap(), ControlSegment::create().unwrap());
        let (place, found) = (mine.enter_group(1).unwrap(), theirs.enter_group(1).unwrap());
        theirs.op_slot(found, 0).arrive(0, 0);
        mine.leave_group(place, LastCall { group: 1, call: 1, peers: vec![(theirs.clone(), found)] });
        let fill = |ids: std::ops::Range<u64>| {
            let places: Vec<_> = ids.map(|id| mine.enter_group(id).unwrap()).collect();
            places.iter().for_each(|&place| mine.leave_group(place, LastCall::default()));
            places
        };
        assert!(!fill(2..1200).contains(&place) && !fill(1200..2400).contains(&place));
        assert_eq!(mine.find_group(1), Some(place));
        theirs.op_slot(found, 0).leave(0);
        assert!(fill(2400..3600).contains(&place));
    }

    #[test]
    fn another_kind_of_segment_is_refused() {
        let small = Segment::create(4096).unwrap();
        let fd = small.fd().unwrap().try_clone_to_owned().unwrap();
        assert!(matches!(ControlSegment::map(fd, Doorbell::event().unwrap()), Err(Error::Auth(_))));
    }

    #[test]
    fn bytes_come_out_as_they_went_in() {
        let control = ControlSegment::create().unwrap();
        let total = 3 * PIPE + 12345;
        let byte = |i: usize| (i * 31 % 251) as u8;
        std::thread::scope(|s| {
            s.spawn(|| {
                let (pipe, ring) = control.pipe(1);
                let data: Vec<u8> = (0..total).map(byte).collect();
                let mut at = 0;
                while at < total {
                    let end = (at + 77_777).min(total);
                    // SAFETY: this thread is the only writer.
                    let n = unsafe { pipe.write(ring, &data[at..end]) };
                    at += n;
                    if n == 0 {
                        std::thread::yield_now();
                    }
                }
            });
            let (pipe, ring) = control.pipe(1);
            let mut at = 0;
            let mut buf = vec![0; 100_001];
            while at < total {
                // SAFETY: this thread is the only reader.
                let (n, _) = unsafe { pipe.read(ring, &mut buf) };
                assert!(buf[..n].iter().enumerate().all(|(i, &b)| b == byte(at + i)));
                at += n;
                if n == 0 {
                    std::thread::yield_now();
                }
            }
            assert!(!pipe.has_input());
        });
    }
}
