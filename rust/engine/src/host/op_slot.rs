//! An operation slot: how far one rank has come in one call, what it called, where its memory is, and an inline
//! buffer for small payloads.
//!
//! Only its owner writes to it. The owner writes what the others read before it *arrives* at the first barrier, and
//! does not change it until it has seen that they have *left* the call.

use std::sync::atomic::Ordering;

#[cfg(not(trigram_loom))]
use trigram_core::planner::INLINE_BYTES;
use trigram_core::signature::Signature;
use zerocopy_words::{from_words, to_words};

use crate::sys::atomics::AtomicU64;
use crate::sys::memory::SegmentOffset;

/// The most calls of one group in flight inside a host; further calls wait.
#[cfg(not(trigram_loom))]
pub const OP_SLOTS: usize = 8;
/// One, so that the second call must wait for the first.
#[cfg(trigram_loom)]
pub const OP_SLOTS: usize = 1;
/// Small, because loom's threads have small stacks.
#[cfg(trigram_loom)]
const INLINE_BYTES: usize = 32;

/// One call in flight, as one rank shows it. Counters only grow, so nothing is ever reset.
///
/// The first line of the cache has all that a peer reads in a tiny call; the owner writes it once in such a call.
#[derive(Debug)]
#[cfg_attr(trigram_loom, derive(Default))]
#[repr(C, align(64))]
pub struct OpSlot {
    /// `call * BARRIERS + barriers arrived at`; 0 before the first.
    arrived: AtomicU64,
    /// `call + 1` of the last call that the owner entered and aborted.
    failed: AtomicU64,
    signature: [AtomicU64; 3],
    /// The owner had left all calls before this one when it arrived; 0: it does not say.
    left_before: AtomicU64,
    tiny: Tiny,
    /// `call + 1` of the last call that the owner has left. Not in the first line, where peers would have to fetch the
    /// line again when it is written.
    done: AtomicU64,
    /// Number of the segment that holds the tensor that the owner lends, its input or its output, plus one; 0: it is
    /// not registered memory.
    segment: AtomicU64,
    offset: AtomicU64,
    /// The same for the bounce buffer.
    bounce_segment: AtomicU64,
    bounce_offset: AtomicU64,
    inline: Inline,
}

#[derive(Debug)]
#[cfg_attr(trigram_loom, derive(Default))]
#[repr(C, align(64))]
struct Inline([u8; INLINE_BYTES]);

/// The most bytes of a payload in the first line of the slot.
pub const TINY_BYTES: usize = 16;

#[derive(Debug)]
#[cfg_attr(trigram_loom, derive(Default))]
#[repr(C, align(16))]
struct Tiny([u8; TINY_BYTES]);

/// The most barriers of a call.
const BARRIERS: u64 = 1 << 20;

