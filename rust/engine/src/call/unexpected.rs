//! Messages and failures that arrive before this rank has made the call that they belong to.

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
}

/// A failure that came before its call.
struct Failure {
    group: u64,
    call: CallId,
    peer: u32,
    error: Error,
}

/// Messages and failures of calls that this rank has not made yet.
#[derive(Default)]
pub(crate) struct Unexpected {
    messages: Vec<UnexpectedMessage>,
    bytes: usize,
    failures: Vec<Failure>,
}

impl Unexpected {
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
        self.messages.push(UnexpectedMessage { peer, frame: *frame, payload });
        Ok(())
    }

    /// Takes out the first message from index `from` on that `is_wanted`; returns it with its index.
    pub(crate) fn take(
        &mut self,
        from: usize,
        is_wanted: impl Fn(&UnexpectedMessage) -> bool,
    ) -> Option<(usize, UnexpectedMessage)> {
        let at = from + self.messages.get(from..)?.iter().position(is_wanted)?;
        let message = self.messages.remove(at);
        self.bytes -= message.payload.len() + MESSAGE_COST;
        Some((at, message))
    }

    /// Drops the messages of a call that has failed; `peer` is the other rank of a message.
    pub(crate) fn drop_messages(&mut self, group: u64, call: CallId, peer: Option<u32>) {
        let is_dropped = |e: &UnexpectedMessage| {
            e.frame.group == group
                && e.frame.call == call
                && if call.is_message() { peer == Some(e.peer) } else { true }
        };
        let dropped = self.messages.iter().filter(|e| is_dropped(e));
        self.bytes -= dropped.map(|e| e.payload.len() + MESSAGE_COST).sum::<usize>();
        self.messages.retain(|e| !is_dropped(e));
    }

    /// Drops the messages and failures of a group that is aborted.
    pub(crate) fn drop_group(&mut self, group: u64) {
        let dropped = self.messages.iter().filter(|e| e.frame.group == group);
        self.bytes -= dropped.map(|e| e.payload.len() + MESSAGE_COST).sum::<usize>();
        self.messages.retain(|e| e.frame.group != group);
        self.failures.retain(|f| f.group != group);
    }

    /// The headers of the messages, and who sent them.
    pub(crate) fn frames(&self) -> impl Iterator<Item = (u32, &Frame)> {
        self.messages.iter().map(|e| (e.peer, &e.frame))
    }

    /// Keeps a failure until its call is made; false if there are too many already.
    pub(crate) fn keep_failure(&mut self, group: u64, call: CallId, peer: u32, error: Error) -> bool {
        if self.failures.len() >= MOST_GROUPS {
            return false;
        }
        self.failures.push(Failure { group, call, peer, error });
        true
    }

    /// Takes the failure of a call that is being made; `peer` is the other rank of a message.
    pub(crate) fn take_failure(&mut self, group: u64, call: CallId, peer: Option<u32>) -> Option<Error> {
        let is_its = |f: &Failure| f.group == group && f.call == call && peer.is_none_or(|p| p == f.peer);
        let at = self.failures.iter().position(is_its)?;
        let failure = self.failures.swap_remove(at);
        if peer.is_none() {
            self.drop_failures(group, call);
        }
        Some(failure.error)
    }

    /// Whether a call has failed on another rank.
    pub(crate) fn has_failed(&self, group: u64, call: CallId) -> bool {
        self.failures.iter().any(|f| f.group == group && f.call == call)
    }

    /// Messages between two ranks that have failed on the other one: that rank, the group and the number.
    pub(crate) fn failed_messages(&self) -> impl Iterator<Item = (u32, u64, CallId)> {
        self.failures.iter().filter(|f| f.call.is_message()).map(|f| (f.peer, f.group, f.call))
    }

    /// Drops the failures of a call that this rank skips.
    pub(crate) fn drop_failures(&mut self, group: u64, call: CallId) {
        self.failures.retain(|f| f.group != group || f.call != call);
    }

    /// The failures that a peer has reported in a group.
    pub(crate) fn failures_of(&self, peer: u32, group: u64) -> impl Iterator<Item = &Error> {
        self.failures.iter().filter(move |f| f.peer == peer && f.group == group).map(|f| &f.error)
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
        assert_eq!(unexpected.frames().count(), 2);
        unexpected.drop_messages(1, CallId(0), None);
        unexpected.keep(2, &frame, half()).unwrap();
    }
}
