//! Several streams to one peer that carry one stream of bytes, for links on which one stream carries too little.
//!
//! The bytes are cut into chunks. Each goes to a stream that has room, behind a head with its position, its length and a
//! checksum of both. What a stream took in part is kept here until it takes the rest, so that the others go on. The receiver
//! passes bytes on in their order; a chunk that comes early is kept, up to a limit, so that its stream goes on too.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use trigram_core::wire::Sum;
use trigram_core::{Error, Result};

use crate::transport::stream::{Read, Receiver, Sender};

/// Bytes of a chunk, at most.
const CHUNK: usize = 64 << 10;
/// Bytes of a chunk's head: its position, its length, and their checksum.
const HEAD: usize = 8 + 4 + 4;
/// Bytes that come early and are kept, at most: as much as a link of 1 Gbit/s has under way in 270 ms.
const MOST_EARLY: usize = 32 << 20;
/// Chunks that have begun to arrive, at most: each costs memory beside its bytes.
const MOST_CHUNKS: usize = 8192;

/// Both directions of several connections to one peer as those of one.
pub fn join(streams: Vec<(Box<dyn Sender>, Box<dyn Receiver>)>) -> (Box<dyn Sender>, Box<dyn Receiver>) {
    let (out, inward): (Vec<_>, Vec<_>) = streams.into_iter().unzip();
    let out = out.into_iter().map(|sender| Out { sender, rest: Vec::new(), gone: 0 }).collect();
    let inward = inward.into_iter().map(Inward::new).collect();
    (
        Box::new(BundleSender { streams: out, turn: 0, at: 0 }),
        Box::new(BundleReceiver { streams: inward, at: 0, early: 0, end: None, broken: None }),
    )
}

/// The head of a chunk. One of no bytes says where the stream of bytes ends.
pub fn head(at: u64, len: usize) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&at.to_le_bytes());
    head[8..12].copy_from_slice(&(len as u32).to_le_bytes());
    let sum = Sum::of(&head[..12]);
    head[12..].copy_from_slice(&sum.to_le_bytes());
    head
}

fn wrong(what: &str) -> Error {
    Error::io("receiving from a peer", std::io::Error::new(ErrorKind::InvalidData, what))
}

/// One of the streams, outward.
struct Out {
    sender: Box<dyn Sender>,
    /// The part of its last chunk that it has not taken, from `gone` on.
    rest: Vec<u8>,
    gone: usize,
}

impl Out {
    fn has_rest(&self) -> bool {
        self.gone < self.rest.len()
    }

    /// Writes the rest; true if anything moved.
    fn push(&mut self) -> Result<bool> {
        let mut moved = false;
        while self.has_rest() && self.sender.has_room() {
            match self.sender.write(&[], &self.rest[self.gone..])? {
                0 => break,
                n => self.gone += n,
            }
            moved = true;
        }
        if !self.has_rest() {
            self.rest.clear();
            self.gone = 0;
        }
        Ok(moved)
    }
}

struct BundleSender {
    streams: Vec<Out>,
    /// The stream that is asked first for the next chunk.
    turn: usize,
    /// The position of the next byte.
    at: u64,
}

impl BundleSender {
    /// Gives a chunk to a stream; false if none takes any of it now.
    fn give(&mut self, start: &[u8], end: &[u8]) -> Result<bool> {
        let len = start.len() + end.len();
        // The head of a frame is short: together with the chunk's it is one slice.
        let mut first = [0; HEAD + 256];
        let short = start.len().min(256);
        first[..HEAD].copy_from_slice(&head(self.at, len));
        first[HEAD..HEAD + short].copy_from_slice(&start[..short]);
        let (first, last) = (&first[..HEAD + short], if start.len() > short { &start[short..] } else { end });
        for i in 0..self.streams.len() {
            let chosen = (self.turn + i) % self.streams.len();
            let out = &mut self.streams[chosen];
            if out.has_rest() || !out.sender.has_room() {
                continue;
            }
            let n = out.sender.write(first, last)?;
            if n == 0 {
                continue;
            }
            out.rest.extend_from_slice(&first[n.min(first.len())..]);
            out.rest.extend_from_slice(&last[n.saturating_sub(first.len())..]);
            if start.len() > short {
                out.rest.extend_from_slice(end);
            }
            self.at += len as u64;
            self.turn = chosen + 1;
            return Ok(true);
        }
        Ok(false)
    }
}

