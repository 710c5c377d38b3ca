//! Brings the ranks of a job together.
//!
//! Each rank makes an *endpoint record* (the address at which it listens, the host it is on). The caller exchanges
//! the records of all ranks through whatever store there is. Ranks that claim the same host prove it over an abstract
//! unix socket and exchange control segments ([`crate::bootstrap::host_handshake`]); the results go through the store
//! too, so that all ranks agree on the hosts. Between hosts, every pair of ranks opens a TCP connection and proves
//! its identity ([`crate::bootstrap::handshake`]).

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use trigram_core::{Error, Result};

use crate::bootstrap::handshake::{self, Identity};
use crate::bootstrap::handshake_stream::HandshakeStream;
use crate::bootstrap::host_handshake;
use crate::group::world::{Neighbour, World};
use crate::host::control_segment::{ControlSegment, MAX_LOCAL};
use crate::link::frames::{Rx, Tx};
use crate::runtime::engine::Engine;
use crate::security::secret::{Claim, PROOF, Security, random};
use crate::security::tls_keys::Tls;
use crate::sys::address::{host_name, own_address};
use crate::sys::completion::InterruptCheck;
use crate::sys::memory::Arena;
use crate::sys::unix;
use crate::transport::{faulty, shm};

/// Which transports a rank may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Shared memory inside a host, TCP between hosts.
    #[default]
    Auto,
    /// Shared memory, or an error if it cannot be used.
    Shm,
    /// TCP only: every rank counts as a host of its own.
    Tcp,
}

/// The endpoint record of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct EndpointRecord {
    version: u32,
    rank: u32,
    address: SocketAddr,
    /// Equal on ranks that should be able to share memory.
    host: String,
    /// The abstract name of its unix socket.
    socket: String,
    token: [u8; 16],
    /// Whether it has a secret, with which it seals its record.
    secret: bool,
    /// Whether it encrypts between hosts.
    tls: bool,
}

const VERSION: u32 = 3;

/// Whether this is an endpoint record of that rank, of this version, with this rank's security settings, and sealed
/// with the job's secret.
pub fn is_record(security: &Security, bytes: &[u8], rank: u32) -> bool {
    let (body, seal) = bytes.split_at(bytes.len().saturating_sub(PROOF));
    let guarded = |c: &EndpointRecord| (c.secret, c.tls) == (security.secret.is_some(), security.tls);
    let reads = postcard::from_bytes::<EndpointRecord>(body)
        .is_ok_and(|c| c.rank == rank && c.version == VERSION && guarded(&c));
    reads && (security.secret.is_none() || security.is_sealed(body, seal))
}

/// A rank that has not connected to the others yet.
pub struct Rendezvous {
    record: EndpointRecord,
    size: usize,
    transport: Transport,
    listener: std::net::TcpListener,
    unix: OwnedFd,
    control: ControlSegment,
    neighbours: HashMap<u32, Neighbour>,
    arena: Arc<Arena>,
    /// By rank; `None` where this world has no such rank.
    records: Vec<Option<EndpointRecord>>,
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
        crate::sys::fork::check()?;
        if rank as usize >= size {
            return Err(Error::misuse(format!("init: there is no rank {rank} in a world of {size} ranks")));
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
        let record = EndpointRecord {
            version: VERSION,
            rank,
            address,
            host,
            socket,
            token,
            secret: false,
            tls: false,
        };
        Ok(Self {
            record,
            size,
            transport,
            listener,
            unix,
            control: ControlSegment::create()?,
            neighbours: HashMap::new(),
            arena: Arc::default(),
            records: Vec::new(),
            security: Security::default(),
        })
    }

    /// Takes over the registered memory of an earlier world, so that tensors in it stay registered.
    pub fn inherit(&mut self, world: &World) {
        self.arena = world.arena.clone();
    }

    /// The token that all ranks of this job derive their keys from.
    fn job(&self) -> [u8; 16] {
        self.records.iter().flatten().next().map_or(self.record.token, |c| c.token)
    }

    /// Applies security settings; to be called before the endpoint record is handed out.
    pub fn secured(mut self, security: Security) -> Self {
        (self.record.secret, self.record.tls) = (security.secret.is_some(), security.tls);
        self.security = security;
        self
    }

    /// This rank's endpoint record with its seal.
    pub fn record(&self) -> Result<Vec<u8>> {
        let mut bytes = postcard::to_stdvec(&self.record)
            .map_err(|e| Error::io("encoding this rank's endpoint record", e))?;
        let seal = self.security.seal(&bytes);
        bytes.extend(seal);
        Ok(bytes)
    }

