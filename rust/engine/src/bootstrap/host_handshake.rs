//! Ranks of one host introduce themselves over unix sockets, and give each other their boards.
//!
//! The higher rank connects to the lower. Four messages: who it is and a nonce; a nonce and the lower rank's proof;
//! the higher rank's proof with its board; the lower rank's board. So a board goes only to who has proved itself.
//! Who is of another user is not even heard ([`unix::accept`]).

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use trigram_core::{Error, Result};

use crate::group::world::Neighbour;
use crate::host::control_segment::Board;
use crate::security::proofs::{Binding, Contact, NONCE, Side};
use crate::security::secret::{Keys, PROOF};
use crate::sys::completion::GLANCE;
use crate::sys::completion::Glance;
use crate::sys::unix::{self, Connected, Received};

/// How long ranks that claim the same host take to prove it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections that are being heard at once; who has been heard longest gives way.
const GREETINGS: usize = 256;
/// The message that brings a board to who has proved itself.
const BOARD: &[u8] = b"board";

/// A conversation under way.
struct Talk {
    socket: OwnedFd,
    contact: Contact,
    proved: bool,
}

/// Meets the ranks of this host, given by rank and the name of their socket. `None` if not all could be met.
pub fn introduce(
    me: u32,
    local: &[(u32, &str)],
    listener: &OwnedFd,
    board: &Board,
    keys: &Keys,
    glance: Glance<'_>,
) -> Result<Option<HashMap<u32, Neighbour>>> {
    let deadline = Instant::now() + PATIENCE;
    let boards = [board.segment().fd(), board.bell().fd()];
    let mut met = HashMap::new();
    let mut to_call: Vec<(u32, &str)> = local.iter().copied().filter(|l| l.0 < me).collect();
    let mut calling = Vec::new();
    let mut strangers: VecDeque<OwnedFd> = VecDeque::new();
    let mut called: Vec<Talk> = Vec::new();
    let mut glanced = Instant::now();
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
            let contact = Contact::begin(me, rank, Binding::Host)?;
            unix::send(&socket, &contact.hello(keys), &[])?;
            calling.push(Talk { socket, contact, proved: false });
        }
        // Lower ranks answer.
        let mut still = Vec::new();
        for mut talk in calling {
            let rank = talk.contact.to;
            match unix::receive(&talk.socket)? {
                Received::Nothing => still.push(talk),
                Received::Closed => return Ok(None),
                Received::Message(bytes, fds) if talk.proved => {
                    if bytes != BOARD {
                        return Ok(None);
                    }
                    met.insert(rank, neighbour(rank, fds, talk.socket)?);
                }
                Received::Message(bytes, _) => {
                    let Some((nonce, proof)) = bytes.split_first_chunk::<NONCE>() else { return Ok(None) };
                    talk.contact.answer = *nonce;
                    if !talk.contact.is_proof(Side::Accepting, keys, proof) {
                        return Ok(None);
                    }
                    unix::send(&talk.socket, &talk.contact.prove(Side::Connecting, keys), &boards)?;
                    talk.proved = true;
                    still.push(talk);
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
                    let contact = Contact::accept(&bytes, me, keys, Binding::Host);
                    let wanted = |rank| rank > me && local.iter().any(|l| l.0 == rank);
                    let Some(contact) = contact.filter(|c| wanted(c.from)) else { continue };
                    let mut answer = contact.answer.to_vec();
                    answer.extend(contact.prove(Side::Accepting, keys));
                    unix::send(&socket, &answer, &[])?;
                    called.push(Talk { socket, contact, proved: false });
                }
            }
        }
        let mut still = Vec::new();
        for talk in called {
            let rank = talk.contact.from;
            match unix::receive(&talk.socket)? {
                Received::Nothing => still.push(talk),
                Received::Closed => {}
                Received::Message(proof, fds) => {
                    if proof.len() == PROOF && talk.contact.is_proof(Side::Connecting, keys, &proof) {
                        unix::send(&talk.socket, BOARD, &boards)?;
                        met.insert(rank, neighbour(rank, fds, talk.socket)?);
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
        if glanced.elapsed() > GLANCE {
            glanced = Instant::now();
            glance()?;
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

fn neighbour(rank: u32, mut fds: Vec<OwnedFd>, control: OwnedFd) -> Result<Neighbour> {
    let (Some(event), Some(board)) = (fds.pop(), fds.pop()) else {
        return Err(Error::Corrupt { rank, what: "a greeting without a board".into() });
    };
    Ok(Neighbour::new(Board::map(board, event)?, Some(control)))
}
