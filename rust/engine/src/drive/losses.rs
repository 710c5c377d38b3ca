//! Handles the loss of a peer: tells the others, removes its connection, and fails the calls that were sending to it.

use std::time::Instant;

use trigram_core::Error;
use trigram_core::wire::Kind;

use crate::call::calls::Calls;
use crate::drive::failures::lost;
use crate::group::world::World;
use crate::health::log_lines::LogLine;
use crate::health::losses::LossKind;
use crate::health::peers::Peers;
use crate::link::frames::Tx;
use crate::link::outbox::{Outbox, control_frame};

/// Evicts a rank that may still run but sends no heartbeats or corrupt data. Tells the others, so that all blame the
/// same rank. Returns the connection, if there is still something to send to the evicted rank.
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
    let others: Vec<u32> = out.all().map(|(peer, _)| peer).filter(|&peer| peer != rank).collect();
    for peer in others {
        announce(out, peer, rank, &why);
    }
    lose(calls, out, peers, world, rank, why, LossKind::Silent)
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
    if kind == LossKind::Silent {
        // Only what fits now: the peer may never read it.
        announce(out, rank, rank, &why);
    }
    let mut tx = out.remove(rank);
    for i in 0..calls.active.len() {
        let id = calls.active[i].body.id;
        if let Some(tx) = tx.as_mut().filter(|tx| tx.holds(id)) {
            tx.take_back(id);
            let error = lost(calls, i, rank, peers, world.rank);
            calls.fail(i, error, true, out);
        }
    }
    if kind == LossKind::Silent {
        kill(peers, world, rank);
    }
    tx.filter(|_| kind == LossKind::Silent && !world.neighbours.contains_key(&rank))
}

/// Kills the process of an evicted rank of this host, and records its death. The process may only be stopped, in the
/// middle of a call that lets it write to this rank's memory, so it must never wake up.
fn kill(peers: &mut Peers, world: &World, rank: u32) {
    let Some(neighbour) = world.neighbours.get(&rank) else { return };
    if neighbour.end() {
        peers.log(LogLine::Killed { me: world.rank, rank });
        peers.set_dead(rank);
    }
    neighbour.dismiss();
    // The time that this took does not count as sleep of this rank.
    peers.note_heartbeat(Instant::now());
}

/// Tells `peer` that `rank`, perhaps `peer` itself, is evicted. This must arrive before the rank's process is killed,
/// see [`kill`].
fn announce(out: &mut Outbox, peer: u32, rank: u32, why: &Error) {
    if let Ok(payload) = postcard::to_stdvec(why) {
        out.give(peer, &control_frame(Kind::Lost, rank, payload.len() as u32), payload);
    }
    out.pump_to(peer);
}
