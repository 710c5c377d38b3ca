//! Frames on their way in one direction, and what of it a lane can do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use trigram_core::wire::{Frame, HEADER, Sum};
use trigram_core::{Error, Result};

use crate::lanes::task::Work;
use crate::transport::stream::{Read, Receiver, Sender};

/// The step of a call that a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The call's number in this process.
    pub call: u64,
    /// The step of its schedule.
    pub step: u32,
}

/// A number of bytes that one thread at a time adds to, and others read.
#[derive(Clone, Debug, Default)]
pub(super) struct Count(Arc<AtomicU64>);

impl Count {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, bytes: usize) {
        // Only one thread adds at a time, so no instruction has to lock the bus.
        self.0.store(self.get() + bytes as u64, Ordering::Relaxed);
    }
}

/// What a frame carries.
#[derive(Debug)]
pub(super) enum Payload {
    /// Memory of a call. The call takes it back ([`crate::link::frames::Tx::take_back`]) before the memory goes away.
    Lent(*const u8, usize),
    Owned(Vec<u8>),
}

// SAFETY: lent memory is read only by the thread that holds the progress lock, or by a lane from which that thread takes
// the frame back before the memory goes.
unsafe impl Send for Payload {}

impl Payload {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: see `Payload::Lent`.
            Payload::Lent(at, len) => unsafe { std::slice::from_raw_parts(*at, *len) },
            Payload::Owned(bytes) => bytes,
        }
    }
}

/// A frame that is to be sent.
#[derive(Debug)]
pub(super) struct Out {
    frame: Frame,
    /// Its header, once it has been encoded: with the payload's checksum, which is computed when it begins to leave. It
    /// leaves the payload in the cache, where sending finds it.
    head: Option<[u8; HEADER]>,
    pub(super) body: Payload,
    /// Bytes that have left, of header and payload.
    pub(super) sent: usize,
    pub(super) token: Option<Token>,
}

impl Out {
    pub(super) fn new(frame: Frame, body: Payload, token: Option<Token>) -> Self {
        Self { frame, head: None, body, sent: 0, token }
    }

    /// Bytes of header and payload.
    pub(super) fn whole(&self) -> usize {
        HEADER + self.body.bytes().len()
    }

    /// Bytes that have not left.
    pub(super) fn left(&self) -> usize {
        self.whole() - self.sent
    }

    /// Writes as much as fits now; how much that was.
    pub(super) fn write(&mut self, sender: &mut dyn Sender) -> Result<usize> {
        let body = self.body.bytes();
        let frame = &self.frame;
        let head = self.head.get_or_insert_with(|| frame.encode(sender.is_summed().then(|| Sum::of(body))));
        let n = sender.write(&head[self.sent.min(HEADER)..], &body[self.sent.saturating_sub(HEADER)..])?;
        self.sent += n;
        Ok(n)
    }
}

/// A lane sends a frame.
pub(super) struct Outgoing {
    pub(super) sender: Box<dyn Sender>,
    pub(super) out: Out,
    pub(super) written: Count,
    pub(super) failed: Option<Error>,
    /// There was no room, and the transport cannot tell when there is some.
    pub(super) is_full: bool,
    /// Bytes that it has written.
    pub(super) moved: usize,
}

impl Work for Outgoing {
    fn run(&mut self, stop: &dyn Fn() -> bool) {
        while self.out.left() > 0 && self.sender.has_room() && !stop() {
            match self.out.write(&mut *self.sender) {
                Ok(0) => {
                    self.is_full = self.sender.has_room();
                    break;
                }
                Ok(n) => {
                    self.written.add(n);
                    self.moved += n;
                }
                Err(error) => {
                    self.failed = Some(error);
                    return;
                }
            }
        }
        self.sender.flush();
    }
}

/// The checksum that a payload must have, and that of the bytes so far.
pub(super) struct Check(pub(super) u32, pub(super) Sum);

/// A lane receives the rest of a payload.
pub(super) struct Incoming {
    pub(super) receiver: Box<dyn Receiver>,
    /// Where it goes, and bytes of it: memory of a call, which takes it back before the memory goes away.
    pub(super) into: *mut u8,
    pub(super) len: usize,
    pub(super) got: usize,
    pub(super) check: Option<Check>,
    pub(super) bytes: Count,
    /// What the last read came to.
    pub(super) read: Result<Read>,
}

// SAFETY: the memory is written only by the lane, from which the thread that handed it over takes it back before it goes.
unsafe impl Send for Incoming {}

impl Work for Incoming {
    fn run(&mut self, stop: &dyn Fn() -> bool) {
        while self.got < self.len && !stop() {
            // SAFETY: see `Incoming::into`.
            let into =
                unsafe { std::slice::from_raw_parts_mut(self.into.add(self.got), self.len - self.got) };
            self.read = self.receiver.read(into);
            let Ok(Read::Some(n)) = self.read else { return };
            if let Some(Check(_, sum)) = &mut self.check {
                sum.add(&into[..n]);
            }
            self.got += n;
            self.bytes.add(n);
        }
    }
}

/// Stands where a connection's end was that a lane has.
pub(super) struct Absent;

impl Sender for Absent {
    fn write(&mut self, _head: &[u8], _body: &[u8]) -> Result<usize> {
        Ok(0)
    }

    fn has_room(&self) -> bool {
        false
    }
}

impl Receiver for Absent {
    fn read(&mut self, _into: &mut [u8]) -> Result<Read> {
        Ok(Read::Nothing)
    }

    fn has_input(&self) -> bool {
        false
    }
}
