//! The outward direction: who gets the next chunk, and what is sent again.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use trigram_core::{Error, Result};

use super::Between;
use super::head::{CHUNK, HEAD, Head, head, misplaced};
use super::receipts::Receipts;
use crate::transport::stream::Sender;

/// Bytes that may be on their way before the peer has passed the first of them on: as much as a link of 1 Gbit/s has under
/// way in 270 ms. The peer keeps no more of what comes early.
pub(super) const WINDOW: u64 = 32 << 20;
/// Chunks of one stream that may be on their way.
const MOST_KEPT: usize = 4096;
/// Buffers that are kept for the next chunks.
const SPARE: usize = 32;

/// A stream of which nothing arrives for this long is asked for.
const ASK: Duration = Duration::from_millis(300);
/// Between two questions of a rank that waits until all has arrived.
const ASK_SOON: Duration = Duration::from_millis(10);
/// After this time, or three times what chunks have needed, what it holds goes by the other streams too.
const STALL: Duration = Duration::from_secs(1);
/// After this time a stream that failed is told of, if others have not.
const TOLD: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Live,
    /// Nothing arrives by it, but it has not failed.
    Stalled,
    Lost,
}

/// Bytes that a stream was given.
struct Piece {
    bytes: Vec<u8>,
    /// A chunk, and not what is told in between.
    is_chunk: bool,
    given: Instant,
}

/// One of the streams.
struct Stream {
    sender: Box<dyn Sender>,
    /// What the peer is not known to have, in the order in which it was given. The stream has taken all of it but for a part
    /// of the last.
    kept: VecDeque<Piece>,
    /// How much of the last it has taken.
    gone: usize,
    /// How many chunks the peer is known to have.
    there: u64,
    /// When that grew last, or the stream began to hold something.
    since: Instant,
    state: State,
    /// Bytes per second that it has carried lately; 0: not known yet.
    rate: f64,
    /// Why and when it was lost, until that is told.
    lost: Option<(Instant, String)>,
}

impl Stream {
    fn has_rest(&self) -> bool {
        self.kept.back().is_some_and(|last| self.gone < last.bytes.len())
    }

    fn is_ready(&self) -> bool {
        !self.has_rest() && self.kept.len() < MOST_KEPT && self.sender.has_room()
    }

    /// Whether chunks of it are on their way.
    fn waits(&self) -> bool {
        self.kept.iter().any(|piece| piece.is_chunk)
    }

    fn chunks(&self) -> impl Iterator<Item = &Piece> {
        self.kept.iter().filter(|piece| piece.is_chunk)
    }

    /// How long it needs for what it has and so many bytes more.
    fn seconds(&self, more: usize) -> f64 {
        let rest = self.kept.back().map_or(0, |last| last.bytes.len() - self.gone);
        (self.sender.unacknowledged().unwrap_or(0) + (rest + more) as u64) as f64 / self.rate
    }

    /// Takes note of what it carries.
    fn measure(&mut self) {
        // What little there was to send may have passed in a burst, or as slowly as it came.
        if let Some((rate, false)) = self.sender.rate() {
            self.rate =
                if self.rate == 0.0 { rate } else { 0.75 * self.rate + 0.25 * rate.min(2.0 * self.rate) };
        }
    }

    /// Gives it a piece, when it has no rest of another; `Some`: it takes none of it now.
    fn give(&mut self, piece: Piece) -> Result<Option<Vec<u8>>> {
        let written = self.sender.write(&[], &piece.bytes);
        match written {
            Ok(0) => return Ok(Some(piece.bytes)),
            Ok(n) if n == piece.bytes.len() && !piece.is_chunk => return Ok(None),
            _ => {}
        }
        if !self.waits() {
            self.since = piece.given;
        }
        self.gone = *written.as_ref().unwrap_or(&0);
        self.kept.push_back(piece);
        written.map(|_| None)
    }

