//! The outward direction: who gets the next chunk, and what is sent again.

use std::cell::Cell;
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
/// Less is not divided among cables.
const LEAST_CHUNK: usize = 16 << 10;
/// Buffers that are kept for the next chunks.
const SPARE: usize = 32;

/// A stream of which nothing arrives for this long is asked for.
const ASK: Duration = Duration::from_millis(300);
/// Between two questions of a rank that waits until all has arrived.
const ASK_SOON: Duration = Duration::from_millis(10);
/// After this time, or three times what chunks have needed, what it holds goes by the other streams too.
const STALL: Duration = Duration::from_secs(1);
const MOST_STALL: Duration = Duration::from_secs(4);
/// What passes between two looks at the streams, at most, of the time that counts: this rank may have been stopped.
const TICK: Duration = Duration::from_millis(200);
/// The least time between two measurements: a rank that leaves looks more often.
const LOOK: Duration = Duration::from_millis(80);
/// Measurements of a stream's rate, ten in a second: so many are kept, and fewer than so many say nothing.
const MEASURED: usize = 9;
const LEAST_MEASURED: usize = 3;
/// Less that has arrived meanwhile does not make a measurement.
const LEAST_ARRIVED: u64 = 32 << 10;
/// How much faster a stream is believed to be that has been passed over for a tenth of a second; and from which doubt on its
/// measurements are not believed.
const GROWTH: f64 = 1.02;
const MOST_DOUBT: f64 = 1.5;
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

/// The position behind a chunk.
fn end(chunk: &[u8]) -> u64 {
    let at = chunk.first_chunk().map_or(0, |at| u64::from_le_bytes(*at));
    at + (chunk.len() - HEAD) as u64
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
    /// For how long nothing of what it holds has arrived.
    waited: Duration,
    /// What the system said last of what has arrived.
    arrived: u64,
    state: State,
    /// Bytes per second that it has carried lately; 0: not known yet.
    rate: f64,
    /// The last measurements of it.
    measured: VecDeque<f64>,
    /// How much more it may carry.
    doubt: f64,
    /// Since it was looked at last, others got what it had room for.
    passed_over: Cell<bool>,
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

    /// Takes note of what it carries: the median of the last measurements, for single ones may be of a burst. What little
    /// there was to send says nothing. One that was passed over is believed to carry a little more with time: else it would
    /// stay unused for a wrong measurement.
    fn measure(&mut self, passed: Duration) {
        let carried = self.sender.carried();
        let arrived = carried.map_or(0, |carried| carried.arrived.saturating_sub(self.arrived));
        self.arrived += arrived;
        self.waited = if arrived > 0 || !self.waits() { Duration::ZERO } else { self.waited + passed };
        match carried.and_then(|carried| carried.rate).filter(|_| arrived >= LEAST_ARRIVED) {
            Some(rate) => {
                if self.doubt > MOST_DOUBT {
                    self.measured.clear();
                }
                self.doubt = 1.0;
                if self.measured.len() == MEASURED {
                    self.measured.pop_front();
                }
                self.measured.push_back(rate);
            }
            None if self.passed_over.get() => self.doubt *= GROWTH,
            None => {}
        }
        self.passed_over.set(false);
        let mut sorted: Vec<f64> = self.measured.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        self.rate = sorted
            .get(sorted.len() / 2)
            .filter(|_| sorted.len() >= LEAST_MEASURED)
            .map_or(0.0, |r| r * self.doubt);
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
            self.waited = Duration::ZERO;
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
            if self.kept.is_empty() || !is_whole {
                return Err(misplaced());
            }
            let piece = self.kept.pop_front().filter(|piece| piece.is_chunk);
            self.there += u64::from(piece.is_some());
            // What it held while nothing arrived says nothing of how long chunks need.
            if self.state == State::Live {
                done.extend(piece);
            }
        }
        self.waited = Duration::ZERO;
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
    /// When the peer was asked last, and the streams were looked at.
    asked: Instant,
    looked: Instant,
    /// Why nothing more is sent: all streams are lost, or the peer says what cannot be.
    failed: Option<Error>,
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
            waited: Duration::ZERO,
            arrived: 0,
            state: State::Live,
            rate: 0.0,
            measured: VecDeque::new(),
            doubt: 1.0,
            passed_over: Cell::new(false),
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
            looked: Instant::now(),
            failed: None,
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
            let is_slow = fastest.is_some_and(|fastest| {
                stream.rate > 0.0
                    && stream.rate < fastest.rate / 2.0
                    && stream.seconds(bytes) > fastest.seconds(bytes)
            });
            stream.passed_over.set(is_slow || stream.passed_over.get());
            is_slow
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
                Err(error) => {
                    self.lose(number, error)?;
                    // A chunk goes by another stream soon; what was to be told is told again.
                    return Ok(if is_chunk { None } else { Some(Vec::new()) });
                }
            }
        }
        Ok(Some(bytes))
    }

    /// A stream has failed: what it holds goes by the others.
    fn lose(&mut self, number: usize, error: Error) -> Result<()> {
        let stream = &mut self.streams[number];
        stream.state = State::Lost;
        stream.lost = Some((Instant::now(), error.to_string()));
        stream.sender.close();
        let chunks = stream.kept.drain(..).filter(|piece| piece.is_chunk).map(|piece| piece.bytes);
        self.again.extend(chunks);
        self.receipts().repeat();
        if self.streams.iter().all(|stream| stream.state == State::Lost) {
            self.failed = Some(error.clone());
            return Err(error);
        }
        Ok(())
    }

    /// Writes what streams have taken in part, and then takes note of what the peer has: what the peer says that it has was
    /// written as a whole, though the last byte may not have been counted under TLS.
    fn push(&mut self) -> Result<bool> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let mut moved = false;
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
        // The word that is wrong is heard once: the error must not be lost with whoever looked first.
        self.hear().inspect_err(|error| self.failed = Some(error.clone()))?;
        Ok(moved)
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
        if let Some(slowest) = done.iter().map(|piece| now - piece.given).max() {
            self.usual = slowest.max(self.usual - self.usual / 64);
        }
        let room = SPARE.saturating_sub(self.spare.len());
        self.spare.extend(
            done.into_iter().map(|piece| piece.bytes).filter(|b| b.capacity() >= LEAST_CHUNK).take(room),
        );
        Ok(())
    }

    /// Tells the peer what has arrived, if that is due; true if it did.
    fn tell(&mut self) -> Result<bool> {
        let receipts = self.receipts();
        if !receipts.are_due() {
            return Ok(false);
        }
        let (heads, is_asked) = (receipts.heads(), receipts.is_asked());
        drop(receipts);
        // Who asks may hear by one stream what does not arrive by another.
        let told = if is_asked { self.tell_by_all(&heads)? } else { self.place(heads, false)?.is_none() };
        if told {
            self.receipts().tell();
        }
        Ok(told)
    }

    /// Tells the peer something by each stream that takes it now; true if one did by which something arrives.
    fn tell_by_all(&mut self, heads: &[u8]) -> Result<bool> {
        let (mut told, used) = (false, self.used());
        for number in 0..self.streams.len() {
            let stream = &mut self.streams[number];
            if stream.state == State::Lost || !stream.is_ready() {
                continue;
            }
            let is_used = stream.state == used;
            match stream.give(Piece { bytes: heads.to_vec(), is_chunk: false, given: Instant::now() }) {
                Ok(None) => told |= is_used,
                Ok(Some(_)) => {}
                Err(error) => self.lose(number, error)?,
            }
        }
        Ok(told)
    }
}

