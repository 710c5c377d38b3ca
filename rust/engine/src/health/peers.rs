//! Which peers are alive and which are lost, under the progress lock.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use trigram_core::Error;
use trigram_core::signature::Signature;

use crate::health::counters::Counters;
use crate::health::log_lines::LogLine;
use crate::health::losses::{LossEvent, LossKind, peer_lost};
use crate::health::stuck::StuckPeer;

/// The time between two heartbeats.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(100);
/// For this long after it woke, a rank takes closed connections for evictions.
const DROWSY: Duration = Duration::from_secs(10);
/// After a loss, a call that does not need the lost rank has this long to make progress.
const GRACE: Duration = Duration::from_millis(500);

/// Lost peers, and losses that were reported but not acted on yet.
#[derive(Debug)]
pub struct Peers {
    counters: Arc<Counters>,
    /// Peers that are gone, and why.
    lost: BTreeMap<u32, Error>,
    /// Lost peers that did not leave in good order, and when they were lost.
    broken: BTreeMap<u32, Instant>,
    events: Vec<LossEvent>,
    /// Why another rank has evicted this one, as it tells the others.
    evicted_for: Option<Error>,
    /// By peer, the call in which it last said that it waits with all its threads.
    stuck: HashMap<u32, StuckPeer>,
    /// The silence after which a rank is evicted: the same on all ranks.
    limit: Duration,
    /// When this rank last sent a heartbeat; when it last woke after sending none, and how long that had lasted.
    last_heartbeat: Instant,
    woke: Option<(Instant, Duration)>,
}

impl Peers {
    /// All peers alive. Losses are also recorded in `counters`, for other threads.
    pub fn new(counters: Arc<Counters>, limit: Duration) -> Self {
        Self {
            counters,
            lost: BTreeMap::new(),
            broken: BTreeMap::new(),
            events: Vec::new(),
            evicted_for: None,
            stuck: HashMap::new(),
            limit,
            last_heartbeat: Instant::now(),
            woke: None,
        }
    }

    /// A peer says that it waits in a call with all its threads.
    pub(crate) fn note_stuck(&mut self, rank: u32, stuck: StuckPeer) {
        self.stuck.insert(rank, stuck);
    }

    /// The peers that have said so, and their calls.
    pub(crate) fn stuck(&self) -> impl Iterator<Item = (u32, &StuckPeer)> {
        self.stuck.iter().map(|(&rank, stuck)| (rank, stuck))
    }

    /// Whether no peer is lost.
    pub fn are_all_alive(&self) -> bool {
        self.lost.is_empty()
    }

    /// Whether a peer is lost.
    pub fn is_lost(&self, rank: u32) -> bool {
        self.lost.contains_key(&rank)
    }

    /// Why a peer is lost, if it is.
    pub fn reason(&self, rank: u32) -> Option<&Error> {
        self.lost.get(&rank)
    }

    /// Which of these ranks was lost first.
    pub fn first_lost(&self, ranks: &[u32]) -> Option<u32> {
        if self.lost.is_empty() { None } else { self.counters.failures().first(ranks) }
    }

    /// Which of these ranks a receive from any source misses: the first that was lost without leaving in good order,
    /// because the message may have been its; one that has left only if nobody but `me` is there any more.
    pub fn first_missed(&self, ranks: &[u32], me: u32) -> Option<u32> {
        let first = self.first_lost(ranks)?;
        let alone = ranks.iter().all(|&rank| rank == me || self.is_lost(rank));
        (alone || self.kind(first) != Some(LossKind::Left)).then_some(first)
    }

    /// What others are told of a call that fails with `error` for want of the lost peer `rank`. A rank that the peer has
    /// evicted tells what the peer tells them: with `error` they would take the peer for the one that is gone.
    pub(crate) fn told(&self, rank: u32, me: u32, signature: &Signature, error: &Error) -> Error {
        if self.kind(rank) != Some(LossKind::Refused) {
            return error.clone();
        }
        let unknown = Error::Aborted("another rank has evicted it".into());
        peer_lost(me, Some(self.evicted_for.as_ref().unwrap_or(&unknown)), signature)
    }

    /// Another rank has evicted this one.
    pub(crate) fn note_eviction(&mut self, why: Error) {
        self.counters.failures().note_eviction(&why);
        self.evicted_for.get_or_insert(why);
    }

    /// How a peer was lost, if it was.
    pub fn kind(&self, rank: u32) -> Option<LossKind> {
        self.counters.failures().kind(rank)
    }

    /// A rank among these that was lost more than [`GRACE`] ago without leaving in good order, if the call has not
    /// progressed since.
    pub(crate) fn broken(&self, ranks: &[u32], moved: Instant, now: Instant) -> Option<u32> {
        let is_broken = |r: &u32| self.broken.get(r).is_some_and(|&at| now - at > GRACE);
        ranks.iter().copied().find(is_broken).filter(|_| now - moved > GRACE)
    }

