//! Connects ranks of different hosts: one of two connects, usually the higher, the other one listens, and both prove that they
//! belong to the job.
//!
//! The connecting side proves first, so that a stranger who connects learns nothing to try secrets on. A stranger is
//! dropped and never fails the job, whatever it sends. All ranks that get here have the same secret (their endpoint
//! records were sealed with it), so if a rank is rejected again and again, something intercepts its connections.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use trigram_core::error::name_ranks;
use trigram_core::{Error, Result};

use crate::bootstrap::cables::Cable;
use crate::bootstrap::handshake_stream::HandshakeStream;
use crate::bootstrap::relay::{self, Kind, Relay, Wish};
use crate::bootstrap::routes::{Peer, Route};
use crate::security::proofs::{HELLO, Handshake, NONCE, Side};
use crate::security::secret::{Keys, PROOF};
use crate::security::tls_keys::Tls;
use crate::sys::address::is_own;
use crate::sys::completion::INTERRUPT_INTERVAL;
use crate::sys::completion::InterruptCheck;
use crate::sys::limits::refused;
use crate::sys::passing::Passing;
use crate::transport::bundle::{self, Between};
use crate::transport::far;
use crate::transport::stream::{Receiver, Sender};

/// The longest time that a connection may take to prove who it is.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// The least time that it gets when other connections wait.
const LEAST_LIMIT: Duration = Duration::from_millis(500);
/// The most connections that prove themselves at the same time.
const MOST_HANDSHAKES: usize = 256;
/// A rank stops after this many rejections in a row: one may be a stray answer.
const MOST_REJECTIONS: u32 = 3;

/// How long an address is tried at a time, if there are other ways to its rank.
const ROUTE_LIMIT: Duration = Duration::from_secs(2);
/// The longest time that a connection through another rank may take: that rank waits too.
const THROUGH_LIMIT: Duration = Duration::from_secs(12);
/// A connection that waits at the relay is made anew after this long, for routers forget those that are idle.
const WAIT_LIMIT: Duration = Duration::from_secs(20);

/// The most ranks of which an error says how connecting to them ended.
const MOST_TOLD: usize = 4;
const NO_ANSWER: &str = "no answer: a firewall drops what is sent, or no such host is there";

const ACCEPTED: u8 = 1;
const REJECTED: u8 = 2;
/// The last byte of a handshake, of the rank that connects.
const CONFIRMED: u8 = 3;

/// How this rank identifies itself to the others.
#[derive(Clone)]
pub struct Identity {
    /// Its rank.
    pub rank: u32,
    /// The keys of its proofs.
    pub keys: Keys,
    /// Its TLS configuration, if it encrypts.
    pub tls: Option<Tls>,
    /// How many connections it makes to each rank to which it connects, if a setting says so.
    pub streams: Option<u8>,
}

/// Which of the connections between two ranks this is: the connecting rank says so with its confirmation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    index: u8,
    /// How many there are.
    of: u8,
    /// Whether their link is far.
    far: bool,
    /// The rank that they pass through, which is not sent.
    through: Option<u32>,
}

/// The connections with another rank.
#[derive(Debug, Default)]
pub struct Connected {
    /// Whether the link is far, as both ranks know.
    pub far: bool,
    /// The rank that they pass through.
    pub through: Option<u32>,
    /// All of them, in their order.
    pub streams: Vec<HandshakeStream>,
}

impl Connected {
    /// Gives the connections what their link needs; false if the system refuses.
    pub fn prepare(&self) -> bool {
        let several = self.streams.len() > 1;
        // All of them, also if one is refused.
        self.streams.iter().filter(|stream| !stream.prepare(self.far, several)).count() == 0
    }

