//! TLS over TCP between hosts: nobody in between can read or alter what travels.
//!
//! Both directions of a connection share one session, as they share the socket; only the thread that holds the
//! progress lock uses either. What the socket does not take stays in the session, and until it has left, the last
//! byte written counts as not written. So at most one piece (128 KiB) waits in the session, the link retries with the
//! rest when there is space, and no frame counts as sent before it has left.

use std::io::{ErrorKind, IoSlice, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::Connection;
use socket2::SockRef;
use trigram_core::{Error, Result};

use crate::sys::fork::GuardedFd;
use crate::sys::socket;
use crate::transport::far;
use crate::transport::stream::{Carried, Read, Receiver, Sender};
use crate::transport::tcp;

/// Plaintext that is encrypted at a time, and that waits for the socket at most.
const PIECE: usize = 128 << 10;
/// Ciphertext that is read from the socket at a time: the session itself would read 4 KiB.
const AHEAD: usize = 128 << 10;

/// Splits a connected socket, on which a session has been set up, into its two directions.
pub fn split(socket: TcpStream, mut session: Connection) -> Result<(Box<dyn Sender>, Box<dyn Receiver>)> {
    let io = |e: std::io::Error| Error::io("setting up a TCP connection", e);
    socket.set_nodelay(true).map_err(io)?;
    socket.set_nonblocking(true).map_err(io)?;
    session.set_buffer_limit(None); // the sender keeps to its own
    let state = State { session, writable: true, held: vec![0; AHEAD], at: 0, end: 0 };
    let link = Arc::new(Link { _guard: GuardedFd::new(&socket), socket, state: Mutex::new(state) });
    let sender = TlsSender { link: link.clone(), owed: false };
    // Data may have arrived together with the end of the handshake.
    Ok((Box::new(sender), Box::new(TlsReceiver { link, readable: true })))
}

struct Link {
    _guard: GuardedFd,
    socket: TcpStream,
    state: Mutex<State>,
}

struct State {
    session: Connection,
    /// The socket has taken all that it was given last.
    writable: bool,
    /// Ciphertext read ahead.
    held: Vec<u8>,
    at: usize,
    end: usize,
}

impl Link {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the socket what the session holds for it; true if it took all.
    fn push(&self, state: &mut State) -> Result<bool> {
        while state.session.wants_write() {
            match state.session.write_tls(&mut Raw(&self.socket)) {
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    state.writable = false;
                    return Ok(false);
                }
                Err(e) => return Err(tcp::failed(e)),
            }
        }
        state.writable = true;
        Ok(true)
    }
}

/// The socket as the session writes to it.
struct Raw<'a>(&'a TcpStream);

impl std::io::Write for Raw<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> std::io::Result<usize> {
        // MSG_EOR, as in `tcp`.
        SockRef::from(self.0).send_vectored_with_flags(slices, libc::MSG_NOSIGNAL | libc::MSG_EOR)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct TlsSender {
    link: Arc<Link>,
    /// One byte has been encrypted that was not counted as written.
    owed: bool,
}

impl Sender for TlsSender {
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
        let mut state = self.link.state();
        if !self.link.push(&mut state)? {
            return Ok(0);
        }
        let len = head.len() + body.len();
        let mut done = usize::from(std::mem::take(&mut self.owed)).min(len);
        while done < len {
            let slices = [
                IoSlice::new(&head[done.min(head.len())..]),
                IoSlice::new(
                    &body[done.saturating_sub(head.len())..][..PIECE.min(len - done.max(head.len()))],
                ),
            ];
            done += state
                .session
                .writer()
                .write_vectored(&slices)
                .map_err(|e| Error::io("sending to a peer", e))?;
            if !self.link.push(&mut state)? {
                self.owed = true;
                return Ok(done - 1);
            }
        }
        Ok(done)
    }

    fn has_room(&self) -> bool {
        self.link.state().writable
    }

    fn wake(&mut self) {
        self.link.state().writable = true;
    }

    fn unacknowledged(&self) -> Option<u64> {
        Some(socket::waiting(self.link.socket.as_fd(), libc::TIOCOUTQ))
    }

    fn carried(&self) -> Option<Carried> {
        far::carried(self.link.socket.as_fd())
    }

    fn close(&mut self) {
        let mut state = self.link.state();
        state.session.send_close_notify();
        // The peer may have closed already; either way nothing more is sent.
        let _ = self.link.push(&mut state);
        let _ = self.link.socket.shutdown(Shutdown::Write);
    }
}

struct TlsReceiver {
    link: Arc<Link>,
    /// The socket, what was read ahead, or the session may have more.
    readable: bool,
}

impl Receiver for TlsReceiver {
    fn read(&mut self, into: &mut [u8]) -> Result<Read> {
        let mut guard = self.link.state();
        loop {
            let state = &mut *guard;
            match state.session.reader().read(into) {
                Ok(0) if !into.is_empty() => return Ok(Read::Closed),
                Ok(n) => return Ok(Read::Some(n)),
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(Read::Closed),
                Err(e) => return Err(Error::io("receiving from a peer", e)),
            }
            if state.at < state.end {
                let held = &mut &state.held[state.at..state.end];
                state.at +=
                    state.session.read_tls(held).map_err(|e| Error::io("receiving from a peer", e))?;
                // Altered data is detected here: the connection is lost, and none of it is passed on.
                state.session.process_new_packets().map_err(|e| Error::io("receiving from a peer", e))?;
                if state.session.wants_write() {
                    self.link.push(state)?;
                }
                continue;
            }
            match tcp::receive(&self.link.socket, &mut state.held, &mut self.readable)? {
                Read::Some(n) => (state.at, state.end) = (0, n),
                other => return Ok(other),
            }
        }
    }

    fn has_input(&self) -> bool {
        self.readable
    }

    fn each_socket(&self, look: &mut dyn FnMut(BorrowedFd<'_>)) {
        look(self.link.socket.as_fd());
    }

    fn wake(&mut self) {
        self.readable = true;
    }
}
