//! One round of everything that moves: what arrived, the calls under way, what waits to be sent.
//!
//! Whoever holds the progress lock ([`crate::engine`]) calls `Progress::poll` until nothing moves.

use std::time::{Duration, Instant};

use trigram_core::Error;
use trigram_core::wire::Kind;

use crate::failing::How;
use crate::hub::Hub;
use crate::link::{Pumped, Rx, Tx};
use crate::pulse::{Pulse, sign};
use crate::ticket::GLANCE;

/// Everything that moves, under the progress lock.
pub(crate) struct Progress {
    pub(crate) hub: Hub,
    pub(crate) rx: Vec<Option<Rx>>,
    /// Neighbours whose control connection has ended.
    pub(crate) gone: Vec<u32>,
    pulse: Pulse,
    ticked: Instant,
}

impl Progress {
    /// Nothing has moved yet.
    pub(crate) fn new(hub: Hub, rx: Vec<Option<Rx>>) -> Self {
        let pulse = Pulse::new(rx.len());
        Self { hub, rx, gone: Vec::new(), pulse, ticked: Instant::now() }
    }

    /// Moves everything once; true if anything moved.
    pub(crate) fn poll(&mut self) -> bool {
        let mut moved = false;
        for rank in 0..self.rx.len() {
            let Some(rx) = &mut self.rx[rank] else { continue };
            if !rx.has_input() {
                if rx.said_bye {
                    self.lose(rank as u32, Error::Aborted("it has left the job".into()), How::Left);
                    moved = true;
                }
                continue;
            }
            match rx.pump(&mut self.hub) {
                Ok(Pumped::Moved) => moved = true,
                Ok(Pumped::Nothing) => {}
                Ok(Pumped::Closed) => {
                    let (why, how) = match rx.said_bye {
                        true => ("it has left the job", How::Left),
                        false => ("its connection has closed", How::Dead),
                    };
                    self.lose(rank as u32, Error::Aborted(why.into()), how);
                    moved = true;
                }
                Err(e) => {
                    self.hub.give_up(rank as u32, e);
                    self.rx[rank] = None;
                    moved = true;
                }
            }
        }
        for rank in std::mem::take(&mut self.gone) {
            // What it wrote before it went has been read above.
            let bye = self.rx[rank as usize].as_ref().is_some_and(|rx| rx.said_bye);
            let (why, how) = match bye {
                true => ("it has left the job", How::Left),
                false => ("its process has ended", How::Dead),
            };
            self.lose(rank, Error::Aborted(why.into()), how);
            moved = true;
        }
        for rank in std::mem::take(&mut self.hub.unwritable) {
            // What it said before it closed is still to be read.
            if let Some(rx) = self.rx[rank as usize].as_mut() {
                rx.wake();
                while matches!(rx.pump(&mut self.hub), Ok(Pumped::Moved)) {}
                let left = rx.said_bye;
                let how = if left { How::Left } else { How::Dead };
                let why = if left { "it has left the job" } else { "its connection has closed" };
                self.hub.told.push((rank, Error::Aborted(why.into()), how));
            }
        }
        for (rank, why, how) in std::mem::take(&mut self.hub.told) {
            self.lose(rank, why, how);
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

    /// Shows that this rank is alive, and looks who else is. What has arrived has just been read.
    pub(crate) fn beat(&mut self) {
        for (rank, silent) in self.pulse.beat(&mut self.hub, &self.rx) {
            let why = format!("it has been silent for {:.1} s", silent.as_secs_f64());
            self.hub.give_up(rank, Error::Aborted(why));
            self.rx[rank as usize] = None;
        }
    }

    fn lose(&mut self, rank: u32, why: Error, how: How) {
        self.hub.lose(rank, why, how);
        self.rx[rank as usize] = None;
    }

    /// Tells the peers that this rank leaves, and sees that what it sent gets through.
    pub(crate) fn say_bye(&mut self) {
        let bye = sign(Kind::Bye, 0, 0);
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
