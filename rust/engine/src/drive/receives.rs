//! Receives from any source: finds the message that each takes.
//!
//! The n-th message that a rank sends to another with some tag is taken by the n-th receive from that rank with that
//! tag, so a call of either knows its number at once. A receive from any source does not: it gets its number when a
//! message has come that is the next of its sender. Until then, receives with the same tag that were made after it have
//! none either. A message that is too large to be sent unasked is announced by its sender ([`Kind::Offer`]).
//!
//! The message that such a receive waits for may be that of any rank of the group. So it fails when one of them dies, as
//! with other libraries; a rank that leaves in good order has sent what it had, and the receive goes on while another is
//! there. What has come before is received in either case.
//!
//! [`Kind::Offer`]: trigram_core::wire::Kind::Offer

use crate::drive::matching::Matching;

impl Matching<'_> {
    /// Gives receives their numbers, as far as messages have come; true if there were any.
    pub(crate) fn match_receives(&mut self) -> bool {
        let mut moved = false;
        while let Some((i, peer)) = self.calls.next_match() {
            moved = true;
            self.calls.bind(i, peer);
            let body = &self.calls.active[i].body;
            let (group, call) = (body.members.id, body.call_id);
            match self.calls.unexpected.take_failure(group, call, Some(peer)) {
                Some(error) => self.calls.fail(i, error, false, self.out),
                None => self.take_unexpected(i),
            }
        }
        moved
    }
}