    /// Writes the rest; true if anything moved.
    fn push(&mut self) -> Result<bool> {
        let mut moved = false;
        while let Some(last) = self.kept.back().filter(|last| self.gone < last.bytes.len()) {
            if !self.sender.has_room() {
                break;
            }
            match self.sender.write(&[], &last.bytes[self.gone..])? {
                0 => break,
                n => self.gone += n,
            }
            moved = true;
        }
        Ok(self.sender.drain()? || moved)
    }

    /// The peer has so many of its chunks. `done` gets the pieces that are not needed any more.
    fn arrive(&mut self, there: u64, done: &mut Vec<Piece>) -> Result<()> {
        if there <= self.there {
            return Ok(());
        }
        while self.there < there {
            let is_whole = self.kept.len() > 1 || !self.has_rest();
            let Some(piece) = self.kept.pop_front().filter(|_| is_whole) else { return Err(misplaced()) };
            self.there += u64::from(piece.is_chunk);
            done.push(piece);
        }
        self.since = Instant::now();
        self.state = if self.state == State::Stalled { State::Live } else { self.state };
        Ok(())
    }
}

pub(super) struct BundleSender {
    streams: Vec<Stream>,
    /// The stream that is asked first for the next chunk.
    turn: usize,
    /// The position of the next byte.
    at: u64,
    /// The peer has passed on all before this position.
    passed: u64,
    /// Chunks that go by another stream than the first time.
    again: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    /// How long chunks need to arrive and to be told of.
    usual: Duration,
    /// When the peer was asked last.
    asked: Instant,
    receipts: Arc<Mutex<Receipts>>,
    between: Between,
}

impl BundleSender {
    pub(super) fn new(
        streams: Vec<Box<dyn Sender>>,
        receipts: Arc<Mutex<Receipts>>,
        between: Between,
    ) -> Self {
        let stream = |sender| Stream {
            sender,
            kept: VecDeque::new(),
            gone: 0,
            there: 0,
            since: Instant::now(),
            state: State::Live,
            rate: 0.0,
            lost: None,
        };
        Self {
            streams: streams.into_iter().map(stream).collect(),
            turn: 0,
            at: 0,
            passed: 0,
            again: VecDeque::new(),
            spare: Vec::new(),
            usual: Duration::ZERO,
            asked: Instant::now(),
            receipts,
            between,
        }
    }

    fn receipts(&self) -> MutexGuard<'_, Receipts> {
        self.receipts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The streams that are used: those that are live; if there is none, those that may live again.
    fn used(&self) -> State {
        match self.streams.iter().any(|stream| stream.state == State::Live) {
            true => State::Live,
            false => State::Stalled,
        }
    }

    /// The stream that gets the next bytes, if one takes some now. On different cables one that is much slower than another
    /// gets them only if it carries them sooner than the other, which may be full for a moment.
    fn choose(&self, bytes: usize) -> Option<usize> {
        let (used, count) = (self.used(), self.streams.len());
        let is_used = |stream: &&Stream| stream.state == used;
        let fastest = self.streams.iter().filter(is_used).max_by(|a, b| a.rate.total_cmp(&b.rate));
        let fastest = fastest.filter(|_| self.between.apart);
        let is_slow = |stream: &Stream| {
            fastest.is_some_and(|fastest| {
                stream.rate > 0.0
                    && stream.rate < fastest.rate / 2.0
                    && stream.seconds(bytes) > fastest.seconds(bytes)
            })
        };
        let mut numbers = (0..count).map(|i| (self.turn + i) % count);
        numbers.find(|&number| {
            let stream = &self.streams[number];
            is_used(&stream) && stream.is_ready() && !is_slow(stream)
        })
    }

