//! One TCP stream of a connection: chunks behind their headers.

use std::io::{self, IoSlice, IoSliceMut, Read};

use socket2::Socket;

use crate::chunk::{Chunk, HEADER};
use crate::error::{Error, Result, is_interrupted, is_later};
use crate::handle::part;
use crate::region::Region;

/// Small messages are read together, and copied out of here; so is the beginning of what follows a large one.
const AHEAD: usize = 4096;

/// The sending end.
#[derive(Debug)]
pub(crate) struct OutStream {
    /// Connected.
    pub(crate) socket: Socket,
    /// What it is sending, and how many bytes of that have gone out, header included.
    current: Option<(Chunk, usize)>,
}

impl OutStream {
    /// With nothing to send yet.
    pub(crate) fn new(socket: Socket) -> Self {
        Self { socket, current: None }
    }

    /// What it is sending.
    pub(crate) fn current(&self) -> Option<Chunk> {
        self.current.map(|(chunk, _)| chunk)
    }

    /// Takes a chunk; it must have none.
    pub(crate) fn take(&mut self, chunk: Chunk) {
        self.current = Some((chunk, 0));
    }

    /// Sends as much as the kernel takes: the bytes that it took, and the chunk if that was the last of it.
    pub(crate) fn push(&mut self, region: &Region) -> io::Result<(usize, Option<Chunk>)> {
        let Some((chunk, gone)) = self.current else { return Ok((0, None)) };
        let header = chunk.header();
        let paid = gone.saturating_sub(HEADER);
        let payload = region.bytes(chunk.offset + paid, chunk.len - paid);
        let parts = [IoSlice::new(&header[gone.min(HEADER)..]), IoSlice::new(payload)];
        let parts = if gone < HEADER { &parts[..] } else { &parts[1..] };
        let sent = loop {
            match self.socket.send_vectored_with_flags(parts, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) {
                Err(e) if is_interrupted(&e) => {}
                Err(e) if is_later(&e) => return Ok((0, None)),
                other => break other?,
            }
        };
        let gone = gone + sent;
        let done = gone == HEADER + chunk.len;
        self.current = (!done).then_some((chunk, gone));
        Ok((sent, done.then_some(chunk)))
    }
}

/// What a read brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// As much as there was room for: there may be more.
    Full,
    /// All that was there.
    Short,
    /// The peer will send no more.
    End,
}

/// The receiving end.
#[derive(Debug)]
pub(crate) struct InStream {
    socket: Socket,
    ahead: Box<[u8; AHEAD]>,
    start: usize,
    end: usize,
    current: Option<Chunk>,
    /// Of a chunk whose message nobody has asked for yet.
    waiting: Option<Chunk>,
    ended: bool,
}

impl InStream {
    /// With nothing received yet.
    pub(crate) fn new(socket: Socket) -> Self {
        Self {
            socket,
            ahead: Box::new([0; AHEAD]),
            start: 0,
            end: 0,
            current: None,
            waiting: None,
            ended: false,
        }
    }

    /// Nothing more comes on it before another message is asked for, if ever.
    pub(crate) fn is_past(&self) -> bool {
        self.current.is_none() && (self.ended || self.waiting.is_some())
    }

    /// Whether something is in memory already.
    pub(crate) fn has_ahead(&self) -> bool {
        self.end > self.start
    }

    /// What is coming: the rest of a chunk.
    pub(crate) fn current(&self) -> Option<Chunk> {
        self.current
    }

    /// The next chunk's header, if it has come; it stays until it is begun.
    pub(crate) fn next_header(&mut self) -> Result<Option<Chunk>> {
        if self.waiting.is_none() && self.end - self.start >= HEADER {
            self.waiting = Some(Chunk::read(&part(&self.ahead[..], self.start))?);
            self.start += HEADER;
        }
        Ok(self.waiting)
    }

    /// Its payload goes where it belongs from now on.
    pub(crate) fn begin(&mut self, chunk: Chunk) {
        self.waiting = None;
        self.current = (chunk.len > 0).then_some(chunk);
    }

    /// Reads the current chunk's payload: the bytes that are now in the region.
    pub(crate) fn pull(&mut self, region: &mut Region) -> Result<(usize, Arrival)> {
        let Some(chunk) = self.current else { return Ok((0, Arrival::Full)) };
        let room = region.room(chunk.offset, chunk.len);
        let there = room.len().min(self.end - self.start);
        if there > 0 {
            room[..there].copy_from_slice(&self.ahead[self.start..self.start + there]);
            self.start += there;
            self.advance(chunk, there);
            return Ok((there, Arrival::Full));
        }
        let wanted = room.len();
        let mut parts = [IoSliceMut::new(room), IoSliceMut::new(&mut self.ahead[..])];
        let got = match read(&self.socket, &mut parts)? {
            None => return Ok((0, Arrival::Short)),
            Some(0) => {
                return Err(Error::remote("the peer closed the connection in the middle of a message"));
            }
            Some(got) => got,
        };
        let paid = got.min(wanted);
        (self.start, self.end) = (0, got - paid);
        self.advance(chunk, paid);
        Ok((paid, if got == wanted + AHEAD { Arrival::Full } else { Arrival::Short }))
    }

    /// Reads the next header, and what follows it.
    pub(crate) fn look_ahead(&mut self) -> Result<Arrival> {
        if self.ended {
            return Ok(Arrival::End);
        }
        self.ahead.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        match read(&self.socket, &mut [IoSliceMut::new(&mut self.ahead[self.end..])])? {
            None => Ok(Arrival::Short),
            Some(0) if self.end > 0 => {
                Err(Error::remote("the peer closed the connection in the middle of a header"))
            }
            Some(0) => {
                self.ended = true;
                Ok(Arrival::End)
            }
            Some(got) => {
                self.end += got;
                Ok(if self.end == AHEAD { Arrival::Full } else { Arrival::Short })
            }
        }
    }

    fn advance(&mut self, chunk: Chunk, by: usize) {
        let rest = Chunk { offset: chunk.offset + by, len: chunk.len - by, ..chunk };
        self.current = (rest.len > 0).then_some(rest);
    }
}

/// `None`: nothing is there yet.
fn read(mut socket: &Socket, parts: &mut [IoSliceMut<'_>]) -> Result<Option<usize>> {
    loop {
        match socket.read_vectored(parts) {
            Ok(got) => return Ok(Some(got)),
            Err(e) if is_interrupted(&e) => {}
            Err(e) if is_later(&e) => return Ok(None),
            Err(e) => return Err(Error::remote(format!("receiving failed: {e}"))),
        }
    }
}
