//! A helper: a rank without data that takes part in the calls of a group.
//!
//! It has no caller that says what comes next. The first message of a call says it: a call's signature determines its
//! schedule. The helper takes calls up in the order of their numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use trigram_core::Error;

use crate::call::calls::Calls;
use crate::call::request::{Request, Submission};
use crate::group::members::Members;
use crate::health::peers::Peers;
use crate::link::outbox::Outbox;
use crate::sys::clock;

/// The most calls that a helper takes part in at the same time: each takes memory for its share of each worker's
/// data.
const MOST_HELPED: usize = 8;

/// The group that this rank helps, if any.
#[derive(Default)]
pub(crate) struct Helper {
    group: Option<Arc<Members>>,
    /// Whether it still helps, for other threads.
    active: Arc<AtomicBool>,
}

/// What a helper does next.
pub(crate) enum Helped {
    /// Nothing now.
    Nothing,
    /// It has stopped helping: a member is lost.
    Ended,
    /// It takes part in this call.
    Call(Submission),
}

impl Helper {
    /// Helps a group from now on; a rank helps one group at a time.
    pub(crate) fn begin(&mut self, members: Arc<Members>) {
        self.group = Some(members);
    }

    /// Whether it helps no group.
    pub(crate) fn is_idle(&self) -> bool {
        self.group.is_none()
    }

    /// Whether it helps a group, for other threads.
    pub(crate) fn active(&self) -> Arc<AtomicBool> {
        self.active.clone()
    }

    /// Checks whether there is a call of the group to take part in.
    pub(crate) fn look(&mut self, calls: &mut Calls, out: &mut Outbox, peers: &Peers) -> Helped {
        let Some(members) = self.group.clone() else { return Helped::Nothing };
        if let Some(rank) = peers.first_lost(&members.ranks) {
            // A rank that left may have its result already, while others still need the helper.
            if calls.active.iter().any(|j| j.body.members.id == members.id) {
                return Helped::Nothing;
            }
            self.end(members, rank, calls, out, peers);
            return Helped::Ended;
        }
        if calls.active.iter().filter(|j| j.body.members.id == members.id).count() >= MOST_HELPED {
            return Helped::Nothing;
        }
        let next = calls.next(members.id);
        let message = calls.unexpected.frames_of(members.id, next).next();
        let request = match message {
            Some((_, frame)) => Request::helping(&frame.signature),
            None if calls.unexpected.has_failed(members.id, next) => Request::nothing(),
            None => return Helped::Nothing,
        };
        Helped::Call(Submission::new(members, request, Arc::default(), None))
    }

    /// Stops helping because a member is lost. The workers must learn that before they learn that this rank leaves,
    /// which is not the cause.
    fn end(&mut self, members: Arc<Members>, gone: u32, calls: &mut Calls, out: &mut Outbox, peers: &Peers) {
        let why = peers.reason(gone).map_or_else(String::new, ToString::to_string);
        let error = Error::PeerLost { rank: gone, what: "a call that this rank helps with".into(), why };
        let (next, _) = calls.number(&members, None);
        let me = members.ranks[members.me as usize];
        let told = peers.told(gone, me, &Request::nothing().signature(), &error);
        let i = calls.enter(members, next, Request::nothing(), Arc::default(), clock::ticks());
        calls.fail_as(i, error, Some(told), out);
        self.group = None;
        self.active.store(false, Ordering::Release);
    }
}
