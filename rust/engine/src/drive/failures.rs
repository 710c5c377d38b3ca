//! Fails calls that cannot go on, and names the ranks that a call waits for.
//!
//! The first failure of a call reaches every rank (invariant ERR-3): the rank that finds it sends it to all members,
//! and each fails the same call with the same error. Other calls of the group go on. A lost peer fails all calls that
//! need it, and all later ones.

use std::time::{Duration, Instant};

use trigram_core::Error;
use trigram_core::error::name_ranks;
use trigram_core::planner::Opening;
use trigram_core::signature::Signature;
use trigram_core::wire::Kind;

use crate::call::active_call::CallState;
use crate::call::calls::Calls;
use crate::health::log_lines::LogLine;
use crate::health::losses::LossKind;
use crate::health::peers::Peers;
use crate::link::outbox::Outbox;

/// After this long without progress, a rank tells the others what it called.
const STALL: Duration = Duration::from_millis(100);
/// After this long, a log line names the ranks that a call waits for.
const NAME_AFTER: Duration = Duration::from_secs(10);

/// The error of a call of `group` that needs the lost rank `rank`; `me`: this rank.
pub(crate) fn reason(
    calls: &Calls,
    peers: &Peers,
    me: u32,
    rank: u32,
    group: u64,
    signature: &Signature,
) -> Error {
    // If a peer exits because a third rank died, blame the third: before it exits, the peer reports the calls that
    // failed. This rank may not know of that death yet, because the kernel closes a dead process's connections one
    // after another.
    let mut deaths = calls
        .unexpected
        .failures_of(rank, group)
        .filter(|e| matches!(e, Error::PeerLost { rank, .. } if *rank != me));
    deaths.next().cloned().unwrap_or_else(|| peers.error(rank, signature))
}

/// Fails a call that cannot go on here. If it lacks a peer, the error gives the reason why that peer was lost.
pub(crate) fn stop(calls: &mut Calls, i: usize, error: Error, out: &mut Outbox, peers: &Peers, me: u32) {
    match error {
        Error::PeerLost { rank, .. } if peers.is_lost(rank) => fail_for(calls, i, rank, true, out, peers, me),
        error => calls.fail(i, error, true, out),
    }
}

/// Fails a call that needs the lost rank `rank`; with `tell`, also tells the other members.
pub(crate) fn fail_for(
    calls: &mut Calls,
    i: usize,
    rank: u32,
    tell: bool,
    out: &mut Outbox,
    peers: &Peers,
    me: u32,
) {
    let error = lost(calls, i, rank, peers, me);
    let told = tell.then(|| peers.told(rank, me, &calls.active[i].body.signature, &error));
    calls.fail_as(i, error, told, out);
}

/// The error of a call under way that needs a lost rank.
pub(crate) fn lost(calls: &Calls, i: usize, rank: u32, peers: &Peers, me: u32) -> Error {
    let body = &calls.active[i].body;
    reason(calls, peers, me, rank, body.members.id, &body.signature)
}

/// Fails calls that need a lost peer.
pub(crate) fn check_losses(calls: &mut Calls, out: &mut Outbox, peers: &Peers, me: u32) {
    if peers.are_all_alive() {
        return;
    }
    for i in 0..calls.active.len() {
        let active = &calls.active[i];
        if active.state == CallState::Closing {
            continue;
        }
        let members = &active.body.members;
        // Before its schedule begins, a call waits for messages from every member.
        let message = active.body.request.message;
        let all =
            active.state == CallState::Waiting && active.opening == Opening::Messages && message.is_none();
        let ranks = if all { members.ranks.clone() } else { members.ranks_of(&active.waiting_for()) };
        let lost_rank = match message.is_some_and(|m| m.is_from_any()) {
            true => peers.first_missed(&ranks, me),
            // Who left may have done so because another member was lost.
            false => peers.first_lost(&ranks).and_then(|rank| match peers.kind(rank) {
                Some(LossKind::Left) if message.is_none() => peers.first_lost(&members.ranks),
                _ => Some(rank),
            }),
        };
        if let Some(rank) = lost_rank {
            // A helper need not tell then: ranks that have left may have had their result without it.
            let tell = !all || members.me < members.layout.workers();
            fail_for(calls, i, rank, tell, out, peers, me);
        }
    }
}

/// Fails calls that have timed out, announces stalled calls to the other ranks, and queues log lines that name the
/// ranks that a call waits for.
pub(crate) fn check_time(calls: &mut Calls, out: &mut Outbox, peers: &Peers, me: u32, now: Instant) {
    for i in 0..calls.active.len() {
        let active = &mut calls.active[i];
        if active.state == CallState::Closing {
            continue;
        }
        if std::mem::take(&mut active.stirred) {
            active.moved = now;
        }
        if let Some(rank) = peers.broken(&active.body.members.ranks, active.moved, now) {
            // It waits for surviving ranks that have learned of the loss in another call and will not make this one.
            fail_for(calls, i, rank, true, out, peers, me);
            continue;
        }
        let late = calls.is_late(i, now);
        let active = &mut calls.active[i];
        let waited = now - active.began;
        // A rank that announces that it is in a call gets all data sent, so it must be able to take it.
        let ready = active.state != CallState::Waiting || active.opening != Opening::Messages;
        let stalled = now - active.moved > STALL && !active.announced && ready;
        let name = waited > NAME_AFTER && !active.named && active.completion.is_awaited();
        if !(late || stalled || name) {
            continue;
        }
        let absent = active.body.members.ranks_of(&active.late());
        let waiting_for = name_ranks(&absent);
        if name {
            active.named = true;
            peers.log(LogLine::LongWait { me, waited, call: active.body.signature, ranks: absent });
        }
        if stalled {
            active.announced = true;
            let (members, message) = (active.body.members.clone(), active.body.request.message);
            let frame = active.body.frame(Kind::Ready, 0, 0);
            for &rank in members.ranks.iter().filter(|&&rank| rank != me && message.is_none()) {
                out.give(rank, &frame, Vec::new());
            }
        }
        if late {
            let what = calls.active[i].body.signature.to_string();
            let millis = waited.as_millis() as u64;
            calls.fail(i, Error::Timeout { what, millis, waiting_for }, true, out);
        }
    }
}
