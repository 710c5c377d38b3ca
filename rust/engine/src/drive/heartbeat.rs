//! Who is alive: every rank shows that it is, and notices who has stopped.
//!
//! A death is told by the kernel: the peer's connection closes. A rank that was stopped, a host without
//! power and a cut cable tell nothing; they are noticed by their silence. So a thread of every rank wakes
//! ten times a second, whatever the rank computes. On the rank's own host it counts up a word of its
//! control segment; to other hosts it sends an empty frame where nothing else was sent. And it looks at the others.
//!
//! Nobody tunes a timeout. Silence is measured in beats of our own, so that a rank which was itself
//! stopped does not take all others for dead when it wakes. And how much silence is too much follows from
//! what is normal for the call: twice the longest silence that was only a pause, and never less than
//! [`least_silence`]. (An adaptive failure detector in the sense of Chen, Toueg and Aguilera, IEEE Trans. Comp.
//! 51(5), 2002.)

use std::time::{Duration, Instant};

use trigram_core::wire::Kind;

use crate::group::world::World;
use crate::health::peers::{HEARTBEAT, Peers, least_silence};
use crate::link::frames::Rx;
use crate::link::outbox::{Outbox, control_frame};

/// Silence that is forgiven before the first heartbeat: the rank may still be meeting others, and its init has a
/// deadline of its own.
const FIRST: Duration = Duration::from_secs(300);
/// Silence that never is, whatever pauses there were.
const MOST: Duration = Duration::from_secs(60);
/// A pause is half forgotten after this many beats: a bit over a minute.
const MEMORY: f64 = 1.0 / 1024.0;

/// What was last heard of a peer.
#[derive(Clone, Copy, Debug, Default)]
struct Heard {
    /// What counts up while it lives: beats on its control segment, or bytes received.
    seen: u64,
    /// For how long it has not, in beats of our own.
    silent: Duration,
    /// Bytes sent to it as of the last beat.
    written: u64,
}

/// The heartbeats, under the progress lock.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    heard: Vec<Heard>,
    /// The longest silence that was only a pause, fading.
    pause: f64,
    last: Instant,
}

impl Heartbeat {
    /// Of a world of `size` ranks, all alive now.
    pub(crate) fn new(size: usize) -> Self {
        Self { heard: vec![Heard::default(); size], pause: 0.0, last: Instant::now() }
    }

    /// The silence after which a rank is given up.
    fn limit(&self) -> Duration {
        Duration::from_secs_f64(2.0 * self.pause).clamp(least_silence(), MOST.max(least_silence()))
    }

    /// One beat: what is there has just been read. Returns those that have been silent too long.
    pub(crate) fn beat(
        &mut self,
        world: &World,
        peers: &mut Peers,
        out: &mut Outbox,
        rx: &[Option<Rx>],
    ) -> Vec<(u32, Duration)> {
        let now = Instant::now();
        // If we were stopped ourselves, the others may have been stopped with us.
        let passed = (now - self.last).min(2 * HEARTBEAT);
        self.last = now;
        peers.note_sleep(now);
        peers.note_heartbeat(now);
        self.pause -= self.pause * MEMORY;
        let mut silent = Vec::new();
        for rank in 0..self.heard.len() {
            let Some(rx) = &rx[rank] else { continue };
            let heard = &mut self.heard[rank];
            let seen = match world.neighbours.get(&(rank as u32)) {
                Some(neighbour) => neighbour.control.heartbeats(),
                None => rx.bytes,
            };
            if seen != heard.seen {
                self.pause = self.pause.max(heard.silent.as_secs_f64());
                (heard.seen, heard.silent) = (seen, Duration::ZERO);
            } else {
                heard.silent += passed;
            }
            let away = !world.neighbours.contains_key(&(rank as u32));
            if let Some(tx) = out.to(rank as u32).filter(|_| away) {
                if tx.written == heard.written && tx.is_idle() {
                    tx.give(&control_frame(Kind::Heartbeat, 0, 0), Vec::new());
                }
                heard.written = tx.written;
            }
        }
        let limit = self.limit();
        peers.set_limit(limit);
        for (rank, heard) in (0..).zip(&self.heard) {
            let limit = if heard.seen == 0 { limit.max(FIRST) } else { limit };
            if rx[rank as usize].is_some() && heard.silent > limit {
                silent.push((rank, heard.silent));
            }
        }
        silent
    }
}
