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
use trigram_core::error::name_ranks;
use trigram_core::tuning::Tuned;
use trigram_core::{Error, Result};

use crate::bootstrap::cables::Cable;
use crate::bootstrap::handshake::{self, Identity, Met};
use crate::bootstrap::routes::{self, Peer, Reach, Site};
use crate::bootstrap::{cables, host_handshake, tuning_file};
use crate::group::world::{MOST_LIMIT, Neighbour, Patience, World};
use crate::host::control_segment::{ControlSegment, MAX_LOCAL};
use crate::host::doorbell::Doorbell;
use crate::lanes::pool::Wanted;
use crate::link::frames::{Rx, Tx};
use crate::runtime::engine::Engine;
use crate::security::secret::{Claim, PROOF, Security, random};
use crate::security::tls_keys::Tls;
use crate::sys::address::{self, OwnAddress, boot_id, host_name, own_address};
use crate::sys::completion::InterruptCheck;
use crate::sys::memory::Arena;
use crate::sys::unix;
use crate::transport::{far, faulty, shm, tcp};

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
    /// The protocol, and the release of trigram: what every protocol's records begin with, from 4 on.
    version: u32,
    release: String,
    rank: u32,
    address: SocketAddr,
    /// At its further interfaces, if it uses several.
    more: Vec<SocketAddr>,
    /// What others see of that, if a setting says so; and whether nobody reaches it.
    announced: Option<SocketAddr>,
    outward: bool,
    /// Equal on ranks that should be able to share memory.
    host: String,
    /// Equal on ranks under one kernel, which no wire connects.
    boot: String,
    /// The abstract name of its unix socket.
    socket: String,
    token: [u8; 16],
    /// Whether it has a secret, with which it seals its record.
    secret: bool,
    /// Whether it encrypts between hosts.
    tls: bool,
    /// After how many milliseconds without a heartbeat the rank would like a rank to be lost; the most holds.
    silence: u64,
    /// What it knows from measurements of the network; that of the first rank holds for all.
    tuning: Vec<Tuned>,
}

const VERSION: u32 = 14;
const RELEASE: &str = env!("CARGO_PKG_VERSION");

impl EndpointRecord {
    /// # Errors
    ///
    /// What runs on the rank, if its record is that of another release or protocol; `None` if it is no record.
    fn decode(body: &[u8]) -> std::result::Result<Self, Option<String>> {
        let (version, rest) = postcard::take_from_bytes::<u32>(body).map_err(|_| None)?;
        if version == 0 || version > 1 << 16 {
            return Err(None);
        }
        let release = match version {
            ..4 => None,
            _ => Some(postcard::take_from_bytes::<String>(rest).map_err(|_| None)?.0),
        };
        let is_plain = |r: &&str| r.len() <= 64 && r.bytes().all(|b| b.is_ascii_graphic());
        let name = release.as_deref().filter(is_plain).unwrap_or("of another release").to_string();
        if version != VERSION || name != RELEASE {
            return Err(Some(format!("trigram {name} (protocol {version})")));
        }
        postcard::from_bytes(body).map_err(|_| None)
    }
}

/// Whether this is an endpoint record of that rank, of this version, with this rank's security settings, and sealed
/// with the job's secret.
pub fn is_record(security: &Security, bytes: &[u8], rank: u32) -> bool {
    let (body, seal) = bytes.split_at(bytes.len().saturating_sub(PROOF));
    let guarded = |c: &EndpointRecord| (c.secret, c.tls) == (security.secret.is_some(), security.tls);
    let reads = EndpointRecord::decode(body).is_ok_and(|c| c.rank == rank && guarded(&c));
    reads && (security.secret.is_none() || security.is_sealed(body, seal))
}

