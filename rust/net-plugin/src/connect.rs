//! The connecting end.
//!
//! NCCL calls `connect` until it gives a connection, with the same handle buffer. What is under way meanwhile is
//! kept here, under an attempt id that is written to that buffer: a pointer there would be the peer's to forge.

use std::collections::HashMap;
use std::io;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Instant;

use socket2::Socket;

use crate::error::{Error, Result, is_interrupted, is_later};
use crate::handle::{self, Handle};
use crate::hello::{self, Hello};
use crate::log;
use crate::send::Sender;
use crate::settings::Settings;
use crate::socket;
use crate::token;

static UNDER_WAY: LazyLock<Mutex<HashMap<u64, Attempt>>> = LazyLock::new(Mutex::default);

/// A connection in the making.
#[derive(Debug)]
struct Attempt {
    to: Handle,
    since: Instant,
    settings: Settings,
    streams: Vec<Half>,
}

/// A stream that has not said all of its hello.
#[derive(Debug)]
struct Half {
    socket: Socket,
    hello: [u8; hello::SIZE],
    said: usize,
}

/// Begins a connection, or goes on with it; `None`: call again.
pub(crate) fn connect(bytes: &mut [u8; handle::SIZE], settings: Settings) -> Result<Option<Sender>> {
    let to = Handle::read(bytes)?;
    let named = handle::attempt_id(bytes);
    let found = {
        let mut all = UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that NCCL gave up.
        all.retain(|attempt_id, attempt| {
            *attempt_id == named || attempt.since.elapsed() < attempt.settings.timeout * 2
        });
        all.remove(&named).filter(|attempt| attempt.to == to)
    };
    let made = match found {
        Some(attempt) => Ok(attempt),
        None if named != 0 => Err(Error::argument("connect: this handle's connection attempt is over")),
        None => Attempt::new(to, settings),
    };
    match made.and_then(Attempt::go_on) {
        Ok(Ok(sender)) => {
            handle::set_attempt_id(bytes, 0);
            Ok(Some(sender))
        }
        Ok(Err(attempt)) => {
            let attempt_id = if named == 0 { u64::from_le_bytes(token::random()?).max(1) } else { named };
            handle::set_attempt_id(bytes, attempt_id);
            UNDER_WAY.lock().unwrap_or_else(PoisonError::into_inner).insert(attempt_id, attempt);
            Ok(None)
        }
        Err(e) => {
            log::warn(&e.message);
            Err(e)
        }
    }
}

impl Attempt {
    fn new(to: Handle, settings: Settings) -> Result<Self> {
        let connection = token::random()?;
        let streams = (0..settings.streams).map(|stream| {
            let hello = Hello { connection, stream, streams: settings.streams }.write(&to.token);
            let socket = socket::connecting(to.address, settings.timeout).map_err(|e| failed(&to, &e))?;
            Ok(Half { socket, hello, said: 0 })
        });
        Ok(Self { to, since: Instant::now(), settings, streams: streams.collect::<Result<_>>()? })
    }

    /// The connection, or what is still in the making.
    fn go_on(mut self) -> Result<std::result::Result<Sender, Self>> {
        let mut complete = true;
        for stream in &mut self.streams {
            complete &= stream.go_on().map_err(|e| failed(&self.to, &e))?;
        }
        if complete {
            let sockets: Vec<Socket> = self.streams.into_iter().map(|half| half.socket).collect();
            log::info(&format!("connected {} streams to {}", sockets.len(), self.to.address));
            return Ok(Ok(Sender::new(self.to.address, sockets, &self.settings)));
        }
        if self.since.elapsed() >= self.settings.timeout {
            return Err(failed(&self.to, &io::ErrorKind::TimedOut.into()));
        }
        Ok(Err(self))
    }
}

impl Half {
    /// Whether the hello has been said.
    fn go_on(&mut self) -> io::Result<bool> {
        if self.said == 0 && !socket::has_arrived(&self.socket)? {
            return Ok(false);
        }
        while self.said < hello::SIZE {
            match self.socket.send_with_flags(&self.hello[self.said..], libc::MSG_NOSIGNAL) {
                Ok(sent) => self.said += sent,
                Err(e) if is_later(&e) => return Ok(false),
                Err(e) if is_interrupted(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }
}

fn failed(to: &Handle, e: &io::Error) -> Error {
    Error::remote(format!("connecting to {}: {e}", to.address))
}
