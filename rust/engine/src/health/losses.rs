//! How peers get lost, and the record of failures that any thread may read.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use trigram_core::signature::Signature;
use trigram_core::{Error, Result};

use crate::group::members::Members;

/// A rank that ends so long after another was lost may have done so for that reason.
const SOON: Duration = Duration::from_secs(10);

/// How a peer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossKind {
    /// It announced that it leaves the job.
    Left,
    /// Its connection closed because the process ended, or it sent data that no correct peer sends.
    Dead,
    /// It sends no heartbeats or cannot be reached, but its process may still run.
    Silent,
    /// It has evicted this rank.
    Refused,
}

/// The loss of a peer, noticed or reported, but not acted on yet.
#[derive(Debug)]
pub struct LossEvent {
    /// The lost peer.
    pub rank: u32,
    /// Why.
    pub why: Error,
    /// How.
    pub kind: LossKind,
    /// The rank that reported the loss of a third rank; `None` if this rank noticed it.
    pub reported_by: Option<u32>,
}

/// What has failed so far, for threads that do not hold the progress lock.
#[derive(Debug, Default)]
pub struct Failures {
    /// Why each lost peer is lost.
    lost: BTreeMap<u32, Error>,
    /// And how.
    kinds: BTreeMap<u32, LossKind>,
    /// When this rank has noticed it.
    times: BTreeMap<u32, Instant>,
    /// In which order. Ranks that left come last: they left because of the others.
    order: Vec<u32>,
    /// By group, the last failure of a call that this rank has not made yet.
    calls: HashMap<u64, Error>,
    /// Who runs the job has sent this rank away, as others say.
    am_sent_away: bool,
}

impl Failures {
    /// The peers lost so far, and how, in the order in which they were lost; those that left come last.
    pub fn losses(&self) -> Vec<(u32, LossKind)> {
        self.order.iter().filter_map(|rank| self.kinds.get(rank).map(|&kind| (*rank, kind))).collect()
    }

    /// Whether this rank was sent away by who runs the job.
    pub fn am_sent_away(&self) -> bool {
        self.am_sent_away
    }

    /// Whether a peer was sent away by who runs the job.
    pub fn is_sent_away(&self, rank: u32) -> bool {
        matches!(self.lost.get(&rank), Some(Error::SentAway(_)))
    }

    /// How a peer was lost, if it was.
    pub fn kind(&self, rank: u32) -> Option<LossKind> {
        self.kinds.get(&rank).copied()
    }

    /// Which of these ranks was lost first.
    pub fn first(&self, ranks: &[u32]) -> Option<u32> {
        self.order.iter().copied().find(|rank| ranks.contains(rank))
    }

    /// Whether a peer has evicted this rank.
    pub(crate) fn is_refused(&self) -> bool {
        self.kinds.values().any(|&kind| kind == LossKind::Refused)
    }

    /// Records the loss of a peer.
    pub(crate) fn add(&mut self, rank: u32, why: Error, kind: LossKind) {
        self.lost.insert(rank, why);
        self.kinds.insert(rank, kind);
        self.times.insert(rank, Instant::now());
        let is_later = |r: &u32| kind != LossKind::Left && self.kinds.get(r) == Some(&LossKind::Left);
        let at = self.order.iter().take_while(|r| !is_later(r)).count();
        self.order.insert(at, rank);
    }

    /// A lost peer can no longer take part: its process has ended, or it is locked out.
    pub(crate) fn set_dead(&mut self, rank: u32) {
        self.kinds.insert(rank, LossKind::Dead);
    }

    /// This rank has been evicted: that connections had closed before may have been its own network's doing, so it takes no
    /// rank for dead that may go on without it.
    pub(crate) fn note_eviction(&mut self, why: &Error) {
        self.am_sent_away |= matches!(why, Error::SentAway(_));
        self.kinds
            .values_mut()
            .filter(|kind| **kind == LossKind::Dead)
            .for_each(|kind| *kind = LossKind::Silent);
    }

