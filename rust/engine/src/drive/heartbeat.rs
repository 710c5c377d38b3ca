//! The failure detector: every rank sends heartbeats, and notices ranks that have stopped sending them.
//!
//! The kernel reports a death: the peer's connection closes. Nothing reports a stopped process, a host without power
//! or a cut cable; they show only as silence. So a thread of every rank wakes ten times a second, whatever the rank
//! computes. For the ranks of its host it increments a counter in its control segment; to each rank of another host
//! it sends an empty frame if it has sent nothing else. Then it checks the other ranks.
//!
//! No user tunes a timeout. Silence is counted in the heartbeats of this rank, so that a rank that was stopped itself
//! does not evict all others when it wakes. The tolerated silence follows from what is normal for the job: twice the
//! longest silence that was only a pause, and never less than [`least_silence`]. (An adaptive failure detector in the
//! sense of Chen, Toueg and Aguilera, IEEE Trans. Comp. 51(5), 2002.)

use std::time::{Duration, Instant};

use trigram_core::wire::Kind;

use crate::group::world::World;
use crate::health::peers::{HEARTBEAT, Peers, least_silence};
use crate::link::frames::Rx;
use crate::link::outbox::{Outbox, control_frame};

/// Silence that is tolerated before a peer's first heartbeat: the peer may still be connecting to others, and its
/// init has a timeout of its own.
const FIRST: Duration = Duration::from_secs(300);
/// The longest silence that is ever tolerated.
const MOST: Duration = Duration::from_secs(60);
/// A pause is half forgotten after this many heartbeats: a bit over a minute.
const MEMORY: f64 = 1.0 / 1024.0;

/// The state of a peer, as of the last heartbeat.
#[derive(Clone, Copy, Debug, Default)]
struct PeerState {
    /// A number that grows while the peer lives: heartbeats in its control segment, or bytes received.
    seen: u64,
    /// For how long that number has not grown, in heartbeats of this rank.
    silent: Duration,
    /// Bytes sent to it as of the last heartbeat.
    written: u64,
}

/// The failure detector, under the progress lock.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    states: Vec<PeerState>,
    /// The longest silence that was only a pause; it fades.
    pause: f64,
    last: Instant,
}

impl Heartbeat {
    /// For a world of `size` ranks, all alive now.
    pub(crate) fn new(size: usize) -> Self {
        Self { states: vec![PeerState::default(); size], pause: 0.0, last: Instant::now() }
    }

    /// The silence after which a rank is evicted.
    fn limit(&self) -> Duration {
        Duration::from_secs_f64(2.0 * self.pause).clamp(least_silence(), MOST.max(least_silence()))
    }

    /// Sends heartbeats and checks those of the peers, whose data has just been read. Returns the peers that have
    /// been silent for too long.
    pub(crate) fn send_and_check(
        &mut self,
        world: &World,
        peers: &mut Peers,
        out: &mut Outbox,
        rx: &[Option<Rx>],
    ) -> Vec<(u32, Duration)> {
        let now = Instant::now();
        // If this rank was stopped, the others may have been stopped with it.
        let passed = (now - self.last).min(2 * HEARTBEAT);
        self.last = now;
        peers.note_sleep(now);
        peers.note_heartbeat(now);
        self.pause -= self.pause * MEMORY;
        let mut silent = Vec::new();
        for rank in 0..self.states.len() {
            let Some(rx) = &rx[rank] else { continue };
            let state = &mut self.states[rank];
            let seen = match world.neighbours.get(&(rank as u32)) {
                Some(neighbour) => neighbour.control.heartbeats(),
                None => rx.bytes,
            };
            if seen != state.seen {
                self.pause = self.pause.max(state.silent.as_secs_f64());
                (state.seen, state.silent) = (seen, Duration::ZERO);
            } else {
                state.silent += passed;
            }
            let away = !world.neighbours.contains_key(&(rank as u32));
            if let Some(tx) = out.to(rank as u32).filter(|_| away) {
                if tx.written == state.written && tx.is_idle() {
                    tx.give(&control_frame(Kind::Heartbeat, 0, 0), Vec::new());
                }
                state.written = tx.written;
            }
        }
        let limit = self.limit();
        peers.set_limit(limit);
        for (rank, state) in (0..).zip(&self.states) {
            let limit = if state.seen == 0 { limit.max(FIRST) } else { limit };
            if rx[rank as usize].is_some() && state.silent > limit {
                silent.push((rank, state.silent));
            }
        }
        silent
    }
}
