//! The sending end of a connection.

use std::net::SocketAddr;

use socket2::Socket;

use crate::chunk::{Chunk, Outgoing};
use crate::error::{Error, Result};
use crate::liveness::SilenceDetector;
use crate::log;
use crate::region::Region;
use crate::ring::Ring;
use crate::settings::Settings;
use crate::stream::OutStream;

/// Sends messages over some streams.
#[derive(Debug)]
pub(crate) struct Sender {
    peer: SocketAddr,
    chunk: usize,
    streams: Vec<OutStream>,
    ring: Ring<Outgoing>,
    /// The oldest message of which streams have not taken all.
    open: u64,
    silence_detector: SilenceDetector,
    failure: Option<Error>,
}

impl Sender {
    /// Over these connected sockets.
    pub(crate) fn new(peer: SocketAddr, sockets: Vec<Socket>, settings: &Settings) -> Self {
        Self {
            peer,
            chunk: settings.chunk,
            silence_detector: SilenceDetector::new(sockets.len(), settings.timeout),
            streams: sockets.into_iter().map(OutStream::new).collect(),
            ring: Ring::new(),
            open: 0,
            failure: None,
        }
    }

    /// Begins to send: the message's slot; `None` if too many are under way.
    pub(crate) fn post(&mut self, region: Region) -> Result<Option<usize>> {
        self.check()?;
        let Some(slot) = self.ring.push(Outgoing::new(region)) else { return Ok(None) };
        // A failure now is `test`'s to report.
        let _ = self.progress();
        Ok(Some(slot))
    }

    /// The size of the message in that slot, if it has been sent; the slot is free then.
    pub(crate) fn test(&mut self, slot: usize) -> Result<Option<usize>> {
        let is_done = |ring: &Ring<Outgoing>| match ring.in_slot(slot) {
            Some(message) => Ok(message.is_done()),
            None => Err(Error::argument("NCCL tested a request that has ended")),
        };
        self.check()?;
        if !is_done(&self.ring)? {
            self.progress()?;
            if !is_done(&self.ring)? {
                return Ok(None);
            }
        }
        Ok(self.ring.take(slot).map(|message| message.region.len()))
    }

    fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn progress(&mut self) -> Result<()> {
        self.check()?;
        self.push_all().map_err(|mut e| {
            e.message = format!("connection to {}: {}", self.peer, e.message);
            log::warn(&e.message);
            self.failure = Some(e.clone());
            self.streams.clear();
            self.ring.clear();
            e
        })
    }

    fn push_all(&mut self) -> Result<()> {
        let mut moved = false;
        for at in 0..self.streams.len() {
            moved |= self.push_one(at)?;
        }
        if moved {
            self.silence_detector.moved();
        } else if let Some(silence) = self.silence_detector.silence(self.streams.iter().map(|s| &s.socket)) {
            return Err(Error::remote(format!("no answer from the peer for {} s", silence.as_secs())));
        }
        Ok(())
    }

    /// One stream takes what it can: whether that was anything.
    fn push_one(&mut self, at: usize) -> Result<bool> {
        let mut moved = false;
        loop {
            let chunk = match self.streams[at].current() {
                Some(chunk) => chunk,
                None => match self.next_chunk() {
                    Some(chunk) => {
                        self.streams[at].take(chunk);
                        chunk
                    }
                    None => return Ok(moved),
                },
            };
            let Some(message) = self.ring.by_number(chunk.number) else {
                return Err(Error::internal("internal error: a chunk belongs to no message"));
            };
            let sent = self.streams[at].push(&message.region);
            let (bytes, finished) = sent.map_err(|e| Error::remote(format!("sending failed: {e}")))?;
            moved |= bytes > 0;
            match finished {
                Some(chunk) => message.finish(chunk),
                None => return Ok(moved),
            }
        }
    }

    fn next_chunk(&mut self) -> Option<Chunk> {
        while self.open < self.ring.next() {
            let message = self.ring.by_number(self.open);
            if let Some(chunk) = message.and_then(|message| message.next_chunk(self.open, self.chunk)) {
                return Some(chunk);
            }
            self.open += 1;
        }
        None
    }
}
