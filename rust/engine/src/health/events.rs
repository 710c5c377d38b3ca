//! A ring of records, one for each of the last calls, which other threads read while it is written.
//!
//! A record has 64 bytes and is made when a call is taken up; each change of the call's state is noted in it, so calls
//! under way are in the ring too. The thread that holds the progress lock writes, without allocating and without waiting
//! for readers; a reader finds out whether a record was overwritten while it read. Times are ticks of
//! [`crate::sys::clock`] until somebody reads them. Memory is touched when it is used first.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use trigram_core::signature::{Collective, Signature};
use trigram_core::wire::CallId;
use trigram_core::{DType, Error};
use zerocopy::FromZeros;

use crate::sys::clock::{self, Scale};

/// Records in the ring, 256 KiB, so that it stays in the cache of a rank that makes many short calls: a line fetched
/// from further away costs several percent of such a call.
const RECORDS: u64 = 1 << 12;
/// Words of a record.
const WORDS: usize = 8;
/// Intervals are kept in units of 2^8 ticks or nanoseconds, in 32 bits: of less than 0.3 us, up to minutes.
const UNIT: u32 = 8;
/// Reasons of failures that are kept.
const REASONS: usize = 64;
/// In the state of a call: it stands for one on GPU memory.
const DEVICE: u64 = 0x80;
/// In the state of a message: this rank receives it.
const RECEIVE: u64 = 0x40;
/// In the state of a call: its lengths differ by rank and by peer.
const UNEVEN: u64 = 0x20;
/// The phase in the state.
const PHASE: u64 = 0x0f;
/// The least significant bit of the state.
const STATE: u32 = 56;

// The words of a record.
const STAMP: usize = 0; // one more than its number; 0 while it is written
const GROUP: usize = 1;
const CALL: usize = 2;
const WHAT: usize = 3; // elements (40 bits), collective, dtype and state (8 each)
const MADE: usize = 4;
const ENDED: usize = 5; // 0: not yet
const BEGAN: usize = 6; // start and first byte, as units since it was made, plus one
const WAITED: usize = 7; // units (of nanoseconds) waited for one peer, and one more than its rank

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Its caller has made it, and it waits for an earlier one.
    Made = 0,
    /// It runs.
    Started = 1,
    /// What the peers contribute has begun to come.
    FirstByte = 2,
    /// It has failed, and ends when no peer uses its memory any more.
    Failed = 3,
    /// It has ended.
    Ended = 4,
}

/// What a record says of a call when it is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Made {
    pub(crate) group: u64,
    pub(crate) call: CallId,
    pub(crate) signature: Signature,
    /// As the signature counts, or where lengths differ by rank, those of this rank.
    pub(crate) elements: u64,
    /// For a message: the world rank of the peer, if it is known, and whether this rank sends.
    pub(crate) message: Option<(Option<u32>, bool)>,
    /// When the caller made it, in ticks.
    pub(crate) at: u64,
}

/// A record, read. Times are nanoseconds of the system's monotonic clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its number, in the order in which calls were taken up.
    pub number: u64,
    /// The group's identity, the same on all members.
    pub group: u64,
    /// The number of the collective in its group, or of the message among those with the same tag and peer.
    pub sequence: u64,
    /// The user's tag of a message.
    pub tag: Option<u32>,
    /// `all_reduce` and so on; messages are `send` or `recv`.
    pub kind: &'static str,
    /// Whether it stands for a call on GPU memory, whose data travels elsewhere.
    pub on_gpu: bool,
    /// Whether its lengths differ by rank and by peer, so that ranks may have other sizes in the same call.
    pub uneven: bool,
    /// The type of the elements.
    pub dtype: &'static str,
    /// Bytes of the payload of a rank, as the collective counts them; where lengths differ by rank, those of this rank.
    pub nbytes: u64,
    /// The rank that it waited for longest, and for how long; for a message, the other rank.
    pub peer: Option<u32>,
    /// See `peer`.
    pub waited: u64,
    /// Whether it has failed.
    pub failed: bool,
    /// When its caller made it.
    pub made: u64,
    /// When it began to run.
    pub started: Option<u64>,
    /// When the peers' contributions began to come.
    pub first_byte: Option<u64>,
    /// When it ended.
    pub ended: Option<u64>,
}

/// A call that has failed, on this rank or, before this rank has made it, on another.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The group's identity.
    pub group: u64,
    /// The number of the collective, or `None` for a message.
    pub sequence: Option<u64>,
    /// Why.
    pub why: String,
}