    /// The error of a call that needs this lost peer.
    pub(crate) fn error(&self, rank: u32, signature: &Signature) -> Error {
        self.counters.failures().error(rank, signature)
    }

    /// Records the loss of a peer. Returns why and how it was lost, corrected by what else is known.
    pub(crate) fn lose(&mut self, rank: u32, why: Error, kind: LossKind) -> (Error, LossKind) {
        let slept = if kind == LossKind::Dead { self.has_slept() } else { None };
        let why = match slept {
            Some(slept) => Error::Aborted(format!(
                "it evicted this rank, which had sent no heartbeat for {:.1} s",
                slept.as_secs_f64()
            )),
            None => why,
        };
        let mut failures = self.counters.failures();
        // A rank that one peer has evicted is evicted by all, so a connection that closes then means no death.
        let refused = slept.is_some() || kind == LossKind::Dead && failures.is_refused();
        let kind = if refused { LossKind::Refused } else { kind };
        failures.add(rank, why.clone(), kind);
        drop(failures);
        if kind != LossKind::Left {
            self.broken.insert(rank, Instant::now());
        }
        self.lost.insert(rank, why.clone());
        (why, kind)
    }

    /// A lost peer can no longer do harm: its process has ended, or it has lost its access to this host's memory and finds
    /// out when it wakes.
    pub(crate) fn set_dead(&mut self, rank: u32) {
        self.counters.failures().set_dead(rank);
    }

    /// A call has failed elsewhere before this rank has made it.
    pub(crate) fn add_failed_call(&mut self, group: u64, error: Error) {
        self.counters.failures().add_call(group, error);
    }

    /// This rank has now made that call.
    pub(crate) fn remove_failed_call(&mut self, group: u64) {
        self.counters.failures().remove_call(group);
    }

    /// Queues a log line.
    pub(crate) fn log(&self, line: LogLine) {
        self.counters.log.push(line);
    }

    /// Records a loss that was noticed or reported, to be acted on later.
    pub(crate) fn report(&mut self, event: LossEvent) {
        self.events.push(event);
    }

    /// The losses reported since this was asked last.
    pub(crate) fn take_events(&mut self) -> Vec<LossEvent> {
        std::mem::take(&mut self.events)
    }

    /// The silence after which a rank is evicted.
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// A peer has sent no heartbeat for this long.
    pub(crate) fn note_silence(&self, rank: u32, silent: Duration) {
        if let Some(counter) = self.counters.silent.get(rank as usize) {
            counter.store(silent.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// This rank sends a heartbeat, or has just done something other than sleep.
    pub(crate) fn note_heartbeat(&mut self, now: Instant) {
        self.last_heartbeat = now;
    }

    /// Records it if this rank did not run for so long that others have evicted it.
    pub(crate) fn note_sleep(&mut self, now: Instant) {
        let slept = now - self.last_heartbeat;
        if slept > self.limit {
            self.woke = Some((now, slept));
            self.last_heartbeat = now;
        }
    }

    /// How long this rank slept, if it has woken just now. Connections that close soon after were closed by peers
    /// that evicted it, not by their deaths.
    fn has_slept(&mut self) -> Option<Duration> {
        let now = Instant::now();
        self.note_sleep(now);
        self.woke.filter(|(woke, _)| now - *woke < DROWSY).map(|(_, slept)| slept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rank 1 has evicted rank 2, this one: third ranks are to hear that 2 is gone, as 1 tells them, and not 1.
    #[test]
    fn who_was_evicted_blames_itself() {
        let mut peers = Peers::new(Arc::default(), Duration::from_secs(1));
        let (signature, text) = (Signature::default(), || String::from("it evicted this rank"));
        peers.lose(0, Error::Aborted(text()), LossKind::Dead);
        peers.lose(1, Error::Aborted(text()), LossKind::Refused);
        let error = peers.error(1, &signature);
        let blamed = |told: &Error| match told {
            Error::PeerLost { rank, .. } | Error::Corrupt { rank, .. } => Some(*rank),
            _ => None,
        };
        assert_eq!(blamed(&peers.told(1, 2, &signature, &error)), Some(2)); // 1 has only marked it
        peers.note_eviction(Error::Corrupt { rank: 2, what: "a wrong checksum".into() });
        let told = peers.told(1, 2, &signature, &error);
        assert!(matches!(&told, Error::Corrupt { rank: 2, what } if what == "a wrong checksum"), "{told}");
        assert_eq!(blamed(&peers.told(0, 2, &signature, &peers.error(0, &signature))), Some(0));
    }
}
