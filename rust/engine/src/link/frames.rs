//! Frames over a byte stream: a queue in the outward direction, a small state machine in the inward one.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use trigram_core::wire::{Frame, HEADER, Kind, Sum};
use trigram_core::{Error, Result};

use crate::sys::socket;
use crate::transport::stream::{Read, Receiver, Sender};

/// The step of a call that a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// The call's number in this process.
    pub call: u64,
    /// The step of its schedule.
    pub step: u32,
}

/// What a frame carries.
#[derive(Debug)]
enum Payload {
    /// Memory of a call. The call takes it back ([`Tx::take_back`]) before the memory goes away.
    Lent(*const u8, usize),
    Owned(Vec<u8>),
}

impl Payload {
    fn bytes(&self) -> &[u8] {
        match self {
            // SAFETY: see `Payload::Lent`.
            Payload::Lent(at, len) => unsafe { std::slice::from_raw_parts(*at, *len) },
            Payload::Owned(bytes) => bytes,
        }
    }
}

#[derive(Debug)]
struct Out {
    head: [u8; HEADER],
    body: Payload,
    sent: usize,
    token: Option<Token>,
}

/// The outward direction to a peer: frames in the order in which they became ready.
pub struct Tx {
    sender: Box<dyn Sender>,
    queue: VecDeque<Out>,
    failed: bool,
    /// Payload bytes handed over so far.
    pub bytes: u64,
    /// Bytes that the transport has taken so far, headers included.
    pub written: u64,
}

// SAFETY: lent memory is read only while the progress lock is held, and taken back before it goes.
unsafe impl Send for Tx {}

impl Tx {
    /// The outward direction over a stream.
    pub fn new(sender: Box<dyn Sender>) -> Self {
        Self { sender, queue: VecDeque::new(), failed: false, bytes: 0, written: 0 }
    }