#[derive(Debug, Default)]
struct Failures {
    count: u64,
    last: VecDeque<Failure>,
}

/// How far a reader has come.
#[derive(Debug, Default)]
pub struct Reader {
    next: u64,
    under_way: Vec<u64>,
}

/// The ring. By default it has no records, and keeps none.
#[derive(Debug, Default)]
pub struct EventRing {
    words: Vec<AtomicU64>,
    /// The first word that begins a line of the cache.
    at: usize,
    next: AtomicU64,
    failures: Mutex<Failures>,
    failed: Condvar,
}

impl EventRing {
    pub(crate) fn new() -> Self {
        // Zeroed memory from the system, of which no page exists before it is written to.
        let words = AtomicU64::new_vec_zeroed((RECORDS as usize + 1) * WORDS).unwrap_or_default();
        let at = words.as_ptr().addr().wrapping_neg() % (WORDS * size_of::<u64>()) / size_of::<u64>();
        Self { words, at, ..Self::default() }
    }

    fn record(&self, number: u64) -> Option<&[AtomicU64; WORDS]> {
        let at = self.at + (number % RECORDS) as usize * WORDS;
        self.words.get(at..at + WORDS)?.try_into().ok()
    }

    /// Makes the record of a call, and returns its number. Only under the progress lock, as all that writes.
    pub(crate) fn begin(&self, made: &Made) -> u64 {
        self.write(made, 0, 0, Phase::Made)
    }

    /// Makes the record of a call that has ended already.
    pub(crate) fn record_ended(&self, made: &Made) {
        self.write(made, clock::ticks(), 1, Phase::Ended);
    }

    fn write(&self, made: &Made, ended: u64, began: u64, phase: Phase) -> u64 {
        let number = self.next.load(Ordering::Relaxed);
        let Some(record) = self.record(number) else { return number };
        let set = |word: usize, value: u64| record[word].store(value, Ordering::Relaxed);
        let [collective, dtype, ..] = made.signature.codes();
        let device = if made.signature.extra & Signature::DEVICE != 0 { DEVICE } else { 0 };
        let uneven = if made.signature.extra & Signature::PAIRWISE != 0 { UNEVEN } else { 0 };
        let receive = if made.message.is_some_and(|(_, sends)| !sends) { RECEIVE } else { 0 };
        let state = phase as u64 | device | receive | uneven;
        let peer = made.message.and_then(|(peer, _)| peer).map_or(0, |peer| u64::from(peer) + 1);
        set(STAMP, 0);
        fence(Ordering::Release); // readers find the stamp gone before anything else has changed
        set(GROUP, made.group);
        set(CALL, made.call.0);
        let elements = made.elements.min((1 << 40) - 1);
        set(WHAT, elements | u64::from(collective) << 40 | u64::from(dtype) << 48 | state << STATE);
        set(MADE, made.at);
        set(ENDED, ended);
        set(BEGAN, began);
        set(WAITED, peer << 32);
        record[STAMP].store(number + 1, Ordering::Release);
        self.next.store(number + 1, Ordering::Release);
        // The next record's line comes into the cache now, and not when the next call would wait for it.
        std::hint::black_box(self.record(number + 1).map(|next| next[STAMP].load(Ordering::Relaxed)));
        number
    }

    /// The record of a call, unless it was overwritten.
    fn own(&self, number: u64) -> Option<&[AtomicU64; WORDS]> {
        self.record(number).filter(|record| record[STAMP].load(Ordering::Relaxed) == number + 1)
    }

    /// Notes a change of a call's state: each passes here, but for those of calls that are recorded when they have ended.
    pub(crate) fn note(&self, number: u64, phase: Phase) {
        let Some(record) = self.own(number) else { return };
        let now = clock::ticks();
        let what = record[WHAT].load(Ordering::Relaxed);
        let since =
            u64::from(units(now.saturating_sub(record[MADE].load(Ordering::Relaxed))).saturating_add(1));
        let began = record[BEGAN].load(Ordering::Relaxed);
        match phase {
            Phase::Started if began as u32 == 0 => record[BEGAN].store(began | since, Ordering::Relaxed),
            Phase::FirstByte if began >> 32 == 0 => {
                record[BEGAN].store(began | since << 32, Ordering::Relaxed)
            }
            _ => {}
        }
        if !is_failed(what) {
            let kept = what & !(PHASE << STATE);
            record[WHAT].store(kept | (phase as u64) << STATE, Ordering::Relaxed);
        }
        if phase == Phase::Ended {
            record[ENDED].store(now, Ordering::Release);
        }
    }