impl OpSlot {
    /// Another group takes the directory entry.
    pub fn begin_anew(&self) {
        for word in [&self.arrived, &self.done, &self.failed, &self.left_before] {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Whether the owner has left the call that used this operation slot before `call`.
    pub fn is_free_for(&self, call: u64) -> bool {
        call < OP_SLOTS as u64 || self.done.load(Ordering::Acquire) > call - OP_SLOTS as u64
    }

    /// Shows what the owner called, and where the tensor that it lends and its bounce buffer are. Published by the first
    /// [`OpSlot::arrive`].
    pub fn describe(
        &self,
        signature: &Signature,
        lent: Option<SegmentOffset>,
        bounce_buffer: Option<SegmentOffset>,
    ) {
        self.describe_one_shot(signature, 0);
        self.segment.store(lent.map_or(0, |p| p.segment + 1), Ordering::Relaxed);
        self.offset.store(lent.map_or(0, |p| p.offset as u64), Ordering::Relaxed);
        self.bounce_segment.store(bounce_buffer.map_or(0, |p| p.segment + 1), Ordering::Relaxed);
        self.bounce_offset.store(bounce_buffer.map_or(0, |p| p.offset as u64), Ordering::Relaxed);
    }

    /// The same for a call whose payload is in the slot. The owner has left all calls before `left_before`.
    pub fn describe_one_shot(&self, signature: &Signature, left_before: u64) {
        for (word, value) in self.signature.iter().zip(to_words(signature)) {
            word.store(value, Ordering::Relaxed);
        }
        self.left_before.store(left_before, Ordering::Relaxed);
    }

    /// The owner has left all calls before this one; valid once it has arrived.
    pub fn left_before(&self) -> u64 {
        self.left_before.load(Ordering::Relaxed)
    }

    /// What the owner called; valid once it has arrived.
    pub fn signature(&self) -> Signature {
        from_words(std::array::from_fn(|i| self.signature[i].load(Ordering::Relaxed)))
    }

    /// Where the tensor is that the owner lends, if it is registered; valid once the owner has arrived.
    pub fn lent(&self) -> Option<SegmentOffset> {
        let segment = self.segment.load(Ordering::Relaxed).checked_sub(1)?;
        Some(SegmentOffset { segment, offset: self.offset.load(Ordering::Relaxed) as usize })
    }

    /// Where the owner's bounce buffer is, if it has one; valid once the owner has arrived.
    pub fn bounce_buffer(&self) -> Option<SegmentOffset> {
        let segment = self.bounce_segment.load(Ordering::Relaxed).checked_sub(1)?;
        Some(SegmentOffset { segment, offset: self.bounce_offset.load(Ordering::Relaxed) as usize })
    }

    /// The owner arrives at a barrier of a call.
    pub fn arrive(&self, call: u64, ordinal: u32) {
        self.arrived.store(call * BARRIERS + u64::from(ordinal) + 1, Ordering::Release);
    }

    /// Whether the owner has arrived at a barrier of a call, or is past it.
    pub fn has_arrived(&self, call: u64, ordinal: u32) -> bool {
        self.arrived.load(Ordering::Acquire) > call * BARRIERS + u64::from(ordinal)
    }

    /// Whether the owner has entered a call but not left it.
    pub fn is_inside(&self, call: u64) -> bool {
        self.has_arrived(call, 0) && self.done.load(Ordering::Acquire) <= call
    }

    /// The owner has left a call: it will not touch anyone's memory for it again.
    pub fn leave(&self, call: u64) {
        // Only the owner writes it, one thread at a time.
        if self.done.load(Ordering::Relaxed) <= call {
            self.done.store(call + 1, Ordering::Release);
        }
    }

    /// `call + 1` of the last call that the owner has left.
    pub fn left(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// The owner aborts a call that it has entered. A rank that has not passed the opening barrier must not pass it,
    /// because the owner takes its memory back; ranks that have passed it are waited for.
    pub fn fail(&self, call: u64) {
        self.failed.store(call + 1, Ordering::Release);
    }

    /// Whether the owner has aborted a call.
    pub fn has_failed(&self, call: u64) -> bool {
        self.failed.load(Ordering::Acquire) == call + 1
    }

    /// The memory for a payload of `len` bytes, and how many bytes it has.
    pub fn inline(&self, len: usize) -> (*mut u8, usize) {
        match len <= TINY_BYTES {
            true => ((&raw const self.tiny.0).cast::<u8>().cast_mut(), TINY_BYTES),
            false => ((&raw const self.inline.0).cast::<u8>().cast_mut(), INLINE_BYTES),
        }
    }
}

/// Signatures as words, so that an operation slot can hold one in atomics.
mod zerocopy_words {
    use trigram_core::signature::Signature;
    use zerocopy::transmute;

    pub(super) fn to_words(signature: &Signature) -> [u64; 3] {
        transmute!(*signature)
    }

    pub(super) fn from_words(words: [u64; 3]) -> Signature {
        transmute!(words)
    }
}
