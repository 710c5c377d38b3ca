//! Connects ranks of one host over unix sockets, and passes them each other's control segments.
//!
//! The higher rank connects to the lower. There are four messages: the higher rank's number and nonce; the lower
//! rank's nonce and proof; the higher rank's proof and control segment; the lower rank's control segment. So a rank
//! passes its control segment only to a peer that has proved itself. Connections from other users are closed at once
//! ([`unix::accept`]).

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use trigram_core::error::name_ranks;
use trigram_core::{Error, Result};

use crate::group::world::Neighbour;
use crate::host::control_segment::ControlSegment;
use crate::security::proofs::{Binding, Handshake, NONCE, Side};
use crate::security::secret::{Keys, PROOF};
use crate::sys::completion::INTERRUPT_INTERVAL;
use crate::sys::completion::InterruptCheck;
use crate::sys::limits::refused;
use crate::sys::unix::{self, Connected, Received};

/// The most connections that prove themselves at the same time; beyond, the oldest is dropped.
const MOST_HANDSHAKES: usize = 256;
/// The content of the message that passes a control segment.
const CONTROL_SEGMENT: &[u8] = b"control";

/// A handshake under way.
struct Pending {
    socket: OwnedFd,
    handshake: Handshake,
    proved: bool,
}

/// Connects this rank with the ranks of its host, given by rank and the name of their socket. `None` if any of them
/// cannot be reached, or does not answer within `limit`.
pub fn connect(
    me: u32,
    local: &[(u32, &str)],
    listener: &OwnedFd,
    control: &ControlSegment,
    keys: &Keys,
    limit: Duration,
    check_interrupt: InterruptCheck<'_>,
) -> Result<Option<HashMap<u32, Neighbour>>> {
    let deadline = Instant::now() + limit;
    let controls: Vec<_> = control.segment().fd().into_iter().chain([control.bell().fd()]).collect();
    let mut met = HashMap::new();
    let mut to_connect: Vec<(u32, &str)> = local.iter().copied().filter(|l| l.0 < me).collect();
    let mut connecting = Vec::new();
    let mut strangers: VecDeque<OwnedFd> = VecDeque::new();
    let mut accepted: Vec<Pending> = Vec::new();
    let mut checked = Instant::now();
    loop {
        for (rank, name) in std::mem::take(&mut to_connect) {
            let socket = match unix::connect(name)? {
                Connected::To(socket) if unix::is_same_user(&socket) => socket,
                Connected::Busy => {
                    to_connect.push((rank, name));
                    continue;
                }
                _ => return Ok(None),
            };
            let handshake = Handshake::begin(me, rank, Binding::Host)?;
            unix::send(&socket, &handshake.hello(keys), &[])?;
            connecting.push(Pending { socket, handshake, proved: false });
        }
        // Answers of lower ranks.
        let mut still = Vec::new();
        for mut pending in connecting {
            let rank = pending.handshake.to;
            match unix::receive(&pending.socket)? {
                Received::Nothing => still.push(pending),
                Received::Closed => return Ok(None),
                Received::WithoutFds(_) if pending.proved => return Err(without_fds(rank)),
                Received::WithoutFds(_) => return Ok(None),
                Received::Message(bytes, fds) if pending.proved => {
                    if bytes != CONTROL_SEGMENT {
                        return Ok(None);
                    }
                    met.insert(rank, neighbour(rank, fds, pending.socket)?);
                }
                Received::Message(bytes, _) => {
                    let Some((nonce, proof)) = bytes.split_first_chunk::<NONCE>() else { return Ok(None) };
                    pending.handshake.accepting_nonce = *nonce;
                    if !pending.handshake.is_proof(Side::Accepting, keys, proof) {
                        return Ok(None);
                    }
                    unix::send(&pending.socket, &pending.handshake.prove(Side::Connecting, keys), &controls)?;
                    pending.proved = true;
                    still.push(pending);
                }
            }
        }
        connecting = still;
        // Connections from higher ranks. Strangers are dropped when they send something wrong.
        while let Some(socket) = unix::accept(listener)? {
            strangers.push_back(socket);
            if strangers.len() + accepted.len() > MOST_HANDSHAKES && strangers.pop_front().is_none() {
                accepted.pop();
            }
        }
        for socket in std::mem::take(&mut strangers) {
            match unix::receive(&socket)? {
                Received::Nothing => strangers.push_back(socket),
                Received::Closed | Received::WithoutFds(_) => {}
                Received::Message(bytes, _) => {
                    let handshake = Handshake::accept(&bytes, me, keys, Binding::Host);
                    let wanted = |rank| rank > me && local.iter().any(|l| l.0 == rank);
                    let Some(handshake) = handshake.filter(|c| wanted(c.from)) else { continue };
                    let mut answer = handshake.accepting_nonce.to_vec();
                    answer.extend(handshake.prove(Side::Accepting, keys));
                    unix::send(&socket, &answer, &[])?;
                    accepted.push(Pending { socket, handshake, proved: false });
                }
            }
        }
        let mut still = Vec::new();
        for pending in accepted {
            let rank = pending.handshake.from;
            match unix::receive(&pending.socket)? {
                Received::Nothing => still.push(pending),
                Received::Closed => {}
                Received::WithoutFds(proof) => {
                    if pending.handshake.is_proof(Side::Connecting, keys, &proof) {
                        return Err(without_fds(rank));
                    }
                }
                Received::Message(proof, fds) => {
                    if proof.len() == PROOF && pending.handshake.is_proof(Side::Connecting, keys, &proof) {
                        unix::send(&pending.socket, CONTROL_SEGMENT, &controls)?;
                        met.insert(rank, neighbour(rank, fds, pending.socket)?);
                    }
                }
            }
        }
        accepted = still;
        if met.len() + 1 == local.len() {
            return Ok(Some(met));
        }
        if Instant::now() > deadline {
            let silent: Vec<u32> =
                local.iter().map(|l| l.0).filter(|rank| *rank != me && !met.contains_key(rank)).collect();
            log::warn!(
                target: "trigram",
                "rank {me}: no answer from {} of this host for {:.0} s; the ranks of this host will share no memory: \
                 all their data goes over TCP",
                name_ranks(&silent),
                limit.as_secs_f64()
            );
            return Ok(None);
        }
        if checked.elapsed() > INTERRUPT_INTERVAL {
            checked = Instant::now();
            match check_interrupt() {
                Err(Error::Timeout { .. }) => return Ok(None), // the others have given up
                other => other?,
            }
            // A rank that no longer listens is gone: it would not have left before it had connected to this one.
            let awaited = local.iter().filter(|(rank, _)| *rank > me && !met.contains_key(rank));
            for (_, name) in awaited {
                if matches!(unix::connect(name)?, Connected::Nobody) {
                    return Ok(None);
                }
            }
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn without_fds(rank: u32) -> Error {
    refused(format!("init: receiving the control segment of rank {rank}"), Errno::MFILE)
}

fn neighbour(rank: u32, mut fds: Vec<OwnedFd>, socket: OwnedFd) -> Result<Neighbour> {
    let (Some(event), Some(control)) = (fds.pop(), fds.pop()) else {
        return Err(Error::Corrupt {
            rank,
            what: "its handshake brought no control segment; does it run another version of trigram?".into(),
        });
    };
    Ok(Neighbour::new(ControlSegment::map(control, event)?, Some(socket)))
}
