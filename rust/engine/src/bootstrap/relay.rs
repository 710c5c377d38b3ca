//! Passes on what two ranks send each other that nobody reaches, through one that both reach.
//!
//! The rank that is called keeps a connection to the relay, which waits there. A rank that calls connects to the relay and
//! says whom it calls; the relay then gives both a byte and passes everything on. Over that the two prove themselves to each
//! other, with TLS if they encrypt, as over any connection: the relay sees what any wire sees. It counts which pairs are done.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use trigram_core::{Error, Result};

use crate::security::proofs::NONCE;
use crate::security::secret::{Keys, PROOF, random};
use crate::sys::fork::GuardedFd;
use crate::sys::passing::Passing;
use crate::sys::socket::waiting;
use crate::transport::{far, tcp};

/// The first byte of a request: no handshake and no TLS session begins with it.
pub const BEGIN: u8 = 1;
const MAGIC: &[u8; 8] = b"\x01TGRELAY";
const REQUEST: usize = 16 + 1 + 4 + 4 + PROOF;
/// What is proved of a request, behind the relay's nonce.
const SAID: usize = REQUEST - PROOF;
/// Connections of one rank that wait, at most.
const MOST_WAITING: usize = 64;
/// What the relay says to both once their bytes pass.
const PASSES: u8 = 1;
/// How long a caller waits at the relay for the called rank.
const WAIT: Duration = Duration::from_secs(5);
/// How long one direction stays open once the other has ended and all has arrived; at most, and between two looks.
const LAST_WORDS: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(50);
/// Bytes of a buffer in each direction.
const BUFFER: usize = 256 << 10;

/// What a rank wants of the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// To be called.
    Wait = 1,
    /// To call the other.
    Call = 2,
    /// The two are connected.
    Done = 3,
}

/// A request to the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    kind: Kind,
    from: u32,
    to: u32,
}

impl Wish {
    fn encode(self, nonce: &[u8; NONCE], keys: &Keys) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        bytes[..16].copy_from_slice(&keys.id);
        bytes[16] = self.kind as u8;
        bytes[17..21].copy_from_slice(&self.from.to_le_bytes());
        bytes[21..25].copy_from_slice(&self.to.to_le_bytes());
        let proof = keys.prove(&[b"trigram relay", nonce, &bytes[..SAID]]);
        bytes[SAID..].copy_from_slice(&proof);
        bytes
    }

    fn decode(bytes: &[u8; REQUEST], nonce: &[u8; NONCE], keys: &Keys) -> Option<Self> {
        let kind = [Kind::Wait, Kind::Call, Kind::Done].into_iter().find(|kind| *kind as u8 == bytes[16])?;
        let number = |at: usize| Some(u32::from_le_bytes(bytes[at..at + 4].try_into().ok()?));
        let proved = bytes[..16] == keys.id
            && keys.is_proof(&[b"trigram relay", nonce, &bytes[..SAID]], &bytes[SAID..]);
        Some(Self { kind, from: number(17)?, to: number(21)? }).filter(|_| proved)
    }

    /// The two ranks, the lower first.
    fn pair(self) -> (u32, u32) {
        (self.from.min(self.to), self.from.max(self.to))
    }
}

/// Reads a request that has begun to arrive; `None` if it is not of this job.
pub async fn hear(stream: &mut TcpStream, keys: &Keys) -> std::io::Result<Option<Wish>> {
    let mut magic = [0; MAGIC.len()];
    stream.read_exact(&mut magic).await?;
    if magic != *MAGIC {
        return Ok(None);
    }
    // A request that was recorded earlier is of no use.
    let nonce: [u8; NONCE] = random().map_err(std::io::Error::other)?;
    stream.write_all(&nonce).await?;
    let mut bytes = [0; REQUEST];
    stream.read_exact(&mut bytes).await?;
    tcp::keep_alive(stream).map_err(std::io::Error::other)?;
    Ok(Wish::decode(&bytes, &nonce, keys))
}

/// A connection to the relay over which this rank waits for a call, or to the rank that it calls.
pub async fn reach(
    relay: SocketAddr,
    kind: Kind,
    from: u32,
    to: u32,
    keys: &Keys,
) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(relay).await?;
    stream.set_nodelay(true)?;
    tcp::keep_alive(&stream).map_err(std::io::Error::other)?;
    stream.write_all(MAGIC).await?;
    let mut nonce = [0; NONCE];
    stream.read_exact(&mut nonce).await?;
    stream.write_all(&Wish { kind, from, to }.encode(&nonce, keys)).await?;
    let mut byte = [0];
    stream.read_exact(&mut byte).await?;
    Ok(stream)
}

/// What the relay keeps while ranks connect.
#[derive(Default)]
pub struct Relay {
    waiting: HashMap<u32, VecDeque<TcpStream>>,
    callers: VecDeque<(Instant, u32, TcpStream)>,
    /// Pairs that are not connected yet.
    open: HashSet<(u32, u32)>,
    thread: Option<Thread>,
}

impl Relay {
    /// For these pairs of ranks, the lower first.
    pub fn new(open: impl IntoIterator<Item = (u32, u32)>) -> Self {
        Self { open: open.into_iter().collect(), ..Self::default() }
    }

    /// A pair that is not connected yet.
    pub fn open(&self) -> Option<(u32, u32)> {
        self.open.iter().min().copied()
    }

