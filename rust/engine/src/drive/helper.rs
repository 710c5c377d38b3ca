//! A rank without data takes part in the calls of the group that it helps.
//!
//! It has no caller that would say what comes next. The first message of a call does, for its signature is all that
//! a schedule is made of; calls are taken up in the order of their numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use trigram_core::Error;

use crate::call::calls::Calls;
use crate::call::request::{Request, Submission};
use crate::group::members::Members;
use crate::health::peers::Peers;
use crate::link::outbox::Outbox;

/// Calls in which a helper takes part at the same time, at most: each takes memory for its share, from each worker.
const MOST_HELPED: usize = 8;

/// The group that this rank helps, if it does.
#[derive(Default)]
pub(crate) struct Helper {
    group: Option<Arc<Members>>,
    /// Whether it has not ended that yet, for other threads.
    active: Arc<AtomicBool>,
}

/// What a look at the group that this rank helps came to.
pub(crate) enum Helped {
    /// There is nothing to do now.
    Nothing,
    /// It helps no more: a member is lost.
    Ended,
    /// It takes part in this call. What the call is, its first message has said.
    Call(Submission),
}

impl Helper {
    /// Helps a group from now on.
    pub(crate) fn begin(&mut self, members: Arc<Members>) {
        self.group = Some(members);
    }

    /// Whether it helps none.
    pub(crate) fn is_idle(&self) -> bool {
        self.group.is_none()
    }

    /// Whether it helps a group, for other threads.
    pub(crate) fn active(&self) -> Arc<AtomicBool> {
        self.active.clone()
    }

    /// Looks whether there is a call of the group to take part in.
    pub(crate) fn look(&mut self, calls: &mut Calls, out: &mut Outbox, peers: &Peers) -> Helped {
        let Some(members) = self.group.clone() else { return Helped::Nothing };
        if let Some(rank) = peers.first_lost(&members.ranks) {
            // Who has left may have its result, and others not yet.
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
        let mut early = calls.unexpected.frames();
        let request = match early.find(|(_, f)| f.group == members.id && f.call == next) {
            Some((_, frame)) => Request::helping(&frame.signature),
            None if calls.unexpected.has_failed(members.id, next) => Request::nothing(),
            None => return Helped::Nothing,
        };
        Helped::Call(Submission { members, request, completion: Arc::default(), deadline: None })
    }

    /// A member is gone. The workers shall hear of it before they hear that this rank leaves, which is no cause.
    fn end(&mut self, members: Arc<Members>, gone: u32, calls: &mut Calls, out: &mut Outbox, peers: &Peers) {
        let why = peers.reason(gone).map_or_else(String::new, ToString::to_string);
        let error = Error::PeerLost { rank: gone, what: "a call that this rank helps with".into(), why };
        let (next, _) = calls.number(&members, None);
        let i = calls.enter(members, next, Request::nothing(), Arc::default());
        calls.fail(i, error, true, out);
        self.group = None;
        self.active.store(false, Ordering::Release);
    }
}
