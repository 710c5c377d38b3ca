//! Finds two ranks that wait for each other for ever, in calls of different groups.
//!
//! A rank whose threads all wait in one call, for [`PATIENCE`] without making another, says so to the members of that
//! call's group. A rank in the same state that has not made the peer's call answers with its own. Each of the two then
//! knows that the peer has not made its call and will not, and fails it on all ranks, with one error that shows both.
//!
//! No other ranks are hit. No collective ends before all members have made it (ADR 5), so a thread that waits in one can
//! go on only when the peer makes the call, and the peer's threads all wait in a call that needs this rank's. Each judges
//! only what it has not made itself; that the other still waits follows, as its call cannot have ended. What was
//! started and not awaited counts as made. A rank concludes nothing while a thread of it is outside of a wait
//! ([`crate::sys::callers`]): it computes, waits with a limit and looks at other things in between, or handles a signal. Nor
//! while it waits for a message, which may come from anyone, or in several calls; nor about calls that a helper takes part in
//! by itself; nor after a rank is lost, when calls end in other ways. What is not found ends at its deadline: cycles of
//! three ranks, and ranks with several threads that wait in different calls.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use trigram_core::Error;
use trigram_core::signature::Signature;
use trigram_core::wire::{CallId, Kind};

use crate::call::active_call::{ActiveCall, CallState};
use crate::call::calls::Calls;
use crate::health::peers::Peers;
use crate::health::stuck::StuckPeer;
use crate::link::outbox::Outbox;
use crate::sys::callers::Callers;

/// A rank that waits for so long with all its threads tells the others.
const PATIENCE: Duration = Duration::from_secs(1);

/// The call in which all threads of this rank wait.
#[derive(Debug)]
struct Stuck {
    /// Its number in this process, and that of the call that was made last.
    key: (u64, u64),
    since: Instant,
    /// Whether this rank has told the members of its group.
    told: bool,
    /// By peer, its call that this rank has answered.
    answered: HashMap<u32, (u64, CallId)>,
}

/// The search for ranks that wait for each other.
#[derive(Debug, Default)]
pub(crate) struct CrossWaits {
    stuck: Option<Stuck>,
}

impl CrossWaits {
    /// Looks for a peer that waits for this rank, while this rank waits for it. What has arrived has just been read.
    pub(crate) fn look(
        &mut self,
        calls: &mut Calls,
        out: &mut Outbox,
        peers: &Peers,
        callers: &Callers,
        now: Instant,
    ) {
        if !peers.are_all_alive() {
            return;
        }
        let Some(i) = calls.active.iter().position(|active| is_stuck(active, callers)) else { return };
        let body = &calls.active[i].body;
        let key = (body.id, calls.last_id);
        let stuck = match &mut self.stuck {
            Some(stuck) if stuck.key == key => stuck,
            _ => self.stuck.insert(Stuck { key, since: now, told: false, answered: HashMap::new() }),
        };
        if now - stuck.since < PATIENCE {
            return;
        }
        let (members, mine) = (body.members.clone(), (body.members.id, body.call_id));
        let workers = || members.ranks.iter().take(members.layout.workers() as usize).copied();
        let tell = |rank: u32, lacks: Option<(u64, CallId)>, out: &mut Outbox| {
            let Some(payload) = StuckPeer::encode(&members.name, lacks) else { return };
            out.give(rank, &body.frame(Kind::Stuck, 0, payload.len() as u32), payload);
        };
        if !std::mem::replace(&mut stuck.told, true) {
            workers()
                .filter(|&rank| Some(rank) != members.ranks.get(members.me as usize).copied())
                .for_each(|rank| tell(rank, None, out));
        }
        let absent = members.ranks_of(&calls.active[i].absent());
        let mut found = None;
        for (rank, peer) in peers.stuck() {
            let theirs = (peer.frame.group, peer.frame.call);
            let waits_for_me = !calls.is_over(rank, &peer.frame);
            if !waits_for_me || !absent.contains(&rank) || workers().all(|worker| worker != rank) {
                continue;
            }
            if stuck.answered.insert(rank, theirs) != Some(theirs) {
                tell(rank, Some(theirs), out);
            }
            if peer.lacks == Some(mine) {
                found = Some((rank, peer));
            }
        }
        let Some((rank, peer)) = found else { return };
        let me = members.ranks[members.me as usize];
        let mut sides = [
            (me, mine.1, body.signature, &*members.name),
            (rank, peer.frame.call, peer.frame.signature, &*peer.group),
        ];
        sides.sort_by_key(|side| side.0);
        let error = mismatch(&sides);
        calls.fail(i, error, true, out);
    }
}

/// Whether all threads of this rank wait in this collective, as ranks that have made it.
fn is_stuck(active: &ActiveCall, callers: &Callers) -> bool {
    let members = &active.body.members;
    active.state != CallState::Closing
        && active.body.request.message.is_none()
        && members.me < members.layout.workers()
        && callers.all_wait_for(&active.completion)
}

/// The error of two ranks that wait for each other: rank, number, signature and group of the call of each.
fn mismatch(sides: &[(u32, CallId, Signature, &str); 2]) -> Error {
    let [(rank, call, signature, group), (other, their_call, their_signature, their_group)] = sides;
    let place = match group == their_group {
        true => format!("another group of that name, {their_group}"),
        false => format!("group {their_group}"),
    };
    let sides = format!(
        "rank {rank} called {signature}; rank {other} did not, but called {their_signature}, which is call {} of {place}, and \
         each waits for the other",
        their_call.0
    );
    Error::Mismatch { group: (*group).to_string(), call: call.0, sides }
}
