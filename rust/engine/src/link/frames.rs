//! Frames over a byte stream: a queue in the outward direction, a small state machine in the inward one.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use trigram_core::wire::{Frame, HEADER, Kind, Sum};
use trigram_core::{Error, Result};

use crate::lanes::pool::{Lanes, Ticket};
use crate::lanes::task::Task;
use crate::link::moves::{Absent, Check, Count, Incoming, Out, Outgoing, Payload};
use crate::sys::socket;
use crate::transport::stream::{Read, Receiver, Sender};

pub use crate::link::moves::Token;

/// The outward direction to a peer: frames in the order in which they became ready.
pub struct Tx {
    sender: Box<dyn Sender>,
    queue: VecDeque<Out>,
    /// A lane has the sender, and sends a frame that was the first.
    away: Option<Task<Outgoing>>,
    /// Meanwhile the transport could be written to again.
    woken: bool,
    /// The last attempt to write found no room, and the transport cannot tell when there is some: until this thread has
    /// found some, no lane is asked to try. Otherwise the two would try in turns, and neither sleep.
    is_full: bool,
    /// See [`Sender::may_hold`].
    may_hold: bool,
    /// What failed in a lane.
    error: Option<Error>,
    failed: bool,
    /// Payload bytes handed over so far.
    pub bytes: u64,
    written: Count,
}

/// The lanes that may send for a connection, and the rank to which it leads.
pub(crate) type Lent<'a> = Option<(&'a Lanes, u32)>;

impl Tx {
    /// The outward direction over a stream.
    pub fn new(sender: Box<dyn Sender>) -> Self {
        let may_hold = sender.may_hold();
        Self {
            sender,
            queue: VecDeque::new(),
            away: None,
            woken: false,
            is_full: false,
            may_hold,
            error: None,
            failed: false,
            bytes: 0,
            written: Count::default(),
        }
    }