impl Sender for BundleSender {
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
        self.drain()?;
        let len = head.len() + body.len();
        let mut done = 0;
        while done < len {
            let start = &head[done.min(head.len())..];
            let start = &start[..start.len().min(CHUNK)];
            let end = &body[done.saturating_sub(head.len())..];
            let end = &end[..end.len().min(CHUNK - start.len())];
            match self.give(start, end) {
                Ok(true) => done += start.len() + end.len(),
                // What has been given must not be given again; the next write finds the same error.
                Err(error) if done == 0 => return Err(error),
                Ok(false) | Err(_) => break,
            }
        }
        Ok(done)
    }

    fn has_room(&self) -> bool {
        self.streams.iter().any(|out| !out.has_rest() && out.sender.has_room())
    }

    fn may_hold(&self) -> bool {
        true
    }

    fn is_drained(&self) -> bool {
        self.streams.iter().all(|out| !out.has_rest() && out.sender.is_drained())
    }

    fn drain(&mut self) -> Result<bool> {
        let mut moved = false;
        for out in &mut self.streams {
            moved |= out.push()?;
            moved |= out.sender.drain()?;
        }
        Ok(moved)
    }

    fn wake(&mut self) {
        self.streams.iter_mut().for_each(|out| out.sender.wake());
    }

    fn flush(&mut self) {
        self.streams.iter_mut().for_each(|out| out.sender.flush());
    }

    fn is_summed(&self) -> bool {
        self.streams.iter().any(|out| out.sender.is_summed())
    }

    fn close(&mut self) {
        let end = head(self.at, 0);
        for out in &mut self.streams {
            out.rest.extend_from_slice(&end);
            // The peer may have closed already; either way nothing more is sent.
            let _ = out.push();
            out.sender.close();
        }
    }
}

/// A chunk that has begun to arrive.
struct Chunk {
    /// The position of its first byte that has not been passed on.
    at: u64,
    /// Its bytes that are still to come.
    missing: usize,
    /// Those that came early, from `passed` on.
    early: Vec<u8>,
    passed: usize,
}

impl Chunk {
    fn is_held(&self) -> bool {
        self.passed < self.early.len()
    }
}

/// One of the streams, inward.
struct Inward {
    receiver: Box<dyn Receiver>,
    head: [u8; HEAD],
    have: usize,
    /// All but the last have arrived.
    chunks: VecDeque<Chunk>,
    /// The position behind its last chunk.
    next: u64,
    /// The peer has said that no more follows.
    ended: bool,
    closed: bool,
}

impl Inward {
    fn new(receiver: Box<dyn Receiver>) -> Self {
        let chunks = VecDeque::new();
        Self { receiver, head: [0; HEAD], have: 0, chunks, next: 0, ended: false, closed: false }
    }

    /// Whether its next bytes are those at this position.
    fn is_at(&self, at: u64) -> bool {
        self.chunks.front().is_some_and(|chunk| chunk.at == at)
    }

    /// Whether there is something to be read that may be read now. `room`: bytes that come early may be kept.
    fn may_read(&self, room: bool) -> bool {
        !self.closed && self.receiver.has_input() && (room || self.chunks.is_empty())
    }

    /// Whether bytes of the first chunk are there, or may be.
    fn may_pass(&self) -> bool {
        !self.closed || self.chunks.front().is_some_and(Chunk::is_held)
    }

    /// Passes bytes of the first chunk on.
    fn pass(&mut self, into: &mut [u8]) -> Result<Read> {
        let Some(chunk) = self.chunks.front_mut() else { return Ok(Read::Nothing) };
        let n = if chunk.is_held() {
            let held = &chunk.early[chunk.passed..];
            let n = held.len().min(into.len());
            into[..n].copy_from_slice(&held[..n]);
            chunk.passed += n;
            n
        } else {
            let most = chunk.missing.min(into.len());
            match self.receiver.read(&mut into[..most])? {
                Read::Some(n) => {
                    chunk.missing -= n;
                    n
                }
                Read::Closed => {
                    self.closed = true;
                    return Ok(Read::Closed);
                }
                Read::Nothing => return Ok(Read::Nothing),
            }
        };
        chunk.at += n as u64;
        if chunk.missing == 0 && !chunk.is_held() {
            self.chunks.pop_front();
        }
        Ok(Read::Some(n))
    }