    /// Gives bytes to a stream; `Some`: none takes any of them now.
    fn place(&mut self, mut bytes: Vec<u8>, is_chunk: bool) -> Result<Option<Vec<u8>>> {
        for _ in 0..self.streams.len() {
            let Some(number) = self.choose(bytes.len()) else { break };
            match self.streams[number].give(Piece { bytes, is_chunk, given: Instant::now() }) {
                Ok(None) => {
                    self.turn = number + 1;
                    return Ok(None);
                }
                Ok(Some(back)) => bytes = back,
                Err(error) => return self.lose(number, error).map(|()| None),
            }
        }
        Ok(Some(bytes))
    }

    /// A stream has failed: what it holds goes by the others.
    fn lose(&mut self, number: usize, error: Error) -> Result<()> {
        let stream = &mut self.streams[number];
        stream.state = State::Lost;
        stream.lost = Some((Instant::now(), error.to_string()));
        let chunks = stream.kept.drain(..).filter(|piece| piece.is_chunk).map(|piece| piece.bytes);
        self.again.extend(chunks);
        if self.streams.iter().all(|stream| stream.state == State::Lost) { Err(error) } else { Ok(()) }
    }

    /// Takes note of what the peer has.
    fn hear(&mut self) -> Result<()> {
        let mut receipts = self.receipts();
        if !std::mem::take(&mut receipts.news) {
            return Ok(());
        }
        let (there, passed) = (receipts.there.clone(), receipts.passed_there);
        drop(receipts);
        if passed > self.at {
            return Err(misplaced());
        }
        self.passed = passed;
        let mut done = Vec::new();
        for (stream, there) in self.streams.iter_mut().zip(there) {
            // What a lost stream held has gone by others.
            if stream.state != State::Lost {
                stream.arrive(there, &mut done)?;
            }
        }
        let now = Instant::now();
        if let Some(slowest) = done.iter().filter(|piece| piece.is_chunk).map(|piece| now - piece.given).max()
        {
            self.usual = slowest.max(self.usual - self.usual / 64);
        }
        let room = SPARE.saturating_sub(self.spare.len());
        self.spare.extend(
            done.into_iter().map(|piece| piece.bytes).filter(|b| b.capacity() > CHUNK / 2).take(room),
        );
        Ok(())
    }

    /// Tells the peer what has arrived, if that is due; true if it did.
    fn tell(&mut self) -> Result<bool> {
        let receipts = self.receipts();
        if !receipts.are_due() {
            return Ok(false);
        }
        let heads = receipts.heads();
        drop(receipts);
        let told = self.place(heads, false)?.is_none();
        if told {
            self.receipts().tell();
        }
        Ok(told)
    }
}

