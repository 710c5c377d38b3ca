//! Connections between hosts: the higher rank connects, the lower listens, and both prove that they are of the job.
//!
//! The connecting side proves first, so that whoever just calls learns nothing to try secrets on. A stranger
//! never fails the job, whatever it sends: it is dropped. All ranks here have the same secret (their endpoint records
//! were sealed with it), so a rank that is refused again and again has somebody between itself and its peer.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use trigram_core::error::name_ranks;
use trigram_core::{Error, Result};

use crate::bootstrap::handshake_stream::HandshakeStream;
use crate::security::proofs::{HELLO, Handshake, NONCE, Side};
use crate::security::secret::{Keys, PROOF};
use crate::security::tls_keys::Tls;
use crate::sys::completion::INTERRUPT_INTERVAL;
use crate::sys::completion::InterruptCheck;

/// How long a stranger may keep a connection without proving who it is.
const GREETING: Duration = Duration::from_secs(5);
/// How long at least, when others wait to be heard.
const PRESSED: Duration = Duration::from_millis(500);
/// Connections that are being greeted at once.
const GREETINGS: usize = 256;
/// A rank that was refused so often in a row gives up: more than one stray answer.
const REFUSALS: u32 = 3;

const ACCEPTED: u8 = 1;
const REFUSED: u8 = 2;

/// Who this rank is to the others.
#[derive(Clone)]
pub struct Identity {
    /// Its rank.
    pub rank: u32,
    /// What it proves that with.
    pub keys: Keys,
    /// How it encrypts, if it does.
    pub tls: Option<Tls>,
}

/// Those who could not prove to be the rank that they claimed, and from where they called.
type Refused = Arc<Mutex<HashMap<u32, IpAddr>>>;

enum Arrival {
    /// A lower rank has proved itself and accepted us.
    Reached(u32, HandshakeStream),
    /// A higher rank has proved itself: it awaits this word.
    Received(u32, HandshakeStream, [u8; 1 + PROOF]),
    /// A lower rank refuses us.
    Barred(Error),
}

/// Connects this rank with `peers`, by rank and address, within `limit`.
pub fn connect(
    me: &Identity,
    peers: &[(u32, SocketAddr)],
    listener: &std::net::TcpListener,
    limit: Duration,
    check_interrupt: InterruptCheck<'_>,
) -> Result<HashMap<u32, HandshakeStream>> {
    let io = |e: std::io::Error| Error::io("setting up TCP", e);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
    runtime.block_on(async {
        let own = listener.local_addr().map_err(io)?;
        let listener = listener.try_clone().map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        let listener = TcpListener::from_std(listener).map_err(io)?;
        let (send, mut arrivals) = mpsc::channel::<Arrival>(16);
        let refused = Refused::default();
        let mut tasks = tokio::task::JoinSet::new();
        for &(rank, address) in peers.iter().filter(|p| p.0 < me.rank) {
            tasks.spawn(reach(rank, address, me.clone(), send.clone()));
        }
        let higher: Arc<[u32]> = peers.iter().map(|p| p.0).filter(|&rank| rank > me.rank).collect();
        tasks.spawn(receive(listener, me.clone(), higher, refused.clone(), send));
        let mut streams = HashMap::new();
        let began = Instant::now();
        while streams.len() < peers.len() {
            match tokio::time::timeout(INTERRUPT_INTERVAL, arrivals.recv()).await {
                Ok(Some(Arrival::Reached(rank, stream))) => drop(streams.insert(rank, stream)),
                Ok(Some(Arrival::Received(rank, mut stream, word))) => {
                    // Said here, where nobody can be dropped any more for others who wait.
                    if let Ok(Ok(())) = tokio::time::timeout(GREETING, stream.write(&word)).await {
                        streams.insert(rank, stream);
                    }
                }
                Ok(Some(Arrival::Barred(error))) => return Err(error),
                Ok(None) | Err(_) => {}
            }
            check_interrupt()?;
            if began.elapsed() > limit && streams.len() < peers.len() {
                let missing = peers.iter().map(|p| p.0).filter(|rank| !streams.contains_key(rank)).collect();
                return Err(too_late(me.rank, own, missing, &refused, limit));
            }
        }
        Ok(streams)
    })
}

fn too_late(me: u32, own: SocketAddr, missing: Vec<u32>, refused: &Refused, limit: Duration) -> Error {
    let refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((rank, ip)) = missing.iter().find_map(|rank| Some((rank, refused.get(rank)?))) {
        return Error::Auth(format!(
            "init: rank {me} waited {:.1} s for {}. A process at {ip} claimed to be rank {rank} but could not prove it: \
             it is an impostor, or something intercepts the connection; check TRIGRAM_SECRET and TRIGRAM_TLS",
            limit.as_secs_f64(),
            name_ranks(&missing)
        ));
    }
    Error::Timeout {
        what: format!("init: connecting rank {me} ({own}) over TCP"),
        millis: limit.as_millis() as u64,
        waiting_for: name_ranks(&missing),
    }
}

