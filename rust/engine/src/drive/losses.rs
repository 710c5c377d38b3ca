//! Handles the loss of a peer: tells the others, removes its connection, and fails the calls that were sending to it.

use std::time::{Duration, Instant};

use trigram_core::planner::Opening;
use trigram_core::wire::Kind;
use trigram_core::{Error, Result};

use crate::call::active_call::{ActiveCall, CallState};
use crate::call::calls::Calls;
use crate::drive::failures::fail_for;
use crate::group::world::{Neighbour, World};
use crate::health::log_lines::LogLine;
use crate::health::losses::LossKind;
use crate::health::peers::Peers;
use crate::link::frames::Tx;
use crate::link::outbox::{Outbox, control_frame};

/// Evicts a rank that may still run but sends no heartbeats or corrupt data. Returns the connection, if there is still
/// something to send to the evicted rank.
pub(crate) fn evict(
    calls: &mut Calls,
    out: &mut Outbox,
    peers: &mut Peers,
    world: &World,
    rank: u32,
    why: Error,
) -> Option<Tx> {
    if peers.is_lost(rank) {
        return None;
    }
    peers.log(LogLine::Evicted { me: world.rank, rank, why: why.clone() });
    lose(calls, out, peers, world, rank, why, LossKind::Silent)
}

/// Tells all other peers that `rank` is lost.
fn announce_to_others(out: &mut Outbox, rank: u32, why: &Error) {
    let others: Vec<u32> = out.all().map(|(peer, _)| peer).filter(|&peer| peer != rank).collect();
    for peer in others {
        announce(out, peer, rank, why);
    }
}

/// Handles a lost peer. Calls that need it fail now; later calls of its groups fail at once. Returns the connection,
/// if the peer may still run and there is still something to send to it.
pub(crate) fn lose(
    calls: &mut Calls,
    out: &mut Outbox,
    peers: &mut Peers,
    world: &World,
    rank: u32,
    why: Error,
    kind: LossKind,
) -> Option<Tx> {
    if peers.is_lost(rank) {
        return None;
    }
    let (why, kind) = peers.lose(rank, why, kind);
    // All are told, so that all blame the same rank. The others see a death themselves; but if only this connection has
    // broken, they hear both ranks. What another rank has told is told on: these two have lost each other now as well.
    if kind == LossKind::Silent || kind == LossKind::Dead && !world.neighbours.contains_key(&rank) {
        announce_to_others(out, rank, &why);
    }
    if kind == LossKind::Silent {
        // Only what fits now: the peer may never read it.
        announce(out, rank, rank, &why);
    }
    let mut tx = out.remove(rank);
    for i in 0..calls.active.len() {
        let id = calls.active[i].body.id;
        if let Some(tx) = tx.as_mut().filter(|tx| tx.holds(id)) {
            tx.take_back(id);
            let body = &calls.active[i].body;
            // Who left may have done so because another member was lost.
            let cause = match kind {
                LossKind::Left if body.request.message.is_none() => peers.first_lost(&body.members.ranks),
                _ => None,
            };
            fail_for(calls, i, cause.unwrap_or(rank), true, out, peers, world.rank);
        }
    }
    if let Some(neighbour) = world.neighbours.get(&rank).filter(|_| kind != LossKind::Left) {
        lock_out(calls, out, peers, world, rank, neighbour, kind);
        // The time that this took does not count as sleep of this rank.
        peers.note_heartbeat(Instant::now());
    }
    if let Some(tx) = tx.as_mut().filter(|tx| kind == LossKind::Left && tx.may_hold()) {
        // It waits until this rank has all or says that it reads nothing more, and may not hear by which of several
        // connections this closes.
        let _ = tx.pump(&mut Vec::new(), None);
        tx.close();
    }
    tx.filter(|_| kind == LossKind::Silent && !world.neighbours.contains_key(&rank))
}

/// A process whose connection has closed may take this long to end.
const DYING: Duration = Duration::from_millis(20);

/// Takes care that a lost rank of this host does no more harm. Its process may only be stopped, in the middle of a call
/// that lets it write to this rank's memory, and wake up at any time.
fn lock_out(
    calls: &mut Calls,
    out: &mut Outbox,
    peers: &mut Peers,
    world: &World,
    rank: u32,
    neighbour: &Neighbour,
    kind: LossKind,
) {
    let mut killed = false;
    // It runs no more code; killing it would cut off its core dump.
    let has_crashed = neighbour.is_dumping_core();
    if kind == LossKind::Silent {
        if let Some(control) = &world.control {
            control.mark_evicted(world.index_on_host(rank));
        }
        killed = world.patience.kills && !has_crashed && neighbour.end();
    }
    let is_shown = |calls: &Calls| calls.active.iter().any(|call| is_shown_to(call, rank));
    if !killed && is_shown(calls) {
        let ended = has_crashed
            || match kind {
                LossKind::Dead => neighbour.ends_within(DYING).unwrap_or(true),
                _ => neighbour.ends_within(Duration::ZERO).unwrap_or(false),
            };
        // Where memory cannot be taken back, only the end of the process is safe.
        killed = !ended && revoke(calls, out, peers, world, rank).is_err() && neighbour.end();
    }
    if killed {
        peers.log(LogLine::Killed { me: world.rank, rank });
    }
    if kind == LossKind::Silent {
        neighbour.dismiss();
        if neighbour.socket().is_some() {
            peers.set_dead(rank);
        }
    }
}

/// Whether a rank of this host may write into the memory of a call, now or when it wakes.
fn is_shown_to(call: &ActiveCall, rank: u32) -> bool {
    let body = &call.body;
    let place = body.members.place_of(rank);
    call.entered
        && call.opening != Opening::OneShot
        && place.is_some_and(|place| body.members.may_be_inside(place, body.call_id))
}

/// Takes back the memory that a lost rank of this host may write into. The calls that show it fail.
fn revoke(calls: &mut Calls, out: &mut Outbox, peers: &Peers, world: &World, rank: u32) -> Result<()> {
    // First the failures: a rank that has not entered a failed call does not enter it any more.
    for i in 0..calls.active.len() {
        if calls.active[i].state != CallState::Closing && is_shown_to(&calls.active[i], rank) {
            fail_for(calls, i, rank, true, out, peers, world.rank);
        }
    }
    for i in 0..calls.active.len() {
        let body = &calls.active[i].body;
        let place = body.members.place_of(rank);
        if !calls.active[i].entered || !place.is_some_and(|p| body.members.inside(body.call_id).contains(&p))
        {
            continue;
        }
        for (at, len) in body.shown() {
            let Some((from, to)) = world.arena.revoke(at, len)? else { continue };
            // Memory of other calls on the same pages is private now too.
            for j in 0..calls.active.len() {
                let other = &calls.active[j];
                let touched =
                    |&(at, len): &(*const u8, usize)| (at as usize) < to && from < at as usize + len;
                if other.entered
                    && other.state != CallState::Closing
                    && other.body.shown().iter().any(touched)
                {
                    fail_for(calls, j, rank, true, out, peers, world.rank);
                }
            }
        }
    }
    Ok(())
}

/// Tells `peer` that `rank`, perhaps `peer` itself, is evicted. This must arrive before the rank is locked out,
/// see [`lock_out`].
fn announce(out: &mut Outbox, peer: u32, rank: u32, why: &Error) {
    if let Ok(payload) = postcard::to_stdvec(why) {
        out.give(peer, &control_frame(Kind::Lost, rank, payload.len() as u32), payload);
    }
    out.pump_to(peer);
}
