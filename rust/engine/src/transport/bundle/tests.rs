use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::thread::sleep;

use trigram_core::{Error, Result};

use super::head::{CHUNK, HEAD};
use super::*;
use crate::transport::stream::Read;

/// One stream of a test: bytes under way, and how many of them may be read and written at a time.
#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    room: usize,
    closed: bool,
    /// Both directions fail.
    failed: bool,
}

#[derive(Clone, Default)]
struct End(Arc<Mutex<Pipe>>);

impl Sender for End {
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
        let mut pipe = self.0.lock().unwrap();
        if pipe.failed {
            return Err(Error::io("sending to a peer", "no route"));
        }
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
        if n == 0 && pipe.failed {
            return Err(Error::io("receiving from a peer", "no route"));
        }
        Ok(match n {
            0 if pipe.closed => Read::Closed,
            0 => Read::Nothing,
            n => Read::Some(n),
        })
    }

    fn has_input(&self) -> bool {
        let pipe = self.0.lock().unwrap();
        pipe.closed || pipe.failed || !pipe.bytes.is_empty()
    }
}

/// Streams `from` one side to the other, joined.
fn joined(ends: &[End]) -> (Box<dyn Sender>, Box<dyn Receiver>) {
    let boxed = |end: &End| (Box::new(end.clone()) as Box<dyn Sender>, Box::new(end.clone()) as _);
    join(ends.iter().map(boxed).collect(), Between::default())
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
                end.0.lock().unwrap().room += if room.is_multiple_of(3) { room % 50_000 } else { room % 40 };
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
    assert!(ends[1..].iter().all(|end| end.0.lock().unwrap().bytes.is_empty()), "what comes early is read");
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

/// Reads all that there is.
fn read_all(rx: &mut dyn Receiver) -> Vec<u8> {
    let (mut got, mut into) = (Vec::new(), vec![0; 3 * CHUNK]);
    while let Read::Some(n) = rx.read(&mut into).unwrap() {
        got.extend_from_slice(&into[..n]);
    }
    got
}

/// What both sides do until nothing is left to do.
fn settle(tx: &mut dyn Sender, rx: &mut dyn Receiver) -> Vec<u8> {
    let mut got = Vec::new();
    loop {
        tx.tick(true).unwrap();
        let moved = tx.drain().unwrap();
        let more = read_all(rx);
        if !moved && more.is_empty() && tx.is_drained() {
            return got;
        }
        got.extend(more);
    }
}

fn open(ends: &[End]) {
    ends.iter().for_each(|end| end.0.lock().unwrap().room = usize::MAX / 2);
}

#[test]
fn what_comes_early_has_a_limit() {
    let ends = [End::default(), End::default()];
    let (mut tx, mut rx) = joined(&ends);
    ends[1].0.lock().unwrap().room = usize::MAX / 2;
    ends[0].0.lock().unwrap().room = 1;
    let data: Vec<u8> = (0..(32 << 20) + 10 * CHUNK).map(byte).collect();
    let sent = tx.write(&[], &data).unwrap();
    assert_eq!(sent, 32 << 20);
    assert!(!tx.has_room());
    assert!(read_all(&mut *rx).is_empty());
    open(&ends);
    let mut got = settle(&mut *tx, &mut *rx);
    assert_eq!(got.len(), sent);
    assert!(tx.has_room());
    assert_eq!(tx.write(&[], &data[sent..]).unwrap(), data.len() - sent);
    got.extend(settle(&mut *tx, &mut *rx));
    assert!(got == data);
    sleep(Duration::from_millis(20));
    settle(&mut *tx, &mut *rx);
    assert_eq!(tx.unacknowledged(), Some(0));
}

#[test]
fn what_a_failed_stream_held_goes_by_the_others() {
    for lost in 0..3 {
        let ends = [End::default(), End::default(), End::default()];
        let (mut tx, mut rx) = joined(&ends);
        open(&ends);
        // A part of its first chunk arrives, and is passed on or kept.
        ends[lost].0.lock().unwrap().room = HEAD + 1000;
        let data: Vec<u8> = (0..50 * CHUNK).map(byte).collect();
        assert_eq!(tx.write(&[], &data).unwrap(), data.len());
        let mut got = read_all(&mut *rx);
        assert!(got.len() < data.len());
        ends[lost].0.lock().unwrap().failed = true;
        got.extend(settle(&mut *tx, &mut *rx));
        assert!(got == data, "{lost}");
        for end in &ends {
            end.0.lock().unwrap().failed = true;
        }
        let mut into = [0; 9];
        assert!(rx.read(&mut into).is_err());
        assert!(tx.write(&[1], &[]).is_err() || tx.tick(true).is_err());
    }
}

#[test]
fn a_stream_by_which_nothing_arrives_is_left_until_it_does() {
    let ends = [End::default(), End::default()];
    let (mut tx, mut rx) = joined(&ends);
    open(&ends);
    let data: Vec<u8> = (0..9 * CHUNK).map(byte).collect();
    // Nothing arrives by the first, as if its cable were cut.
    let cut = End::default();
    assert_eq!(tx.write(&[], &data).unwrap(), data.len());
    std::mem::swap(&mut *cut.0.lock().unwrap(), &mut *ends[0].0.lock().unwrap());
    ends[0].0.lock().unwrap().room = 0;
    let mut got = read_all(&mut *rx);
    let since = std::time::Instant::now();
    while got.len() < data.len() {
        assert!(since.elapsed() < Duration::from_secs(20), "{}", got.len());
        tx.tick(false).unwrap();
        tx.drain().unwrap();
        got.extend(read_all(&mut *rx));
        sleep(Duration::from_millis(20));
    }
    assert!(got == data && since.elapsed() > Duration::from_millis(900));
    settle(&mut *tx, &mut *rx);
    assert!(tx.is_drained(), "the stalled stream is not waited for");
    // It is mended: what was under way arrives a second time, and is dropped.
    std::mem::swap(&mut *cut.0.lock().unwrap(), &mut *ends[0].0.lock().unwrap());
    assert!(settle(&mut *tx, &mut *rx).is_empty());
    sleep(Duration::from_millis(20));
    settle(&mut *tx, &mut *rx);
    let before = ends[0].0.lock().unwrap().room;
    assert_eq!(tx.write(&[], &data).unwrap(), data.len());
    assert!(ends[0].0.lock().unwrap().room < before, "it is used again");
    assert!(settle(&mut *tx, &mut *rx) == data);
}

#[test]
fn all_that_have_closed_are_a_loss() {
    let ends = [End::default(), End::default()];
    let (mut tx, mut rx) = joined(&ends);
    open(&ends);
    assert_eq!(tx.write(&[1; 5], &[]).unwrap(), 5);
    ends[1].0.lock().unwrap().closed = true;
    let mut into = [0; 9];
    assert_eq!(rx.read(&mut into).unwrap(), Read::Some(5), "what was sent before comes first");
    assert_eq!(rx.read(&mut into).unwrap(), Read::Nothing, "the other stream goes on");
    assert_eq!(tx.write(&[2; 7], &[]).unwrap(), 7);
    assert_eq!(rx.read(&mut into).unwrap(), Read::Some(7));
    ends[0].0.lock().unwrap().closed = true;
    assert_eq!(rx.read(&mut into).unwrap(), Read::Closed);
    assert!(rx.has_input());
}

#[test]
fn a_peer_that_has_what_was_never_sent_is_told_of_whoever_looks_first() {
    for lie in [head::Head::Passed(6), head::Head::Received(0, 2)] {
        let ends = [End::default(), End::default()];
        let (mut tx, mut rx) = joined(&ends);
        open(&ends);
        assert_eq!(tx.write(&[1; 5], &[]).unwrap(), 5);
        ends[1].0.lock().unwrap().bytes.extend(lie.encode());
        read_all(&mut *rx);
        assert!(tx.tick(false).is_err(), "{lie:?}");
        assert!(tx.write(&[2], &[]).is_err() && tx.drain().is_err(), "{lie:?}");
    }
}

#[test]
fn heads_are_checked() {
    let cases: [(&str, Vec<u8>); 5] = [
        ("checksum", [&head(0, 5)[..15], &[9]].concat()),
        ("not where", head(0, CHUNK + 1).to_vec()),
        ("not where", head(1 << 40, 1).to_vec()),
        ("not where", [head(1, 0), head(0, 1)].concat()),
        ("not where", [head(1, 0), head(2, 0)].concat()),
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
