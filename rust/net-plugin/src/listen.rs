//! The listening end: lets in who presents the handle's token, and nobody else.
//!
//! Strangers may connect, too: they get a bounded number of places and a bounded time to say a hello.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use socket2::Socket;

use crate::error::{Error, Result, is_interrupted, is_later};
use crate::handle::Handle;
use crate::hello::{self, ConnectionId, Hello};
use crate::log;
use crate::recv::Receiver;
use crate::settings::Settings;
use crate::socket;
use crate::token::{self, Token};

/// How long a peer may take: to say its hello, and from its first stream to its last.
const PATIENCE: Duration = Duration::from_secs(10);
/// Where places are rare, who has said nothing for so long makes room.
const IMPATIENCE: Duration = Duration::from_secs(1);
/// Places for those that have not said their hello.
const HALF_OPEN: usize = 128;
/// Places for connections of which some streams are there.
const PARTIAL: usize = 256;

/// Listens at a device's address.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: Socket,
    token: Token,
    settings: Settings,
    strangers: Vec<Stranger>,
    partial: Vec<Partial>,
}

/// Has connected, and not said its hello yet.
#[derive(Debug)]
struct Stranger {
    socket: Socket,
    since: Instant,
    hello: [u8; hello::SIZE],
    have: usize,
}

/// A connection of which some streams are there.
#[derive(Debug)]
struct Partial {
    id: ConnectionId,
    since: Instant,
    streams: Vec<Option<Socket>>,
}

/// What is known of a stranger now.
enum Standing {
    Unknown,
    Known(Hello),
    Refused,
}

impl Listener {
    /// At a free port of this address, and the handle for who is to connect.
    pub(crate) fn new(ip: IpAddr, settings: Settings) -> Result<(Self, Handle)> {
        let failed = |e: io::Error| Error::io(&format!("listening on {ip}"), &e);
        let socket = socket::listening(SocketAddr::new(ip, 0)).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?.as_socket();
        let address = address.ok_or_else(|| Error::internal("the listening socket has no address"))?;
        let token = token::random()?;
        let listener = Self { socket, token, settings, strangers: Vec::new(), partial: Vec::new() };
        Ok((listener, Handle { address, token }))
    }

    /// The next connection; `None` if none is complete yet.
    pub(crate) fn accept(&mut self) -> Result<Option<Receiver>> {
        let now = Instant::now();
        loop {
            let more = self.take_in(now)?;
            if let Some(streams) = self.poll_strangers(now) {
                return self.receiver(streams).map(Some);
            }
            if !more {
                break;
            }
        }
        self.strangers.retain(|stranger| now - stranger.since < PATIENCE);
        let late = self.partial.iter().position(|partial| now - partial.since >= PATIENCE);
        if let Some(late) = late {
            let partial = self.partial.swap_remove(late);
            let there = partial.streams.iter().flatten().count();
            let e = Error::remote(format!(
                "accept: a peer opened only {there} of {} streams",
                partial.streams.len()
            ));
            log::warn(&e.message);
            return Err(e);
        }
        Ok(None)
    }

    /// Takes in who has connected, as far as there are places: whether there may be more.
    fn take_in(&mut self, now: Instant) -> Result<bool> {
        loop {
            if self.strangers.len() >= HALF_OPEN && !self.make_room(now, IMPATIENCE) {
                return Ok(false);
            }
            match socket::accepted(&self.socket, self.settings.timeout) {
                Ok(socket) => {
                    let hello = [0; hello::SIZE];
                    self.strangers.push(Stranger { socket, since: now, hello, have: 0 });
                    if self.strangers.len() >= HALF_OPEN {
                        return Ok(true);
                    }
                }
                Err(e) if is_later(&e) => return Ok(false),
                Err(e) if is_interrupted(&e) => {}
                Err(e) if is_full(&e) => {
                    if !self.make_room(now, Duration::ZERO) {
                        return Err(Error::io("accept", &e));
                    }
                }
                // Whoever it was is gone again.
                Err(e) if is_theirs(&e) => {}
                Err(e) => return Err(Error::io("accept", &e)),
            }
        }
    }

    /// Drops the stranger that has been silent longest, if that is at least so long.
    fn make_room(&mut self, now: Instant, silence: Duration) -> bool {
        let oldest = self.strangers.iter().enumerate().min_by_key(|(_, stranger)| stranger.since);
        let Some((oldest, _)) = oldest.filter(|(_, s)| now - s.since >= silence) else { return false };
        self.strangers.swap_remove(oldest);
        true
    }

    /// Hears what strangers say: the streams of the first connection that becomes complete.
    fn poll_strangers(&mut self, now: Instant) -> Option<Vec<Socket>> {
        let mut at = 0;
        while at < self.strangers.len() {
            match self.strangers[at].read_hello(&self.token) {
                Standing::Unknown => at += 1,
                Standing::Refused => {
                    self.strangers.swap_remove(at);
                }
                Standing::Known(hello) => {
                    let socket = self.strangers.swap_remove(at).socket;
                    if let Some(streams) = self.join(socket, hello, now) {
                        return Some(streams);
                    }
                }
            }
        }
        None
    }