    /// Whether no frame waits.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.away.is_none() && self.sender.is_drained()
    }

    /// See [`Sender::may_hold`].
    pub(crate) fn may_hold(&self) -> bool {
        self.may_hold
    }

    /// Bytes that the transport has taken so far, headers included.
    pub fn written(&self) -> u64 {
        self.written.get()
    }

    /// Whether the transport has something that was written to it, and can still send it.
    pub(crate) fn holds_back(&self) -> bool {
        !self.failed && !self.sender.is_drained()
    }

    /// See [`Sender::tick`]. Whoever writes next finds the same error.
    pub(crate) fn tick(&mut self, soon: bool) {
        if !self.failed && self.may_hold {
            self.recall();
            let _ = self.sender.tick(soon);
        }
    }

    /// See [`Sender::unacknowledged`].
    pub(crate) fn unacknowledged(&mut self) -> Option<u64> {
        self.recall();
        self.sender.unacknowledged()
    }

    /// The transport has failed, and those who should know do: it is not tried again.
    pub(crate) fn give_up(&mut self) {
        self.failed = true;
    }

    /// Bytes that the transport has not taken yet, headers included.
    pub(crate) fn waiting_bytes(&mut self) -> u64 {
        self.recall();
        self.queue.iter().map(|out| out.left() as u64).sum()
    }

    /// The transport can be written to again.
    pub fn wake(&mut self) {
        match self.away {
            Some(_) => self.woken = true,
            None => self.sender.wake(),
        }
    }

    /// Sends a frame with memory of a call; true if all of it is sent already.
    ///
    /// # Safety
    ///
    /// `len` bytes from `body` stay readable until the token comes back from [`Tx::pump`] or the call has been taken
    /// back.
    pub(crate) unsafe fn lend(
        &mut self,
        frame: &Frame,
        body: *const u8,
        len: usize,
        token: Token,
        done: &mut Vec<Token>,
        lanes: Lent<'_>,
    ) -> Result<bool> {
        let was_idle = self.is_idle();
        self.bytes += len as u64;
        self.queue.push_back(Out::new(*frame, Payload::Lent(body, len), Some(token)));
        if was_idle {
            let before = done.len();
            // Whoever writes next finds the same error, and why the peer takes nothing more.
            if self.pump(done, lanes).is_err() {
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
        self.queue.push_back(Out::new(*frame, Payload::Owned(body), None));
    }

    /// Writes what fits, or lets a lane do so; true if anything moved. Steps whose frame has left are added to `done`.
    pub(crate) fn pump(&mut self, done: &mut Vec<Token>, lanes: Lent<'_>) -> Result<bool> {
        if self.failed {
            return Ok(false);
        }
        let mut moved = false;
        if let Some(task) = &self.away {
            if lanes.is_some() && !task.is_finished() {
                return Ok(false);
            }
            moved = self.recall() > 0;
        }
        if let Some(error) = self.error.take() {
            return Err(error);
        }
        moved |= self.sender.drain()?;
        loop {
            self.take_sent(done);
            let Some(out) = self.queue.front_mut() else { break };
            let left = out.left();
            if !self.sender.has_room() {
                break;
            }
            let lanes = lanes.filter(|_| !self.is_full);
            if let Some((lanes, rank)) =
                lanes.filter(|(lanes, _)| out.token.is_some() && lanes.want(out.whole(), left))
            {
                if moved {
                    self.sender.flush(); // what this thread has written
                }
                if let Some(out) = self.queue.pop_front() {
                    let sender = std::mem::replace(&mut self.sender, Box::new(Absent));
                    let work = Outgoing {
                        sender,
                        out,
                        written: self.written.clone(),
                        failed: None,
                        is_full: false,
                        moved: 0,
                    };
                    self.away = Some(lanes.submit(Ticket::Sent(rank), work));
                }
                return Ok(true);
            }
            let n = out.write(&mut *self.sender)?;
            self.written.add(n);
            moved |= n > 0;
            // What has just found some room has probably filled it.
            let fills = n == 0 || self.is_full && n < left;
            self.is_full = fills && self.sender.has_room();
            if fills {
                break;
            }
        }
        if moved {
            self.sender.flush();
        }
        Ok(moved)
    }

    /// Takes back what a lane has: from here on no lane uses the connection. How many bytes the lane has written.
    pub(crate) fn recall(&mut self) -> usize {
        let Some(work) = self.away.take().and_then(|task| task.recall()) else { return 0 };
        let Outgoing { sender, out, failed, is_full, moved, .. } = work;
        self.sender = sender;
        self.queue.push_front(out);
        self.error = failed;
        self.is_full = is_full;
        if std::mem::take(&mut self.woken) {
            self.sender.wake();
        }
        moved
    }

    /// Adds the steps whose frames have left to `done`.
    pub(crate) fn take_sent(&mut self, done: &mut Vec<Token>) {
        while self.queue.front().is_some_and(|out| out.left() == 0) {
            done.extend(self.queue.pop_front().and_then(|out| out.token));
        }
    }

    /// Takes a call's memory back: drops frames not begun, and copies the rest of one begun, so that the stream stays
    /// in step.
    pub fn take_back(&mut self, call: u64) {
        self.recall();
        let is_its = |out: &Out| out.token.is_some_and(|t| t.call == call);
        self.queue.retain(|out| !is_its(out) || out.sent > 0);
        for out in self.queue.iter_mut().filter(|out| is_its(out)) {
            out.body = Payload::Owned(out.body.bytes().to_vec());
            out.token = None;
        }
    }

    /// Whether a frame of this call has not left yet; to be asked when no lane has one.
    pub(crate) fn holds(&self, call: u64) -> bool {
        self.queue.iter().any(|out| out.token.is_some_and(|t| t.call == call))
    }

    /// Closes the direction: no more frames.
    pub fn close(&mut self) {
        self.recall();
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

/// The inward direction from a peer.
pub struct Rx {
    /// The peer's world rank.
    pub peer: u32,
    receiver: Box<dyn Receiver>,
    /// Its sockets, which stay open as long as it is there.
    sockets: Vec<RawFd>,
    state: State,
    /// A lane has the receiver, and receives the rest of a payload.
    away: Option<Task<Incoming>>,
    /// Meanwhile the socket has become readable.
    woken: bool,
    /// The last attempt to read found nothing, although there may be something; see [`Tx`]'s `is_full`.
    is_dry: bool,
    /// What a lane's last read came to, if there may be nothing more.
    read: Option<Result<Read>>,
    /// See [`Receiver::signs`], as of the last look.
    signs: u64,
    ahead: Vec<u8>,
    ahead_at: usize,
    ahead_end: usize,
    /// The peer has announced that it leaves the job.
    pub is_leaving: bool,
    bytes: Count,
}

// SAFETY: memory of a call is written only by the thread that holds the progress lock, or by a lane from which that
// thread takes it back, and redirected before it goes away.
unsafe impl Send for Rx {}

/// The outcome of `Rx::pump`.
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
        let mut sockets = Vec::new();
        receiver.each_socket(&mut |fd| sockets.push(fd.as_raw_fd()));
        Self {
            peer,
            receiver,
            sockets,
            state: State::Head([0; HEADER], 0),
            away: None,
            woken: false,
            is_dry: false,
            read: None,
            signs: 0,
            ahead,
            ahead_at: 0,
            ahead_end: 0,
            is_leaving: false,
            bytes: Count::default(),
        }
    }

    /// Whether `Rx::pump` may find something.
    pub fn has_input(&self) -> bool {
        match &self.away {
            Some(task) => task.is_finished(),
            None => self.read.is_some() || self.ahead_at < self.ahead_end || self.receiver.has_input(),
        }
    }

    /// Bytes received so far, headers included.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Shows the sockets that carry its bytes.
    pub fn each_socket(&self, look: &mut dyn FnMut(BorrowedFd<'_>)) {
        for &socket in &self.sockets {
            // SAFETY: the receiver, here or with a lane, keeps it open.
            look(unsafe { BorrowedFd::borrow_raw(socket) });
        }
    }

    /// Whether a socket carries its bytes.
    pub(crate) fn has_socket(&self) -> bool {
        !self.sockets.is_empty()
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
        match self.away {
            Some(_) => self.woken = true,
            None => self.receiver.wake(),
        }
    }

    /// A number that grows whenever something arrives.
    pub(crate) fn signs(&mut self) -> u64 {
        if self.away.is_none() {
            self.signs = self.receiver.signs();
        }
        self.bytes() + self.signs
    }

    /// Takes back what a lane has: from here on no lane uses the connection, or the memory of the call. How many bytes the
    /// lane has read.
    pub(crate) fn recall(&mut self) -> usize {
        let Some(incoming) = self.away.take().and_then(|task| task.recall()) else { return 0 };
        self.receiver = incoming.receiver;
        if let State::Payload(_, _, got, check) = &mut self.state {
            *got += incoming.got;
            *check = incoming.check;
        }
        // A payload that is complete is to be looked at, too.
        let is_over = incoming.got == incoming.len || !matches!(incoming.read, Ok(Read::Some(_)));
        self.read = is_over.then_some(incoming.read);
        if std::mem::take(&mut self.woken) {
            self.receiver.wake();
        }
        incoming.got
    }

    /// Drops what is arriving for a call from now on.
    pub fn redirect(&mut self, call: u64) {
        let is_its = matches!(&self.state, State::Payload(_, Target::Memory(_, t), ..) if t.call == call);
        if is_its {
            self.recall();
            if let State::Payload(_, target, ..) = &mut self.state {
                *target = Target::Nowhere;
            }
        }
    }

    /// Reads what there is, and drops it.
    pub(crate) fn drop_input(&mut self) -> Result<Pumped> {
        let mut nowhere = [0; 16 << 10];
        self.recall();
        if let Some(read) = self.read.take() {
            match read? {
                Read::Closed => return Ok(Pumped::Closed),
                Read::Some(_) | Read::Nothing => {}
            }
        }
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

    /// Reads what there is, or lets one of these lanes do so.
    pub(crate) fn pump(&mut self, sink: &mut dyn Sink, lanes: Option<&Lanes>) -> Result<Pumped> {
        let mut moved = false;
        if let Some(task) = &self.away {
            if lanes.is_some() && !task.is_finished() {
                return Ok(Pumped::Nothing);
            }
            moved = self.recall() > 0;
        }
        let before = self.bytes();
        let mut last = self.read.take();
        if last.is_some() {
            self.end_if_complete(sink)?;
        }
        let outcome = loop {
            if (self.bytes() - before) as usize >= TURN {
                break Pumped::Moved;
            }
            if let Some(lanes) = lanes.filter(|_| last.is_none() && !self.is_dry)
                && self.hand_over(lanes)
            {
                break Pumped::Moved;
            }
            let read = match last.take().filter(|read| !matches!(read, Ok(Read::Some(_)))) {
                Some(read) => read?,
                None => self.advance(sink)?,
            };
            self.is_dry = read == Read::Nothing && self.receiver.has_input();
            match read {
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
        moved |= self.bytes() > before;
        Ok(if moved && outcome == Pumped::Nothing { Pumped::Moved } else { outcome })
    }

    /// Lets a lane receive the rest of a payload, if it is much and may be there; true if one does.
    fn hand_over(&mut self, lanes: &Lanes) -> bool {
        let State::Payload(frame, Target::Memory(at, _), got, check) = &mut self.state else { return false };
        let left = frame.len as usize - *got;
        if !lanes.want(frame.len as usize, left)
            || self.ahead_at < self.ahead_end
            || !self.receiver.has_input()
        {
            return false;
        }
        let work = Incoming {
            receiver: std::mem::replace(&mut self.receiver, Box::new(Absent)),
            // SAFETY: see `Target::Memory`; the length was checked against the span.
            into: unsafe { at.add(*got) },
            len: left,
            got: 0,
            check: check.take(),
            bytes: self.bytes.clone(),
            read: Ok(Read::Some(0)),
        };
        self.away = Some(lanes.submit(Ticket::Received(self.peer), work));
        true
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
            self.bytes.add(n);
        }
        Ok(read)
    }
}