    /// Both directions. `ranks`: this rank and the other. `summed`: frames carry checksums, unless they are encrypted.
    pub fn split(self, ranks: (u32, u32), summed: bool) -> Result<(Box<dyn Sender>, Box<dyn Receiver>)> {
        let addresses = self.streams.iter().map(HandshakeStream::addresses).collect();
        let ip = |stream: &HandshakeStream| stream.own_ip();
        let apart = self.streams.iter().any(|stream| Some(ip(stream)) != self.streams.first().map(ip));
        let halves = self.streams.into_iter().map(|stream| stream.split(summed));
        let mut halves = halves.collect::<Result<Vec<_>>>()?;
        match halves.pop() {
            Some(one) if halves.is_empty() => Ok(one),
            last => Ok(bundle::join(
                halves.into_iter().chain(last).collect(),
                Between { ranks, addresses, apart },
            )),
        }
    }
}

/// The connections with other ranks, by rank, as far as they have been made.
#[derive(Default)]
struct Made(HashMap<u32, (Place, BTreeMap<u8, HandshakeStream>)>);

impl Made {
    fn add(&mut self, rank: u32, place: Place, stream: HandshakeStream) {
        let (first, streams) = self.0.entry(rank).or_insert((place, BTreeMap::new()));
        let is_same = |a: &Place, b: &Place| (a.of, a.far, a.through) == (b.of, b.far, b.through);
        // The first of another attempt: that rank has given the last one up.
        if place.index == 0 && !is_same(first, &place) {
            *first = place;
            streams.clear();
        }
        if is_same(first, &place) {
            streams.insert(place.index, stream);
        }
    }

    /// How many connections with a rank there are, and are to be.
    fn count(&self, rank: u32) -> (usize, usize) {
        self.0.get(&rank).map_or((0, 1), |(first, streams)| (streams.len(), usize::from(first.of)))
    }

    fn has(&self, rank: u32) -> bool {
        let (count, of) = self.count(rank);
        count == of
    }
}

/// Ranks that a caller claimed to be but could not prove, and the caller's address.
type Rejected = Arc<Mutex<HashMap<u32, IpAddr>>>;

/// How the last attempt to connect to a rank ended.
type Attempts = Arc<Mutex<HashMap<u32, String>>>;

enum Arrival {
    /// A called rank has proved itself and accepted this rank; or one that calls, which has confirmed it.
    Connected(u32, Place, HandshakeStream),
    /// A rank that calls has proved itself, and waits for this answer.
    Accepted(u32, Option<u32>, HandshakeStream, [u8; 1 + PROOF]),
    /// A called rank rejects this rank.
    Rejected(Error),
    /// Something for the relay.
    Relay(Wish, TcpStream),
    /// The relay knows that this rank has connected to another.
    Told,
}

/// What [`connect`] has made.
#[derive(Default)]
pub struct Met {
    /// The connections, by rank.
    pub connected: HashMap<u32, Connected>,
    /// What this rank passes on for others.
    pub passing: Option<Arc<Passing>>,
}