    /// A stream joins its connection: all streams, if it was the last.
    fn join(&mut self, socket: Socket, hello: Hello, now: Instant) -> Option<Vec<Socket>> {
        let at = self.partial.iter().position(|partial| partial.id == hello.connection);
        let at = match at {
            Some(at) => at,
            None if self.partial.len() >= PARTIAL => return None,
            None => {
                let streams = (0..hello.streams).map(|_| None).collect();
                self.partial.push(Partial { id: hello.connection, since: now, streams });
                self.partial.len() - 1
            }
        };
        let partial = &mut self.partial[at];
        // The first stream said how many there are; a place is taken once.
        if partial.streams.len() != hello.streams || partial.streams[hello.stream].is_some() {
            return None;
        }
        partial.streams[hello.stream] = Some(socket);
        if partial.streams.iter().any(Option::is_none) {
            return None;
        }
        Some(self.partial.swap_remove(at).streams.into_iter().flatten().collect())
    }

    fn receiver(&self, streams: Vec<Socket>) -> Result<Receiver> {
        let peer = streams.first().and_then(|s| s.peer_addr().ok()).and_then(|a| a.as_socket());
        let peer = peer.ok_or_else(|| Error::remote("accept: the peer closed the connection at once"))?;
        log::info(&format!("accepted a connection of {} streams from {peer}", streams.len()));
        Ok(Receiver::new(peer, streams))
    }
}

impl Stranger {
    fn read_hello(&mut self, token: &Token) -> Standing {
        while self.have < hello::SIZE {
            match (&self.socket).read(&mut self.hello[self.have..]) {
                Ok(0) => return Standing::Refused,
                Ok(got) => self.have += got,
                Err(e) if is_later(&e) => return Standing::Unknown,
                Err(e) if is_interrupted(&e) => continue,
                Err(_) => return Standing::Refused,
            }
            let begun = self.have.min(hello::MAGIC.len());
            if self.hello[..begun] != hello::MAGIC[..begun] {
                return Standing::Refused;
            }
        }
        Hello::read(&self.hello, token).map_or(Standing::Refused, Standing::Known)
    }
}

/// No descriptors or memory are left.
fn is_full(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

/// Errors of the connection that was to be accepted, not of the listener.
fn is_theirs(e: &io::Error) -> bool {
    let codes = [
        libc::ECONNABORTED,
        libc::ECONNRESET,
        libc::EINVAL,
        libc::ENOTCONN,
        libc::EPROTO,
        libc::ENETDOWN,
        libc::EHOSTUNREACH,
        libc::ENETUNREACH,
    ];
    e.raw_os_error().is_some_and(|code| codes.contains(&code))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{Ipv4Addr, TcpStream};

    use super::*;

    const STREAMS: usize = 2;

    fn listener() -> (Listener, Handle) {
        Listener::new(IpAddr::V4(Ipv4Addr::LOCALHOST), Settings::default()).unwrap()
    }

    fn say(handle: &Handle, connection: u8, stream: usize, token: &Token) -> TcpStream {
        let mut socket = TcpStream::connect(handle.address).unwrap();
        let hello = Hello { connection: [connection; 16], stream, streams: STREAMS };
        socket.write_all(&hello.write(token)).unwrap();
        socket
    }

    fn soon(mut accept: impl FnMut() -> Option<Receiver>) -> Option<Receiver> {
        (0..50).find_map(|_| {
            std::thread::sleep(Duration::from_millis(2));
            accept()
        })
    }

    #[test]
    fn streams_of_two_connections_do_not_mix() {
        let (mut listener, handle) = listener();
        let _a = say(&handle, 1, 0, &handle.token);
        let _b = say(&handle, 2, 1, &handle.token);
        let _again = say(&handle, 1, 0, &handle.token);
        assert!(soon(|| listener.accept().unwrap()).is_none());
        let _c = say(&handle, 2, 0, &handle.token);
        assert!(soon(|| listener.accept().unwrap()).is_some());
        assert_eq!(listener.partial.len(), 1);
    }

    #[test]
    fn strangers_are_dropped() {
        let (mut listener, handle) = listener();
        let mut wrong = say(&handle, 1, 0, &[0; 32]);
        let mut garbage = TcpStream::connect(handle.address).unwrap();
        garbage.write_all(b"GET / HTTP/1.1\r\n").unwrap();
        let _silent = TcpStream::connect(handle.address).unwrap();
        assert!(soon(|| listener.accept().unwrap()).is_none());
        assert_eq!((listener.strangers.len(), listener.partial.len()), (1, 0));
        for socket in [&mut wrong, &mut garbage] {
            socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            assert!(matches!(socket.read(&mut [0; 1]), Ok(0) | Err(_)));
        }
        listener.strangers.iter_mut().for_each(|stranger| stranger.since -= PATIENCE);
        assert!(listener.accept().unwrap().is_none());
        assert!(listener.strangers.is_empty());
    }
}
