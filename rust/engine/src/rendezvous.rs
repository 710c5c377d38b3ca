//! How ranks find each other.
//!
//! Each rank makes a *card* (where it listens, on which host it is) and gives it to the caller,
//! who carries the cards of all ranks to all ranks, through whatever store there is. Ranks that
//! claim the same host prove it over an abstract unix socket and exchange boards; the verdicts go
//! through the store too, so that everybody has the same picture of the hosts. Between hosts every
//! pair opens a TCP connection: the higher rank connects, the lower listens.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use trigram_core::error::name_ranks;
use trigram_core::{Error, Result};

use crate::address::{host_name, own_address};
use crate::engine::{Engine, Glance};
use crate::host::board::{Board, MAX_LOCAL};
use crate::link::{Rx, Tx};
use crate::ticket::GLANCE;
use crate::transport::{shm, tcp};
use crate::unix::{self, Received};
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
}

const VERSION: u32 = 1;
/// How long ranks that claim the same host take to prove it.
const PROOF: Duration = Duration::from_secs(10);
/// How long a stranger may keep a connection without saying who it is.
const GREETING: Duration = Duration::from_secs(5);
/// Connections that are being greeted at once.
const GREETINGS: usize = 256;

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
}

fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("getting random bytes", e))?;
    Ok(bytes)
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
        let token = random()?;
        let hex: String = token.iter().map(|b| format!("{b:02x}")).collect();
        let host = match transport {
            Transport::Tcp => format!("rank {rank} alone"),
            _ => host_name()?,
        };
        let socket = format!("trigram-{hex}");
        let unix = unix::listen(&socket)?;
        let card = Card { version: VERSION, rank, address, host, socket, token: random()? };
        Ok(Self {
            card,
            size,
            transport,
            listener,
            unix,
            board: Board::create()?,
            neighbours: HashMap::new(),
            cards: Vec::new(),
        })
    }

    /// This rank's card.
    pub fn card(&self) -> Result<Vec<u8>> {
        postcard::to_stdvec(&self.card).map_err(|e| Error::io("writing a card", e))
    }

    /// Proves to the ranks that claim the same host that we are there, and gets their boards.
    /// False if not all could: then none of that host share memory.
    pub fn meet(&mut self, cards: &[Vec<u8>], glance: Glance<'_>) -> Result<bool> {
        if cards.len() != self.size {
            return Err(Error::misuse(format!("{} cards for a world of {}", cards.len(), self.size)));
        }
        self.cards.clear();
        for (rank, bytes) in (0..).zip(cards) {
            let card: Card = postcard::from_bytes(bytes).map_err(|_| Error::Corrupt {
                rank,
                what: "its card cannot be read; does it run another version of trigram?".into(),
            })?;
            if card.version != VERSION || card.rank != rank {
                return Err(Error::Config(format!(
                    "rank {rank}'s card is version {} of rank {}; this is version {VERSION}. All ranks need \
                     the same trigram, and a rank of their own",
                    card.version, card.rank
                )));
            }
            self.cards.push(card);
        }
        let local: Vec<u32> =
            self.cards.iter().filter(|c| c.host == self.card.host).map(|c| c.rank).collect();
        if local.len() > MAX_LOCAL {
            return Ok(false);
        }
        self.exchange_boards(&local, glance)
    }

    fn exchange_boards(&mut self, local: &[u32], glance: Glance<'_>) -> Result<bool> {
        let me = self.card.rank;
        let deadline = Instant::now() + PROOF;
        let job = self.cards[0].token;
        let hello: Vec<u8> = job.iter().copied().chain(me.to_le_bytes()).collect();
        let mut controls: HashMap<u32, OwnedFd> = HashMap::new();
        let mut expected: Vec<u32> = local.iter().copied().filter(|&r| r != me).collect();
        for &rank in local.iter().filter(|&&r| r < me) {
            let Some(stream) = unix::connect(&self.cards[rank as usize].socket)? else { return Ok(false) };
            if !unix::is_same_user(&stream) {
                return Ok(false);
            }
            unix::send(&stream, &hello, &[self.board.segment().fd(), self.board.bell().fd()])?;
            controls.insert(rank, stream);
        }
        let mut unknown: Vec<OwnedFd> = Vec::new();
        let mut glanced = Instant::now();
        while !expected.is_empty() {
            unknown.extend(unix::accept(&self.unix)?);
            // Higher ranks introduce themselves.
            let mut still_unknown = Vec::new();
            for stream in unknown.drain(..) {
                match unix::receive(&stream)? {
                    Received::Nothing => still_unknown.push(stream),
                    Received::Closed => {}
                    Received::Message(bytes, fds) => {
                        let rank = introduced(&bytes, &job).filter(|r| expected.contains(r) && *r > me);
                        if let Some(rank) = rank {
                            unix::send(
                                &stream,
                                &hello,
                                &[self.board.segment().fd(), self.board.bell().fd()],
                            )?;
                            self.welcome(rank, fds, stream)?;
                            expected.retain(|&r| r != rank);
                        }
                    }
                }
            }
            unknown = still_unknown;
            // Lower ranks answer.
            for &rank in local.iter().filter(|&&r| r < me) {
                let Some(stream) = controls.remove(&rank) else { continue };
                match unix::receive(&stream)? {
                    Received::Nothing => drop(controls.insert(rank, stream)),
                    Received::Closed => return Ok(false),
                    Received::Message(bytes, fds) => {
                        if introduced(&bytes, &job) != Some(rank) {
                            return Ok(false);
                        }
                        self.welcome(rank, fds, stream)?;
                        expected.retain(|&r| r != rank);
                    }
                }
            }
            if expected.is_empty() {
                break;
            }
            if Instant::now() > deadline {
                return Ok(false);
            }
            if glanced.elapsed() > GLANCE {
                glanced = Instant::now();
                glance()?;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(true)
    }

    fn welcome(&mut self, rank: u32, mut fds: Vec<OwnedFd>, control: OwnedFd) -> Result<()> {
        let (Some(event), Some(board)) = (fds.pop(), fds.pop()) else {
            return Err(Error::Corrupt { rank, what: "a greeting without a board".into() });
        };
        let board = Board::map(board, event)?;
        self.neighbours.insert(rank, Neighbour::new(board, Some(control)));
        Ok(())
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
        let mut sockets = self.open_sockets(&away, limit, glance)?;
        let local: Vec<usize> = (0..size).filter(|&r| is_here(r)).collect();
        let index = |rank: usize| local.iter().position(|&r| r == rank).unwrap_or_default();
        let (mut tx, mut rx) = (Vec::with_capacity(size), Vec::with_capacity(size));
        for rank in 0..size {
            let ways = if let Some(neighbour) = self.neighbours.get(&(rank as u32)) {
                Some(shm::pair(&self.board, index(me), &neighbour.board, index(rank)))
            } else {
                sockets.remove(&rank).map(tcp::split).transpose()?
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

    fn open_sockets(
        &self,
        away: &[usize],
        limit: Duration,
        glance: Glance<'_>,
    ) -> Result<HashMap<usize, std::net::TcpStream>> {
        if away.is_empty() {
            return Ok(HashMap::new());
        }
        let io = |e: std::io::Error| Error::io("preparing TCP", e);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
        runtime.block_on(async {
            let listener = self.listener.try_clone().map_err(io)?;
            listener.set_nonblocking(true).map_err(io)?;
            let listener = TcpListener::from_std(listener).map_err(io)?;
            let (send, mut arrivals) = tokio::sync::mpsc::channel::<(usize, TcpStream)>(16);
            let me = self.card.rank as usize;
            let job = self.cards[0].token;
            let mut tasks = tokio::task::JoinSet::new();
            for &rank in away.iter().filter(|&&r| r < me) {
                tasks.spawn(reach(rank, self.cards[rank].address, me, job, send.clone()));
            }
            tasks.spawn(receive(listener, me, job, send.clone()));
            let mut sockets = HashMap::new();
            let began = Instant::now();
            while sockets.len() < away.len() {
                match tokio::time::timeout(GLANCE, arrivals.recv()).await {
                    Ok(Some((rank, stream))) if away.contains(&rank) => {
                        let stream = stream.into_std().map_err(io)?;
                        tcp::keep_alive(&stream)?;
                        sockets.insert(rank, stream);
                    }
                    Ok(_) => {}
                    Err(_) => glance()?,
                }
                if began.elapsed() > limit {
                    let missing: Vec<u32> =
                        away.iter().filter(|r| !sockets.contains_key(r)).map(|&r| r as u32).collect();
                    return Err(Error::Timeout {
                        what: format!("init: rank {me} connecting over TCP ({})", self.card.address),
                        millis: limit.as_millis() as u64,
                        waiting_for: name_ranks(&missing),
                    });
                }
            }
            Ok(sockets)
        })
    }
}

/// Who a greeting inside a host is from, if it is of this job.
fn introduced(bytes: &[u8], job: &[u8; 16]) -> Option<u32> {
    let (token, rank) = bytes.split_at_checked(16)?;
    (token == job).then_some(u32::from_le_bytes(rank.try_into().ok()?))
}

const MAGIC: &[u8; 8] = b"TRIGRAM\x01";
const HELLO: usize = 8 + 16 + 4 + 4;

fn hello(job: &[u8; 16], from: usize, to: usize) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..24].copy_from_slice(job);
    bytes[24..28].copy_from_slice(&(from as u32).to_le_bytes());
    bytes[28..].copy_from_slice(&(to as u32).to_le_bytes());
    bytes
}

type Arrivals = tokio::sync::mpsc::Sender<(usize, TcpStream)>;

/// Connects to a lower rank, again and again until it answers.
async fn reach(rank: usize, address: SocketAddr, me: usize, job: [u8; 16], arrived: Arrivals) {
    loop {
        let attempt = async {
            let mut stream = TcpStream::connect(address).await?;
            stream.write_all(&hello(&job, me, rank)).await?;
            let mut answer = [0; HELLO];
            stream.read_exact(&mut answer).await?;
            std::io::Result::Ok((stream, answer))
        };
        if let Ok(Ok((stream, answer))) = tokio::time::timeout(GREETING, attempt).await
            && answer == hello(&job, rank, me)
        {
            // The receiver has gone only if the wait was given up.
            let _ = arrived.send((rank, stream)).await;
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Receives higher ranks. Strangers are dropped when they say the wrong thing or nothing.
async fn receive(listener: TcpListener, me: usize, job: [u8; 16], arrived: Arrivals) {
    let places = Arc::new(tokio::sync::Semaphore::new(GREETINGS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Ok((mut stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let arrived = arrived.clone();
        tokio::spawn(async move {
            let greeting = async {
                let mut bytes = [0; HELLO];
                stream.read_exact(&mut bytes).await.ok()?;
                let from = u32::from_le_bytes(bytes[24..28].try_into().ok()?) as usize;
                if bytes != hello(&job, from, me) {
                    return None;
                }
                stream.write_all(&hello(&job, me, from)).await.ok()?;
                Some(from)
            };
            if let Ok(Some(from)) = tokio::time::timeout(GREETING, greeting).await {
                let _ = arrived.send((from, stream)).await;
            }
            drop(place);
        });
    }
}