    /// Connects to the ranks that claim the same host, proves to them that this rank is there, and gets their control
    /// segments. False if not all could be reached: then no ranks of that host share memory.
    ///
    /// `records`: endpoint records by rank, empty where there is no such rank: after a loss, the others keep their
    /// numbers.
    pub fn handshake(&mut self, records: &[Vec<u8>], check_interrupt: InterruptCheck<'_>) -> Result<bool> {
        if records.len() < self.size {
            return Err(Error::misuse(format!(
                "init: {} endpoint records for a world of {} ranks",
                records.len(),
                self.size
            )));
        }
        self.size = records.len();
        self.records.clear();
        let mut claims = Vec::with_capacity(records.len());
        for (rank, bytes) in (0..).zip(records) {
            if bytes.is_empty() && rank != self.record.rank {
                self.records.push(None);
                continue;
            }
            let (body, seal) = bytes.split_at(bytes.len().saturating_sub(PROOF));
            let sealed = self.security.is_sealed(body, seal);
            match postcard::from_bytes::<EndpointRecord>(body) {
                Ok(record) => {
                    claims.push(Claim { rank, secret: record.secret, tls: record.tls, sealed });
                    self.records.push(Some(record));
                }
                // No rank with this secret wrote this.
                Err(_) if self.security.secret.is_some() && !sealed => {
                    claims.push(Claim { rank, secret: true, tls: self.security.tls, sealed });
                    self.records.push(None);
                }
                Err(_) => {
                    let what = "its endpoint record cannot be decoded; do all ranks run the same version of trigram?".into();
                    return Err(Error::Corrupt { rank, what });
                }
            }
        }
        let me = self.record.rank;
        self.security.check(me, &claims)?;
        if records[me as usize] != self.record()? {
            return Err(Error::Auth(format!(
                "init: the store holds another endpoint record for rank {me} than this process wrote: two processes \
                 run as rank {me}, or the record was forged"
            )));
        }
        for (rank, record) in (0..).zip(&self.records) {
            let Some(record) = record else { continue };
            if record.version != VERSION || record.rank != rank {
                return Err(Error::Config(format!(
                    "init: the endpoint record of rank {rank} has version {} and rank {}, expected version {VERSION} and \
                     rank {rank}; run the same version of trigram on all ranks, and give each a rank of its own",
                    record.version, record.rank
                )));
            }
        }
        let local: Vec<(u32, &str)> = self
            .records
            .iter()
            .flatten()
            .filter(|c| c.host == self.record.host)
            .map(|c| (c.rank, c.socket.as_str()))
            .collect();
        if local.len() > MAX_LOCAL {
            return Ok(false);
        }
        let keys = self.security.keys(&self.job());
        let met = host_handshake::connect(me, &local, &self.unix, &self.control, &keys, check_interrupt)?;
        let all = met.is_some();
        self.neighbours = met.unwrap_or_default();
        Ok(all)
    }

    /// Opens the connections and starts the engine. `verdicts[r]` is what [`Rendezvous::handshake`] returned on rank
    /// r.
    pub fn connect(
        mut self,
        verdicts: &[bool],
        limit: Duration,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<Engine> {
        let (me, size) = (self.record.rank as usize, self.size);
        let mut names: Vec<String> = Vec::new();
        let mut host_of = Vec::with_capacity(size);
        for (rank, record) in self.records.iter().enumerate() {
            let host = record.as_ref().map(|c| &c.host);
            let mut here = self.records.iter().flatten().filter(|c| Some(&c.host) == host);
            let proved = here.all(|c| verdicts.get(c.rank as usize) == Some(&true));
            let name = host.filter(|_| proved).cloned().unwrap_or_else(|| format!("rank {rank} alone"));
            let known = names.iter().position(|n| *n == name);
            host_of.push(known.unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            }));
        }
        let is_here = |rank: usize| host_of[rank] == host_of[me];
        if self.transport == Transport::Shm
            && let Some(other) = (0..size).find(|&r| self.records[r].is_some() && !is_here(r))
        {
            return Err(Error::Config(format!(
                "TRIGRAM_TRANSPORT=shm, but rank {me} shares no memory with rank {other}: they are on different \
                 hosts, network namespaces or users, or TRIGRAM_TRANSPORT differs"
            )));
        }
        self.neighbours.retain(|&r, _| is_here(r as usize));
        for (number, segment) in self.arena.segments() {
            for (rank, neighbour) in &self.neighbours {
                neighbour.share(*rank, number, &segment)?;
            }
        }
        let away = self.records.iter().flatten().filter(|c| !is_here(c.rank as usize));
        let peers: Vec<(u32, SocketAddr)> = away.map(|c| (c.rank, c.address)).collect();
        let mut streams = HashMap::new();
        if !peers.is_empty() {
            let tls = self.security.tls.then(Tls::new).transpose()?;
            let identity = Identity { rank: me as u32, keys: self.security.keys(&self.job()), tls };
            streams = handshake::connect(&identity, &peers, &self.listener, limit, check_interrupt)?;
        }
        let local: Vec<usize> = (0..size).filter(|&r| is_here(r)).collect();
        let index = |rank: usize| local.iter().position(|&r| r == rank).unwrap_or_default();
        let (mut tx, mut rx) = (Vec::with_capacity(size), Vec::with_capacity(size));
        for rank in 0..size {
            let halves = if let Some(neighbour) = self.neighbours.get(&(rank as u32)) {
                Some(shm::pair(&self.control, index(me), &neighbour.control, index(rank)))
            } else {
                let halves = streams.remove(&(rank as u32)).map(HandshakeStream::split).transpose()?;
                halves.map(faulty::wrap).transpose()?
            };
            let (out, inn) = halves.unzip();
            tx.push(out.map(Tx::new));
            rx.push(inn.map(|r| Rx::new(rank as u32, r)));
        }
        let world = World {
            rank: me as u32,
            host_of,
            control: self.control,
            neighbours: self.neighbours,
            arena: self.arena,
            retired: Arc::default(),
        };
        Engine::new(Arc::new(world), tx, rx)
    }
}
