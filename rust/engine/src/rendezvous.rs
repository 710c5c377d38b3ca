//! How ranks find each other.
//!
//! Each rank makes a *card* (where it listens, on which host it is) and gives it to the caller,
//! who carries the cards of all ranks to all ranks, through whatever store there is. Ranks that
//! claim the same host prove it over an abstract unix socket and exchange boards ([`crate::introduce`]);
//! the verdicts go through the store too, so that everybody has the same picture of the hosts. Between
//! hosts every pair opens a TCP connection and proves what it is ([`crate::handshake`]).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trigram_core::{Error, Result};

use crate::address::{host_name, own_address};
use crate::channel::Channel;
use crate::engine::{Engine, Glance};
use crate::handshake::{self, Identity};
use crate::host::board::{Board, MAX_LOCAL};
use crate::introduce::introduce;
use crate::link::{Rx, Tx};
use crate::secret::{Claim, PROOF, Security, random};
use crate::session::Tls;
use crate::transport::shm;
use crate::unix;
use crate::world::{Neighbour, World};

/// Which transports a rank may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory inside a host, TCP between hosts.
    #[default]
    Auto,
    /// Shared memory, or an error where it cannot be had.
    Shm,
    /// TCP only: every rank counts as a host of its own.
    Tcp,
}

/// What a rank tells all others.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Card {
    version: u32,
    rank: u32,
    address: SocketAddr,
    /// Equal on ranks that should be able to share memory.
    host: String,
    /// Abstract name of the unix socket.
    socket: String,
    token: [u8; 16],
    /// It was given a secret, and seals its card with it.
    secret: bool,
    /// It encrypts between hosts.
    tls: bool,
}

const VERSION: u32 = 2;

/// A rank that has not met the others.
pub struct Rendezvous {
    card: Card,
    size: usize,
    transport: Transport,
    listener: std::net::TcpListener,
    unix: OwnedFd,
    board: Board,
    neighbours: HashMap<u32, Neighbour>,
    cards: Vec<Card>,
    security: Security,
}

impl Rendezvous {
    /// Begins to listen. `toward`: a host that all ranks can reach, if one is known.
    pub fn open(
        rank: u32,
        size: usize,
        iface: Option<&str>,
        toward: Option<&str>,
        transport: Transport,
    ) -> Result<Self> {
        crate::fork::check()?;
        if rank as usize >= size {
            return Err(Error::misuse(format!("rank {rank} is outside of a world of {size}")));
        }
        let ip = own_address(iface, toward)?;
        let listener =
            std::net::TcpListener::bind((ip, 0)).map_err(|e| Error::io(format!("listening on {ip}"), e))?;
        let address = listener.local_addr().map_err(|e| Error::io("listening", e))?;
        let token: [u8; 16] = random()?;
        let hex: String = token.iter().map(|b| format!("{b:02x}")).collect();
        let host = match transport {
            Transport::Tcp => format!("rank {rank} alone"),
            _ => host_name()?,
        };
        let socket = format!("trigram-{hex}");
        let unix = unix::listen(&socket)?;
        let token = random()?;
        let card = Card { version: VERSION, rank, address, host, socket, token, secret: false, tls: false };
        Ok(Self {
            card,
            size,
            transport,
            listener,
            unix,
            board: Board::create()?,
            neighbours: HashMap::new(),
            cards: Vec::new(),
            security: Security::default(),
        })
    }

    /// Guards the rank against strangers; to be said before it gives its card away.
    pub fn secured(mut self, security: Security) -> Self {
        (self.card.secret, self.card.tls) = (security.secret.is_some(), security.tls);
        self.security = security;
        self
    }

    /// This rank's card, and its seal.
    pub fn card(&self) -> Result<Vec<u8>> {
        let mut bytes = postcard::to_stdvec(&self.card).map_err(|e| Error::io("writing a card", e))?;
        let seal = self.security.seal(&bytes);
        bytes.extend(seal);
        Ok(bytes)
    }