    /// Notes the number of a receive that was made before it had one.
    pub(crate) fn set_call(&self, number: u64, call: CallId) {
        if let Some(record) = self.own(number) {
            record[CALL].store(call.0, Ordering::Relaxed);
        }
    }

    /// Notes for which rank a call has waited longest so far, in nanoseconds; for a message, with which rank it is exchanged.
    pub(crate) fn note_wait(&self, number: u64, rank: u32, waited: u64) {
        if let Some(record) = self.own(number) {
            let waited = u64::from(units(waited));
            record[WAITED].store((u64::from(rank) + 1) << 32 | waited, Ordering::Relaxed);
        }
    }

    /// Notes that a call has failed, and why; wakes those that wait for it in [`EventRing::wait_for_failure`].
    pub(crate) fn note_failure(&self, group: u64, call: CallId, why: &Error) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.count += 1;
        if failures.last.len() == REASONS {
            failures.last.pop_front();
        }
        let sequence = (!call.is_message()).then_some(call.0);
        failures.last.push_back(Failure { group, sequence, why: why.to_string() });
        self.failed.notify_all();
    }

    /// Waits until more than `seen` calls have failed, or the time has passed. Returns how many have, and the last.
    pub fn wait_for_failure(&self, seen: u64, limit: Duration) -> (u64, Vec<Failure>) {
        let until = Instant::now() + limit;
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        while failures.count <= seen {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            (failures, _) = self.failed.wait_timeout(failures, left).unwrap_or_else(PoisonError::into_inner);
        }
        (failures.count, failures.last.iter().cloned().collect())
    }

    /// Ends all waits for failures: the engine shuts down.
    pub(crate) fn close(&self) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        failures.count += 1;
        self.failed.notify_all();
    }

    fn read_one(&self, number: u64, scale: &Scale) -> Option<Event> {
        let record = self.record(number)?;
        let before = record[STAMP].load(Ordering::Acquire);
        let words: [u64; WORDS] = std::array::from_fn(|i| record[i].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let after = record[STAMP].load(Ordering::Relaxed);
        (before == number + 1 && after == before).then(|| decode(number, &words, scale))
    }

    /// All calls that the ring has, those under way too, in the order in which they were taken up.
    pub fn all(&self) -> Vec<Event> {
        let (next, scale) = (self.next.load(Ordering::Acquire), Scale::now());
        (next.saturating_sub(RECORDS)..next).filter_map(|number| self.read_one(number, &scale)).collect()
    }

    /// The calls that have ended since the reader has read last; and how many records were overwritten before.
    pub fn read(&self, reader: &mut Reader) -> (Vec<Event>, u64) {
        let (next, scale) = (self.next.load(Ordering::Acquire), Scale::now());
        let first = reader.next.max(next.saturating_sub(RECORDS));
        let mut lost = first - reader.next;
        let mut ended = Vec::new();
        let before = std::mem::take(&mut reader.under_way);
        for number in before.into_iter().chain(first..next) {
            match self.read_one(number, &scale) {
                Some(event) if event.ended.is_some() => ended.push(event),
                Some(_) => reader.under_way.push(number),
                None => lost += 1,
            }
        }
        reader.next = next;
        (ended, lost)
    }
}

/// Whether a record's call has failed.
fn is_failed(what: u64) -> bool {
    what >> STATE & PHASE == Phase::Failed as u64
}

/// An interval as a record keeps it.
fn units(length: u64) -> u32 {
    u32::try_from(length >> UNIT).unwrap_or(u32::MAX)
}

fn decode(number: u64, words: &[u64; WORDS], scale: &Scale) -> Event {
    let (what, state) = (words[WHAT], words[WHAT] >> STATE);
    let (code, dtype) = ((what >> 40) as u8, DType::from_code((what >> 48) as u8).ok());
    let call = CallId(words[CALL]);
    let kind = match Collective::ALL.into_iter().find(|c| *c as u8 == code) {
        Some(Collective::SendRecv) if state & RECEIVE != 0 => "recv",
        Some(Collective::SendRecv) => "send",
        Some(collective) => collective.name(),
        None => "unknown",
    };
    let made = words[MADE];
    let moment = |units: u64| (units > 0).then(|| scale.moment(made + ((units - 1) << UNIT)));
    let message = call.as_message();
    Event {
        number,
        group: words[GROUP],
        sequence: message.map_or(call.0, |(_, n)| n),
        tag: message.map(|(tag, _)| tag),
        kind,
        on_gpu: state & DEVICE != 0,
        uneven: state & UNEVEN != 0,
        dtype: dtype.map_or("unknown", DType::name),
        nbytes: (what & ((1 << 40) - 1)) * dtype.map_or(0, DType::size) as u64,
        peer: ((words[WAITED] >> 32) as u32).checked_sub(1),
        waited: u64::from(words[WAITED] as u32) << UNIT,
        failed: is_failed(what),
        made: scale.moment(made),
        started: moment(u64::from(words[BEGAN] as u32)),
        first_byte: moment(words[BEGAN] >> 32),
        ended: (words[ENDED] != 0).then(|| scale.moment(words[ENDED])),
    }
}

