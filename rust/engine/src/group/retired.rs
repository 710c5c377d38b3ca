//! Bounce buffers of deleted groups, kept until no peer reads from them any more.

use std::sync::{Mutex, PoisonError};

use crate::host::control_segment::LastCall;
use crate::sys::memory::RegisteredBuffer;

/// Bounce buffers of deleted groups that a peer may still read.
#[derive(Debug, Default)]
pub struct Retired(Mutex<Vec<RetiredBuffer>>);

#[derive(Debug)]
pub(crate) struct RetiredBuffer {
    pub(crate) _buffer: RegisteredBuffer,
    /// The last call that used it.
    pub(crate) last: LastCall,
}

impl Retired {
    pub(crate) fn add(&self, buffer: RetiredBuffer) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        self.sweep();
    }

    /// Frees the bounce buffers that no peer reads any more.
    pub fn sweep(&self) {
        let mut buffers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let read =
            std::mem::take(&mut *buffers).into_iter().filter(|buffer| !buffer.last.is_over()).collect();
        *buffers = read;
    }
}
