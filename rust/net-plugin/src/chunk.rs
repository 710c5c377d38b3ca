//! What precedes each chunk, and which bytes of a message are still to come.
//!
//! `magic 4 | length 4 | message number 8 | offset 8 | length of the message 8`, little-endian.

use crate::error::{Error, Result};
use crate::handle::part;
use crate::region::Region;

/// Bytes of a header.
pub(crate) const HEADER: usize = 32;
const MAGIC: u32 = 0x5472_4743;

/// A chunk of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Which message of the connection, from 0.
    pub(crate) number: u64,
    /// Where in the message.
    pub(crate) offset: usize,
    /// Bytes of the chunk.
    pub(crate) len: usize,
    /// Bytes of the message.
    pub(crate) total: usize,
}

impl Chunk {
    /// Its header.
    pub(crate) fn header(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&u32::try_from(self.len).unwrap_or(u32::MAX).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.offset as u64).to_le_bytes());
        bytes[24..].copy_from_slice(&(self.total as u64).to_le_bytes());
        bytes
    }

    /// From a header: a chunk that lies inside of its message.
    pub(crate) fn read(bytes: &[u8; HEADER]) -> Result<Self> {
        let corrupt = || Error::remote("corrupt header from the peer");
        let size = |from| usize::try_from(u64::from_le_bytes(part(bytes, from))).map_err(|_| corrupt());
        let chunk = Self {
            number: u64::from_le_bytes(part(bytes, 8)),
            offset: size(16)?,
            len: u32::from_le_bytes(part(bytes, 4)) as usize,
            total: size(24)?,
        };
        let inside = chunk.offset.checked_add(chunk.len).is_some_and(|end| end <= chunk.total);
        // A chunk without bytes is all of a message without bytes.
        let sound = inside && (chunk.len > 0 || chunk.total == 0);
        if u32::from_le_bytes(part(bytes, 0)) != MAGIC || !sound {
            return Err(corrupt());
        }
        Ok(chunk)
    }
}

/// A message to be sent.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// Its bytes.
    pub(crate) region: Region,
    assigned: usize,
    empty: bool,
    sent: usize,
    unfinished: usize,
}

impl Outgoing {
    /// Nothing of it is sent yet.
    pub(crate) fn new(region: Region) -> Self {
        Self { empty: region.len() == 0, region, assigned: 0, sent: 0, unfinished: 0 }
    }

    /// The next chunk, of at most `most` bytes; `None`: streams have taken all.
    pub(crate) fn next_chunk(&mut self, number: u64, most: usize) -> Option<Chunk> {
        let (offset, total) = (self.assigned, self.region.len());
        let len = most.min(total - offset);
        if len == 0 && !self.empty {
            return None;
        }
        self.empty = false;
        self.assigned += len;
        self.unfinished += 1;
        Some(Chunk { number, offset, len, total })
    }

    /// A chunk has gone out.
    pub(crate) fn finish(&mut self, chunk: Chunk) {
        self.sent += chunk.len;
        self.unfinished -= 1;
    }

    /// Whether all has gone out.
    pub(crate) fn is_done(&self) -> bool {
        !self.empty && self.unfinished == 0 && self.sent == self.region.len()
    }
}

/// A message to be received.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// Where it goes.
    pub(crate) region: Region,
    total: Option<usize>,
    claimed: usize,
    received: usize,
}

impl Incoming {
    /// Nothing of it has come yet.
    pub(crate) fn new(region: Region) -> Self {
        Self { region, total: None, claimed: 0, received: 0 }
    }