#[cfg(test)]
mod tests {
    use trigram_core::ReduceOp;
    use trigram_core::signature::Via;

    use super::*;

    fn made(n: u64) -> Made {
        let signature = Signature::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, Via::Auto, 0, 25);
        let call = CallId::collective(n);
        Made { group: 7, call, signature, elements: 25, message: None, at: clock::ticks() }
    }

    #[test]
    fn a_call_is_there_from_its_beginning_and_read_once_when_it_has_ended() {
        let (ring, mut reader) = (EventRing::new(), Reader::default());
        assert_eq!(ring.words.as_ptr().wrapping_add(ring.at).addr() % 64, 0);
        let slow = ring.begin(&made(0));
        ring.record_ended(&made(1));
        assert_eq!(ring.read(&mut reader).0.iter().map(|e| e.sequence).collect::<Vec<_>>(), [1]);
        ring.note(slow, Phase::Started);
        ring.note_wait(slow, 3, 1 << 20);
        let all = ring.all();
        assert_eq!((all.len(), all[0].ended, all[0].peer), (2, None, Some(3)));
        ring.note(slow, Phase::FirstByte);
        ring.note(slow, Phase::Ended);
        let (events, lost) = ring.read(&mut reader);
        let [event] = &events[..] else { panic!("{events:?}") };
        assert_eq!((event.group, event.kind, event.dtype, event.nbytes), (7, "all_reduce", "float32", 100));
        let times = [Some(event.made), event.started, event.first_byte, event.ended];
        assert!(times.iter().all(Option::is_some) && times.is_sorted(), "{event:?}");
        assert!(!event.failed && lost == 0 && ring.read(&mut reader).0.is_empty());
    }

    #[test]
    fn what_stands_for_another_call_or_has_unequal_lengths_says_so() {
        let ring = EventRing::new();
        for extra in [0, Signature::DEVICE, Signature::PAIRWISE] {
            let mut one = made(0);
            one.signature.extra = extra;
            ring.record_ended(&one);
        }
        let said: Vec<_> = ring.all().iter().map(|e| (e.on_gpu, e.uneven)).collect();
        assert_eq!(said, [(false, false), (true, false), (false, true)]);
    }

    #[test]
    fn a_receive_gets_its_number_later() {
        let ring = EventRing::new();
        let call = CallId::message(5, u64::MAX);
        let number = ring.begin(&Made { call, message: Some((None, false)), ..made(0) });
        ring.set_call(number, CallId::message(5, 2));
        assert_eq!((ring.all()[0].tag, ring.all()[0].sequence), (Some(5), 2));
    }

    #[test]
    fn a_failed_call_stays_failed_when_it_ends() {
        let ring = EventRing::new();
        let number = ring.begin(&made(0));
        ring.note(number, Phase::Failed);
        ring.note(number, Phase::Ended);
        assert!(ring.all()[0].failed && ring.all()[0].ended.is_some());
        ring.note_failure(7, CallId::collective(0), &Error::Aborted("why".into()));
        let (count, last) = ring.wait_for_failure(0, Duration::from_secs(5));
        assert_eq!((count, last[0].group, last[0].sequence), (1, 7, Some(0)));
        assert!(last[0].why.contains("why"));
    }

    #[test]
    fn readers_count_what_was_overwritten_and_read_nothing_torn() {
        let (ring, mut reader) = (EventRing::new(), Reader::default());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..4 * RECORDS {
                    // In each record, all fields say the same.
                    ring.record_ended(&Made { group: n, elements: n, ..made(n) });
                }
            });
            let (mut seen, mut lost) = (0, 0);
            while seen + lost < 4 * RECORDS {
                let (events, missed) = ring.read(&mut reader);
                assert!(events.iter().all(|e| [e.group, e.sequence, e.nbytes / 4] == [e.number; 3]));
                (seen, lost) = (seen + events.len() as u64, lost + missed);
            }
            assert!(seen >= RECORDS);
        });
    }
}