/// Connects this rank with `peers` within `limit`. Far ranks, and those for which a setting asks for it, have several
/// connections. `pairs`: for whom this rank is the relay. `world`: the number of ranks.
pub fn connect(
    me: &Identity,
    peers: &[Peer],
    pairs: &[(u32, u32)],
    listeners: &[std::net::TcpListener],
    world: usize,
    limit: Duration,
    check_interrupt: InterruptCheck<'_>,
) -> Result<Met> {
    let io = |e: std::io::Error| Error::io("setting up TCP", e);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
    runtime.block_on(async {
        let Some(own_socket) = listeners.first() else { return Err(Error::misuse("no port to listen at")) };
        let own = own_socket.local_addr().map_err(io)?;
        let (send, mut arrivals) = mpsc::channel::<Arrival>(16);
        let (rejected, attempts) = (Rejected::default(), Attempts::default());
        let mut tasks = tokio::task::JoinSet::new();
        for peer in peers.iter().filter(|peer| peer.called) {
            let to = Toward { peer: peer.clone(), me: me.clone(), world, attempts: attempts.clone() };
            tasks.spawn(connect_to(to, send.clone()));
        }
        let callers: Arc<[u32]> = peers.iter().filter(|peer| !peer.called).map(|peer| peer.rank).collect();
        let hall = Hall { me: me.clone(), callers, rejected: rejected.clone(), arrived: send.clone() };
        if let Some(relay) = peers.iter().filter(|peer| !peer.called).find_map(|peer| peer.relay) {
            tasks.spawn(wait_at(relay, hall.clone()));
        }
        for listener in listeners {
            let listener = listener.try_clone().map_err(io)?;
            listener.set_nonblocking(true).map_err(io)?;
            tasks.spawn(accept_all(TcpListener::from_std(listener).map_err(io)?, hall.clone()));
        }
        let (mut made, mut relay) = (Made::default(), Relay::new(pairs.iter().copied()));
        let is_missing = |made: &Made| peers.iter().any(|peer| !made.has(peer.rank));
        let began = Instant::now();
        let mut spare = began;
        let mut untold = peers.iter().filter(|peer| peer.called && peer.relay.is_some()).count();
        while is_missing(&made) || relay.open().is_some() || untold > 0 {
            match tokio::time::timeout(INTERRUPT_INTERVAL, arrivals.recv()).await {
                Ok(Some(Arrival::Connected(rank, place, stream))) => made.add(rank, place, stream),
                Ok(Some(Arrival::Accepted(rank, through, stream, word))) => {
                    // Answered here, where the connection can no longer be dropped in favour of others.
                    tasks.spawn(answer(rank, through, stream, word, send.clone()));
                }
                Ok(Some(Arrival::Rejected(error))) => return Err(error),
                Ok(Some(Arrival::Relay(wish, stream))) => relay.take(wish, stream)?,
                Ok(Some(Arrival::Told)) => untold -= 1,
                Ok(None) | Err(_) => {}
            }
            let given_up = match check_interrupt() {
                Err(Error::Timeout { what, .. }) => Some(what),
                other => {
                    other?;
                    None
                }
            };
            match rustix::io::fcntl_dupfd_cloexec(own_socket.as_fd(), 0) {
                Err(e) if spare.elapsed() > HANDSHAKE_LIMIT => {
                    return Err(refused(format!("init: connecting rank {} over TCP", me.rank), e));
                }
                Err(_) => {}
                Ok(_) => spare = Instant::now(),
            }
            let incomplete = is_missing(&made) || relay.open().is_some() || untold > 0;
            if incomplete && (began.elapsed() > limit || given_up.is_some()) {
                let (what, waiting_for) = if is_missing(&made) {
                    let missing: Vec<&Peer> = peers.iter().filter(|peer| !made.has(peer.rank)).collect();
                    let waited = began.elapsed();
                    let waiting_for = missing_ranks(me.rank, own, &missing, &made, &rejected, &attempts, waited)?;
                    (format!("connecting rank {} over TCP", me.rank), waiting_for)
                } else if let Some((a, b)) = relay.open() {
                    let waiting_for = format!(
                        "{}. Both only connect outwards (TRIGRAM_OUTWARD=1); each must reach rank {} at {own}",
                        name_ranks(&[a, b]),
                        me.rank
                    );
                    (format!("connecting ranks {a} and {b} through rank {}", me.rank), waiting_for)
                } else {
                    let waiting_for = "the rank that passes on what ranks send each other that nobody reaches".into();
                    (format!("connecting rank {} over TCP", me.rank), waiting_for)
                };
                let why = given_up.map_or(String::new(), |why| format!(". This rank waits no longer: {why}"));
                return Err(Error::Timeout {
                    what: format!("init: {what}"),
                    millis: began.elapsed().as_millis() as u64,
                    waiting_for: waiting_for + &why,
                });
            }
        }
        let connected = |(first, streams): (Place, BTreeMap<_, _>)| Connected {
            far: first.far,
            through: first.through,
            streams: streams.into_values().collect(),
        };
        let connected = made.0.into_iter().map(|(rank, made)| (rank, connected(made))).collect();
        Ok(Met { connected, passing: relay.finish() })
    })
}

