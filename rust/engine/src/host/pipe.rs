//! A byte pipe between two processes: one writer, one reader, and a ring in the reader's control segment.
//!
//! It carries messages inside a host: two copies through memory that stays in the cache, and no system call unless
//! the other side sleeps.

use std::sync::atomic::Ordering;

use crate::sys::atomics::{AtomicU32, AtomicU64, Byte, copy_in, copy_out, fence};

/// Bytes of a ring. Chunks of this size stay in a core's second-level cache.
#[cfg(not(trigram_loom))]
pub const PIPE: usize = 256 << 10;
/// Small, so that a message wraps around.
#[cfg(trigram_loom)]
pub const PIPE: usize = 3;

/// The counters of a ring. They only grow; their difference is what the ring holds.
#[derive(Debug)]
#[cfg_attr(trigram_loom, derive(Default))]
#[repr(C, align(64))]
pub struct Pipe {
    written: AtomicU64,
    /// The writer waits for free space.
    full: AtomicU32,
    #[cfg(not(trigram_loom))]
    apart: [u8; 48],
    read: AtomicU64,
    #[cfg(not(trigram_loom))]
    apart_too: [u8; 56],
}

impl Pipe {
    /// Whether there is something to read.
    pub fn has_input(&self) -> bool {
        self.written.load(Ordering::Acquire) != self.read.load(Ordering::Relaxed)
    }

    /// Copies as much as fits from `bytes` into the ring; 0 when it is full.
    ///
    /// # Safety
    ///
    /// `ring` is this pipe's, of [`PIPE`] bytes, and the caller is its only writer.
    pub unsafe fn write(&self, ring: *mut Byte, bytes: &[u8]) -> usize {
        let written = self.written.load(Ordering::Relaxed);
        let room = |read: u64| PIPE - (written.wrapping_sub(read) as usize).min(PIPE);
        let mut free = room(self.read.load(Ordering::Acquire));
        if free == 0 {
            // Announce it, and check again: the reader may have freed space before it could see the mark.
            self.full.store(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            free = room(self.read.load(Ordering::Acquire));
            if free == 0 {
                return 0;
            }
            self.full.store(0, Ordering::Relaxed);
        }
        let n = bytes.len().min(free);
        let at = written as usize % PIPE;
        let first = n.min(PIPE - at);
        // SAFETY: both parts lie inside the ring, in the stretch that the reader has released.
        unsafe {
            copy_in(bytes.as_ptr(), ring.add(at), first);
            copy_in(bytes.as_ptr().add(first), ring, n - first);
        }
        self.written.store(written.wrapping_add(n as u64), Ordering::Release);
        n
    }

    /// Copies as much as there is into `into`; returns how many bytes, and whether the writer waits for the space
    /// that this freed.
    ///
    /// # Safety
    ///
    /// `ring` is this pipe's, of [`PIPE`] bytes, and the caller is its only reader.
    pub unsafe fn read(&self, ring: *const Byte, into: &mut [u8]) -> (usize, bool) {
        let read = self.read.load(Ordering::Relaxed);
        let held = self.written.load(Ordering::Acquire).wrapping_sub(read) as usize;
        let n = into.len().min(held.min(PIPE)); // a hostile writer cannot send us out of the ring
        if n == 0 {
            return (0, false);
        }
        let at = read as usize % PIPE;
        let first = n.min(PIPE - at);
        // SAFETY: both parts lie inside the ring, in the stretch that the writer has filled.
        unsafe {
            copy_out(ring.add(at), into.as_mut_ptr(), first);
            copy_out(ring, into.as_mut_ptr().add(first), n - first);
        }
        self.read.store(read.wrapping_add(n as u64), Ordering::Release);
        fence(Ordering::SeqCst);
        let waits = self.full.load(Ordering::Relaxed) != 0 && self.full.swap(0, Ordering::AcqRel) != 0;
        (n, waits)
    }
}