    /// Proves to the ranks that claim the same host that we are there, and gets their boards.
    /// False if not all could: then none of that host share memory.
    pub fn meet(&mut self, cards: &[Vec<u8>], glance: Glance<'_>) -> Result<bool> {
        if cards.len() != self.size {
            return Err(Error::misuse(format!("{} cards for a world of {}", cards.len(), self.size)));
        }
        let mut claims = Vec::with_capacity(cards.len());
        for (rank, bytes) in (0..).zip(cards) {
            let (body, seal) = bytes.split_at(bytes.len().saturating_sub(PROOF));
            let sealed = self.security.is_sealed(body, seal);
            match postcard::from_bytes::<Card>(body) {
                Ok(card) => {
                    claims.push(Claim { rank, secret: card.secret, tls: card.tls, sealed });
                    self.cards.push(card);
                }
                // Nobody who has our secret wrote this.
                Err(_) if self.security.secret.is_some() && !sealed => {
                    claims.push(Claim { rank, secret: true, tls: self.security.tls, sealed });
                }
                Err(_) => {
                    let what = "its card cannot be read; does it run another version of trigram?".into();
                    return Err(Error::Corrupt { rank, what });
                }
            }
        }
        let me = self.card.rank;
        self.security.check(me, &claims)?;
        if cards[me as usize] != self.card()? {
            return Err(Error::Auth(format!(
                "init: the store holds another card for rank {me} than rank {me} wrote: two processes run as \
                 rank {me}, or somebody forged it"
            )));
        }
        for (rank, card) in (0..).zip(&self.cards) {
            if card.version != VERSION || card.rank != rank {
                return Err(Error::Config(format!(
                    "rank {rank}'s card is version {} of rank {}; this is version {VERSION}. All ranks need \
                     the same trigram, and a rank of their own",
                    card.version, card.rank
                )));
            }
        }
        let local: Vec<(u32, &str)> = self
            .cards
            .iter()
            .filter(|c| c.host == self.card.host)
            .map(|c| (c.rank, c.socket.as_str()))
            .collect();
        if local.len() > MAX_LOCAL {
            return Ok(false);
        }
        let keys = self.security.keys(&self.cards[0].token);
        let met = introduce(me, &local, &self.unix, &self.board, &keys, glance)?;
        let all = met.is_some();
        self.neighbours = met.unwrap_or_default();
        Ok(all)
    }

    /// Opens the connections and starts the engine. `verdicts[r]`: rank r's answer of
    /// [`Rendezvous::meet`].
    pub fn connect(mut self, verdicts: &[bool], limit: Duration, glance: Glance<'_>) -> Result<Engine> {
        let (me, size) = (self.card.rank as usize, self.size);
        let mut names: Vec<String> = Vec::new();
        let mut host_of = Vec::with_capacity(size);
        for card in &self.cards {
            let here = self.cards.iter().filter(|c| c.host == card.host);
            let proved = here.clone().all(|c| verdicts.get(c.rank as usize) == Some(&true));
            let name = if proved { card.host.clone() } else { format!("rank {} alone", card.rank) };
            let known = names.iter().position(|n| *n == name);
            host_of.push(known.unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            }));
        }
        let is_here = |rank: usize| host_of[rank] == host_of[me];
        if self.transport == Transport::Shm
            && let Some(other) = (0..size).find(|&r| !is_here(r))
        {
            return Err(Error::Config(format!(
                "TRIGRAM_TRANSPORT=shm, but rank {me} shares no memory with rank {other}: they are on different \
                 hosts, network namespaces or users, or TRIGRAM_TRANSPORT differs"
            )));
        }
        self.neighbours.retain(|&r, _| is_here(r as usize));
        let away: Vec<usize> = (0..size).filter(|&r| !is_here(r)).collect();
        let peers: Vec<(u32, SocketAddr)> = away.iter().map(|&r| (r as u32, self.cards[r].address)).collect();
        let mut channels = HashMap::new();
        if !peers.is_empty() {
            let tls = self.security.tls.then(Tls::new).transpose()?;
            let identity = Identity { rank: me as u32, keys: self.security.keys(&self.cards[0].token), tls };
            channels = handshake::connect(&identity, &peers, &self.listener, limit, glance)?;
        }
        let local: Vec<usize> = (0..size).filter(|&r| is_here(r)).collect();
        let index = |rank: usize| local.iter().position(|&r| r == rank).unwrap_or_default();
        let (mut tx, mut rx) = (Vec::with_capacity(size), Vec::with_capacity(size));
        for rank in 0..size {
            let ways = if let Some(neighbour) = self.neighbours.get(&(rank as u32)) {
                Some(shm::pair(&self.board, index(me), &neighbour.board, index(rank)))
            } else {
                channels.remove(&(rank as u32)).map(Channel::split).transpose()?
            };
            let (out, inn) = ways.unzip();
            tx.push(out.map(Tx::new));
            rx.push(inn.map(|r| Rx::new(rank as u32, r)));
        }
        let world = World {
            rank: me as u32,
            host_of,
            board: self.board,
            neighbours: self.neighbours,
            arena: Arc::default(),
            retired: Arc::default(),
        };
        Engine::new(Arc::new(world), tx, rx)
    }
}