    /// A chunk begins to come: an error unless it fits what has come before, and the buffer.
    pub(crate) fn claim(&mut self, chunk: Chunk) -> Result<()> {
        if chunk.total > self.region.len() {
            return Err(Error::usage(format!(
                "the peer sent {} bytes into a buffer of {}; do all ranks run the same collectives?",
                chunk.total,
                self.region.len()
            )));
        }
        let repeated = self.total.is_some_and(|total| total != chunk.total || total == 0);
        if repeated || chunk.len > chunk.total - self.claimed {
            return Err(Error::remote("the peer's chunks overlap or exceed the message"));
        }
        self.total = Some(chunk.total);
        self.claimed += chunk.len;
        Ok(())
    }

    /// So many more bytes are in the buffer.
    pub(crate) fn receive(&mut self, bytes: usize) {
        self.received += bytes;
    }

    /// The message's size, once it is all there.
    pub(crate) fn size(&self) -> Option<usize> {
        self.total.filter(|&total| total == self.received)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(memory: &mut [u8]) -> Region {
        // SAFETY: tests drop the region before the memory.
        unsafe { Region::new(memory.as_mut_ptr(), memory.len()) }
    }

    fn chunk(offset: usize, len: usize, total: usize) -> Chunk {
        Chunk { number: 7, offset, len, total }
    }

    #[test]
    fn headers_round_trip() {
        let sent = chunk(1 << 33, 512 << 10, 1 << 40);
        assert_eq!(Chunk::read(&sent.header()).unwrap(), sent);
        assert_eq!(Chunk::read(&chunk(0, 0, 0).header()).unwrap(), chunk(0, 0, 0));
    }

    #[test]
    fn corrupt_headers_are_refused() {
        for bad in [chunk(1, 10, 10), chunk(0, 0, 10), chunk(usize::MAX, 2, 10), chunk(1, 0, 0)] {
            assert_eq!(Chunk::read(&bad.header()).unwrap_err().code, 6);
        }
        let mut bytes = chunk(0, 10, 10).header();
        bytes[0] ^= 1;
        assert!(Chunk::read(&bytes).is_err());
        assert!(Chunk::read(&[0; HEADER]).is_err());
    }

    #[test]
    fn outgoing_is_cut_into_chunks() {
        let mut memory = [0; 10];
        let mut message = Outgoing::new(region(&mut memory));
        let chunks: Vec<Chunk> = std::iter::from_fn(|| message.next_chunk(7, 4)).collect();
        assert_eq!(chunks, [chunk(0, 4, 10), chunk(4, 4, 10), chunk(8, 2, 10)]);
        for chunk in chunks {
            assert!(!message.is_done());
            message.finish(chunk);
        }
        assert!(message.is_done());
    }

    #[test]
    fn a_message_without_bytes_is_one_chunk() {
        let mut message = Outgoing::new(region(&mut []));
        assert!(!message.is_done());
        let only = message.next_chunk(7, 4).unwrap();
        assert!(message.next_chunk(7, 4).is_none() && !message.is_done());
        message.finish(only);
        assert!(message.is_done());
        let mut incoming = Incoming::new(region(&mut []));
        assert_eq!(incoming.size(), None);
        incoming.claim(only).unwrap();
        assert_eq!(incoming.size(), Some(0));
        assert!(incoming.claim(only).is_err(), "twice");
    }

    #[test]
    fn incoming_takes_each_byte_once() {
        let mut memory = [0; 12];
        let mut message = Incoming::new(region(&mut memory));
        message.claim(chunk(4, 4, 10)).unwrap();
        message.claim(chunk(0, 4, 10)).unwrap();
        assert_eq!(message.claim(chunk(0, 4, 10)).unwrap_err().code, 6, "more than the message");
        assert_eq!(message.claim(chunk(8, 2, 11)).unwrap_err().code, 6, "another length");
        message.claim(chunk(8, 2, 10)).unwrap();
        message.receive(9);
        assert_eq!(message.size(), None);
        message.receive(1);
        assert_eq!(message.size(), Some(10));
        let mut small = [0; 9];
        assert_eq!(Incoming::new(region(&mut small)).claim(chunk(0, 4, 10)).unwrap_err().code, 5);
    }
}
