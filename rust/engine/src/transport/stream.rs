//! What a transport is: a [`Sender`] and a [`Receiver`] of a byte stream, which never block.

use std::os::fd::BorrowedFd;

use trigram_core::Result;

/// The outcome of an attempt to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// This many bytes.
    Some(usize),
    /// No bytes yet.
    Nothing,
    /// End of the stream: the peer has closed its end.
    Closed,
}

/// What the system knows of what a connection has carried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Carried {
    /// Bytes that the peer's host has, of all that were ever written.
    pub arrived: u64,
    /// Bytes per second, lately; `None` if there was less to send.
    pub rate: Option<f64>,
}

/// The outward direction to one peer.
pub trait Sender: Send {
    /// Writes as much of `head` and then `body` as fits now; 0 if nothing does.
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize>;

    /// Whether a write may succeed now. A wrong yes is allowed.
    fn has_room(&self) -> bool {
        true
    }

    /// A descriptor has become writable.
    fn wake(&mut self) {}

    /// Whether something that was written may not have left for the system yet.
    fn may_hold(&self) -> bool {
        false
    }

    /// Whether all that was written has left for the system.
    fn is_drained(&self) -> bool {
        true
    }

    /// Sends on what was written and has not left; true if anything moved.
    fn drain(&mut self) -> Result<bool> {
        Ok(false)
    }

    /// Called ten times a second: looks whether what was written arrives. `soon`: this rank waits until it has.
    fn tick(&mut self, _soon: bool) -> Result<()> {
        Ok(())
    }

    /// How many bytes the peer's host is not known to have; `None`: what was written has arrived.
    fn unacknowledged(&self) -> Option<u64> {
        None
    }

    /// What the system knows of what it has carried.
    fn carried(&self) -> Option<Carried> {
        None
    }

    /// Called after a burst of writes: wakes the peer if the transport does not do so by itself.
    fn flush(&mut self) {}

    /// Whether bytes may be damaged in transit, so that frames carry checksums.
    fn is_summed(&self) -> bool {
        false
    }

    /// Closes this direction; what was written still arrives.
    fn close(&mut self) {}
}

/// The inward direction from one peer.
pub trait Receiver: Send {
    /// Reads what there is, at most the size of `into`.
    fn read(&mut self, into: &mut [u8]) -> Result<Read>;

    /// Whether a read may succeed now. A wrong yes is allowed.
    fn has_input(&self) -> bool;

    /// Shows the sockets to wait on, which both directions share; none if the sender rings the receiver's doorbell instead.
    fn each_socket(&self, _look: &mut dyn FnMut(BorrowedFd<'_>)) {}

    /// A number that grows whenever something arrives, also if it cannot be passed on yet.
    fn signs(&self) -> u64 {
        0
    }

    /// A socket has become readable.
    fn wake(&mut self) {}

    /// Nothing can be done before this many more bytes have arrived: the socket need not become readable before.
    /// Always a part of what the peer sends next, or all of it.
    fn expect(&mut self, _bytes: usize) {}

    /// How many bytes to read ahead of a header: reading more than was asked for saves system calls.
    fn read_ahead(&self) -> usize {
        0
    }
}
