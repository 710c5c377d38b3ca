//! The caller's memory.

use std::slice;

/// A buffer that belongs to NCCL until its request is done.
#[derive(Debug)]
pub(crate) struct Region {
    start: *mut u8,
    len: usize,
}

// SAFETY: a region is used by whoever holds its connection's lock; the memory is not bound to a thread.
unsafe impl Send for Region {}

impl Region {
    /// A buffer of the caller's.
    ///
    /// # Safety
    ///
    /// `len` bytes at `start` stay valid, and nobody else writes there, until this region is dropped. (That is
    /// when the request is reported done or its connection is closed.)
    pub(crate) unsafe fn new(start: *mut u8, len: usize) -> Self {
        Self { start, len }
    }

    /// Its bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// `len` bytes from `offset`, to be sent; none if they are not all inside.
    pub(crate) fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        if len == 0 || !self.holds(offset, len) {
            return &[];
        }
        // SAFETY: inside of the buffer, which is valid as `new` demands.
        unsafe { slice::from_raw_parts(self.start.add(offset), len) }
    }

    /// `len` bytes from `offset`, to be received into; none if they are not all inside.
    pub(crate) fn room(&mut self, offset: usize, len: usize) -> &mut [u8] {
        if len == 0 || !self.holds(offset, len) {
            return &mut [];
        }
        // SAFETY: inside of the buffer, which is valid and ours alone as `new` demands.
        unsafe { slice::from_raw_parts_mut(self.start.add(offset), len) }
    }

    fn holds(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_outside_of_the_buffer() {
        let mut memory = [1u8, 2, 3, 4];
        // SAFETY: `memory` outlives the region.
        let mut region = unsafe { Region::new(memory.as_mut_ptr(), 4) };
        assert_eq!(region.bytes(1, 3), [2, 3, 4]);
        assert!(region.bytes(1, 4).is_empty() && region.bytes(usize::MAX, 2).is_empty());
        assert_eq!(region.room(0, 4).len(), 4);
        assert!(region.room(3, 2).is_empty());
    }
}
