//! Connections on which this rank has nothing new to say: that to an evicted rank, and all of them when this rank leaves.
//!
//! A connection that is closed over unread bytes, or to which the peer still writes, is reset: the system discards what
//! has not arrived yet. So it stays open until the peer has everything, and what still comes from the peer is dropped.

use std::time::{Duration, Instant};

use crate::link::frames::{Pumped, Rx, Tx};

/// The least time that the connection to an evicted rank is kept.
const LEAST: Duration = Duration::from_secs(2);

/// How long a leaving rank waits while none of what it has sent arrives: a cable may be out for seconds.
const MOST_STANDSTILL: Duration = Duration::from_secs(10);

/// A peer whose host has everything closes its end when it next reads: at once, or with its next heartbeat. If it says
/// nothing at all for this long, it is stopped.
const ANSWER: Duration = Duration::from_millis(300);

/// The same where another rank passes everything on: that it has everything says little of the peer.
const ANSWER_THROUGH: Duration = Duration::from_secs(3);

/// A connection that is kept until its end.
pub(crate) struct ClosingConnection {
    tx: Tx,
    rx: Rx,
    since: Instant,
    /// Whether it still carries something.
    is_open: bool,
    /// The peer has closed its end.
    is_answered: bool,
    /// When the peer was heard last.
    heard: Instant,
    /// When its host had everything, and this direction was closed.
    closed: Option<Instant>,
    /// Bytes written, and those of them that have not arrived; and when this changed last.
    state: (u64, u64),
    moved: Instant,
    /// How long a peer may say nothing whose host has everything.
    answer: Duration,
}

/// How far a leaving rank has come with one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Farewell {
    /// Something is still on the way.
    Waiting,
    /// The peer has everything, or it is gone.
    Over,
    /// For this long none of the last bytes has arrived, of which there are so many.
    Stuck(Duration, u64),
}

impl ClosingConnection {
    /// `through`: the connection passes through another rank.
    pub(crate) fn new(mut tx: Tx, mut rx: Rx, through: bool) -> Self {
        tx.recall();
        rx.recall();
        let answer = if through { ANSWER_THROUGH } else { ANSWER };
        let now = Instant::now();
        let (since, heard, moved) = (now, now, now);
        Self {
            tx,
            rx,
            since,
            is_open: true,
            is_answered: false,
            heard,
            closed: None,
            state: (0, 0),
            moved,
            answer,
        }
    }

    /// The peer's rank.
    pub(crate) fn peer(&self) -> u32 {
        self.rx.peer
    }

    fn pump(&mut self) {
        self.tx.wake();
        self.tx.tick(true);
        self.is_open &= self.tx.pump(&mut Vec::new(), None).is_ok();
        match self.rx.drop_input() {
            Ok(Pumped::Moved) => self.heard = Instant::now(),
            Ok(Pumped::Nothing) => {}
            Ok(Pumped::Closed) => self.is_answered = true,
            Err(_) => self.is_open = false,
        }
    }

    /// To an evicted rank: sends what is left; false once that is done.
    pub(crate) fn lingers(&mut self) -> bool {
        self.pump();
        self.is_open && !self.is_answered && (self.is_due() || self.since.elapsed() < LEAST)
    }

    /// Whether something is left to send.
    pub(crate) fn is_due(&self) -> bool {
        !self.tx.is_idle()
    }

    /// To any rank when this one leaves: sends what is left, and waits until the peer has everything and says so by closing
    /// its end. `limit`: the silence after which a rank is lost.
    pub(crate) fn take_leave(&mut self, limit: Duration) -> Farewell {
        self.pump();
        // A peer that has closed its end reads nothing more.
        if !self.is_open || self.is_answered {
            return Farewell::Over;
        }
        let unacknowledged = self.tx.unacknowledged();
        let now = Instant::now();
        let state = (self.tx.written(), unacknowledged.unwrap_or(0));
        if std::mem::replace(&mut self.state, state) != state {
            self.moved = now;
        }
        let patience = limit.min(MOST_STANDSTILL);
        if let Some(closed) = self.closed {
            // Heartbeats come from a peer that lives and has not read the end yet: what acknowledged it was not its host.
            let is_silent = now - closed.max(self.heard) > self.answer.min(patience);
            let over = is_silent || now - self.moved.max(closed) > patience;
            return if over { Farewell::Over } else { Farewell::Waiting };
        }
        if self.tx.is_idle() && state.1 == 0 {
            self.tx.close();
            self.closed = Some(now);
            return if unacknowledged.is_none() { Farewell::Over } else { Farewell::Waiting };
        }
        if self.rx.is_broken() {
            return Farewell::Over;
        }
        let standstill = now - self.moved;
        match standstill > patience {
            true => Farewell::Stuck(standstill, self.tx.waiting_bytes() + state.1),
            false => Farewell::Waiting,
        }
    }
}
