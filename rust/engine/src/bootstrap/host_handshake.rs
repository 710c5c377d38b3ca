//! Ranks of one host introduce themselves over unix sockets, and give each other their control segments.
//!
//! The higher rank connects to the lower. Four messages: who it is and a nonce; a nonce and the lower rank's proof;
//! the higher rank's proof with its control segment; the lower rank's control segment. So a control segment goes only to who has proved itself.
//! Who is of another user is not even heard ([`unix::accept`]).

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use trigram_core::{Error, Result};

use crate::group::world::Neighbour;
use crate::host::control_segment::ControlSegment;
use crate::security::proofs::{Binding, Handshake, NONCE, Side};
use crate::security::secret::{Keys, PROOF};
use crate::sys::completion::INTERRUPT_INTERVAL;
use crate::sys::completion::InterruptCheck;
use crate::sys::unix::{self, Connected, Received};

/// How long ranks that claim the same host take to prove it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections that are being heard at once; who has been heard longest gives way.
const GREETINGS: usize = 256;
/// The message that brings a control segment to who has proved itself.
const CONTROL_SEGMENT: &[u8] = b"control";

/// A conversation under way.
struct Conversation {
    socket: OwnedFd,
    handshake: Handshake,
    proved: bool,
}

/// Meets the ranks of this host, given by rank and the name of their socket. `None` if not all could be met.
pub fn connect(
    me: u32,
    local: &[(u32, &str)],
    listener: &OwnedFd,
    control: &ControlSegment,
    keys: &Keys,
    check_interrupt: InterruptCheck<'_>,
) -> Result<Option<HashMap<u32, Neighbour>>> {
    let deadline = Instant::now() + PATIENCE;
    let controls = [control.segment().fd(), control.bell().fd()];
    let mut met = HashMap::new();
    let mut to_call: Vec<(u32, &str)> = local.iter().copied().filter(|l| l.0 < me).collect();
    let mut calling = Vec::new();
    let mut strangers: VecDeque<OwnedFd> = VecDeque::new();
    let mut called: Vec<Conversation> = Vec::new();
    let mut checked = Instant::now();
    loop {
        for (rank, name) in std::mem::take(&mut to_call) {
            let socket = match unix::connect(name)? {
                Connected::To(socket) if unix::is_same_user(&socket) => socket,
                Connected::Busy => {
                    to_call.push((rank, name));
                    continue;
                }
                _ => return Ok(None),
            };
            let handshake = Handshake::begin(me, rank, Binding::Host)?;
            unix::send(&socket, &handshake.hello(keys), &[])?;
            calling.push(Conversation { socket, handshake, proved: false });
        }
        // Lower ranks answer.
        let mut still = Vec::new();
        for mut conversation in calling {
            let rank = conversation.handshake.to;
            match unix::receive(&conversation.socket)? {
                Received::Nothing => still.push(conversation),
                Received::Closed => return Ok(None),
                Received::Message(bytes, fds) if conversation.proved => {
                    if bytes != CONTROL_SEGMENT {
                        return Ok(None);
                    }
                    met.insert(rank, neighbour(rank, fds, conversation.socket)?);
                }
                Received::Message(bytes, _) => {
                    let Some((nonce, proof)) = bytes.split_first_chunk::<NONCE>() else { return Ok(None) };
                    conversation.handshake.accepting_nonce = *nonce;
                    if !conversation.handshake.is_proof(Side::Accepting, keys, proof) {
                        return Ok(None);
                    }
                    unix::send(
                        &conversation.socket,
                        &conversation.handshake.prove(Side::Connecting, keys),
                        &controls,
                    )?;
                    conversation.proved = true;
                    still.push(conversation);
                }
            }
        }
        calling = still;
        // Higher ranks introduce themselves. Strangers are dropped when they say the wrong thing.
        while let Some(socket) = unix::accept(listener)? {
            strangers.push_back(socket);
            if strangers.len() + called.len() > GREETINGS && strangers.pop_front().is_none() {
                called.pop();
            }
        }
        for socket in std::mem::take(&mut strangers) {
            match unix::receive(&socket)? {
                Received::Nothing => strangers.push_back(socket),
                Received::Closed => {}
                Received::Message(bytes, _) => {
                    let handshake = Handshake::accept(&bytes, me, keys, Binding::Host);
                    let wanted = |rank| rank > me && local.iter().any(|l| l.0 == rank);
                    let Some(handshake) = handshake.filter(|c| wanted(c.from)) else { continue };
                    let mut answer = handshake.accepting_nonce.to_vec();
                    answer.extend(handshake.prove(Side::Accepting, keys));
                    unix::send(&socket, &answer, &[])?;
                    called.push(Conversation { socket, handshake, proved: false });
                }
            }
        }
        let mut still = Vec::new();
        for conversation in called {
            let rank = conversation.handshake.from;
            match unix::receive(&conversation.socket)? {
                Received::Nothing => still.push(conversation),
                Received::Closed => {}
                Received::Message(proof, fds) => {
                    if proof.len() == PROOF && conversation.handshake.is_proof(Side::Connecting, keys, &proof)
                    {
                        unix::send(&conversation.socket, CONTROL_SEGMENT, &controls)?;
                        met.insert(rank, neighbour(rank, fds, conversation.socket)?);
                    }
                }
            }
        }
        called = still;
        if met.len() + 1 == local.len() {
            return Ok(Some(met));
        }
        if Instant::now() > deadline {
            return Ok(None);
        }
        if checked.elapsed() > INTERRUPT_INTERVAL {
            checked = Instant::now();
            check_interrupt()?;
            // Who listens no more has gone: it would not have left before it had met this rank.
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

fn neighbour(rank: u32, mut fds: Vec<OwnedFd>, socket: OwnedFd) -> Result<Neighbour> {
    let (Some(event), Some(control)) = (fds.pop(), fds.pop()) else {
        return Err(Error::Corrupt {
            rank,
            what: "its handshake brought no control segment; does it run another version of trigram?".into(),
        });
    };
    Ok(Neighbour::new(ControlSegment::map(control, event)?, Some(socket)))
}