/// Answers a higher rank that has proved itself. It may have given this attempt up meanwhile, and makes another: this one
/// counts once it says that it does not.
async fn answer(
    rank: u32,
    through: Option<u32>,
    mut stream: HandshakeStream,
    word: [u8; 1 + PROOF],
    arrived: mpsc::Sender<Arrival>,
) {
    let confirmed = async {
        stream.write(&word).await?;
        let mut bytes = [0; 4];
        stream.read(&mut bytes).await?;
        std::io::Result::Ok(bytes)
    };
    let Ok(Ok([CONFIRMED, index, of, far])) = tokio::time::timeout(HANDSHAKE_LIMIT, confirmed).await else {
        return;
    };
    if index < of && of <= far::MOST_STREAMS {
        let place = Place { index, of, far: far == 1, through };
        let _ = arrived.send(Arrival::Connected(rank, place, stream)).await;
    }
}

/// What is missing; as an error, if a process could not prove that it is one of the ranks.
fn missing_ranks(
    me: u32,
    own: SocketAddr,
    missing: &[&Peer],
    made: &Made,
    rejected: &Rejected,
    attempts: &Attempts,
    waited: Duration,
) -> Result<String> {
    let rejected = rejected.lock().unwrap_or_else(PoisonError::into_inner);
    let names = name_ranks(&missing.iter().map(|peer| peer.rank).collect::<Vec<_>>());
    if let Some((rank, ip)) = missing.iter().find_map(|peer| Some((peer.rank, rejected.get(&peer.rank)?))) {
        return Err(Error::Auth(format!(
            "init: rank {me} waited {:.1} s for {names}. A process at {ip} claimed to be rank {rank} but could not prove it: \
             it is an impostor, or something intercepts the connection; check TRIGRAM_SECRET and TRIGRAM_TLS",
            waited.as_secs_f64(),
        )));
    }
    let attempts = attempts.lock().unwrap_or_else(PoisonError::into_inner);
    let mut tried: Vec<String> = Vec::new();
    for Peer { rank, routes, .. } in missing.iter().filter(|peer| peer.called).take(MOST_TOLD) {
        let attempt = attempts.get(rank).map_or(NO_ANSWER, String::as_str);
        let is_own = |route: &Route| matches!(route, Route::Direct(address) if is_own(address.ip()));
        let own = match routes.iter().any(is_own) {
            true => format!("; this is also an address of the host of rank {me}"),
            false => String::new(),
        };
        let routes: Vec<String> = routes.iter().map(Route::to_string).collect();
        tried.push(format!(
            "rank {rank} announced {}, and rank {me} tried to connect to it: {attempt}{own}",
            routes.join(" or ")
        ));
    }
    let (begun, callers): (Vec<u32>, Vec<u32>) = missing
        .iter()
        .filter(|peer| !peer.called)
        .map(|peer| peer.rank)
        .partition(|&rank| made.count(rank).0 > 0);
    for rank in begun.into_iter().take(MOST_TOLD) {
        let (count, of) = made.count(rank);
        tried.push(format!("of {of} connections of rank {rank}, {count} have come"));
    }
    if !callers.is_empty() {
        let callers = name_ranks(&callers);
        tried.push(format!("rank {me} announced {own}, and no connection of {callers} has come there"));
    }
    Ok(format!(
        "{names}. {}. Set TRIGRAM_IFACE, on each host, to the interface or address that the others reach, and let the \
         firewall pass connections between the hosts, at all ports or at those of TRIGRAM_PORT. A rank that others \
         cannot reach behind its router needs TRIGRAM_OUTWARD=1; one that others reach at another address, TRIGRAM_ANNOUNCE",
        tried.join("; ")
    ))
}

