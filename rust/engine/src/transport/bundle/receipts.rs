//! What the two directions of a bundle tell each other: what has arrived here, and what the peer says has arrived there.

use std::time::Instant;

use trigram_core::{Error, Result};

use super::head::{HEAD, Head, misplaced};

/// Bytes that are passed on before the peer is told.
const BYTES: u64 = 1 << 20;
/// Chunks that arrive before the peer is told.
const CHUNKS: u64 = 64;

/// Of one stream, how many chunks have arrived here, and how many of them the peer knows of.
#[derive(Clone, Copy, Debug, Default)]
struct Arrived {
    chunks: u64,
    told: u64,
}

/// Shared by the two directions.
#[derive(Debug)]
pub(super) struct Receipts {
    arrived: Vec<Arrived>,
    /// All bytes before this position have been passed on; and what the peer knows of that.
    passed: u64,
    told: u64,
    /// The peer wants to know.
    asked: bool,
    /// Of each stream, how many chunks have arrived there.
    pub(super) there: Vec<u64>,
    /// The peer has passed on all before this position.
    pub(super) passed_there: u64,
    /// Something above is new.
    pub(super) news: bool,
    /// When the peer said last what has arrived there.
    pub(super) heard: Instant,
    /// Why streams have closed or failed, inward, before the peer had said that no more follows.
    pub(super) closed: Vec<Option<Error>>,
}

impl Receipts {
    pub(super) fn new(streams: usize) -> Self {
        Self {
            arrived: vec![Arrived::default(); streams],
            passed: 0,
            told: 0,
            asked: false,
            there: vec![0; streams],
            passed_there: 0,
            news: false,
            heard: Instant::now(),
            closed: (0..streams).map(|_| None).collect(),
        }
    }

    /// A chunk has arrived.
    pub(super) fn arrive(&mut self, stream: usize) {
        self.arrived[stream].chunks += 1;
    }

    /// All bytes before this position have been passed on.
    pub(super) fn pass(&mut self, at: u64) {
        self.passed = at;
    }

    /// A stream has closed or failed, inward.
    pub(super) fn close(&mut self, stream: usize, why: Error) {
        self.closed[stream] = Some(why);
        self.news = true;
    }

    /// The peer says or asks something.
    pub(super) fn hear(&mut self, head: Head) -> Result<()> {
        if head != Head::Asked {
            self.heard = Instant::now();
        }
        match head {
            Head::Received(stream, chunks) => {
                let there = self.there.get_mut(stream).ok_or_else(misplaced)?;
                *there = chunks.max(*there);
                self.news = true;
            }
            Head::Passed(at) => {
                self.passed_there = at.max(self.passed_there);
                self.news = true;
            }
            _ => self.asked = true,
        }
        Ok(())
    }

    /// What the peer was told may be lost: it is told again.
    pub(super) fn repeat(&mut self) {
        self.asked = true;
    }

    /// Whether the peer waits for an answer.
    pub(super) fn is_asked(&self) -> bool {
        self.asked
    }

    /// Whether the peer is to be told what has arrived.
    pub(super) fn are_due(&self) -> bool {
        let untold = || self.arrived.iter().map(|stream| stream.chunks - stream.told).sum::<u64>();
        self.asked || self.passed - self.told >= BYTES || untold() >= CHUNKS
    }

    /// What it is to be told.
    pub(super) fn heads(&self) -> Vec<u8> {
        let mut heads = Vec::with_capacity(HEAD * (1 + self.arrived.len()));
        for (stream, arrived) in self.arrived.iter().enumerate() {
            if self.asked || arrived.chunks > arrived.told {
                heads.extend(Head::Received(stream, arrived.chunks).encode());
            }
        }
        heads.extend(Head::Passed(self.passed).encode());
        heads
    }

    /// It has been told.
    pub(super) fn tell(&mut self) {
        self.asked = false;
        self.told = self.passed;
        self.arrived.iter_mut().for_each(|stream| stream.told = stream.chunks);
    }
}