/// What came of calling a lower rank.
enum Called {
    Proved(HandshakeStream),
    Refused,
}

async fn call(rank: u32, address: SocketAddr, me: &Identity) -> std::io::Result<Called> {
    let stream = TcpStream::connect(address).await?;
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
    let proved = word[0] == ACCEPTED && handshake.is_proof(Side::Accepting, &me.keys, &word[1..]);
    Ok(if proved { Called::Proved(stream) } else { Called::Refused })
}

/// Connects to a lower rank, again and again until it answers.
async fn reach(rank: u32, address: SocketAddr, me: Identity, arrived: mpsc::Sender<Arrival>) {
    let mut refusals = 0;
    loop {
        match tokio::time::timeout(GREETING, call(rank, address, &me)).await {
            Ok(Ok(Called::Proved(stream))) => {
                // The receiver has gone only if the wait was given up.
                let _ = arrived.send(Arrival::Reached(rank, stream)).await;
                return;
            }
            Ok(Ok(Called::Refused)) => refusals += 1,
            // Nobody there yet, or too many others: neither says anything about the secret.
            Ok(Err(_)) | Err(_) => {}
        }
        if refusals >= REFUSALS {
            let me = me.rank;
            let _ = arrived
                .send(Arrival::Barred(Error::Auth(format!(
                    "init: rank {me} and rank {rank} at {address} could not authenticate each other: give both the \
                     same TRIGRAM_SECRET; if they have it, something intercepts the connection"
                ))))
                .await;
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Receives higher ranks. Strangers are dropped when they say the wrong thing or nothing.
async fn receive(
    listener: TcpListener,
    me: Identity,
    higher: Arc<[u32]>,
    refused: Refused,
    arrived: mpsc::Sender<Arrival>,
) {
    let mut tasks = tokio::task::JoinSet::new();
    let mut greeted: VecDeque<(Instant, tokio::task::AbortHandle)> = VecDeque::new();
    let mut short = false;
    loop {
        while tasks.try_join_next().is_some() {}
        greeted.retain(|(_, task)| !task.is_finished());
        // Out of room, or of descriptors: who has been heard longest gives way.
        if (short || greeted.len() >= GREETINGS)
            && greeted.front().is_some_and(|(since, _)| since.elapsed() >= PRESSED)
            && let Some((_, task)) = greeted.pop_front()
        {
            task.abort();
        }
        if greeted.len() >= GREETINGS {
            tokio::time::sleep(Duration::from_millis(5)).await;
            continue;
        }
        let accepted = listener.accept().await;
        short = accepted.is_err();
        let Ok((stream, from)) = accepted else {
            tokio::time::sleep(Duration::from_millis(10)).await;
            continue;
        };
        let (me, higher, refused, arrived) = (me.clone(), higher.clone(), refused.clone(), arrived.clone());
        let task = tasks.spawn(async move {
            let heard = hear(stream, from.ip(), &me, &higher, &refused);
            if let Ok(Ok(Some(arrival))) = tokio::time::timeout(GREETING, heard).await {
                let _ = arrived.send(arrival).await;
            }
        });
        greeted.push_back((Instant::now(), task));
    }
}

/// Hears one caller; `None` if it is a stranger.
async fn hear(
    stream: TcpStream,
    from: IpAddr,
    me: &Identity,
    higher: &[u32],
    refused: &Refused,
) -> std::io::Result<Option<Arrival>> {
    stream.set_nodelay(true)?;
    let session = me.tls.as_ref().map(Tls::accepting).transpose()?;
    let mut stream = HandshakeStream::open(stream, session).await?;
    let mut hello = [0; HELLO];
    stream.read(&mut hello).await?;
    let handshake = Handshake::accept(&hello, me.rank, &me.keys, stream.binding()?);
    let Some(handshake) = handshake.filter(|c| higher.contains(&c.from)) else { return Ok(None) };
    stream.write(&handshake.accepting_nonce).await?;
    let mut proof = [0; PROOF];
    stream.read(&mut proof).await?;
    let mut word = [0; 1 + PROOF];
    if !handshake.is_proof(Side::Connecting, &me.keys, &proof) {
        refused.lock().unwrap_or_else(PoisonError::into_inner).insert(handshake.from, from);
        word[0] = REFUSED;
        stream.write(&word).await?;
        return Ok(None);
    }
    word[0] = ACCEPTED;
    word[1..].copy_from_slice(&handshake.prove(Side::Accepting, &me.keys));
    Ok(Some(Arrival::Received(handshake.from, stream, word)))
}
