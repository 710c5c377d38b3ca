//! Finds two ranks that wait for each other for ever, in calls of different groups, or in messages.
//!
//! A rank whose threads all wait in one call, for [`PATIENCE`] without making another, says so to the members of that
//! call's group, or to the other rank of a message. A rank in the same state that has not made the peer's call answers
//! with its own. Each of the two then knows that the peer has not made its call and will not. Whoever learns that first
//! fails both, on all members of both groups, with one error that shows both.
//!
//! No other ranks are hit. No collective ends before all members have made it (ADR 5), so a thread that waits in one
//! can go on only when the peer makes the call, and the peer's threads all wait in a call that needs this rank's. A
//! message needs its counterpart likewise, which is numbered alike on both ranks. Each judges only what it has not made
//! itself; that the other still waits follows, as its call cannot have ended. What was started and not awaited counts
//! as made. A rank concludes nothing while a thread of it is outside of a wait ([`crate::sys::callers`]): it computes,
//! waits with a limit and looks at other things in between, or handles a signal. Nor while it waits for a message that
//! may come from anyone, or in several calls; nor about calls that a helper takes part in by itself; nor while a call
//! is under way that is followed by another of this rank ([`crate::sys::serving`]), and that all members have made; nor
//! after a rank is lost, when calls end in other ways. What is not found ends at its deadline: cycles of three ranks,
//! and ranks with several threads that wait in different calls.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use trigram_core::Error;
use trigram_core::wire::{CallId, Frame, Kind};

use crate::call::active_call::{ActiveCall, CallState};
use crate::call::calls::Calls;
use crate::health::peers::Peers;
use crate::health::stuck::{Lack, StuckPeer};
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
    answered: HashMap<u32, (u64, CallId, u32)>,
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
        peers: &mut Peers,
        callers: &Callers,
        now: Instant,
    ) {
        if !peers.are_all_alive() {
            return;
        }
        let Some(i) = calls.active.iter().position(|active| is_stuck(active, callers)) else { return };
        if calls.active.iter().any(is_about_to_be_followed) {
            return;
        }
        let body = &calls.active[i].body;
        let key = (body.id, calls.last_id);
        let stuck = match &mut self.stuck {
            Some(stuck) if stuck.key == key => stuck,
            _ => self.stuck.insert(Stuck { key, since: now, told: false, answered: HashMap::new() }),
        };
        if now - stuck.since < PATIENCE {
            return;
        }
        let message = body.request.message;
        // As in a failure, the tag tells the direction of a message.
        let direction = u32::from(message.is_some_and(|m| m.sends));
        let (members, mine) = (body.members.clone(), body.frame(Kind::Stuck, direction, 0));
        let me = members.ranks[members.me as usize];
        let other = message.and_then(|m| members.ranks.get(m.peer as usize)).map(std::slice::from_ref);
        let concerned = other.unwrap_or(&members.ranks[..members.layout.workers() as usize]);
        let tell = |rank: u32, lacks: Option<Lack>, out: &mut Outbox| {
            let Some(payload) = StuckPeer::encode(&members.name, lacks) else { return };
            out.give(rank, &Frame { len: payload.len() as u32, ..mine }, payload);
        };
        if !std::mem::replace(&mut stuck.told, true) {
            concerned.iter().filter(|&&rank| rank != me).for_each(|&rank| tell(rank, None, out));
        }
        let absent = other.map_or_else(|| members.ranks_of(&calls.active[i].absent()), <[u32]>::to_vec);
        let mut found = None;
        for (rank, peer) in peers.stuck() {
            let theirs = peer.frame;
            if calls.is_over(rank, &theirs) || !absent.contains(&rank) || !concerned.contains(&rank) {
                continue;
            }
            let call = (theirs.group, theirs.call, theirs.tag);
            if stuck.answered.insert(rank, call) != Some(call) {
                let ranks = if other.is_some() { vec![me, rank] } else { members.ranks.clone() };
                let lack = Lack { group: theirs.group, call: theirs.call.0, tag: theirs.tag, ranks };
                tell(rank, Some(lack), out);
            }
            if let Some(lack) = &peer.lacks
                && (lack.group, lack.call, lack.tag) == (mine.group, mine.call.0, mine.tag)
            {
                found = Some((rank, theirs, peer.group.clone(), lack.ranks.clone()));
            }
        }
        let Some((rank, theirs, group, ranks)) = found else { return };
        let mut sides = [(me, mine, members.name.as_str()), (rank, theirs, group.as_str())];
        sides.sort_by_key(|side| side.0);
        let error = mismatch(&sides);
        calls.fail(i, error.clone(), true, out);
        fail_theirs(&theirs, (me, rank), &ranks, &error, calls, out, peers);
    }
}