impl Sender for BundleSender {
    fn write(&mut self, first: &[u8], body: &[u8]) -> Result<usize> {
        self.drain()?;
        let len = first.len() + body.len();
        // What is short goes in parts too, over several cables at a time.
        let parts = if self.between.apart { self.streams.len() } else { 1 };
        let most = len.div_ceil(parts).clamp(LEAST_CHUNK, CHUNK);
        let mut done = 0;
        while done < len && self.has_room() {
            let start = &first[done.min(first.len())..];
            let start = &start[..start.len().min(most)];
            let end = &body[done.saturating_sub(first.len())..];
            let end = &end[..end.len().min(most - start.len())];
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
        let mut moved = self.push()?;
        while let Some(bytes) = self.again.pop_front() {
            if end(&bytes) <= self.passed {
                continue;
            }
            if let Some(back) = self.place(bytes, true)? {
                self.again.push_front(back);
                break;
            }
            moved = true;
        }
        Ok(self.tell()? || moved)
    }

    fn tick(&mut self, soon: bool) -> Result<()> {
        self.push()?;
        let now = Instant::now();
        if now - self.looked >= LOOK {
            let passed = (now - std::mem::replace(&mut self.looked, now)).min(TICK);
            self.streams.iter_mut().for_each(|stream| stream.measure(passed));
        }
        let waits = |stream: &Stream, limit: Duration| {
            stream.state != State::Lost && stream.waits() && stream.waited >= limit
        };
        let (after, pause) = if soon { (Duration::ZERO, ASK_SOON) } else { (ASK, Duration::ZERO) };
        if now - self.asked >= pause && self.streams.iter().any(|stream| waits(stream, after)) {
            self.asked = now;
            self.tell_by_all(&Head::Asked.encode())?;
        }
        let stall = (3 * self.usual).clamp(STALL, MOST_STALL);
        // The peer speaks, and does not say that it has what such a stream holds.
        let is_heard = now - self.receipts().heard < stall / 2;
        for number in 0..self.streams.len() {
            let live = self.streams.iter().filter(|stream| stream.state == State::Live).count();
            let stream = &mut self.streams[number];
            if is_heard && stream.state == State::Live && waits(stream, stall) && live > 1 {
                stream.state = State::Stalled;
                let chunks =
                    stream.chunks().map(|piece| &piece.bytes).filter(|chunk| end(chunk) > self.passed);
                let chunks: Vec<Vec<u8>> = chunks.cloned().collect();
                self.between.tell_stalled(number, stream.waited);
                self.again.extend(chunks);
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
