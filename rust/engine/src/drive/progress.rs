//! One round of everything that moves: what arrived, the calls under way, what waits to be sent.
//!
//! Whoever holds the progress lock (`crate::runtime::driver`) calls `Progress::poll` until nothing moves.

use std::time::{Duration, Instant};

use trigram_core::Error;
use trigram_core::wire::Kind;

use crate::drive::failing::{How, Told};
use crate::drive::heartbeat::{Pulse, sign};
use crate::drive::hub::Hub;
use crate::link::frames::{Parting, Pumped, Rx, Tx};
use crate::sys::completion::GLANCE;

/// How long a rank that leaves waits for those that it gave up to take the word that they are.
const FAREWELL: Duration = Duration::from_millis(100);

/// Everything that moves, under the progress lock.
pub struct Progress {
    /// The calls under way, and what waits to be sent.
    pub hub: Hub,
    /// By rank: what arrives from it; None for this rank, and for those that are lost.
    pub rx: Vec<Option<Rx>>,
    /// Neighbours whose control connection has ended.
    pub(crate) gone: Vec<u32>,
    parting: Vec<Parting>,
    pulse: Pulse,
    ticked: Instant,
}

impl Progress {
    /// Nothing has moved yet.
    pub fn new(hub: Hub, rx: Vec<Option<Rx>>) -> Self {
        let pulse = Pulse::new(rx.len());
        Self { hub, rx, gone: Vec::new(), parting: Vec::new(), pulse, ticked: Instant::now() }
    }

    /// Moves everything once; true if anything moved.
    pub fn poll(&mut self) -> bool {
        let mut moved = self.read();
        // Only now: what a peer said before its connection closed is acted on before that.
        for told in std::mem::take(&mut self.hub.told) {
            self.hear(told);
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
        self.parting.retain_mut(Parting::pump);
        for (rank, silent) in self.pulse.beat(&mut self.hub, &self.rx) {
            let why = Error::Aborted(format!("it has been silent for {:.1} s", silent.as_secs_f64()));
            self.hear(Told { rank, why, how: How::Silent, by: None });
        }
    }

    /// Reads what has arrived, and takes note of who is gone; true if anything has.
    fn read(&mut self) -> bool {
        let mut moved = false;
        for rank in 0..self.rx.len() as u32 {
            let Some(rx) = &mut self.rx[rank as usize] else { continue };
            let (how, why) = match rx.has_input().then(|| rx.pump(&mut self.hub)) {
                None if rx.said_bye => closed(rx, ""),
                None | Some(Ok(Pumped::Nothing)) => continue,
                Some(Ok(Pumped::Moved)) => {
                    moved = true;
                    continue;
                }
                Some(Ok(Pumped::Closed)) => closed(rx, "its connection has closed"),
                Some(Err(e)) => (How::Silent, e),
            };
            self.hub.told.push(Told { rank, why, how, by: None });
        }
        for (rank, error) in std::mem::take(&mut self.hub.unwritable) {
            // What it said before it closed is still to be read, and may be why.
            let Some(rx) = self.rx[rank as usize].as_mut() else { continue };
            rx.wake();
            let end = loop {
                match rx.pump(&mut self.hub) {
                    Ok(Pumped::Moved) => {}
                    end => break end,
                }
            };
            let (how, why) = match end {
                Err(e) => (How::Silent, e),
                Ok(_) if matches!(error, Error::Aborted(_)) => closed(rx, "its connection has closed"),
                Ok(_) => (How::Silent, error),
            };
            self.hub.told.push(Told { rank, why, how, by: None });
        }
        for rank in std::mem::take(&mut self.gone) {
            let Some(rx) = self.rx[rank as usize].as_ref() else { continue };
            let (how, why) = closed(rx, "its process has ended");
            self.hub.told.push(Told { rank, why, how, by: None });
        }
        moved
    }

    /// Acts on what was heard of a rank.
    fn hear(&mut self, told: Told) {
        let Told { rank, why, how, by } = told;
        // Two that are cut off from each other accuse each other: who comes second is not heard.
        let how_is = |rank| self.hub.counters.news().how.get(&rank).copied();
        if by.and_then(how_is).is_some_and(|how| matches!(how, How::Silent | How::Refused)) {
            return;
        }
        match how {
            How::Silent if by.is_none() => self.hub.give_up(rank, why),
            how => self.hub.lose(rank, why, how),
        }
        let rx = self.rx[rank as usize].take();
        if let Some((tx, rx)) = self.hub.farewell.take().zip(rx) {
            self.parting.push(Parting::new(tx, rx));
        }
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
        let patience = Instant::now() + FAREWELL;
        while self.parting.iter_mut().filter_map(|p| p.pump().then_some(&*p)).any(Parting::is_due)
            && Instant::now() < patience
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.parting.clear();
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

/// What the end of a connection means.
fn closed(rx: &Rx, why: &str) -> (How, Error) {
    match rx.said_bye {
        true => (How::Left, Error::Aborted("it has left the job".into())),
        false => (How::Dead, Error::Aborted(why.into())),
    }
}