/// Fails the call in which a peer waits, and which this rank has not made: on these members of its group, and here.
fn fail_theirs(
    theirs: &Frame,
    (me, peer): (u32, u32),
    ranks: &[u32],
    error: &Error,
    calls: &mut Calls,
    out: &mut Outbox,
    peers: &mut Peers,
) {
    let Ok(payload) = postcard::to_stdvec(error) else { return };
    // What fails here is the counterpart of a message, which goes the other way for this rank.
    let is_message = theirs.call.is_message();
    let tag = if is_message { u32::from(theirs.tag == 0) } else { theirs.tag };
    let frame = Frame { kind: Kind::Fail, tag, len: payload.len() as u32, ..*theirs };
    // In the order of the world: each once, whatever the peer has sent.
    for rank in (0..out.connections().len() as u32).filter(|rank| *rank != me && ranks.contains(rank)) {
        out.give(rank, &frame, payload.clone());
    }
    if calls.unexpected.keep_failure(theirs.group, theirs.call, peer, error.clone()) && !is_message {
        peers.add_failed_call(theirs.group, error.clone());
    }
}

/// Whether all threads of this rank wait in this call, as ranks that have made it, and for known ranks.
fn is_stuck(active: &ActiveCall, callers: &Callers) -> bool {
    let members = &active.body.members;
    !matches!(active.state, CallState::Closing | CallState::Unmatched)
        && members.me < members.layout.workers()
        && callers.all_wait_for(&active.completion)
}

/// Whether all members have made this collective, and this rank's threads make another when it ends, while they wait:
/// that may be the one that the peer waits for.
fn is_about_to_be_followed(active: &ActiveCall) -> bool {
    active.body.request.message.is_none()
        && active.completion.is_followed()
        && active.not_entered().is_empty()
}

/// The error of two ranks that wait for each other: each with its call, and what it calls the group of that.
fn mismatch(sides: &[(u32, Frame, &str); 2]) -> Error {
    let [(rank, called, group), (other, instead, other_group)] = sides;
    let place = match (called.group == instead.group, group == other_group) {
        (true, _) => "the same group".into(),
        (_, true) => format!("another group of that name, {other_group}"),
        _ => format!("group {other_group}"),
    };
    let (made, theirs) = (action(called, *other), action(instead, *rank));
    let which = match instead.call.as_message() {
        Some((tag, n)) => format!("message {n} with tag {tag}"),
        None => format!("call {}", instead.call.0),
    };
    let sides = format!(
        "rank {rank} called {made}; rank {other} did not, but called {theirs}, which is {which} of {place}, and each waits for the other"
    );
    let call = called.call.as_message().map_or(called.call.0, |(_, n)| n);
    Error::Mismatch { group: (*group).to_string(), call, sides }
}

/// What a rank called: of a message, the direction and the other rank too.
fn action(frame: &Frame, peer: u32) -> String {
    let called = frame.signature.to_string();
    match (frame.call.is_message(), frame.tag) {
        (false, _) => called,
        (true, 0) => format!("{} from rank {peer}", called.replace("send/recv", "recv")),
        (true, _) => format!("{} to rank {peer}", called.replace("send/recv", "send")),
    }
}