impl Sender for BundleSender {
    fn write(&mut self, first: &[u8], body: &[u8]) -> Result<usize> {
        self.drain()?;
        let len = first.len() + body.len();
        let mut done = 0;
        while done < len && self.has_room() {
            let start = &first[done.min(first.len())..];
            let start = &start[..start.len().min(CHUNK)];
            let end = &body[done.saturating_sub(first.len())..];
            let end = &end[..end.len().min(CHUNK - start.len())];
            let n = start.len() + end.len();
            let mut bytes = self.spare.pop().unwrap_or_default();
            bytes.clear();
            bytes.reserve(HEAD + n);
            bytes.extend_from_slice(&head(self.at, n));
            bytes.extend_from_slice(start);
            bytes.extend_from_slice(end);
            match self.place(bytes, true) {
                Ok(None) => {
                    self.at += n as u64;
                    done += n;
                }
                Ok(Some(back)) => {
                    self.spare.push(back);
                    break;
                }
                // What has been given must not be given again; the next write finds the same error.
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn has_room(&self) -> bool {
        self.again.is_empty()
            && self.at + CHUNK as u64 <= self.passed + WINDOW
            && self.choose(CHUNK).is_some()
    }

    fn may_hold(&self) -> bool {
        true
    }

    fn is_drained(&self) -> bool {
        let used = self.used();
        let mut streams = self.streams.iter().filter(|stream| stream.state == used);
        let receipts = self.receipts();
        self.again.is_empty()
            && !receipts.news
            && !receipts.are_due()
            && streams.all(|stream| !stream.has_rest() && stream.sender.is_drained())
    }

    fn drain(&mut self) -> Result<bool> {
        let mut moved = false;
        self.hear()?;
        for number in 0..self.streams.len() {
            if self.streams[number].state == State::Lost {
                continue;
            }
            let closed = self.receipts().closed[number].take();
            match closed.map_or_else(|| self.streams[number].push(), Err) {
                Ok(any) => moved |= any,
                Err(error) => self.lose(number, error)?,
            }
        }
        while let Some(bytes) = self.again.pop_front() {
            if let Some(back) = self.place(bytes, true)? {
                self.again.push_front(back);
                break;
            }
            moved = true;
        }
        Ok(self.tell()? || moved)
    }

    fn tick(&mut self, soon: bool) -> Result<()> {
        self.hear()?;
        self.streams.iter_mut().for_each(Stream::measure);
        let (now, heard, stall) = (Instant::now(), self.receipts().heard, STALL.max(3 * self.usual));
        let waits = |stream: &Stream, limit: Duration| {
            stream.state != State::Lost && stream.waits() && now - stream.since > limit
        };
        let (after, pause) = if soon { (Duration::ZERO, ASK_SOON) } else { (ASK, Duration::ZERO) };
        if now - self.asked >= pause && self.streams.iter().any(|stream| waits(stream, after)) {
            self.asked = now;
            for number in 0..self.streams.len() {
                let stream = &mut self.streams[number];
                if stream.state == State::Lost || !stream.is_ready() {
                    continue;
                }
                let piece = Piece { bytes: Head::Asked.encode().to_vec(), is_chunk: false, given: now };
                if let Err(error) = stream.give(piece) {
                    self.lose(number, error)?;
                }
            }
        }
        for number in 0..self.streams.len() {
            let live = self.streams.iter().filter(|stream| stream.state == State::Live).count();
            let stream = &mut self.streams[number];
            // The peer speaks, and does not say that it has these chunks.
            let is_stalled =
                stream.state == State::Live && waits(stream, stall) && heard > stream.since + stall / 2;
            if is_stalled && live > 1 {
                stream.state = State::Stalled;
                let chunks: Vec<Vec<u8>> = stream.chunks().map(|piece| piece.bytes.clone()).collect();
                self.again.extend(chunks);
                self.between.tell_stalled(number, now - self.streams[number].since);
            }
            let stream = &mut self.streams[number];
            // All of a peer that has ended close at about the same time.
            if let Some((_, why)) = stream.lost.take_if(|(since, _)| live > 0 && now - *since > TOLD) {
                self.between.tell_lost(number, &why);
            }
        }
        self.drain().map(drop)
    }

    fn unacknowledged(&self) -> Option<u64> {
        let bytes = |pieces: &mut dyn Iterator<Item = usize>| pieces.map(|n| n as u64).sum::<u64>();
        let live = self.streams.iter().filter(|stream| stream.state == self.used());
        let kept = bytes(&mut live.flat_map(Stream::chunks).map(|piece| piece.bytes.len()));
        Some(kept + bytes(&mut self.again.iter().map(Vec::len)))
    }

    fn wake(&mut self) {
        self.streams.iter_mut().for_each(|stream| stream.sender.wake());
    }

    fn flush(&mut self) {
        self.streams.iter_mut().for_each(|stream| stream.sender.flush());
    }

    fn is_summed(&self) -> bool {
        self.streams.iter().any(|stream| stream.sender.is_summed())
    }

    fn close(&mut self) {
        for stream in &mut self.streams {
            let bytes = Head::End(self.at).encode().to_vec();
            let piece = Piece { bytes, is_chunk: false, given: Instant::now() };
            if !stream.has_rest() {
                // The peer may have closed already; either way nothing more is sent.
                let _ = stream.give(piece);
            }
            stream.sender.close();
        }
    }
}