/// What the system's answer to an attempt to connect says.
fn told(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionRefused => format!("refused, nobody listens there ({error})"),
        ErrorKind::TimedOut => format!("{NO_ANSWER} ({error})"),
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
            format!("the connection was closed before the rank had proved itself ({error})")
        }
        _ => format!("it cannot be reached ({error})"),
    }
}

/// The outcome of connecting to a lower rank.
enum Reached {
    Proved(Place, HandshakeStream),
    Rejected,
}

/// A rank to which this one connects.
struct Toward {
    peer: Peer,
    me: Identity,
    world: usize,
    attempts: Attempts,
}

impl Toward {
    /// Whether it is a way to the addresses of the other's interfaces.
    fn leads_over_cables(&self, route: Route) -> bool {
        self.peer.cables.iter().any(|cable| route == Route::Direct(cable.to))
    }

    /// Over which of several cables a connection goes.
    fn cable(&self, place: Option<Place>) -> Option<&Cable> {
        let index = place.map_or(0, |place| usize::from(place.index));
        self.peer.cables.get(index.checked_rem(self.peer.cables.len())?)
    }
}

/// `place`: which of several connections to make; `None`: the first, which says how many there are to be.
async fn try_connect(to: &Toward, route: Route, place: Option<Place>) -> std::io::Result<Reached> {
    let Toward { me, .. } = to;
    let cable = to.cable(place);
    let rank = to.peer.rank;
    let limit = if to.peer.routes.len() > 1 { ROUTE_LIMIT } else { HANDSHAKE_LIMIT };
    let stream = match route {
        Route::Direct(address) if let Some(cable) = cable.filter(|cable| cable.to == address) => {
            tokio::time::timeout(HANDSHAKE_LIMIT, cable.connect())
                .await
                .map_err(|_| ErrorKind::TimedOut)??
        }
        Route::Direct(address) => tokio::time::timeout(limit, TcpStream::connect(address))
            .await
            .map_err(|_| ErrorKind::TimedOut)??,
        Route::Through(_, relay) => relay::reach(relay, Kind::Call, me.rank, rank, &me.keys).await?,
    };
    stream.set_nodelay(true)?;
    let session = me.tls.as_ref().map(Tls::connecting).transpose()?;
    let mut stream = HandshakeStream::open(stream, session).await?;
    let begun = Handshake::begin(me.rank, rank, stream.binding()?);
    let mut handshake = begun.map_err(std::io::Error::other)?;
    stream.write(&handshake.hello(&me.keys)).await?;
    let mut answer = [0; NONCE];
    stream.read(&mut answer).await?;
    handshake.accepting_nonce = answer;
    stream.write(&handshake.prove(Side::Connecting, &me.keys)).await?;
    let mut word = [0; 1 + PROOF];
    stream.read(&mut word).await?;
    if !matches!(word[0], ACCEPTED | REJECTED) {
        let what = "something that is not a rank of this job answers there";
        return Err(std::io::Error::new(ErrorKind::InvalidData, what));
    }
    let proved = word[0] == ACCEPTED && handshake.is_proof(Side::Accepting, &me.keys, &word[1..]);
    if !proved {
        return Ok(Reached::Rejected);
    }
    let place = place.unwrap_or_else(|| {
        let far = stream.is_far();
        let of = me.streams.unwrap_or_else(|| stream.streams(far, to.world));
        // As many over each cable.
        let cables = if to.leads_over_cables(route) { to.peer.cables.len() } else { 1 };
        let of = usize::from(of).div_ceil(cables) * cables;
        let of = u8::try_from(of).unwrap_or(u8::MAX).min(far::MOST_STREAMS);
        let through = if let Route::Through(relay, _) = route { Some(relay) } else { None };
        Place { index: 0, of, far, through }
    });
    stream.write(&[CONFIRMED, place.index, place.of, u8::from(place.far)]).await?;
    Ok(Reached::Proved(place, stream))
}

