//! TCP between hosts, over non-blocking sockets.
//!
//! [`crate::bootstrap::rendezvous`] makes the connections; here they carry bytes. One `epoll` watches all of them,
//! edge-triggered, so a socket costs a system call only when there is something to do.

use std::io::{ErrorKind, IoSlice, Read as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use socket2::SockRef;
use trigram_core::{Error, Result};

use crate::sys::fork::GuardedFd;
use crate::sys::socket;
use crate::transport::far;
use crate::transport::stream::{Carried, Read, Receiver, Sender};

/// Splits a connected socket into its two directions. `summed`: frames carry checksums.
pub fn split(socket: TcpStream, summed: bool) -> Result<(Box<dyn Sender>, Box<dyn Receiver>)> {
    let io = |e: std::io::Error| Error::io("setting up a TCP connection", e);
    socket.set_nodelay(true).map_err(io)?;
    socket.set_nonblocking(true).map_err(io)?;
    let socket = Arc::new(Socket { _guard: GuardedFd::new(&socket), stream: socket });
    let sender = TcpSender { socket: socket.clone(), writable: true, summed };
    Ok((Box::new(sender), Box::new(TcpReceiver { socket, readable: true, low: 1 })))
}

struct Socket {
    _guard: GuardedFd,
    stream: TcpStream,
}

struct TcpSender {
    socket: Arc<Socket>,
    writable: bool,
    summed: bool,
}

impl Sender for TcpSender {
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
        let slices = [IoSlice::new(head), IoSlice::new(body)];
        let slices = if head.is_empty() { &slices[1..] } else { &slices[..] };
        loop {
            // MSG_EOR: the end of a frame must not wait for earlier data to leave this host (autocorking).
            let flags = libc::MSG_NOSIGNAL | libc::MSG_EOR;
            match SockRef::from(&self.socket.stream).send_vectored_with_flags(slices, flags) {
                Ok(n) => {
                    self.writable = n == head.len() + body.len();
                    return Ok(n);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.writable = false;
                    return Ok(0);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(failed(e)),
            }
        }
    }

    fn has_room(&self) -> bool {
        self.writable
    }

    fn wake(&mut self) {
        self.writable = true;
    }

    fn unacknowledged(&self) -> Option<u64> {
        Some(socket::waiting(self.socket.stream.as_fd(), libc::TIOCOUTQ))
    }

    fn carried(&self) -> Option<Carried> {
        far::carried(self.socket.stream.as_fd())
    }

    fn is_summed(&self) -> bool {
        self.summed
    }

    fn close(&mut self) {
        // The peer may have closed already; either way nothing more is sent.
        let _ = self.socket.stream.shutdown(Shutdown::Write);
    }
}

struct TcpReceiver {
    socket: Arc<Socket>,
    readable: bool,
    /// Bytes that must have arrived before the socket becomes readable.
    low: usize,
}

/// Inside a large body, the rank wakes for this many bytes at a time.
const AT_ONCE: usize = 128 << 10;
/// For less, it wakes at once: telling the kernel costs a system call, too.
const FEW: usize = 32 << 10;

impl Receiver for TcpReceiver {
    fn read(&mut self, into: &mut [u8]) -> Result<Read> {
        receive(&self.socket.stream, into, &mut self.readable)
    }

    fn has_input(&self) -> bool {
        self.readable
    }

    fn each_socket(&self, look: &mut dyn FnMut(BorrowedFd<'_>)) {
        look(self.socket.stream.as_fd());
    }

    fn wake(&mut self) {
        self.readable = true;
    }

    fn expect(&mut self, bytes: usize) {
        let low = if bytes < FEW { 1 } else { bytes.min(AT_ONCE) };
        if low != self.low && set_low(&self.socket.stream, low) {
            self.low = low;
        }
    }

    fn read_ahead(&self) -> usize {
        16 << 10
    }
}

/// Why a write failed: [`Error::Aborted`] if the peer has closed its end, which means that it died; any other error,
/// for example an unreachable host, does not say so.
pub(super) fn failed(e: std::io::Error) -> Error {
    match e.kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
            Error::Aborted("its connection has closed".into())
        }
        _ => Error::io("sending to a peer", e),
    }
}

