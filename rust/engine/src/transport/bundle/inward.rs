//! The inward direction: puts chunks into their order.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use trigram_core::{Error, Result};

use super::head::{HEAD, Head, misplaced};
use super::outward::WINDOW;
use super::receipts::Receipts;
use crate::transport::stream::{Read, Receiver};

/// Chunks that have come early, at most: as many as a window has, of the smallest frames.
const MOST_HELD: usize = WINDOW as usize / 64;
/// Bytes of chunks that have come before by another stream are read by so many.
const TOSSED: usize = 4 << 10;

/// A chunk that has begun to arrive.
struct Chunk {
    /// The position of the next byte to arrive, and that behind the last.
    next: u64,
    end: u64,
    /// Those that came early, which stand before `next`.
    early: Vec<u8>,
}

/// One of the streams.
struct Stream {
    receiver: Box<dyn Receiver>,
    head: [u8; HEAD],
    have: usize,
    chunk: Option<Chunk>,
    /// The peer has said that no more follows.
    ended: bool,
    closed: bool,
}

impl Stream {
    /// Whether its next bytes are those at this position.
    fn is_at(&self, at: u64) -> bool {
        self.chunk.as_ref().is_some_and(|chunk| chunk.next == at && chunk.early.is_empty())
    }

    fn may_read(&self) -> bool {
        !self.closed && self.receiver.has_input()
    }
}

pub(super) struct BundleReceiver {
    streams: Vec<Stream>,
    /// The position of the byte that is passed on next.
    at: u64,
    /// Chunks that came early, by their position.
    held: BTreeMap<u64, Vec<u8>>,
    /// The position of the end, once the peer has said it.
    end: Option<u64>,
    /// How often something arrived.
    arrivals: u64,
    /// Why the last stream failed, if it did.
    failed: Option<Error>,
    receipts: Arc<Mutex<Receipts>>,
}

impl BundleReceiver {
    pub(super) fn new(streams: Vec<Box<dyn Receiver>>, receipts: Arc<Mutex<Receipts>>) -> Self {
        let stream = |receiver| Stream {
            receiver,
            head: [0; HEAD],
            have: 0,
            chunk: None,
            ended: false,
            closed: false,
        };
        let streams = streams.into_iter().map(stream).collect();
        Self { streams, at: 0, held: BTreeMap::new(), end: None, arrivals: 0, failed: None, receipts }
    }

    fn receipts(&self) -> MutexGuard<'_, Receipts> {
        self.receipts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// So many bytes have been passed on.
    fn pass(&mut self, n: usize) -> Read {
        self.at += n as u64;
        self.receipts().pass(self.at);
        Read::Some(n)
    }

    /// Passes on what came early.
    fn pass_held(&mut self, into: &mut [u8]) -> Option<Read> {
        while let Some(entry) = self.held.first_entry().filter(|entry| *entry.key() <= self.at) {
            let from = (self.at - entry.key()) as usize;
            let Some(bytes) = entry.get().get(from..).filter(|bytes| !bytes.is_empty()) else {
                entry.remove(); // it has come by another stream too
                continue;
            };
            let n = bytes.len().min(into.len());
            into[..n].copy_from_slice(&bytes[..n]);
            if n == bytes.len() {
                entry.remove();
            }
            return Some(self.pass(n));
        }
        // Of a chunk that has not arrived whole.
        for number in 0..self.streams.len() {
            let Some(chunk) = &mut self.streams[number].chunk else { continue };
            let start = chunk.next - chunk.early.len() as u64;
            if chunk.early.is_empty() || start > self.at {
                continue;
            }
            let from = ((self.at - start) as usize).min(chunk.early.len());
            let n = (chunk.early.len() - from).min(into.len());
            into[..n].copy_from_slice(&chunk.early[from..from + n]);
            if from + n == chunk.early.len() {
                chunk.early = Vec::new();
            }
            if n > 0 {
                return Some(self.pass(n));
            }
        }
        None
    }

    /// Reads what is passed on next from the stream that has it.
    fn read_next(&mut self, into: &mut [u8]) -> Result<Option<Read>> {
        for number in 0..self.streams.len() {
            let stream = &mut self.streams[number];
            if !stream.is_at(self.at) || !stream.may_read() {
                continue;
            }
            let Some(chunk) = &mut stream.chunk else { continue };
            let most = usize::try_from(chunk.end - chunk.next).unwrap_or(usize::MAX).min(into.len());
            let read = stream.receiver.read(&mut into[..most]);
            if let Some(n) = self.note(number, read)? {
                return Ok(Some(self.pass(n)));
            }
        }
        Ok(None)
    }

    /// Takes note of the outcome of a read: bytes of a chunk, or an end.
    fn note(&mut self, number: usize, read: Result<Read>) -> Result<Option<usize>> {
        let stream = &mut self.streams[number];
        let error = match read {
            Ok(Read::Some(n)) => {
                self.arrivals += 1;
                if let Some(chunk) = &mut stream.chunk {
                    chunk.next += n as u64;
                    self.finish(number)?;
                }
                return Ok(Some(n));
            }
            Ok(Read::Nothing) => return Ok(None),
            Ok(Read::Closed) => None,
            Err(error) => Some(error),
        };
        // What has arrived of a chunk stays; all of it comes again by another stream.
        stream.closed = true;
        if !stream.ended {
            let closed = || Error::Aborted("its connection has closed".into());
            self.receipts().close(number, error.clone().unwrap_or_else(closed));
        }
        self.failed = error;
        Ok(None)
    }