    /// Reads a head, or bytes that come early. `at`: the position that is passed on next.
    fn take(&mut self, at: u64, end: &mut Option<u64>, early: &mut usize) -> Result<Read> {
        let is_direct = self.is_at(at);
        if let Some(chunk) = self.chunks.back_mut().filter(|chunk| chunk.missing > 0) {
            if is_direct && chunk.at == at && !chunk.is_held() {
                return Ok(Read::Nothing); // goes to its reader without a copy
            }
            let have = chunk.early.len();
            chunk.early.resize(have + chunk.missing, 0);
            let read = self.receiver.read(&mut chunk.early[have..]);
            let n = if let Ok(Read::Some(n)) = read { n } else { 0 };
            chunk.early.truncate(have + n);
            chunk.missing -= n;
            *early += n;
            return read;
        }
        let read = self.receiver.read(&mut self.head[self.have..])?;
        let Read::Some(n) = read else { return Ok(read) };
        self.have += n;
        if self.have == HEAD {
            self.have = 0;
            self.begin(at, end)?;
        }
        Ok(read)
    }

    /// A head has arrived.
    fn begin(&mut self, at: u64, end: &mut Option<u64>) -> Result<()> {
        let number =
            |from: usize| u32::from_le_bytes(self.head[from..from + 4].try_into().unwrap_or_default());
        let position = u64::from_le_bytes(self.head[..8].try_into().unwrap_or_default());
        let (len, sum) = (number(8) as usize, number(12));
        if Sum::of(&self.head[..12]) != sum {
            return Err(wrong("wrong checksum of a chunk's head: bits flipped between the two hosts"));
        }
        let next = position.checked_add(len as u64);
        let is_here = position >= self.next.max(at) && end.is_none_or(|end| position <= end);
        let Some(next) = next.filter(|_| !self.ended && len <= CHUNK && is_here) else {
            return Err(wrong("a chunk is not where one may be"));
        };
        if len == 0 {
            self.ended = true;
            *end = Some(position);
            return Ok(());
        }
        self.next = next;
        self.chunks.push_back(Chunk { at: position, missing: len, early: Vec::new(), passed: 0 });
        Ok(())
    }
}

struct BundleReceiver {
    streams: Vec<Inward>,
    /// The position of the byte that is passed on next.
    at: u64,
    /// Bytes that came early and have not been passed on.
    early: usize,
    /// The position of the end, once the peer has said it.
    end: Option<u64>,
    /// When the first stream closed without the peer having said so.
    broken: Option<Instant>,
}

/// A process that ends closes its streams one after another, and what it has sent by the others may still be on its way.
const CLOSING: Duration = Duration::from_secs(1);

impl BundleReceiver {
    /// Whether the peer is gone.
    fn is_over(&self) -> bool {
        let all = || self.streams.iter().all(|stream| stream.closed);
        self.end == Some(self.at) || self.broken.is_some_and(|since| all() || since.elapsed() > CLOSING)
    }

    /// Whether more may come early.
    fn has_room(&self) -> bool {
        let chunks: usize = self.streams.iter().map(|stream| stream.chunks.len()).sum();
        self.early < MOST_EARLY && chunks < MOST_CHUNKS
    }

