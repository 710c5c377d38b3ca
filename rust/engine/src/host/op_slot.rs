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
#[derive(Debug)]
#[cfg_attr(trigram_loom, derive(Default))]
#[repr(C, align(64))]
pub struct OpSlot {
    /// `call * BARRIERS + barriers arrived at`; 0 before the first.
    arrived: AtomicU64,
    /// `call + 1` of the last call that the owner has left.
    done: AtomicU64,
    /// `call + 1` of the last call that the owner entered and aborted.
    failed: AtomicU64,
    signature: [AtomicU64; 3],
    /// Number of the segment that holds the input, plus one; 0: the input is not registered memory.
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

/// The most barriers of a call.
const BARRIERS: u64 = 1 << 20;

impl OpSlot {
    /// Another group takes the directory entry.
    pub fn begin_anew(&self) {
        for word in [&self.arrived, &self.done, &self.failed] {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Whether the owner has left the call that used this operation slot before `call`.
    pub fn is_free_for(&self, call: u64) -> bool {
        call < OP_SLOTS as u64 || self.done.load(Ordering::Acquire) > call - OP_SLOTS as u64
    }

    /// Shows what the owner called, and where its input and its bounce buffer are. Published by the first
    /// [`OpSlot::arrive`].
    pub fn describe(
        &self,
        signature: &Signature,
        input: Option<SegmentOffset>,
        bounce_buffer: Option<SegmentOffset>,
    ) {
        for (word, value) in self.signature.iter().zip(to_words(signature)) {
            word.store(value, Ordering::Relaxed);
        }
        self.segment.store(input.map_or(0, |p| p.segment + 1), Ordering::Relaxed);
        self.offset.store(input.map_or(0, |p| p.offset as u64), Ordering::Relaxed);
        self.bounce_segment.store(bounce_buffer.map_or(0, |p| p.segment + 1), Ordering::Relaxed);
        self.bounce_offset.store(bounce_buffer.map_or(0, |p| p.offset as u64), Ordering::Relaxed);
    }

    /// What the owner called; valid once it has arrived.
    pub fn signature(&self) -> Signature {
        from_words(std::array::from_fn(|i| self.signature[i].load(Ordering::Relaxed)))
    }

    /// Where the owner's input is, if it is registered; valid once the owner has arrived.
    pub fn input(&self) -> Option<SegmentOffset> {
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
        self.done.fetch_max(call + 1, Ordering::AcqRel);
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

    /// The first byte of the inline buffer.
    pub fn inline(&self) -> *mut u8 {
        (&raw const self.inline.0).cast::<u8>().cast_mut()
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
