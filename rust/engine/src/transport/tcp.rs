//! TCP between hosts, over non-blocking sockets.
//!
//! Connections are made by [`crate::rendezvous`]; here they carry bytes. One `epoll` watches all
//! of them, edge-triggered, so a socket costs a system call only when there is something to do.

use std::io::{ErrorKind, IoSlice, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use socket2::SockRef;
use trigram_core::{Error, Result};

use crate::fork::Watched;
use crate::transport::{Read, Receiver, Sender};

/// Splits a connected socket into its two ways.
pub fn split(socket: TcpStream) -> Result<(Box<dyn Sender>, Box<dyn Receiver>)> {
    let io = |e: std::io::Error| Error::io("preparing a TCP connection", e);
    socket.set_nodelay(true).map_err(io)?;
    socket.set_nonblocking(true).map_err(io)?;
    let socket = Arc::new(Socket { _watched: Watched::new(&socket), stream: socket });
    let sender = TcpSender { socket: socket.clone(), writable: true };
    Ok((Box::new(sender), Box::new(TcpReceiver { socket, readable: true })))
}

struct Socket {
    _watched: Watched,
    stream: TcpStream,
}

struct TcpSender {
    socket: Arc<Socket>,
    writable: bool,
}

impl Sender for TcpSender {
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
        let slices = [IoSlice::new(head), IoSlice::new(body)];
        let slices = if head.is_empty() { &slices[1..] } else { &slices[..] };
        loop {
            match (&self.socket.stream).write_vectored(slices) {
                Ok(n) => {
                    self.writable = n == head.len() + body.len();
                    return Ok(n);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.writable = false;
                    return Ok(0);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io("sending", e)),
            }
        }
    }

    fn has_room(&self) -> bool {
        self.writable
    }

    fn wake(&mut self) {
        self.writable = true;
    }

    fn close(&mut self) {
        // The peer may have closed already; either way nothing more is sent.
        let _ = self.socket.stream.shutdown(Shutdown::Write);
    }
}

struct TcpReceiver {
    socket: Arc<Socket>,
    readable: bool,
}

impl Receiver for TcpReceiver {
    fn read(&mut self, into: &mut [u8]) -> Result<Read> {
        loop {
            match (&self.socket.stream).read(into) {
                Ok(0) if !into.is_empty() => return Ok(Read::Closed),
                Ok(n) => return Ok(Read::Some(n)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.readable = false;
                    return Ok(Read::Nothing);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return Ok(Read::Closed),
                Err(e) => return Err(Error::io("receiving", e)),
            }
        }
    }

    fn has_input(&self) -> bool {
        self.readable
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.stream.as_fd())
    }

    fn wake(&mut self) {
        self.readable = true;
    }

    fn read_ahead(&self) -> usize {
        16 << 10
    }
}

/// Makes a dead host noticeable: the kernel gives an unacknowledged connection up after this.
pub fn keep_alive(socket: &TcpStream) -> Result<()> {
    let keep = socket2::TcpKeepalive::new()
        .with_time(std::time::Duration::from_secs(5))
        .with_interval(std::time::Duration::from_secs(2))
        .with_retries(5);
    SockRef::from(socket).set_tcp_keepalive(&keep).map_err(|e| Error::io("preparing a TCP connection", e))
}
