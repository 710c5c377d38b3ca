//! Bounce buffers of deleted groups, kept until no peer reads from them any more.

use std::sync::{Mutex, PoisonError};

use crate::host::control_segment::ControlSegment;
use crate::sys::memory::RegisteredBuffer;

/// Bounce buffers of deleted groups that a peer may still read.
#[derive(Debug, Default)]
pub struct Retired(Mutex<Vec<RetiredBuffer>>);

#[derive(Debug)]
pub(crate) struct RetiredBuffer {
    pub(crate) _buffer: RegisteredBuffer,
    pub(crate) group: u64,
    /// One more than the last call that used it.
    pub(crate) call: u64,
    /// Control segments of the ranks that may read it, and the group's index in each.
    pub(crate) readers: Vec<(ControlSegment, usize)>,
}

impl RetiredBuffer {
    fn is_read(&self) -> bool {
        self.call > 0
            && self.readers.iter().any(|(control, found)| {
                control.has_group(*found, self.group)
                    && control.op_slot(*found, self.call - 1).left() < self.call
            })
    }
}

impl Retired {
    pub(crate) fn add(&self, buffer: RetiredBuffer) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        self.sweep();
    }

    /// Frees the bounce buffers that no peer reads any more.
    pub fn sweep(&self) {
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let read = std::mem::take(&mut *buffers).into_iter().filter(RetiredBuffer::is_read).collect();
        *buffers = read;
    }
}
