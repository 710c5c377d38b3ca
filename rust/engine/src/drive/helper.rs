//! A rank without data takes part in the calls of the group that it helps.
//!
//! It has no caller that would say what comes next. The first message of a call does, for its signature is all that
//! a schedule is made of; calls are taken up in the order of their numbers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use trigram_core::Error;
use trigram_core::planner::Call;
use trigram_core::signature::{Collective, Signature};
use trigram_core::wire::CallId;

use crate::call::job::Request;
use crate::drive::hub::{Hub, Submission};
use crate::group::members::Members;

/// Calls in which a helper takes part at the same time, at most: each takes memory for its share, from each worker.
const MOST_HELPED: usize = 8;

/// Elements of a call that a helper takes part in, at most: a peer's word is no reason for more memory.
const LARGEST_HELPED: usize = 1 << 30;

impl Request {
    /// What a helper does in a call of this signature. One that no helper can take part in does not match,
    /// and fails.
    pub fn helping(signature: &Signature) -> Self {
        let Some((dtype, op, via)) = signature.how() else { return Self::nothing() };
        let Some(len) = usize::try_from(signature.count).ok().filter(|len| *len <= LARGEST_HELPED) else {
            return Self::nothing();
        };
        let call = Call { what: Collective::AllReduce, dtype, len, root: 0, via, splits: None };
        Self { call, op, ..Self::nothing() }
    }
}

impl Hub {
    /// Takes part in the next call of the group that this rank helps, once it hears of it; true if it did. What
    /// the call is, the first message says.
    pub fn help(&mut self) -> bool {
        let Some(members) = self.helped.clone() else { return false };
        if let Some(rank) = self.first_lost(&members.ranks) {
            // Who has left may have its result, and others not yet.
            let over = self.jobs.iter().all(|j| j.body.members.id != members.id);
            if over {
                self.stop_helping(members, rank);
            }
            return over;
        }
        if self.jobs.iter().filter(|j| j.body.members.id == members.id).count() >= MOST_HELPED {
            return false;
        }
        let next = CallId::collective(self.books.entry(members.id).or_default().next);
        let mut early =
            self.early.iter().map(|e| &e.frame).filter(|f| f.group == members.id && f.call == next);
        let request = match early.next() {
            Some(frame) => Request::helping(&frame.signature),
            None if self.failures.iter().any(|f| f.group == members.id && f.call == next) => {
                Request::nothing()
            }
            None => return false,
        };
        self.admit(Submission { members, request, ticket: Arc::default(), deadline: None });
        true
    }

    /// A member is gone. The workers shall hear of it before they hear that this rank leaves, which is no cause.
    fn stop_helping(&mut self, members: Arc<Members>, gone: u32) {
        let why = self.lost.get(&gone).map_or_else(String::new, ToString::to_string);
        let error = Error::PeerLost { rank: gone, what: "a call with helpers".into(), why };
        let book = self.books.entry(members.id).or_default();
        book.next += 1;
        let next = CallId::collective(book.next - 1);
        let i = self.enter(members, next, Request::nothing(), Arc::default());
        self.fail(i, error, true);
        self.helped = None;
        self.helping.store(false, Ordering::Release);
    }
}
