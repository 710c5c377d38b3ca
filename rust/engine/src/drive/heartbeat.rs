//! Who is alive: every rank shows that it is, and notices who has stopped.
//!
//! A death is told by the kernel: the peer's connection closes. A rank that was stopped, a host without
//! power and a cut cable tell nothing; they are noticed by their silence. So a thread of every rank wakes
//! ten times a second, whatever the rank computes. On the rank's own host it counts up a word of its
//! board; to other hosts it sends an empty frame where nothing else was sent. And it looks at the others.
//!
//! Nobody tunes a timeout. Silence is measured in beats of our own, so that a rank which was itself
//! stopped does not take all others for dead when it wakes. And how much silence is too much follows from
//! what is normal for the job: twice the longest silence that was only a pause, and never less than
//! [`LEAST`]. (An adaptive failure detector in the sense of Chen, Toueg and Aguilera, IEEE Trans. Comp.
//! 51(5), 2002.)

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use trigram_core::Error;
use trigram_core::signature::Signature;
use trigram_core::wire::{CallId, Frame, Kind};

use crate::drive::failing::How;
use crate::drive::hub::Hub;
use crate::link::frames::{Rx, Tx};

/// Between two signs of life.
pub(crate) const BEAT: Duration = Duration::from_millis(100);
/// Silence that is always forgiven: `TRIGRAM_SILENCE` seconds, where a job must survive longer pauses, as
/// of a machine that moves or of a debugger.
const LEAST: Duration = Duration::from_millis(1200);
/// Silence that is forgiven before the first sign of life: the rank may still be meeting others, and its init has a
/// deadline of its own.
const FIRST: Duration = Duration::from_secs(300);
/// For so long after it woke a rank takes closed connections for refusals.
const DROWSY: Duration = Duration::from_secs(10);
/// Silence that never is, whatever pauses there were.
const MOST: Duration = Duration::from_secs(60);
/// A pause is half forgotten after this many beats: a bit over a minute.
const MEMORY: f64 = 1.0 / 1024.0;

fn least() -> Duration {
    static LEAST_NOW: OnceLock<Duration> = OnceLock::new();
    *LEAST_NOW.get_or_init(|| {
        let asked = std::env::var("TRIGRAM_SILENCE").ok().and_then(|s| s.parse().ok());
        asked.and_then(|s: f64| Duration::try_from_secs_f64(s).ok()).map_or(LEAST, |s| s.max(BEAT * 5))
    })
}

/// What was last heard of a peer.
#[derive(Clone, Copy, Debug, Default)]
struct Heard {
    /// What counts up while it lives: beats on its board, or bytes received.
    seen: u64,
    /// For how long it has not, in beats of our own.
    silent: Duration,
    /// Bytes sent to it as of the last beat.
    written: u64,
}

/// The signs of life, under the progress lock.
#[derive(Debug)]
pub(crate) struct Pulse {
    heard: Vec<Heard>,
    /// The longest silence that was only a pause, fading.
    pause: f64,
    last: Instant,
}

impl Pulse {
    /// Of a world of `size` ranks, all alive now.
    pub(crate) fn new(size: usize) -> Self {
        Self { heard: vec![Heard::default(); size], pause: 0.0, last: Instant::now() }
    }

    /// The silence after which a rank is given up.
    fn limit(&self) -> Duration {
        Duration::from_secs_f64(2.0 * self.pause).clamp(least(), MOST.max(least()))
    }

    /// One beat: what is there has just been read. Returns those that have been silent too long.
    pub(crate) fn beat(&mut self, hub: &mut Hub, rx: &[Option<Rx>]) -> Vec<(u32, Duration)> {
        let now = Instant::now();
        // If we were stopped ourselves, the others may have been stopped with us.
        let passed = (now - self.last).min(2 * BEAT);
        self.last = now;
        hub.wake(now);
        hub.beaten = now;
        self.pause -= self.pause * MEMORY;
        let mut silent = Vec::new();
        for rank in 0..self.heard.len() {
            let Some(rx) = &rx[rank] else { continue };
            let heard = &mut self.heard[rank];
            let seen = match hub.world.neighbours.get(&(rank as u32)) {
                Some(neighbour) => neighbour.board.beats(),
                None => rx.bytes,
            };
            if seen != heard.seen {
                self.pause = self.pause.max(heard.silent.as_secs_f64());
                (heard.seen, heard.silent) = (seen, Duration::ZERO);
            } else {
                heard.silent += passed;
            }
            let away = !hub.world.neighbours.contains_key(&(rank as u32));
            if let Some(tx) = hub.tx[rank].as_mut().filter(|_| away) {
                if tx.written == heard.written && tx.is_idle() {
                    tx.give(&sign(Kind::Beat, 0, 0), Vec::new());
                }
                heard.written = tx.written;
            }
        }
        hub.name_straggler();
        let limit = self.limit();
        hub.limit = limit;
        for (rank, heard) in (0..).zip(&self.heard) {
            let limit = if heard.seen == 0 { limit.max(FIRST) } else { limit };
            if rx[rank as usize].is_some() && heard.silent > limit {
                silent.push((rank, heard.silent));
            }
        }
        silent
    }
}

/// A frame that belongs to no call.
pub(crate) fn sign(kind: Kind, tag: u32, len: u32) -> Frame {
    Frame { kind, group: 0, call: CallId(0), tag, len, signature: Signature::default() }
}

impl Hub {
    /// Gives up a rank that may live on: it is silent, or what it sends is corrupt. The others are told, so
    /// that all name the same rank.
    pub(crate) fn give_up(&mut self, rank: u32, why: Error) {
        if self.lost.contains_key(&rank) {
            return;
        }
        eprintln!("trigram: rank {}: rank {rank} is given up: {why}", self.world.rank);
        for (peer, tx) in (0..).zip(&mut self.tx) {
            if let Some(tx) = tx.as_mut().filter(|_| peer != rank) {
                dismiss(tx, rank, &why);
                // It must be there before the rank's process is ended, see `Hub::fence`.
                let _ = tx.pump(&mut self.done);
            }
        }
        self.lose(rank, why, How::Silent);
    }

    /// Takes note if this rank has not run for so long that others have given it up.
    pub(crate) fn wake(&mut self, now: Instant) {
        let slept = now - self.beaten;
        if slept > least().max(self.limit) {
            self.woke = Some((now, slept));
            self.beaten = now;
        }
    }

    /// For how long this rank had slept, if it has woken just now: connections that are closed then were closed
    /// by those who gave it up, and not by their deaths.
    pub(crate) fn has_slept(&mut self) -> Option<Duration> {
        let now = Instant::now();
        self.wake(now);
        self.woke.filter(|(woke, _)| now - *woke < DROWSY).map(|(_, slept)| slept)
    }

    /// A peer has given a rank up: so do we. If it is this rank, it cannot go on with that peer.
    pub(crate) fn hear_lost(&mut self, peer: u32, rank: u32, payload: &[u8]) -> Option<(u32, Error)> {
        let why: Error = postcard::from_bytes(payload).ok()?;
        if rank == self.world.rank {
            let why = format!("it has given up this rank, rank {rank}: {why}");
            return Some((peer, Error::Aborted(why)));
        }
        (rank as usize).lt(&self.tx.len()).then_some((rank, why))
    }
}

/// Says over a connection that a rank is given up, perhaps the one at its other end.
pub(crate) fn dismiss(tx: &mut Tx, rank: u32, why: &Error) {
    if let Ok(payload) = postcard::to_stdvec(why) {
        tx.give(&sign(Kind::Lost, rank, payload.len() as u32), payload);
    }
}