/// Reads what there is; clears `readable` when there is nothing more.
pub(super) fn receive(mut socket: &TcpStream, into: &mut [u8], readable: &mut bool) -> Result<Read> {
    loop {
        match socket.read(into) {
            Ok(0) if !into.is_empty() => return Ok(Read::Closed),
            Ok(n) => return Ok(Read::Some(n)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                *readable = false;
                return Ok(Read::Nothing);
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(Read::Closed),
            Err(e) => return Err(Error::io("receiving from a peer", e)),
        }
    }
}

/// Which frames carry checksums. Receivers accept both kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksums {
    /// Those that pass a wire: a second look at bytes that never leave the memory of one machine finds nothing.
    Auto,
    /// All.
    On,
    /// None.
    Off,
}

impl Checksums {
    /// As `TRIGRAM_CHECKSUM` asks for.
    pub fn from_env() -> Self {
        Self::asked(&std::env::var("TRIGRAM_CHECKSUM").unwrap_or_default())
    }

    /// As its value asks for.
    pub(crate) fn asked(value: &str) -> Self {
        match value {
            "on" => Self::On,
            "off" => Self::Off,
            _ => Self::Auto,
        }
    }

    /// Whether frames to a rank carry checksums that a wire leads to, or not.
    pub fn apply(self, over_wire: bool) -> bool {
        match self {
            Self::Auto => over_wire,
            Self::On => true,
            Self::Off => false,
        }
    }
}

/// Sets `SO_RCVLOWAT`; the kernel reports at once if as much is there already.
fn set_low(socket: &TcpStream, bytes: usize) -> bool {
    let value = libc::c_int::try_from(bytes).unwrap_or(1);
    // SAFETY: the kernel reads one int.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    done == 0
}

/// Makes a dead host noticeable: the kernel closes a connection that stays unacknowledged for this long.
pub fn keep_alive(socket: &impl AsFd) -> Result<()> {
    let keep = socket2::TcpKeepalive::new()
        .with_time(std::time::Duration::from_secs(5))
        .with_interval(std::time::Duration::from_secs(2))
        .with_retries(5);
    SockRef::from(socket).set_tcp_keepalive(&keep).map_err(|e| Error::io("setting up a TCP connection", e))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn inside_a_large_body_a_rank_wakes_for_much_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        assert!(!crate::transport::far::is_far(near.as_fd()));
        let (_tx, mut rx) = split(far, true).unwrap();
        let is_readable = |rx: &dyn Receiver, wait: i32| {
            let mut poll = libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 };
            rx.each_socket(&mut |fd| poll.fd = fd.as_raw_fd());
            // SAFETY: one entry.
            unsafe { libc::poll(&raw mut poll, 1, wait) == 1 }
        };
        rx.expect(100_000);
        near.write_all(&[7; 60_000]).unwrap();
        assert!(!is_readable(&*rx, 100));
        near.write_all(&[7; 40_000]).unwrap();
        assert!(is_readable(&*rx, 10_000));
        let mut body = vec![0; 100_000];
        let mut got = 0;
        while got < body.len() {
            if let Read::Some(n) = rx.read(&mut body[got..]).unwrap() {
                got += n;
            }
        }
        // The header of the next frame may come alone.
        near.write_all(&[7; 80]).unwrap();
        assert!(!is_readable(&*rx, 100));
        rx.expect(80);
        assert!(is_readable(&*rx, 10_000));
        rx.expect(100_000);
        drop(near);
        assert!(is_readable(&*rx, 10_000), "an end is told at once");
    }
}
