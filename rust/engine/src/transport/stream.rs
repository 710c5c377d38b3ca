//! How bytes reach a peer. A transport is one file: a [`Sender`] and a [`Receiver`] of a byte
//! stream that never block. Frames, matching and errors are the same above all of them.

use std::os::fd::BorrowedFd;

use trigram_core::Result;

/// What came of an attempt to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// So many bytes.
    Some(usize),
    /// None now.
    Nothing,
    /// None ever: the peer has closed its end.
    Closed,
}

/// The way out to one peer.
pub trait Sender: Send {
    /// Writes as much of `head` and then `body` as fits now; 0 if nothing does.
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize>;

    /// Whether writing is worth a try. May be wrong in saying yes.
    fn has_room(&self) -> bool {
        true
    }

    /// The descriptor has become writable.
    fn wake(&mut self) {}

    /// Called after a burst of writes: wakes the peer where the transport does not do so itself.
    fn flush(&mut self) {}

    /// The link carries so many bytes per second: queue no more than keeps it busy.
    ///
    /// Flows that meet at a receiver share its link in the ratio of what they have queued. With a
    /// bounded queue they share alike, so that pieces of one sum arrive together.
    fn pace(&mut self, _rate: f64) {}

    /// Whether bytes may be damaged on the way, so that frames carry checksums.
    fn is_summed(&self) -> bool {
        false
    }

    /// No more will be written; what was written will still arrive.
    fn close(&mut self) {}
}

/// The way in from one peer.
pub trait Receiver: Send {
    /// Reads what there is, up to the size of `into`.
    fn read(&mut self, into: &mut [u8]) -> Result<Read>;

    /// Whether reading is worth a try. May be wrong in saying yes.
    fn has_input(&self) -> bool;

    /// What to wait on for input; `None` where the sender rings the receiver's doorbell.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The descriptor has become readable.
    fn wake(&mut self) {}

    /// How much to read ahead of a header: system calls are saved by reading more than asked.
    fn read_ahead(&self) -> usize {
        0
    }
}
