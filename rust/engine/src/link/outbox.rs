//! What waits to be sent, to all peers.

use std::sync::Arc;

use trigram_core::Error;
use trigram_core::signature::Signature;
use trigram_core::wire::{CallId, Frame, Kind};

use crate::lanes::pool::Lanes;
use crate::link::frames::{Token, Tx};

/// The outward connections to all peers.
pub struct Outbox {
    /// The threads that move much.
    pub(crate) lanes: Arc<Lanes>,
    /// By world rank; `None` for this rank, and for those that are lost.
    tx: Vec<Option<Tx>>,
    /// Whether a connection may hold what no frame waits for any more.
    may_hold: bool,
    /// Steps whose frames have left since this was asked last.
    finished: Vec<Token>,
    /// Peers that can no longer be written to, and why.
    unwritable: Vec<(u32, Error)>,
}

/// A frame that belongs to no call.
pub(crate) fn control_frame(kind: Kind, tag: u32, len: u32) -> Frame {
    Frame { kind, group: 0, call: CallId(0), tag, len, signature: Signature::default() }
}

impl Outbox {
    /// With one connection per world rank.
    pub(crate) fn new(tx: Vec<Option<Tx>>, lanes: Arc<Lanes>) -> Self {
        let may_hold = tx.iter().flatten().any(Tx::may_hold);
        Self { lanes, tx, may_hold, finished: Vec::new(), unwritable: Vec::new() }
    }

    /// By world rank, the connections.
    pub fn connections(&self) -> &[Option<Tx>] {
        &self.tx
    }

    /// The connection to a rank, unless it is this one or lost.
    pub fn to(&mut self, rank: u32) -> Option<&mut Tx> {
        self.tx.get_mut(rank as usize)?.as_mut()
    }

    /// The connections to ranks that are not lost.
    pub fn all(&mut self) -> impl Iterator<Item = (u32, &mut Tx)> {
        (0..).zip(&mut self.tx).filter_map(|(rank, tx)| Some((rank, tx.as_mut()?)))
    }

    /// Removes the connection to a lost rank.
    pub(crate) fn remove(&mut self, rank: u32) -> Option<Tx> {
        let mut tx = self.tx.get_mut(rank as usize)?.take();
        if let Some(tx) = &mut tx {
            tx.recall();
            // A lost rank may have had all that it needed: what a lane has sent counts, although nobody has looked yet.
            tx.take_sent(&mut self.finished);
        }
        tx
    }

    /// Whether anything waits.
    pub fn is_idle(&self) -> bool {
        self.tx.iter().flatten().all(Tx::is_idle)
    }

    /// Whether a connection holds what has been written to it, and somebody must send it on.
    pub(crate) fn holds_back(&self) -> bool {
        self.may_hold && self.tx.iter().flatten().any(Tx::holds_back)
    }

    /// Sends a frame with memory of a call. `None` if there is no connection to this rank; else whether all of it has
    /// been sent already.
    ///
    /// # Safety
    ///
    /// As for [`Tx::lend`].
    pub(crate) unsafe fn lend(
        &mut self,
        rank: u32,
        frame: &Frame,
        body: *const u8,
        len: usize,
        token: Token,
    ) -> Option<trigram_core::Result<bool>> {
        let tx = self.tx.get_mut(rank as usize)?.as_mut()?;
        // SAFETY: passed on to the caller.
        Some(unsafe { tx.lend(frame, body, len, token, &mut self.finished, Some((&self.lanes, rank))) })
    }

    /// Sends a frame with a payload of its own, unless the rank is lost.
    pub fn give(&mut self, rank: u32, frame: &Frame, body: Vec<u8>) {
        if let Some(tx) = self.to(rank) {
            tx.give(frame, body);
        }
    }

    /// Writes what waits for one rank, as far as it fits now.
    pub(crate) fn pump_to(&mut self, rank: u32) {
        if let Some(tx) = self.tx.get_mut(rank as usize).and_then(Option::as_mut) {
            // Whoever writes next finds the same error.
            let _ = tx.pump(&mut self.finished, Some((&self.lanes, rank)));
        }
    }

    /// Writes what waits; true if anything moved.
    pub fn pump(&mut self) -> bool {
        let mut moved = false;
        for (rank, tx) in (0..).zip(&mut self.tx) {
            let Some(tx) = tx.as_mut().filter(|tx| !tx.is_idle()) else { continue };
            match tx.pump(&mut self.finished, Some((&self.lanes, rank))) {
                Ok(any) => moved |= any,
                Err(e) => {
                    tx.give_up();
                    self.unwritable.push((rank, e));
                    moved = true;
                }
            }
        }
        moved
    }

    /// A step whose frame has left, if there is one.
    pub fn next_finished(&mut self) -> Option<Token> {
        self.finished.pop()
    }

    /// Peers that could not be written to since this was asked last, and why.
    pub(crate) fn take_unwritable(&mut self) -> Vec<(u32, Error)> {
        std::mem::take(&mut self.unwritable)
    }

    /// Takes a call's memory back, see [`Tx::take_back`].
    pub fn take_back(&mut self, call: u64) {
        self.tx.iter_mut().flatten().for_each(|tx| tx.take_back(call));
    }
}