    /// A call has failed elsewhere before this rank has made it.
    pub(crate) fn add_call(&mut self, group: u64, error: Error) {
        self.calls.insert(group, error);
    }

    /// This rank has now made that call.
    pub(crate) fn remove_call(&mut self, group: u64) {
        self.calls.remove(&group);
    }

    /// Whether a group can go on.
    ///
    /// # Errors
    ///
    /// If it cannot: a member is lost, or has aborted a call that this rank has not made yet.
    pub fn check(&self, members: &Members, what: &Signature) -> Result<()> {
        if let Some(rank) = self.first(&members.ranks) {
            return Err(self.error(rank, what));
        }
        self.calls.get(&members.id).map_or(Ok(()), |error| Err(error.clone()))
    }

    /// The error of a call that needs this lost peer. If another was lost shortly before, it says so: the peer may have
    /// ended for that reason, and of the neighbours of a dead rank only some see its death in their own calls.
    pub(crate) fn error(&self, rank: u32, signature: &Signature) -> Error {
        let why = self.lost.get(&rank);
        let Some((first, before)) = self.lost_before(rank) else { return peer_lost(rank, why, signature) };
        let why = why.map_or_else(String::new, ToString::to_string);
        let why = Error::Aborted(format!("{why}; rank {first} was lost before: {before}"));
        peer_lost(rank, Some(&why), signature)
    }

    /// Who was lost first of those that were so shortly before this one, and why.
    fn lost_before(&self, rank: u32) -> Option<(u32, &Error)> {
        let when = *self.times.get(&rank)?;
        let is_cause = |other: &u32| {
            let before = self.times.get(other).and_then(|&at| when.checked_duration_since(at));
            *other != rank
                && self.kinds.get(other) != Some(&LossKind::Left)
                && before.is_some_and(|before| before < SOON)
        };
        let first = self.order.iter().copied().find(is_cause)?;
        self.lost.get(&first).map(|why| (first, why))
    }
}

/// The error of a call that needs a lost peer.
pub(crate) fn peer_lost(rank: u32, why: Option<&Error>, signature: &Signature) -> Error {
    match why {
        Some(Error::Corrupt { rank, what }) => Error::Corrupt { rank: *rank, what: what.clone() },
        why => Error::PeerLost {
            rank,
            what: signature.to_string(),
            why: why.map_or_else(String::new, ToString::to_string),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_come_in_their_order() {
        let mut failures = Failures::default();
        let why = || Error::Aborted(String::new());
        failures.add(5, why(), LossKind::Left);
        failures.add(3, why(), LossKind::Silent);
        failures.add(1, why(), LossKind::Dead);
        failures.set_dead(3);
        assert_eq!(failures.losses(), [(3, LossKind::Dead), (1, LossKind::Dead), (5, LossKind::Left)]);
    }

    #[test]
    fn who_ends_after_a_death_does_not_stand_for_the_dead() {
        let (mut failures, signature) = (Failures::default(), Signature::default());
        let why = |text: &str| Error::Aborted(text.into());
        let told = |failures: &Failures, rank| failures.error(rank, &signature).to_string();
        failures.add(1, why("it has left"), LossKind::Left);
        failures.add(0, why("its process has ended"), LossKind::Dead);
        assert!(told(&failures, 1).contains("(it has left)"), "{}", told(&failures, 1));
        for (rank, kind) in [(2, LossKind::Left), (3, LossKind::Dead)] {
            failures.add(rank, why("it has gone"), kind);
            let text = told(&failures, rank);
            let expected = "is gone (it has gone; rank 0 was lost before: its process has ended)";
            assert!(text.contains(expected), "{text}");
        }
        assert!(
            told(&failures, 0).contains("rank 0 is gone (its process has ended)"),
            "{}",
            told(&failures, 0)
        );
        failures.times.entry(0).and_modify(|at| *at -= 2 * SOON);
        assert!(told(&failures, 2).contains("(it has gone)"), "{}", told(&failures, 2));
    }
}
