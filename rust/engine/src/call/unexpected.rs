//! Messages and failures that arrive before this rank has made the call that they belong to.

use std::collections::{HashMap, VecDeque};

use trigram_core::wire::{CallId, Frame};
use trigram_core::{Error, Result};

/// The most bytes of messages for calls that this rank has not made yet.
pub(crate) const MOST_MESSAGE_BYTES: usize = 1 << 30;

/// The least that such a message counts for: many messages without payload take memory too, and time to search.
pub(crate) const MESSAGE_COST: usize = 1 << 10;

/// The most groups that peers may mention before this rank knows them, and the most failures of calls that it has not
/// made.
pub(crate) const MOST_GROUPS: usize = 4096;

/// A message that came before its call.
pub(crate) struct UnexpectedMessage {
    pub(crate) peer: u32,
    pub(crate) frame: Frame,
    pub(crate) payload: Vec<u8>,
    /// How many came before it.
    pub(crate) arrival: u64,
}

impl UnexpectedMessage {
    /// What it counts for.
    fn cost(&self) -> usize {
        self.payload.len() + MESSAGE_COST
    }
}

/// A failure that came before its call.
struct Failure {
    peer: u32,
    error: Error,
}

/// A group and the number of a call. Peers choose them, so the hash is one that they cannot predict.
type Key = (u64, CallId);

/// Messages and failures of calls that this rank has not made yet.
#[derive(Default)]
pub(crate) struct Unexpected {
    messages: HashMap<Key, VecDeque<UnexpectedMessage>>,
    bytes: usize,
    arrivals: u64,
    failures: HashMap<Key, Vec<Failure>>,
    failure_count: usize,
}