/// A rank that has not connected to the others yet.
pub struct Rendezvous {
    record: EndpointRecord,
    size: usize,
    transport: Transport,
    listeners: Vec<std::net::TcpListener>,
    /// Its interfaces.
    own: Vec<OwnAddress>,
    /// `None` once this rank has given up sharing memory: those that wait for it see that nobody listens.
    unix: Option<OwnedFd>,
    /// `None` until another rank of this host needs it.
    control: Option<ControlSegment>,
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
        let names = iface.map_or(Ok(Vec::new()), cables::names)?;
        let mut own = names.iter().map(|name| address::interface(name)).collect::<Result<Vec<_>>>()?;
        if let Some(twice) = own.iter().enumerate().find_map(|(i, at)| own[..i].contains(at).then_some(at)) {
            let iface = iface.unwrap_or_default();
            let what =
                format!("TRIGRAM_IFACE={iface:?} names {} twice; name each interface once", twice.device);
            return Err(Error::Config(what));
        }
        if own.is_empty() {
            own.push(own_address(toward)?);
        }
        let mut reach = Reach::from_env()?;
        let listeners = own.iter().map(|own| reach.listen(own.at)).collect::<Result<Vec<_>>>()?;
        let addresses = listeners.iter().map(|listener| listener.local_addr());
        let mut more =
            addresses.collect::<std::io::Result<Vec<_>>>().map_err(|e| Error::io("listening", e))?;
        let address = more.remove(0);
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
            release: RELEASE.into(),
            rank,
            address,
            more,
            announced: reach.announced,
            outward: reach.outward,
            host,
            boot: boot_id()?,
            socket,
            token,
            secret: false,
            tls: false,
            silence: Patience::from_env().limit.as_millis() as u64,
            tuning: tuning_file::read()?,
        };
        Ok(Self {
            record,
            size,
            transport,
            listeners,
            own,
            unix: Some(unix),
            control: None,
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

    /// Whether what this rank sends to another may leave the machine.
    fn is_over_wire(&self, rank: usize) -> bool {
        let record = self.records.get(rank).and_then(Option::as_ref);
        record.is_none_or(|record| record.boot != self.record.boot)
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
    /// segments. False if not all could be reached, or one did not answer within `limit`: then no ranks of that host
    /// share memory.
    ///
    /// `records`: endpoint records by rank, empty where there is no such rank: after a loss, the others keep their
    /// numbers.
    pub fn handshake(
        &mut self,
        records: &[Vec<u8>],
        limit: Duration,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<bool> {
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
        let mut others = Vec::new();
        for (rank, bytes) in (0..).zip(records) {
            if bytes.is_empty() && rank != self.record.rank {
                self.records.push(None);
                continue;
            }
            let (body, seal) = bytes.split_at(bytes.len().saturating_sub(PROOF));
            let sealed = self.security.is_sealed(body, seal);
            match EndpointRecord::decode(body) {
                Ok(record) => {
                    claims.push(Claim { rank, secret: record.secret, tls: record.tls, sealed });
                    self.records.push(Some(record));
                }
                // No rank with this secret wrote this.
                Err(_) if self.security.secret.is_some() && !sealed => {
                    claims.push(Claim { rank, secret: true, tls: self.security.tls, sealed });
                    self.records.push(None);
                }
                Err(Some(other)) => {
                    others.push((rank, other));
                    self.records.push(None);
                }
                Err(None) => {
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
        if let Some((rank, other)) = others.first() {
            return Err(Error::Config(format!(
                "init: rank {rank} runs {other}, and rank {me} runs trigram {RELEASE} (protocol {VERSION}); install the \
                 same release on all ranks"
            )));
        }
        for (rank, record) in (0..).zip(&self.records) {
            let Some(record) = record.as_ref().filter(|record| record.rank != rank) else { continue };
            return Err(Error::Config(format!(
                "init: the endpoint record of rank {rank} names rank {}; give each process a rank of its own",
                record.rank
            )));
        }
        let local: Vec<(u32, &str)> = self
            .records
            .iter()
            .flatten()
            .filter(|c| c.host == self.record.host)
            .map(|c| (c.rank, c.socket.as_str()))
            .collect();
        if local.len() == 1 {
            return Ok(true);
        }
        let unix = self.unix.take().filter(|_| local.len() <= MAX_LOCAL);
        let Some(unix) = unix else { return Ok(false) };
        let control = match ControlSegment::create() {
            Err(refused) if self.transport == Transport::Auto => {
                log::warn!(
                    target: "trigram",
                    "rank {me}: {refused}; the ranks of this host will share no memory: all their data goes over TCP"
                );
                return Ok(false);
            }
            made => made?,
        };
        let keys = self.security.keys(&self.job());
        let met = host_handshake::connect(me, &local, &unix, &control, &keys, limit, check_interrupt)?;
        let Some(met) = met else { return Ok(false) };
        (self.unix, self.control, self.neighbours) = (Some(unix), Some(control), met);
        Ok(true)
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
        let interface = address::scope(&self.record.address);
        let site = |c: &EndpointRecord| Site {
            rank: c.rank,
            address: address::with_scope(c.address, interface),
            announced: c.announced,
            outward: c.outward,
        };
        let sites: Vec<Site> = self.records.iter().flatten().map(site).collect();
        let away = sites.iter().filter(|other| !is_here(other.rank as usize));
        let cables_to = |other: &Site| {
            let record = self.records[other.rank as usize].as_ref();
            let theirs = record.map_or(&[][..], |record| &record.more);
            cables::pairs(&self.own, &[&[other.address], theirs].concat())
        };
        // Where another has more interfaces than this rank, this one uses those that it reaches.
        let seen = |other: &Site, cables: &[Cable]| Site {
            address: cables.first().map_or(other.address, |cable| cable.to),
            ..*other
        };
        let relay = routes::relay(&sites).map(|relay| seen(relay, &cables_to(relay)));
        let relay = relay.as_ref();
        let peers: Vec<Peer> = away
            .map(|other| {
                let cables = cables_to(other);
                Peer::at(&site(&self.record), &seen(other, &cables), relay).over(cables)
            })
            .collect();
        // For whom this rank is the relay: those that nobody reaches, on different hosts.
        let outward =
            || sites.iter().filter(|site| site.outward && relay.is_some_and(|r| r.rank == me as u32));
        let pairs: Vec<(u32, u32)> = outward()
            .flat_map(|a| outward().map(move |b| (a.rank, b.rank)))
            .filter(|&(a, b)| a < b && host_of[a as usize] != host_of[b as usize])
            .collect();
        let mut met = Met::default();
        if !peers.is_empty() {
            let tls = self.security.tls.then(Tls::new).transpose()?;
            let keys = self.security.keys(&self.job());
            let identity = Identity { rank: me as u32, keys, tls, streams: far::asked_streams() };
            met =
                handshake::connect(&identity, &peers, &pairs, &self.listeners, size, limit, check_interrupt)?;
        }
        let local: Vec<usize> = (0..size).filter(|&r| is_here(r)).collect();
        let index = |rank: usize| local.iter().position(|&r| r == rank).unwrap_or_default();
        let (mut tx, mut rx) = (Vec::with_capacity(size), Vec::with_capacity(size));
        let (mut are_far, mut through) = (Vec::with_capacity(size), Vec::with_capacity(size));
        let mut refused = Vec::new();
        for rank in 0..size {
            let neighbour = self.neighbours.get(&(rank as u32));
            let (mut is_far, mut by) = (false, None);
            let halves = if let Some((neighbour, control)) = neighbour.zip(self.control.as_ref()) {
                Some(shm::pair(control, index(me), &neighbour.control, index(rank)))
            } else {
                let summed = tcp::Checksums::from_env().apply(self.is_over_wire(rank));
                let connected = met.connected.remove(&(rank as u32));
                is_far = connected.as_ref().is_some_and(|connected| connected.far);
                by = connected.as_ref().and_then(|connected| connected.through);
                if connected.as_ref().is_some_and(|connected| !connected.prepare()) {
                    refused.push(rank as u32);
                }
                let halves = connected.map(|c| c.split((me as u32, rank as u32), summed)).transpose()?;
                halves.map(faulty::wrap).transpose()?
            };
            let (out, inn) = halves.unzip();
            are_far.push(is_far);
            through.push(by);
            tx.push(out.map(Tx::new));
            rx.push(inn.map(|r| Rx::new(rank as u32, r)));
        }
        if !refused.is_empty() {
            log::warn!(
                target: "trigram",
                "rank {me}: the links to {} are far, and this system refuses the congestion control that they would use: \
                 on them every lost packet costs much of the rate; `trigram doctor` says what to change",
                name_ranks(&refused)
            );
        }
        let mine = Patience::from_env();
        let asked = self.records.iter().flatten().map(|record| Duration::from_millis(record.silence)).max();
        let limit = asked.unwrap_or(mine.limit).min(MOST_LIMIT);
        let tuning = self.records.iter().flatten().next().map_or_else(Vec::new, |first| first.tuning.clone());
        let bell =
            self.control.as_ref().map_or_else(Doorbell::alone, |control| Ok(control.bell().clone()))?;
        let world = World {
            tuning,
            patience: Patience { limit, ..mine },
            lanes: Wanted::from_env(),
            rank: me as u32,
            host_of,
            far: are_far,
            bell,
            control: self.control,
            neighbours: self.neighbours,
            arena: self.arena,
            retired: Arc::default(),
            through,
            passing: met.passing,
        };
        Engine::new(Arc::new(world), tx, rx)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use trigram_core::DType;
    use trigram_core::signature::Collective;

    use super::*;
    use crate::call::request::{Message, Request};
    use crate::group::members::Members;
    use crate::runtime::group::{Group, call, in_place};

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_rank_that_is_slow_is_waited_for() {
        let verdicts = |limits: [Duration; 2]| {
            let open = |rank| Rendezvous::open(rank, 2, Some("lo"), None, Transport::Shm).unwrap();
            let mut ranks = [open(0), open(1)];
            let records = ranks.each_ref().map(|r| r.record().unwrap());
            let [one, slow] = ranks.each_mut();
            std::thread::scope(|s| {
                let first = s.spawn(|| one.handshake(&records, limits[0], &mut || Ok(())).unwrap());
                std::thread::sleep(Duration::from_millis(300));
                let second = slow.handshake(&records, limits[1], &mut || Ok(())).unwrap();
                [first.join().unwrap(), second]
            })
        };
        assert_eq!(verdicts([LIMIT, LIMIT]), [true, true]);
        let short = Duration::from_millis(50);
        assert_eq!(verdicts([short, short]), [false, false]);
    }

    #[test]
    fn ranks_of_another_release_are_refused_by_name() {
        let open = |rank| Rendezvous::open(rank, 2, Some("lo"), None, Transport::Tcp).unwrap();
        let (mut one, mut other) = (open(0), open(1));
        let said = |one: &mut Rendezvous, record: Vec<u8>| {
            assert!(!is_record(&one.security, &record, 1));
            let records = [one.record().unwrap(), record];
            one.handshake(&records, LIMIT, &mut || Ok(())).unwrap_err()
        };
        other.record.release = "9.8.7".into();
        let error = said(&mut one, other.record().unwrap());
        assert!(matches!(error, Error::Config(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 1 runs trigram 9.8.7") && text.contains(RELEASE), "{text}");
        other.record.version = VERSION + 1;
        let text = said(&mut one, other.record().unwrap()).to_string();
        assert!(text.contains(&format!("protocol {}", VERSION + 1)), "{text}");
        // A record of protocol 3, which had no release.
        let mut old = postcard::to_stdvec(&(3u32, 1u32, other.record.address, "host", "socket")).unwrap();
        old.extend([0; 64]);
        let text = said(&mut one, old).to_string();
        assert!(text.contains("protocol 3"), "{text}");
    }

    #[test]
    fn only_ranks_under_one_kernel_are_not_joined_by_a_wire() {
        let open = |rank| Rendezvous::open(rank, 3, Some("lo"), None, Transport::Tcp).unwrap();
        let (mut one, two, mut away) = (open(0), open(1), open(2));
        away.record.boot = "another".into();
        let records = [&one, &two, &away].map(|r| r.record().unwrap());
        assert!(one.handshake(&records, LIMIT, &mut || Ok(())).unwrap());
        assert_eq!([1, 2, 3].map(|rank| one.is_over_wire(rank)), [false, true, true]);
        for (asked, each) in [("auto", [false, true]), ("on", [true, true]), ("off", [false, false])] {
            let checksums = tcp::Checksums::asked(asked);
            assert_eq!([1, 2].map(|rank| checksums.apply(one.is_over_wire(rank))), each, "{asked}");
        }
    }

    /// The engines of two ranks whose records a test has changed.
    fn engines(change: impl Fn(&mut EndpointRecord)) -> Vec<Engine> {
        let open = |rank| Rendezvous::open(rank, 2, Some("lo"), None, Transport::Tcp).unwrap();
        let mut ranks = [open(0), open(1)];
        ranks.iter_mut().for_each(|r| change(&mut r.record));
        let records = ranks.each_ref().map(|r| r.record().unwrap());
        ranks.iter_mut().for_each(|r| assert!(r.handshake(&records, LIMIT, &mut || Ok(())).unwrap()));
        let connect =
            |r: Rendezvous| r.connect(&[true, true], Duration::from_secs(60), &mut || Ok(())).unwrap();
        std::thread::scope(|s| {
            let all = ranks.map(|r| s.spawn(move || connect(r)));
            all.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    /// Passes connections on, slowly and with little room: what has left a rank is far from having arrived.
    fn slow_link(to: SocketAddr) -> SocketAddr {
        const ROOM: usize = 32 << 10;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let pass = |mut from: TcpStream, mut to: TcpStream| {
            socket2::SockRef::from(&from).set_recv_buffer_size(ROOM).unwrap();
            let mut bytes = vec![0; ROOM];
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                if to.write_all(&bytes[..n]).is_err() {
                    break;
                }
                std::thread::sleep(Duration::from_micros(n as u64 / 4));
            }
            let _ = to.shutdown(std::net::Shutdown::Write);
        };
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let (near, far) = (near.unwrap(), TcpStream::connect(to).unwrap());
                let (near2, far2) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                std::thread::spawn(move || pass(near, far));
                std::thread::spawn(move || pass(far2, near2));
            }
        });
        at
    }

    #[test]
    fn what_a_rank_sends_last_arrives_however_slow_the_link() {
        let mut engines = engines(|record| {
            if record.rank == 0 {
                record.address = slow_link(record.address);
            }
        });
        let send = |engine: Engine, sends: bool, mut data: Vec<u8>| {
            let engine = Arc::new(engine);
            let group = Group::new(&engine, "both".into(), vec![0, 1], 0, 0).unwrap();
            let request = Request {
                call: call(Collective::SendRecv, DType::U8, data.len()),
                tensors: in_place(data.as_mut_ptr(), data.len()),
                message: Some(Message { peer: u32::from(sends), tag: 0, sends, shorter: false }),
                ..Request::nothing()
            };
            // SAFETY: `data` outlives the call.
            unsafe { group.run(request, Some(LIMIT), &mut || Ok(())) }.unwrap();
            data
        };
        let (receiver, sender) = (engines.pop().unwrap(), engines.pop().unwrap());
        let len = 8 << 20;
        std::thread::scope(|s| {
            s.spawn(move || send(sender, true, vec![7; len]));
            let came = send(receiver, false, vec![0; len]);
            assert!(came.iter().all(|&byte| byte == 7));
        });
    }

    #[test]
    fn the_first_rank_tells_what_was_measured() {
        let tuned = |doubling| vec![Tuned { world: 2, doubling, ring: None }];
        for engine in engines(|record| record.tuning = tuned([5000, 7000][record.rank as usize])) {
            assert_eq!(engine.world().tuning, tuned(5000));
            let group = |ranks| {
                let members = Members::new(7, "all".into(), ranks, 0, engine.world()).unwrap();
                members.layout.tuned
            };
            assert_eq!(group(vec![0, 1]), Some(tuned(5000)[0]));
            assert_eq!(group(vec![engine.world().rank]), None);
        }
    }

    #[test]
    fn the_longest_patience_holds_for_all() {
        for engine in engines(|record| record.silence = [700, 2500][record.rank as usize]) {
            assert_eq!(engine.world().patience.limit, Duration::from_millis(2500));
        }
    }
}
