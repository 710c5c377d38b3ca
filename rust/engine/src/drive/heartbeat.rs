//! The failure detector: every rank sends heartbeats, and notices ranks that have stopped sending them.
//!
//! The kernel reports a death: the peer's connection closes. Nothing reports a stopped process, a host without power
//! or a cut cable; they show only as silence. So a thread of every rank wakes ten times a second, whatever the rank
//! computes. For the ranks of its host it increments a counter in its control segment; to each rank of another host
//! it sends an empty frame if it has sent nothing else. Then it checks the other ranks.
//!
//! Silence is not death: a debugger, a frozen container or a cable that is out for seconds cause it too.
//! So it is warned of soon, with its reason where this host knows it, and becomes a loss only after a limit that all
//! ranks have agreed on. It is counted in the heartbeats of this rank, so that a rank that was stopped itself does not
//! evict all others when it wakes.

use std::time::{Duration, Instant};

use trigram_core::wire::Kind;

use crate::group::world::World;
use crate::health::log_lines::LogLine;
use crate::health::peers::{HEARTBEAT, Peers};
use crate::link::frames::Rx;
use crate::link::outbox::{Outbox, control_frame};

/// Silence that is tolerated before a peer's first heartbeat: the peer may still be connecting to others, and its
/// init has a timeout of its own.
const FIRST: Duration = Duration::from_secs(300);
/// A log line warns of a silence of this length.
const WARN: Duration = Duration::from_millis(1500);
/// After this silence the kernel is asked whether a rank of this host has crashed. While a process writes a core dump, its
/// connections stay open; that can take minutes, and the process will never run again.
const SUSPECT: Duration = Duration::from_millis(300);
/// Up to this silence a peer's heartbeats count as coming in time.
const IN_TIME: Duration = Duration::from_secs(1);

/// The state of a peer, as of the last heartbeat.
#[derive(Clone, Copy, Debug, Default)]
struct PeerState {
    /// A number that grows while the peer lives: heartbeats in its control segment, or what arrives from it.
    seen: u64,
    /// For how long that number has not grown, in heartbeats of this rank.
    silent: Duration,
    /// Whether a log line has warned of this silence.
    warned: bool,
    /// Bytes sent to it as of the last heartbeat.
    written: u64,
}

/// The failure detector, under the progress lock.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    states: Vec<PeerState>,
    last: Instant,
    /// The time that silence is counted in: this rank's own heartbeats.
    clock: Duration,
}

/// A peer that has been silent for too long, or has crashed.
pub(crate) struct Silence {
    pub(crate) rank: u32,
    pub(crate) silent: Duration,
    /// Why, as far as this host knows; otherwise empty.
    pub(crate) why: &'static str,
}

impl Heartbeat {
    /// For a world of `size` ranks, all alive now.
    pub(crate) fn new(size: usize) -> Self {
        Self { states: vec![PeerState::default(); size], last: Instant::now(), clock: Duration::ZERO }
    }

    /// The time that silence is counted in: it stands still while this rank is stopped.
    pub(crate) fn clock(&self) -> Duration {
        self.clock
    }

    /// Up to which silence this rank hears a peer that another finds silent after `limit`.
    pub(crate) fn heard(limit: Duration) -> Duration {
        IN_TIME.min(limit / 2)
    }

    /// Whether this rank hears a peer.
    pub(crate) fn hears(&self, rank: u32, limit: Duration) -> bool {
        self.states.get(rank as usize).is_some_and(|state| state.silent < Self::heard(limit))
    }

    /// Sends heartbeats and checks those of the peers, whose data has just been read. Returns the peers that have
    /// been silent for too long, and those that have crashed.
    pub(crate) fn send_and_check(
        &mut self,
        world: &World,
        peers: &mut Peers,
        out: &mut Outbox,
        rx: &mut [Option<Rx>],
    ) -> Vec<Silence> {
        let now = Instant::now();
        // If this rank was stopped, the others may have been stopped with it.
        let passed = (now - self.last).min(2 * HEARTBEAT);
        self.last = now;
        self.clock += passed;
        peers.note_sleep(now);
        peers.note_heartbeat(now);
        let (me, limit) = (world.rank, peers.limit());
        let mut lost = Vec::new();
        for (rank, state) in (0..).zip(&mut self.states) {
            let Some(rx) = &mut rx[rank as usize] else {
                if std::mem::take(&mut state.silent) > Duration::ZERO {
                    peers.note_silence(rank, Duration::ZERO); // it is lost: see the losses
                }
                continue;
            };
            let neighbour = world.neighbours.get(&rank);
            let seen = neighbour.map_or_else(|| rx.signs(), |neighbour| neighbour.control.heartbeats());
            if seen != state.seen {
                if std::mem::take(&mut state.warned) {
                    peers.log(LogLine::Resumed { me, rank, silent: state.silent });
                }
                if state.silent > WARN {
                    peers.note_silence(rank, Duration::ZERO);
                }
                (state.seen, state.silent) = (seen, Duration::ZERO);
            } else {
                state.silent += passed;
            }
            if let Some(tx) = out.to(rank).filter(|_| neighbour.is_none()) {
                if tx.written() == state.written && tx.is_idle() {
                    tx.give(&control_frame(Kind::Heartbeat, 0, 0), Vec::new());
                }
                state.written = tx.written();
                tx.tick(false);
            }
            let silent = state.silent;
            if silent > SUSPECT
                && let Some(neighbour) = neighbour.filter(|neighbour| neighbour.is_dumping_core())
            {
                lost.push(Silence { rank, silent, why: neighbour.why_silent() });
                continue;
            }
            if silent <= WARN.min(limit) || state.seen == 0 && silent <= FIRST {
                continue;
            }
            peers.note_silence(rank, silent);
            let why = || neighbour.map_or("", |neighbour| neighbour.why_silent());
            if silent > limit {
                lost.push(Silence { rank, silent, why: why() });
            } else if !state.warned {
                state.warned = true;
                peers.log(LogLine::Silent { me, rank, silent, why: why(), limit });
            }
        }
        lost
    }
}
