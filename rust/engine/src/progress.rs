//! One round of everything that moves: what arrived, the calls under way, what waits to be sent.
//!
//! Whoever holds the progress lock ([`crate::engine`]) calls `Progress::poll` until nothing moves.

use std::time::{Duration, Instant};

use trigram_core::Error;
use trigram_core::wire::{CallId, Frame, Kind};

use crate::hub::Hub;
use crate::link::{Pumped, Rx, Tx};
use crate::ticket::GLANCE;

/// Everything that moves, under the progress lock.
pub(crate) struct Progress {
    pub(crate) hub: Hub,
    pub(crate) rx: Vec<Option<Rx>>,
    /// Neighbours whose control connection has ended.
    pub(crate) gone: Vec<u32>,
    ticked: Instant,
}

impl Progress {
    /// Nothing has moved yet.
    pub(crate) fn new(hub: Hub, rx: Vec<Option<Rx>>) -> Self {
        Self { hub, rx, gone: Vec::new(), ticked: Instant::now() }
    }

    /// Moves everything once; true if anything moved.
    pub(crate) fn poll(&mut self) -> bool {
        let mut moved = false;
        for rank in 0..self.rx.len() {
            let Some(rx) = &mut self.rx[rank] else { continue };
            if !rx.has_input() {
                if rx.said_bye {
                    self.lose(rank as u32, Error::Aborted("it has left the job".into()));
                    moved = true;
                }
                continue;
            }
            match rx.pump(&mut self.hub) {
                Ok(Pumped::Moved) => moved = true,
                Ok(Pumped::Nothing) => {}
                Ok(Pumped::Closed) => {
                    let why = if rx.said_bye { "it has left the job" } else { "its connection has closed" };
                    self.lose(rank as u32, Error::Aborted(why.into()));
                    moved = true;
                }
                Err(e) => {
                    self.lose(rank as u32, e);
                    moved = true;
                }
            }
        }
        for rank in std::mem::take(&mut self.gone) {
            // What it wrote before it went has been read above.
            let bye = self.rx[rank as usize].as_ref().is_some_and(|rx| rx.said_bye);
            let why = if bye { "it has left the job" } else { "its process has ended" };
            self.lose(rank, Error::Aborted(why.into()));
            moved = true;
        }
        if moved {
            let Hub { meter, tx, .. } = &mut self.hub;
            meter.look(&self.rx, tx);
        }
        self.hub.check_losses();
        moved |= self.hub.help();
        moved |= self.hub.finish_sends();
        for i in 0..self.hub.jobs.len() {
            moved |= self.hub.advance(i);
        }
        moved |= self.hub.pump_out();
        self.forget_dead();
        let now = self.ticked;
        moved |= self.hub.reap(now);
        if !moved {
            let now = Instant::now();
            if now - self.ticked > GLANCE / 2 {
                self.ticked = now;
                self.hub.tick(now);
            }
        }
        moved
    }

    fn lose(&mut self, rank: u32, why: Error) {
        self.rx[rank as usize] = None;
        self.hub.lose(rank, why);
    }

    /// Tells the peers that this rank leaves, and sees that what it sent gets through.
    pub(crate) fn say_bye(&mut self) {
        let bye = Frame {
            kind: Kind::Bye,
            group: 0,
            call: CallId(0),
            tag: 0,
            len: 0,
            signature: trigram_core::signature::Signature::default(),
        };
        self.hub.tx.iter_mut().flatten().for_each(|tx| tx.give(&bye, Vec::new()));
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.hub.tx.iter().flatten().any(|tx| !tx.is_idle()) && Instant::now() < deadline {
            self.hub.tx.iter_mut().flatten().for_each(Tx::wake);
            if !self.hub.pump_out() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.hub.tx.iter_mut().flatten().for_each(Tx::close);
        // Read what is there: closing over unread bytes would tear down what we have just sent.
        for rx in self.rx.iter_mut().flatten() {
            rx.wake();
            while matches!(rx.pump(&mut self.hub), Ok(Pumped::Moved)) {}
        }
        self.forget_dead();
        self.hub.reap(Instant::now() + Duration::from_secs(60));
    }

    /// What still arrives for failed jobs goes nowhere: their memory is about to be given back.
    fn forget_dead(&mut self) {
        for job in std::mem::take(&mut self.hub.dead) {
            self.rx.iter_mut().flatten().for_each(|rx| rx.forget(job));
        }
    }
}
