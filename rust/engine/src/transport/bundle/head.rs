//! What stands before each chunk of a bundle's stream, and what the two ends tell each other between chunks.

use trigram_core::wire::Sum;
use trigram_core::{Error, Result};

/// Bytes of a chunk, at most.
pub(super) const CHUNK: usize = 64 << 10;
/// Bytes of a head: a number, what it is of, and their checksum.
pub(super) const HEAD: usize = 8 + 4 + 4;

const RECEIVED: u32 = 1 << 31;
const PASSED: u32 = 1 << 30;
const ASKED: u32 = 1 << 29;

/// What a head says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// So many bytes follow, which stand at this position.
    Chunk(u64, usize),
    /// No byte stands at this position or behind it.
    End(u64),
    /// So many chunks of this stream have arrived, in the other direction.
    Received(usize, u64),
    /// All bytes before this position have been passed on, in the other direction.
    Passed(u64),
    /// What has arrived of mine?
    Asked,
}

/// The head of a chunk. One of no bytes says where the stream of bytes ends.
pub fn head(at: u64, len: usize) -> [u8; HEAD] {
    encode(at, len as u32)
}

fn encode(number: u64, what: u32) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&number.to_le_bytes());
    head[8..12].copy_from_slice(&what.to_le_bytes());
    let sum = Sum::of(&head[..12]);
    head[12..].copy_from_slice(&sum.to_le_bytes());
    head
}

impl Head {
    pub(super) fn encode(self) -> [u8; HEAD] {
        match self {
            Self::Chunk(at, len) => head(at, len),
            Self::End(at) => head(at, 0),
            Self::Received(stream, chunks) => encode(chunks, RECEIVED | stream as u32),
            Self::Passed(at) => encode(at, PASSED),
            Self::Asked => encode(0, ASKED),
        }
    }

    pub(super) fn decode(bytes: &[u8; HEAD]) -> Result<Self> {
        let number = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
        let word = |from: usize| u32::from_le_bytes(bytes[from..from + 4].try_into().unwrap_or_default());
        if Sum::of(&bytes[..12]) != word(12) {
            return Err(wrong("wrong checksum of a chunk's head: bits flipped between the two hosts"));
        }
        match word(8) {
            0 => Ok(Self::End(number)),
            PASSED => Ok(Self::Passed(number)),
            ASKED => Ok(Self::Asked),
            what if what & RECEIVED != 0 => Ok(Self::Received((what ^ RECEIVED) as usize, number)),
            len if len as usize <= CHUNK => Ok(Self::Chunk(number, len as usize)),
            _ => Err(misplaced()),
        }
    }
}

/// The error of a chunk that no peer sends that keeps to the protocol.
pub(super) fn misplaced() -> Error {
    wrong("a chunk is not where one may be")
}

/// The error of bytes that are not those that a peer sends.
pub(super) fn wrong(what: &str) -> Error {
    Error::io("receiving from a peer", what)
}