impl Unexpected {
    /// Whether nothing has come before its call.
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty() && self.failures.is_empty()
    }

    /// Keeps a message until its call is made.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if that would take too much memory; the message is lost then.
    pub(crate) fn keep(&mut self, peer: u32, frame: &Frame, payload: Vec<u8>) -> Result<()> {
        let bytes = self.bytes + payload.len() + MESSAGE_COST;
        if bytes > MOST_MESSAGE_BYTES {
            return Err(Error::io(
                format!("receiving from rank {peer}"),
                "more than 1 GiB of messages wait for calls that this rank has not made; make the calls sooner on this \
                 rank, or let the senders wait for it",
            ));
        }
        self.bytes = bytes;
        self.arrivals += 1;
        let kept = self.messages.entry((frame.group, frame.call)).or_default();
        kept.push_back(UnexpectedMessage { peer, frame: *frame, payload, arrival: self.arrivals });
        Ok(())
    }

    /// Takes out the first message of a call, from index `from` on, that `is_wanted`; returns it with its index.
    pub(crate) fn take(
        &mut self,
        group: u64,
        call: CallId,
        from: usize,
        is_wanted: impl Fn(&UnexpectedMessage) -> bool,
    ) -> Option<(usize, UnexpectedMessage)> {
        if self.messages.is_empty() {
            return None; // nearly always
        }
        let kept = self.messages.get_mut(&(group, call))?;
        let at = kept.iter().skip(from).position(is_wanted)? + from;
        let message = kept.remove(at)?;
        if kept.is_empty() {
            self.messages.remove(&(group, call));
        }
        self.bytes -= message.cost();
        Some((at, message))
    }

    /// Drops the messages of a call that has failed; `peer` is the other rank of a message.
    pub(crate) fn drop_messages(&mut self, group: u64, call: CallId, peer: Option<u32>) {
        let Some(kept) = self.messages.get_mut(&(group, call)) else { return };
        let bytes = &mut self.bytes;
        kept.retain(|m| {
            let stays = call.is_message() && peer != Some(m.peer);
            *bytes -= if stays { 0 } else { m.cost() };
            stays
        });
        if kept.is_empty() {
            self.messages.remove(&(group, call));
        }
    }

    /// Drops the messages and failures of a group that is aborted from a collective on.
    pub(crate) fn drop_from(&mut self, group: u64, from: CallId) {
        let stays = |key: &(u64, CallId)| key.0 != group || !key.1.is_message() && key.1 < from;
        self.messages.retain(|key, _| stays(key));
        self.bytes = self.messages.values().flatten().map(UnexpectedMessage::cost).sum();
        self.failures.retain(|key, _| stays(key));
        self.failure_count = self.failures.values().map(Vec::len).sum();
    }

    /// The messages, in no particular order.
    pub(crate) fn messages(&self) -> impl Iterator<Item = &UnexpectedMessage> {
        self.messages.values().flatten()
    }

    /// The headers of the messages of a call, and who sent them.
    pub(crate) fn frames_of(&self, group: u64, call: CallId) -> impl Iterator<Item = (u32, &Frame)> {
        let kept = if self.messages.is_empty() { None } else { self.messages.get(&(group, call)) };
        kept.into_iter().flatten().map(|e| (e.peer, &e.frame))
    }

    /// Keeps a failure until its call is made; false if there are too many already.
    pub(crate) fn keep_failure(&mut self, group: u64, call: CallId, peer: u32, error: Error) -> bool {
        if self.failure_count >= MOST_GROUPS {
            return false;
        }
        self.failure_count += 1;
        self.failures.entry((group, call)).or_default().push(Failure { peer, error });
        true
    }

    /// Takes the failure of a call that is being made; `peer` is the other rank of a message.
    pub(crate) fn take_failure(&mut self, group: u64, call: CallId, peer: Option<u32>) -> Option<Error> {
        if self.failure_count == 0 {
            return None; // nearly always
        }
        let kept = self.failures.get_mut(&(group, call))?;
        let at = kept.iter().position(|f| peer.is_none_or(|p| p == f.peer))?;
        let failure = kept.remove(at);
        self.failure_count -= 1;
        if kept.is_empty() || peer.is_none() {
            self.drop_failures(group, call);
        }
        Some(failure.error)
    }

    /// Whether a call has failed on another rank.
    pub(crate) fn has_failed(&self, group: u64, call: CallId) -> bool {
        self.failures.contains_key(&(group, call))
    }

    /// Messages between two ranks that have failed on the other one: that rank, the group and the number.
    pub(crate) fn failed_messages(&self) -> impl Iterator<Item = (u32, u64, CallId)> {
        let of_messages = self.failures.iter().filter(|((_, call), _)| call.is_message());
        of_messages.flat_map(|(&(group, call), kept)| kept.iter().map(move |f| (f.peer, group, call)))
    }

    /// Drops the failures of a call that this rank skips.
    pub(crate) fn drop_failures(&mut self, group: u64, call: CallId) {
        self.failure_count -= self.failures.remove(&(group, call)).map_or(0, |dropped| dropped.len());
    }

    /// The failures that a peer has reported in a group.
    pub(crate) fn failures_of(&self, peer: u32, group: u64) -> impl Iterator<Item = &Error> {
        let of_group = self.failures.iter().filter(move |(key, _)| key.0 == group);
        of_group.flat_map(|(_, kept)| kept).filter(move |f| f.peer == peer).map(|f| &f.error)
    }
}

#[cfg(test)]
mod tests {
    use trigram_core::signature::Signature;
    use trigram_core::wire::Kind;

    use super::*;

    #[test]
    fn a_message_without_room_changes_nothing() {
        let mut unexpected = Unexpected::default();
        let frame = Frame {
            kind: Kind::Data,
            group: 1,
            call: CallId(0),
            tag: 0,
            len: 0,
            signature: Signature::default(),
        };
        let half = || vec![0; MOST_MESSAGE_BYTES / 2]; // zeros that nobody touches take no memory
        unexpected.keep(2, &frame, half()).unwrap();
        let error = unexpected.keep(2, &frame, half()).unwrap_err();
        assert!(matches!(&error, Error::Io { what, .. } if what.contains("rank 2")), "{error}");
        unexpected.keep(3, &frame, vec![0; 1000]).unwrap();
        assert_eq!(unexpected.frames_of(1, CallId(0)).count(), 2);
        unexpected.drop_messages(1, CallId(0), None);
        unexpected.keep(2, &frame, half()).unwrap();
    }
}
