//! The receiving end of a connection.

use std::net::SocketAddr;

use socket2::Socket;

use crate::chunk::{Chunk, Incoming};
use crate::error::{Error, Result};
use crate::log;
use crate::region::Region;
use crate::ring::Ring;
use crate::stream::{Arrival, InStream};

/// What the kernels' buffers could hold of messages not asked for: a header further ahead is corrupt.
const FAR: u64 = 1 << 32;

/// Receives messages over some streams.
#[derive(Debug)]
pub(crate) struct Receiver {
    peer: SocketAddr,
    streams: Vec<InStream>,
    ring: Ring<Incoming>,
    failure: Option<Error>,
}

impl Receiver {
    /// Over these connected sockets, whose hellos have been read.
    pub(crate) fn new(peer: SocketAddr, sockets: Vec<Socket>) -> Self {
        let streams = sockets.into_iter().map(InStream::new).collect();
        Self { peer, streams, ring: Ring::new(), failure: None }
    }

    /// Begins to receive: the message's slot; `None` if too many are under way.
    pub(crate) fn post(&mut self, region: Region) -> Result<Option<usize>> {
        self.check()?;
        // Nothing is read here: NCCL posts in advance, mostly before anything has come.
        Ok(self.ring.push(Incoming::new(region)))
    }

    /// The size of the message in that slot, if it has come; the slot is free then.
    pub(crate) fn test(&mut self, slot: usize) -> Result<Option<usize>> {
        let size = |ring: &Ring<Incoming>| match ring.in_slot(slot) {
            Some(message) => Ok(message.size()),
            None => Err(Error::argument("NCCL tested a request that has ended")),
        };
        self.check()?;
        let mut done = size(&self.ring)?;
        if done.is_none() {
            self.progress(slot)?;
            done = size(&self.ring)?;
        }
        if done.is_some() {
            self.ring.take(slot);
        }
        Ok(done)
    }

    fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn progress(&mut self, wanted: usize) -> Result<()> {
        self.pull_all(wanted).map_err(|mut e| {
            e.message = format!("connection from {}: {}", self.peer, e.message);
            log::warn(&e.message);
            self.failure = Some(e.clone());
            self.streams.clear();
            self.ring.clear();
            e
        })
    }

    fn pull_all(&mut self, wanted: usize) -> Result<()> {
        for at in 0..self.streams.len() {
            self.pull_one(at)?;
        }
        // Streams carry messages in order: what waits for a later one brings nothing of this one.
        let is_missing = self.ring.in_slot(wanted).is_some_and(|message| message.size().is_none());
        if is_missing && self.streams.iter().all(InStream::is_past) {
            return Err(Error::remote("the peer closed the connection before a message was complete"));
        }
        Ok(())
    }

    /// One stream brings what it has, as long as it belongs to messages that were asked for.
    fn pull_one(&mut self, at: usize) -> Result<()> {
        let mut drained = false;
        loop {
            let stream = &mut self.streams[at];
            // A read that came back short would come back empty now; what was read ahead is in memory.
            if let Some(chunk) = stream.current() {
                if drained && !stream.has_ahead() {
                    return Ok(());
                }
                let message = message(&mut self.ring, chunk)?;
                let (bytes, arrival) = stream.pull(&mut message.region)?;
                message.receive(bytes);
                drained |= arrival == Arrival::Short;
            } else if let Some(chunk) = stream.next_header()? {
                if chunk.number >= self.ring.next() {
                    let is_corrupt = chunk.number - self.ring.next() > FAR;
                    return if is_corrupt {
                        Err(Error::remote("corrupt header from the peer"))
                    } else {
                        Ok(())
                    };
                }
                message(&mut self.ring, chunk)?.claim(chunk)?;
                stream.begin(chunk);
            } else {
                if drained {
                    return Ok(());
                }
                match stream.look_ahead()? {
                    Arrival::Full => {}
                    Arrival::Short => drained = true,
                    Arrival::End => return Ok(()),
                }
            }
        }
    }
}

fn message(ring: &mut Ring<Incoming>, chunk: Chunk) -> Result<&mut Incoming> {
    ring.by_number(chunk.number)
        .ok_or_else(|| Error::remote("the peer sent a chunk of a message that has ended"))
}