/// Makes all connections to a rank, by the way by which it was reached first.
async fn connect_to(mut to: Toward, arrived: mpsc::Sender<Arrival>) {
    let Some((first, route)) = connect_once(&to, None, &arrived).await else { return };
    to.peer.routes = vec![route];
    if !to.leads_over_cables(route) {
        to.peer.cables.clear();
    }
    let to = Arc::new(to);
    let mut rest = tokio::task::JoinSet::new();
    for index in 1..first.of {
        let (to, arrived) = (to.clone(), arrived.clone());
        rest.spawn(async move { connect_once(&to, Some(Place { index, ..first }), &arrived).await });
    }
    while rest.join_next().await.is_some() {}
    if let Some((_, relay)) = to.peer.relay {
        let mut perhaps = false;
        loop {
            let told = relay::reach(relay, Kind::Done, to.me.rank, to.peer.rank, &to.me.keys);
            let is_told = match tokio::time::timeout(HANDSHAKE_LIMIT, told).await {
                Ok(Ok(_)) => true,
                // Its answer may have been lost, and it listens no more once it has heard from all.
                Ok(Err(error)) => perhaps && error.kind() == ErrorKind::ConnectionRefused,
                Err(_) => false,
            };
            if is_told {
                let _ = arrived.send(Arrival::Told).await;
                return;
            }
            perhaps = true;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Makes one connection to a rank, again and again until it accepts. `None` if it rejects this rank.
async fn connect_once(
    to: &Toward,
    place: Option<Place>,
    arrived: &mpsc::Sender<Arrival>,
) -> Option<(Place, Route)> {
    // The first connection goes by the first way by which the rank is reached, and each further one over its cable.
    let cable = to.cable(place).filter(|_| place.is_some());
    let routes = cable.map_or(to.peer.routes.clone(), |cable| vec![Route::Direct(cable.to)]);
    let over = cable.map_or(String::new(), |cable| format!("over {cable}: "));
    let note = |text: String| {
        to.attempts.lock().unwrap_or_else(PoisonError::into_inner).insert(to.peer.rank, over.clone() + &text)
    };
    let mut rejections = vec![0; routes.len()];
    for (i, &route) in routes.iter().enumerate().cycle() {
        let limit = if matches!(route, Route::Through(..)) { THROUGH_LIMIT } else { HANDSHAKE_LIMIT };
        match tokio::time::timeout(limit, try_connect(to, route, place)).await {
            Ok(Ok(Reached::Proved(place, stream))) => {
                // What is noted from now on is of another connection.
                to.attempts.lock().unwrap_or_else(PoisonError::into_inner).remove(&to.peer.rank);
                // The receiver is gone only if the caller has stopped waiting.
                let _ = arrived.send(Arrival::Connected(to.peer.rank, place, stream)).await;
                return Some((place, route));
            }
            Ok(Ok(Reached::Rejected)) => rejections[i] += 1,
            // The rank has too many callers, or another host has its address: neither says anything about the secret.
            Ok(Err(error)) => {
                rejections[i] = 0;
                note(told(&error));
            }
            Err(_) => {
                rejections[i] = 0;
                note(NO_ANSWER.into());
            }
        }
        if rejections.iter().all(|&times| times >= MOST_REJECTIONS) {
            let (me, rank) = (to.me.rank, to.peer.rank);
            let _ = arrived
                .send(Arrival::Rejected(Error::Auth(format!(
                    "init: rank {me} and rank {rank} at {route} could not authenticate each other: give both the \
                     same TRIGRAM_SECRET; if they have it, something intercepts the connection"
                ))))
                .await;
            return None;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    None
}

/// What those who come need.
#[derive(Clone)]
struct Hall {
    me: Identity,
    /// The ranks that connect to this one.
    callers: Arc<[u32]>,
    rejected: Rejected,
    arrived: mpsc::Sender<Arrival>,
}

impl Hall {
    /// Talks to one who has come.
    async fn receive(self, stream: TcpStream, from: IpAddr, through: Option<u32>) {
        let accepted = accept_one(stream, from, through, &self);
        if let Ok(Ok(Some(arrival))) = tokio::time::timeout(HANDSHAKE_LIMIT, accepted).await {
            let _ = self.arrived.send(arrival).await;
        }
    }
}

/// Waits at the relay for ranks that call this one, who come as if they had connected to it.
async fn wait_at((rank, relay): (u32, SocketAddr), hall: Hall) {
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        while tasks.try_join_next().is_some() {}
        if tasks.len() >= MOST_HANDSHAKES {
            let _ = tasks.join_next().await;
        }
        let called = relay::reach(relay, Kind::Wait, hall.me.rank, hall.me.rank, &hall.me.keys);
        match tokio::time::timeout(WAIT_LIMIT, called).await {
            Ok(Ok(stream)) => drop(tasks.spawn(hall.clone().receive(stream, relay.ip(), Some(rank)))),
            // The relay is not there yet, or all whom it would pass on are connected.
            Ok(Err(_)) => tokio::time::sleep(Duration::from_millis(200)).await,
            Err(_) => {}
        }
    }
}

/// Accepts ranks that call. Drops strangers when they send something wrong, or nothing.
async fn accept_all(listener: TcpListener, hall: Hall) {
    let mut tasks = tokio::task::JoinSet::new();
    let mut pending: VecDeque<(Instant, tokio::task::AbortHandle)> = VecDeque::new();
    let mut short = false;
    loop {
        while tasks.try_join_next().is_some() {}
        pending.retain(|(_, task)| !task.is_finished());
        // Out of room or of descriptors: drop the connection that has had the most time.
        if (short || pending.len() >= MOST_HANDSHAKES)
            && pending.front().is_some_and(|(since, _)| since.elapsed() >= LEAST_LIMIT)
            && let Some((_, task)) = pending.pop_front()
        {
            task.abort();
        }
        if pending.len() >= MOST_HANDSHAKES {
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        }
        let accepted = listener.accept().await;
        short = accepted.is_err();
        let Ok((stream, from)) = accepted else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let task = tasks.spawn(hall.clone().receive(stream, from.ip(), None));
        pending.push_back((Instant::now(), task));
    }
}

/// Talks to one caller; `None` if it is a stranger.
async fn accept_one(
    mut stream: TcpStream,
    from: IpAddr,
    through: Option<u32>,
    hall: &Hall,
) -> std::io::Result<Option<Arrival>> {
    let me = &hall.me;
    stream.set_nodelay(true)?;
    let mut first = [0];
    if stream.peek(&mut first).await? == 1 && first[0] == relay::BEGIN {
        let wish = relay::hear(&mut stream, &me.keys).await?;
        return Ok(wish.map(|wish| Arrival::Relay(wish, stream)));
    }
    let session = me.tls.as_ref().map(Tls::accepting).transpose()?;
    let mut stream = HandshakeStream::open(stream, session).await?;
    let mut hello = [0; HELLO];
    stream.read(&mut hello).await?;
    let handshake = Handshake::accept(&hello, me.rank, &me.keys, stream.binding()?);
    let Some(handshake) = handshake.filter(|c| hall.callers.contains(&c.from)) else { return Ok(None) };
    stream.write(&handshake.accepting_nonce).await?;
    let mut proof = [0; PROOF];
    stream.read(&mut proof).await?;
    let mut word = [0; 1 + PROOF];
    if !handshake.is_proof(Side::Connecting, &me.keys, &proof) {
        hall.rejected.lock().unwrap_or_else(PoisonError::into_inner).insert(handshake.from, from);
        word[0] = REJECTED;
        stream.write(&word).await?;
        return Ok(None);
    }
    word[0] = ACCEPTED;
    word[1..].copy_from_slice(&handshake.prove(Side::Accepting, &me.keys));
    Ok(Some(Arrival::Accepted(handshake.from, through, stream, word)))
}