    /// Reads what does not come in its turn, and heads; true if anything arrived.
    fn take_in(&mut self) -> Result<bool> {
        let mut moved = false;
        let room = self.has_room();
        for stream in &mut self.streams {
            if !stream.may_read(room) {
                continue;
            }
            match stream.take(self.at, &mut self.end, &mut self.early)? {
                Read::Some(_) => moved = true,
                Read::Nothing => {}
                Read::Closed => {
                    stream.closed = true;
                    if !stream.ended {
                        self.broken.get_or_insert_with(Instant::now);
                    }
                }
            }
        }
        Ok(moved)
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
            let next = |stream: &&mut Inward| stream.is_at(self.at) && stream.may_pass();
            if let Some(stream) = self.streams.iter_mut().find(next) {
                let held = stream.chunks.front().is_some_and(Chunk::is_held);
                match stream.pass(into)? {
                    Read::Some(n) => {
                        self.at += n as u64;
                        self.early -= if held { n } else { 0 };
                        return Ok(Read::Some(n));
                    }
                    Read::Nothing => {}
                    Read::Closed => drop(self.broken.get_or_insert_with(Instant::now)),
                }
            }
            if !self.take_in()? {
                return Ok(if self.is_over() { Read::Closed } else { Read::Nothing });
            }
        }
    }

    fn has_input(&self) -> bool {
        let room = self.has_room();
        self.is_over()
            || self.streams.iter().any(|stream| match stream.chunks.front() {
                Some(chunk) if chunk.at == self.at => {
                    chunk.is_held() || !stream.closed && stream.receiver.has_input()
                }
                _ => stream.may_read(room),
            })
    }

    fn each_socket(&self, look: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.streams.iter().for_each(|stream| stream.receiver.each_socket(look));
    }

    fn wake(&mut self) {
        self.streams.iter_mut().for_each(|stream| stream.receiver.wake());
    }

    fn read_ahead(&self) -> usize {
        self.streams.first().map_or(0, |stream| stream.receiver.read_ahead())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// One stream of a test: bytes under way, and how many of them may be read and written at a time.
    #[derive(Default)]
    struct Pipe {
        bytes: VecDeque<u8>,
        room: usize,
        closed: bool,
    }

    #[derive(Clone, Default)]
    struct End(Arc<Mutex<Pipe>>);

    impl Sender for End {
        fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
            let mut pipe = self.0.lock().unwrap();
            let n = (head.len() + body.len()).min(pipe.room);
            pipe.bytes.extend(head.iter().chain(body).take(n));
            pipe.room -= n;
            Ok(n)
        }

        fn close(&mut self) {
            self.0.lock().unwrap().closed = true;
        }
    }

    impl Receiver for End {
        fn read(&mut self, into: &mut [u8]) -> Result<Read> {
            let mut pipe = self.0.lock().unwrap();
            let n = into.len().min(pipe.bytes.len());
            for (to, byte) in into.iter_mut().zip(pipe.bytes.drain(..n)) {
                *to = byte;
            }
            Ok(match n {
                0 if pipe.closed => Read::Closed,
                0 => Read::Nothing,
                n => Read::Some(n),
            })
        }

        fn has_input(&self) -> bool {
            let pipe = self.0.lock().unwrap();
            pipe.closed || !pipe.bytes.is_empty()
        }
    }

    /// Streams `from` one side to the other, joined.
    fn joined(ends: &[End]) -> (Box<dyn Sender>, Box<dyn Receiver>) {
        let boxed = |end: &End| (Box::new(end.clone()) as Box<dyn Sender>, Box::new(end.clone()) as _);
        join(ends.iter().map(boxed).collect())
    }

    fn byte(at: usize) -> u8 {
        (at * 31 + at / 251) as u8
    }

    /// Numbers that look random, the same in each run.
    fn next(state: &mut u64) -> usize {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state >> 16) as usize
    }

    #[test]
    fn bytes_come_in_their_order_whatever_the_streams_do() {
        for seed in 1..60 {
            let mut state = u64::wrapping_mul(seed, 0x9E37_79B9_7F4A_7C15);
            let ends: Vec<End> = (0..1 + next(&mut state) % 5).map(|_| End::default()).collect();
            let (mut tx, mut rx) = joined(&ends);
            let total = next(&mut state) % 600_000;
            let data: Vec<u8> = (0..total).map(byte).collect();
            let (mut sent, mut got) = (0, Vec::new());
            // An attempt is made again with the same bytes, as a link does.
            let mut asked = None;
            let mut into = vec![0; 100_000];
            while got.len() < total || sent < total || !tx.is_drained() {
                for end in &ends {
                    let room = next(&mut state);
                    end.0.lock().unwrap().room +=
                        if room.is_multiple_of(3) { room % 50_000 } else { room % 40 };
                }
                tx.drain().unwrap();
                if sent < total {
                    let (start, len) = asked.unwrap_or_else(|| {
                        let start = next(&mut state) % 400;
                        (start, (start + next(&mut state) % 200_000).min(total - sent))
                    });
                    let start = start.min(len);
                    let whole = &data[sent..sent + len];
                    let n = tx.write(&whole[..start], &whole[start..]).unwrap();
                    sent += n;
                    asked = (n < len).then(|| (start.saturating_sub(n), len - n));
                }
                for _ in 0..next(&mut state) % 4 {
                    let most = 1 + next(&mut state) % into.len();
                    if let Read::Some(n) = rx.read(&mut into[..most]).unwrap() {
                        got.extend_from_slice(&into[..n]);
                    }
                }
                assert!(ends.iter().all(|end| end.0.lock().unwrap().bytes.is_empty()) || rx.has_input());
            }
            assert!(got == data, "seed {seed}");
            ends.iter().for_each(|end| end.0.lock().unwrap().room = HEAD);
            tx.close();
            assert_eq!(rx.read(&mut into).unwrap(), Read::Closed);
        }
    }

    #[test]
    fn a_stream_that_stands_still_does_not_stop_the_others() {
        let ends = [End::default(), End::default(), End::default()];
        let (mut tx, mut rx) = joined(&ends);
        ends.iter().for_each(|end| end.0.lock().unwrap().room = usize::MAX / 2);
        // The first stream takes the head of a chunk and ten bytes, and no more.
        ends[0].0.lock().unwrap().room = HEAD + 10;
        let data: Vec<u8> = (0..40 * CHUNK).map(byte).collect();
        assert_eq!(tx.write(&[], &data).unwrap(), data.len());
        assert!(!tx.is_drained());
        let mut got = vec![0; data.len()];
        assert_eq!(rx.read(&mut got).unwrap(), Read::Some(10));
        assert_eq!(rx.read(&mut got[10..]).unwrap(), Read::Nothing);
        assert!(
            ends[1..].iter().all(|end| end.0.lock().unwrap().bytes.is_empty()),
            "what comes early is read"
        );
        assert!(!rx.has_input());
        ends[0].0.lock().unwrap().room = CHUNK;
        assert!(tx.drain().unwrap() && tx.is_drained());
        let mut have = 10;
        while have < got.len() {
            let Read::Some(n) = rx.read(&mut got[have..]).unwrap() else { panic!("{have}") };
            have += n;
        }
        assert!(got == data);
    }

    #[test]
    fn what_comes_early_has_a_limit() {
        let ends = [End::default(), End::default()];
        let (mut tx, mut rx) = joined(&ends);
        ends[1].0.lock().unwrap().room = usize::MAX / 2;
        ends[0].0.lock().unwrap().room = 1;
        let data = vec![7; MOST_EARLY + 10 * CHUNK];
        assert_eq!(tx.write(&[], &data).unwrap(), data.len());
        let mut into = vec![0; CHUNK];
        assert_eq!(rx.read(&mut into).unwrap(), Read::Nothing);
        assert!(ends[1].0.lock().unwrap().bytes.len() >= 8 * CHUNK);
        assert!(!rx.has_input(), "nothing can be done before the first stream goes on");
        ends[0].0.lock().unwrap().room = usize::MAX / 2;
        tx.drain().unwrap();
        let mut have = 0;
        while have < data.len() {
            assert!(rx.has_input());
            let Read::Some(n) = rx.read(&mut into).unwrap() else { panic!("{have}") };
            have += n;
        }
    }

    #[test]
    fn an_end_that_was_not_said_is_a_loss() {
        let ends = [End::default(), End::default()];
        let (mut tx, mut rx) = joined(&ends);
        ends.iter().for_each(|end| end.0.lock().unwrap().room = usize::MAX / 2);
        assert_eq!(tx.write(&[1; 5], &[]).unwrap(), 5);
        ends[1].0.lock().unwrap().closed = true;
        let mut into = [0; 9];
        assert_eq!(rx.read(&mut into).unwrap(), Read::Some(5), "what was sent before comes first");
        assert_eq!(rx.read(&mut into).unwrap(), Read::Nothing, "the other stream may still bring something");
        assert_eq!(tx.write(&[2; 7], &[]).unwrap(), 7);
        // This chunk goes by the second stream, which is closed for what has not been read.
        std::thread::sleep(CLOSING + Duration::from_millis(50));
        assert!(rx.has_input());
        assert_eq!(rx.read(&mut into).unwrap(), Read::Closed);
        let ends = [End::default(), End::default()];
        let (_tx, mut rx) = joined(&ends);
        ends.iter().for_each(|end| end.0.lock().unwrap().closed = true);
        assert_eq!(rx.read(&mut into).unwrap(), Read::Closed, "all have closed");
    }

    #[test]
    fn heads_are_checked() {
        let cases: [(&str, Vec<u8>); 5] = [
            ("checksum", [&head(0, 5)[..15], &[9]].concat()),
            ("not where", head(0, CHUNK + 1).to_vec()),
            ("not where", [&head(0, 1)[..], &[1], &head(0, 1)].concat()),
            ("not where", [head(1, 0), head(0, 1)].concat()),
            ("not where", [&head(4, 2)[..], &[1, 1], &head(5, 1)].concat()),
        ];
        for (what, bytes) in cases {
            let end = End::default();
            let (_, mut rx) = joined(std::slice::from_ref(&end));
            end.0.lock().unwrap().bytes.extend(bytes);
            let mut into = [0; 64];
            let error = loop {
                match rx.read(&mut into) {
                    Ok(Read::Some(_)) => {}
                    Ok(other) => panic!("{what}: {other:?}"),
                    Err(error) => break error,
                }
            };
            assert!(error.to_string().contains(what), "{error}");
        }
    }
}