    /// Takes up a request of a rank of this job.
    pub fn take(&mut self, wish: Wish, stream: TcpStream) -> Result<()> {
        match wish.kind {
            Kind::Wait if self.open.iter().any(|(a, b)| [*a, *b].contains(&wish.from)) => {
                let waiting = self.waiting.entry(wish.from).or_default();
                waiting.push_back(stream);
                waiting.retain(is_open);
                if waiting.len() > MOST_WAITING {
                    waiting.pop_front();
                }
            }
            Kind::Call if self.open.contains(&wish.pair()) => {
                self.callers.push_back((Instant::now(), wish.to, stream));
            }
            Kind::Wait | Kind::Call => {}
            Kind::Done => {
                self.open.remove(&wish.pair());
                // The rank tells again until it hears this.
                let _ = stream.try_write(&[PASSES]);
            }
        }
        // One that has given up must not use up a connection that waits.
        self.callers.retain(|(since, _, caller)| since.elapsed() < WAIT && is_open(caller));
        let mut i = 0;
        while let Some((_, to, _)) = self.callers.get(i) {
            // The newest is the likeliest to be there.
            let Some(called) = self.waiting.get_mut(to).and_then(VecDeque::pop_back) else {
                i += 1;
                continue;
            };
            // One that has gone meanwhile is found by the handshake, and the caller calls again.
            if called.try_write(&[PASSES]).is_ok()
                && let Some((_, _, caller)) = self.callers.remove(i)
                && caller.try_write(&[PASSES]).is_ok()
            {
                self.pass(called, caller)?;
            }
        }
        Ok(())
    }

    fn pass(&mut self, a: TcpStream, b: TcpStream) -> Result<()> {
        let thread = match self.thread.take() {
            Some(thread) => thread,
            None => Thread::start()?,
        };
        let io = |e: std::io::Error| Error::io("passing on what other ranks send", e);
        thread.pairs.send((a.into_std().map_err(io)?, b.into_std().map_err(io)?)).ok();
        self.thread = Some(thread);
        Ok(())
    }

    /// All pairs are connected: what goes on passing them, if anything does.
    pub fn finish(self) -> Option<Arc<Passing>> {
        self.thread.map(|thread| thread.passing)
    }
}

/// Whether the other end of a connection, which has nothing to say now, is still there.
fn is_open(stream: &TcpStream) -> bool {
    matches!(stream.try_read(&mut [0]), Err(e) if e.kind() == std::io::ErrorKind::WouldBlock)
}

/// Passes connections on.
struct Thread {
    pairs: mpsc::UnboundedSender<(std::net::TcpStream, std::net::TcpStream)>,
    passing: Arc<Passing>,
}

impl Thread {
    /// It ends once nothing more comes, and all that it passes on is closed.
    fn start() -> Result<Self> {
        let io = |e: std::io::Error| Error::io("passing on what other ranks send", e);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(io)?;
        let (pairs, mut coming) = mpsc::unbounded_channel();
        let passing = Arc::<Passing>::default();
        let counted = passing.clone();
        let work = async move {
            let mut tasks = tokio::task::JoinSet::new();
            while let Some((a, b)) = coming.recv().await {
                counted.begin();
                let counted = counted.clone();
                tasks.spawn(async move {
                    // Whoever is cut off is noticed by the two.
                    let _ = pass(a, b).await;
                    counted.end();
                });
            }
            while tasks.join_next().await.is_some() {}
        };
        let named = std::thread::Builder::new().name("trigram-relay".into());
        named.spawn(move || runtime.block_on(work)).map_err(io)?;
        Ok(Self { pairs, passing })
    }
}

async fn pass(a: std::net::TcpStream, b: std::net::TcpStream) -> std::io::Result<()> {
    let seen = [a.try_clone()?, b.try_clone()?];
    let guards = [&a, &b, &seen[0], &seen[1]].map(GuardedFd::new);
    for socket in [&a, &b] {
        tcp::keep_alive(socket).map_err(std::io::Error::other)?;
        socket.set_nodelay(true)?;
        // Each half of the way is a link of its own.
        far::prepare(socket.as_fd(), far::is_far(socket.as_fd()), true);
    }
    let (from_a, mut to_a) = TcpStream::from_std(a)?.into_split();
    let (from_b, mut to_b) = TcpStream::from_std(b)?.into_split();
    {
        let (forth, back) = (copy(from_a, &mut to_b), copy(from_b, &mut to_a));
        tokio::pin!(forth, back);
        tokio::select! {
            _ = &mut forth => linger(back, &seen).await,
            _ = &mut back => linger(forth, &seen).await,
        }
    }
    drop(guards);
    Ok(())
}

/// One direction has ended: waits until what it has brought has arrived, and hears the last words of the other. One whose
/// host is gone would be waited for long.
async fn linger(other: impl Future<Output = std::io::Result<()>>, sockets: &[std::net::TcpStream; 2]) {
    tokio::pin!(other);
    let began = Instant::now();
    let (mut moved, mut ended) = (began, false);
    while moved.elapsed() < LAST_WORDS && began.elapsed() < LONGEST {
        match ended {
            false => ended = tokio::time::timeout(LOOK, &mut other).await.is_ok(),
            true => tokio::time::sleep(LOOK).await,
        }
        let on_the_way = sockets.iter().any(|socket| waiting(socket.as_fd(), libc::TIOCOUTQ) > 0);
        match on_the_way {
            true => moved = Instant::now(),
            false if ended => return,
            false => {}
        }
    }
}

async fn copy(from: OwnedReadHalf, to: &mut OwnedWriteHalf) -> std::io::Result<()> {
    let copied = tokio::io::copy_buf(&mut BufReader::with_capacity(BUFFER, from), to).await;
    to.shutdown().await?;
    copied.map(drop)
}