    /// If a stream's chunk has arrived whole, makes room for its next.
    fn finish(&mut self, number: usize) -> Result<()> {
        let stream = &mut self.streams[number];
        let Some(chunk) = stream.chunk.take_if(|chunk| chunk.next == chunk.end) else { return Ok(()) };
        self.receipts().arrive(number);
        if !chunk.early.is_empty() && chunk.end > self.at {
            let start = chunk.end - chunk.early.len() as u64;
            self.held.entry(start).or_insert(chunk.early);
            if self.held.len() > MOST_HELD {
                return Err(misplaced());
            }
        }
        Ok(())
    }

    /// Reads heads, and what does not come in its turn; true if anything arrived.
    fn take_in(&mut self) -> Result<bool> {
        let mut moved = false;
        for number in 0..self.streams.len() {
            let stream = &mut self.streams[number];
            if !stream.may_read() || stream.is_at(self.at) {
                continue;
            }
            let read = match &mut stream.chunk {
                Some(chunk) if chunk.next < self.at => {
                    let mut tossed = [0; TOSSED];
                    let most = (chunk.end.min(self.at) - chunk.next).min(TOSSED as u64) as usize;
                    chunk.early = Vec::new();
                    stream.receiver.read(&mut tossed[..most])
                }
                Some(chunk) => {
                    let have = chunk.early.len();
                    chunk.early.resize(have + (chunk.end - chunk.next) as usize, 0);
                    let read = stream.receiver.read(&mut chunk.early[have..]);
                    let n = if let Ok(Read::Some(n)) = read { n } else { 0 };
                    chunk.early.truncate(have + n);
                    read
                }
                None => {
                    let read = stream.receiver.read(&mut stream.head[stream.have..]);
                    if let Ok(Read::Some(n)) = read {
                        self.arrivals += 1;
                        stream.have += n;
                        if stream.have == HEAD {
                            stream.have = 0;
                            self.begin(number)?;
                        }
                        moved = true;
                        continue;
                    }
                    read
                }
            };
            moved |= self.note(number, read)?.is_some();
        }
        Ok(moved)
    }

    /// A head has arrived.
    fn begin(&mut self, number: usize) -> Result<()> {
        let stream = &mut self.streams[number];
        match Head::decode(&stream.head)? {
            Head::Chunk(at, len) => {
                let end = at.checked_add(len as u64).filter(|end| *end <= self.at + WINDOW);
                let end = end.filter(|end| !stream.ended && self.end.is_none_or(|last| *end <= last));
                stream.chunk = Some(Chunk { next: at, end: end.ok_or_else(misplaced)?, early: Vec::new() });
                Ok(())
            }
            Head::End(at) => {
                if at < self.at || at > self.at + WINDOW || self.end.is_some_and(|end| end != at) {
                    return Err(misplaced());
                }
                stream.ended = true;
                self.end = Some(at);
                Ok(())
            }
            told => self.receipts().hear(told),
        }
    }

    fn is_over(&self) -> bool {
        self.end == Some(self.at) || self.streams.iter().all(|stream| stream.closed)
    }
}

impl Receiver for BundleReceiver {
    fn read(&mut self, into: &mut [u8]) -> Result<Read> {
        if into.is_empty() {
            return Ok(Read::Some(0));
        }
        loop {
            if self.end == Some(self.at) {
                return Ok(Read::Closed);
            }
            if let Some(read) = self.pass_held(into) {
                return Ok(read);
            }
            if let Some(read) = self.read_next(into)? {
                return Ok(read);
            }
            if !self.take_in()? {
                break;
            }
        }
        match self.failed.take_if(|_| self.streams.iter().all(|stream| stream.closed)) {
            Some(error) => Err(error),
            None => Ok(if self.is_over() { Read::Closed } else { Read::Nothing }),
        }
    }

    fn has_input(&self) -> bool {
        let is_early =
            |chunk: &Chunk| !chunk.early.is_empty() && chunk.next - chunk.early.len() as u64 <= self.at;
        self.held.first_key_value().is_some_and(|(from, _)| *from <= self.at)
            || self.is_over()
            || self.streams.iter().any(|s| s.may_read() || s.chunk.as_ref().is_some_and(is_early))
    }

    fn each_socket(&self, look: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.streams.iter().for_each(|stream| stream.receiver.each_socket(look));
    }

    fn signs(&self) -> u64 {
        self.arrivals
    }

    fn wake(&mut self) {
        self.streams.iter_mut().for_each(|stream| stream.receiver.wake());
    }

    fn read_ahead(&self) -> usize {
        self.streams.first().map_or(0, |stream| stream.receiver.read_ahead())
    }
}