    /// Whether no frame waits.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.sender.is_drained()
    }

    /// See [`Sender::may_hold`].
    pub(crate) fn may_hold(&self) -> bool {
        self.sender.may_hold()
    }

    /// Whether the transport has something that was written to it, and can still send it.
    pub(crate) fn holds_back(&self) -> bool {
        !self.failed && !self.sender.is_drained()
    }

    /// See [`Sender::tick`]. Whoever writes next finds the same error.
    pub(crate) fn tick(&mut self, soon: bool) {
        if !self.failed {
            let _ = self.sender.tick(soon);
        }
    }

    /// See [`Sender::unacknowledged`].
    pub(crate) fn unacknowledged(&self) -> Option<u64> {
        self.sender.unacknowledged()
    }

    /// The transport has failed, and those who should know do: it is not tried again.
    pub(crate) fn give_up(&mut self) {
        self.failed = true;
    }

    /// Bytes that the transport has not taken yet, headers included.
    pub(crate) fn waiting_bytes(&self) -> u64 {
        self.queue.iter().map(|out| (HEADER + out.body.bytes().len() - out.sent) as u64).sum()
    }

    /// The transport can be written to again.
    pub fn wake(&mut self) {
        self.sender.wake();
    }

    /// Sends a frame with memory of a call; true if all of it is sent already.
    ///
    /// # Safety
    ///
    /// `len` bytes from `body` stay readable until the token comes back from [`Tx::pump`] or the call has been taken
    /// back.
    pub unsafe fn lend(
        &mut self,
        frame: &Frame,
        body: *const u8,
        len: usize,
        token: Token,
        done: &mut Vec<Token>,
    ) -> Result<bool> {
        let was_idle = self.is_idle();
        self.bytes += len as u64;
        self.push(frame, Payload::Lent(body, len), Some(token));
        if was_idle {
            let before = done.len();
            // Whoever writes next finds the same error, and why the peer takes nothing more.
            if self.pump(done).is_err() {
                return Ok(false);
            }
            if done.len() > before {
                done.pop(); // ours: the queue held nothing else
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Sends a frame with a payload of its own.
    pub fn give(&mut self, frame: &Frame, body: Vec<u8>) {
        self.push(frame, Payload::Owned(body), None);
    }

    fn push(&mut self, frame: &Frame, body: Payload, token: Option<Token>) {
        // The checksum first: it leaves the payload in the cache, where sending finds it.
        let sum = self.sender.is_summed().then(|| Sum::of(body.bytes()));
        self.queue.push_back(Out { head: frame.encode(sum), body, sent: 0, token });
    }

    /// Writes what fits; true if anything did. Steps whose frame has left are added to `done`.
    pub fn pump(&mut self, done: &mut Vec<Token>) -> Result<bool> {
        if self.failed {
            return Ok(false);
        }
        let mut moved = self.sender.drain()?;
        while let Some(out) = self.queue.front_mut() {
            if !self.sender.has_room() {
                break;
            }
            let head = &out.head[out.sent.min(HEADER)..];
            let body = &out.body.bytes()[out.sent.saturating_sub(HEADER)..];
            let (left, n) = (head.len() + body.len(), self.sender.write(head, body)?);
            out.sent += n;
            self.written += n as u64;
            moved |= n > 0;
            if n < left {
                if n == 0 {
                    break;
                }
                continue;
            }
            done.extend(self.queue.pop_front().and_then(|out| out.token));
        }
        if moved {
            self.sender.flush();
        }
        Ok(moved)
    }

    /// Takes a call's memory back: drops frames not begun, and copies the rest of one begun, so that the stream stays
    /// in step.
    pub fn take_back(&mut self, call: u64) {
        let is_its = |out: &Out| out.token.is_some_and(|t| t.call == call);
        self.queue.retain(|out| !is_its(out) || out.sent > 0);
        for out in self.queue.iter_mut().filter(|out| is_its(out)) {
            out.body = Payload::Owned(out.body.bytes().to_vec());
            out.token = None;
        }
    }

    /// Whether a frame of this call has not left yet.
    pub fn holds(&self, call: u64) -> bool {
        self.queue.iter().any(|out| out.token.is_some_and(|t| t.call == call))
    }

    /// Closes the direction: no more frames.
    pub fn close(&mut self) {
        self.sender.close();
    }
}

/// Where an arriving payload goes.
#[derive(Debug)]
pub enum Target {
    /// Into a call's memory. The call redirects it ([`Rx::redirect`]) before the memory goes away.
    Memory(*mut u8, Token),
    /// Into memory that grows with what arrives, see [`AHEAD`], until its call wants it.
    Heap(Vec<u8>),
    /// Read and dropped.
    Nowhere,
}

/// Decides where payloads go.
pub trait Sink {
    /// A frame begins.
    fn begin(&mut self, peer: u32, frame: &Frame) -> Result<Target>;
    /// Its payload has arrived.
    fn end(&mut self, peer: u32, frame: &Frame, target: Target) -> Result<()>;
}

enum State {
    Head([u8; HEADER], usize),
    Payload(Frame, Target, usize, Option<Check>),
}

/// The checksum that a payload must have, and that of the bytes so far.
struct Check(u32, Sum);

/// The inward direction from a peer.
pub struct Rx {
    /// The peer's world rank.
    pub peer: u32,
    receiver: Box<dyn Receiver>,
    state: State,
    ahead: Vec<u8>,
    ahead_at: usize,
    ahead_end: usize,
    /// The peer has announced that it leaves the job.
    pub is_leaving: bool,
    /// Bytes received so far, headers included.
    pub bytes: u64,
}

// SAFETY: memory of a call is written only while the progress lock is held, and redirected before it goes away.
unsafe impl Send for Rx {}

/// The outcome of [`Rx::pump`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pumped {
    /// Bytes arrived.
    Moved,
    /// None did.
    Nothing,
    /// The peer has closed its end.
    Closed,
}

/// For a payload that no call wants yet, memory is allocated this many bytes ahead of what has arrived, or as much
/// again as has arrived, whichever is more: a peer that announces much gets no memory for the announcement.
pub const AHEAD: usize = 1 << 20;

/// Payload bytes read from one peer before the others have their turn.
const TURN: usize = 1 << 20;

impl Rx {
    /// The inward direction over a stream.
    pub fn new(peer: u32, receiver: Box<dyn Receiver>) -> Self {
        let ahead = vec![0; receiver.read_ahead()];
        Self {
            peer,
            receiver,
            state: State::Head([0; HEADER], 0),
            ahead,
            ahead_at: 0,
            ahead_end: 0,
            is_leaving: false,
            bytes: 0,
        }
    }

    /// Whether [`Rx::pump`] may find something.
    pub fn has_input(&self) -> bool {
        self.ahead_at < self.ahead_end || self.receiver.has_input()
    }

    /// See [`Receiver::each_socket`].
    pub fn each_socket(&self, look: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.receiver.each_socket(look);
    }

    /// Whether a socket carries its bytes.
    pub(crate) fn has_socket(&self) -> bool {
        let mut any = false;
        self.each_socket(&mut |_| any = true);
        any
    }

    /// Bytes that wait in its sockets, see [`socket::waiting`]; `None` where there is no socket, so that what was written has
    /// arrived.
    pub(crate) fn waiting(&self, what: libc::c_ulong) -> Option<u64> {
        let mut sum = None;
        self.each_socket(&mut |fd| *sum.get_or_insert(0) += socket::waiting(fd, what));
        sum
    }

    /// A socket has become readable.
    pub fn wake(&mut self) {
        self.receiver.wake();
    }

    /// A number that grows whenever something arrives.
    pub(crate) fn signs(&self) -> u64 {
        self.bytes + self.receiver.signs()
    }

    /// Drops what is arriving for a call from now on.
    pub fn redirect(&mut self, call: u64) {
        if let State::Payload(_, target, ..) = &mut self.state
            && matches!(target, Target::Memory(_, token) if token.call == call)
        {
            *target = Target::Nowhere;
        }
    }

    /// Reads what there is, and drops it.
    pub(crate) fn drop_input(&mut self) -> Result<Pumped> {
        let mut nowhere = [0; 16 << 10];
        self.receiver.wake();
        let mut outcome = Pumped::Nothing;
        for _ in 0..TURN / nowhere.len() {
            match self.receiver.read(&mut nowhere)? {
                Read::Some(_) => outcome = Pumped::Moved,
                Read::Nothing => break,
                Read::Closed => return Ok(Pumped::Closed),
            }
        }
        Ok(outcome)
    }

    /// Whether none of its connections carries anything any more in either direction.
    pub(crate) fn is_broken(&self) -> bool {
        let mut broken = self.has_socket();
        self.each_socket(&mut |fd| broken &= socket::has_hung_up(fd));
        broken
    }

    /// Reads what there is.
    pub fn pump(&mut self, sink: &mut dyn Sink) -> Result<Pumped> {
        let before = self.bytes;
        let outcome = loop {
            if (self.bytes - before) as usize >= TURN {
                break Pumped::Moved;
            }
            match self.advance(sink)? {
                Read::Some(_) => {}
                Read::Nothing => {
                    self.receiver.expect(match &self.state {
                        State::Head(_, have) => HEADER - have,
                        State::Payload(frame, _, got, _) => frame.len as usize - got,
                    });
                    break Pumped::Nothing;
                }
                Read::Closed => break Pumped::Closed,
            }
        };
        let moved = self.bytes > before;
        Ok(if moved && outcome == Pumped::Nothing { Pumped::Moved } else { outcome })
    }

    /// One read, and what follows from it.
    fn advance(&mut self, sink: &mut dyn Sink) -> Result<Read> {
        match &mut self.state {
            State::Head(head, have) => {
                let mut head_now = *head;
                let at = *have;
                let read = self.fill(&mut head_now[at..])?;
                let Read::Some(n) = read else { return Ok(read) };
                if at + n < HEADER {
                    self.state = State::Head(head_now, at + n);
                    return Ok(read);
                }
                let rank = self.peer;
                let (frame, sum) =
                    Frame::decode(&head_now).map_err(|e| Error::Corrupt { rank, what: e.to_string() })?;
                let target = sink.begin(self.peer, &frame)?;
                self.state = State::Payload(frame, target, 0, sum.map(|sum| Check(sum, Sum::default())));
                self.end_if_complete(sink)?;
                Ok(read)
            }
            State::Payload(frame, target, got, _) => {
                let left = frame.len as usize - *got;
                let mut sump = [0u8; 4096];
                let into: &mut [u8] = match target {
                    // SAFETY: see `Target::Memory`; the length was checked against the span.
                    Target::Memory(at, _) => unsafe { std::slice::from_raw_parts_mut(at.add(*got), left) },
                    Target::Heap(bytes) => {
                        if bytes.len() == *got {
                            bytes.resize(*got + left.min(AHEAD.max(*got)), 0);
                        }
                        &mut bytes[*got..]
                    }
                    Target::Nowhere => &mut sump[..left.min(4096)],
                };
                let (into, len) = (into.as_mut_ptr(), into.len());
                // SAFETY: the slice above, free of the borrow of `self.state`; `fill` does not touch it.
                let into = unsafe { std::slice::from_raw_parts_mut(into, len) };
                let read = self.fill(into)?;
                if let (Read::Some(n), State::Payload(_, _, got, check)) = (read, &mut self.state) {
                    *got += n;
                    if let Some(Check(_, sum)) = check {
                        sum.add(&into[..n]);
                    }
                    self.end_if_complete(sink)?;
                }
                Ok(read)
            }
        }
    }

    fn end_if_complete(&mut self, sink: &mut dyn Sink) -> Result<()> {
        if let State::Payload(frame, _, got, check) = &self.state
            && *got == frame.len as usize
        {
            if check.as_ref().is_some_and(|Check(sum, seen)| seen.value() != *sum) {
                let what = format!(
                    "wrong checksum of {} bytes: bits flipped between the two hosts; check their network adapters, cables and memory",
                    frame.len
                );
                return Err(Error::Corrupt { rank: self.peer, what });
            }
            let State::Payload(frame, target, ..) =
                std::mem::replace(&mut self.state, State::Head([0; HEADER], 0))
            else {
                return Ok(());
            };
            self.is_leaving |= frame.kind == Kind::Leave;
            sink.end(self.peer, &frame, target)?;
        }
        Ok(())
    }

    /// Reads into `into`, through the read-ahead buffer where that saves a system call.
    fn fill(&mut self, into: &mut [u8]) -> Result<Read> {
        if self.ahead_at == self.ahead_end && into.len() < self.ahead.len() {
            (self.ahead_at, self.ahead_end) = match self.receiver.read(&mut self.ahead)? {
                Read::Some(n) => (0, n),
                other => return Ok(other),
            };
        }
        let held = self.ahead_end - self.ahead_at;
        let read = if held > 0 {
            let n = held.min(into.len());
            into[..n].copy_from_slice(&self.ahead[self.ahead_at..self.ahead_at + n]);
            self.ahead_at += n;
            Read::Some(n)
        } else {
            self.receiver.read(into)?
        };
        if let Read::Some(n) = read {
            self.bytes += n as u64;
        }
        Ok(read)
    }
}
