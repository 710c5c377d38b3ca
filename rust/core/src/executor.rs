//! Walks a schedule. A state machine with no I/O of its own.
//!
//! The executor hands each step to an [`Io`] once everything it depends on is done, and is told
//! when the step has finished, at once or later. It never waits, reads no clock and knows no
//! transport, so the engine and the simulator run the same code.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::error::Result;
use crate::schedule::{Loc, Place, Schedule, Span, Step};

/// Whether a step finished in the call that started it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Started {
    /// It is done.
    Done,
    /// [`Executor::complete`] will be called for it.
    Later,
}

/// What carries steps out.
pub trait Io {
    /// Begin to send `span` to `to`.
    fn send(&mut self, step: u32, to: Place, tag: u32, span: Span) -> Result<Started>;
    /// Begin to receive `span` from `from`.
    fn recv(&mut self, step: u32, from: Place, tag: u32, span: Span) -> Result<Started>;
    /// Fold `from` into each of `to`, now or in turns.
    fn reduce(&mut self, step: u32, from: &[Loc], to: &[Loc], finish: bool) -> Result<Started>;
    /// Arrive at a barrier.
    fn barrier(&mut self, step: u32, ordinal: u32) -> Result<Started>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Started,
    Done,
}

/// One run of a schedule.
#[derive(Debug)]
pub struct Executor {
    schedule: Arc<Schedule>,
    missing: Vec<u32>,
    state: Vec<State>,
    ready: VecDeque<u32>,
    left: usize,
}

impl Default for Executor {
    fn default() -> Self {
        Self::new(Schedule::empty())
    }
}

impl Executor {
    /// A run of `schedule`, not started.
    pub fn new(schedule: Arc<Schedule>) -> Self {
        let mut new = Self {
            schedule: schedule.clone(),
            missing: Vec::new(),
            state: Vec::new(),
            ready: VecDeque::new(),
            left: 0,
        };
        new.reset(schedule);
        new
    }

    /// Makes this a run of another schedule, keeping its memory (invariant MEM-1).
    pub fn reset(&mut self, schedule: Arc<Schedule>) {
        self.missing.clear();
        self.missing.extend_from_slice(schedule.missing());
        self.state.clear();
        self.state.resize(schedule.steps.len(), State::Waiting);
        self.ready.clear();
        self.left = schedule.steps.len();
        self.schedule = schedule;
    }

    /// Lets go of the schedule, and keeps the memory for another one.
    pub fn rest(&mut self) {
        self.reset(Schedule::empty());
    }

    /// The schedule.
    pub fn schedule(&self) -> &Arc<Schedule> {
        &self.schedule
    }

    /// Whether every step is done.
    pub fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Whether a step has been handed to the [`Io`] and is not done.
    pub fn is_started(&self, step: u32) -> bool {
        self.state.get(step as usize) == Some(&State::Started)
    }

    /// Whether a step is done.
    pub fn is_finished(&self, step: u32) -> bool {
        self.state.get(step as usize) == Some(&State::Done)
    }

    /// The peers whose messages have not all arrived, in order, one for each message.
    pub fn waiting_for(&self) -> Vec<Place> {
        let mut peers: Vec<Place> = (self.schedule.steps.iter().zip(&self.state))
            .filter_map(|(step, state)| match step {
                Step::Recv { from, .. } if *state != State::Done => Some(*from),
                _ => None,
            })
            .collect();
        peers.sort_unstable();
        peers
    }

    /// The peers to which messages have begun and not left yet, in order, one for each message.
    pub fn sending_to(&self) -> Vec<Place> {
        let mut peers: Vec<Place> = (self.schedule.steps.iter().zip(&self.state))
            .filter_map(|(step, state)| match step {
                Step::Send { to, .. } if *state == State::Started => Some(*to),
                _ => None,
            })
            .collect();
        peers.sort_unstable();
        peers
    }

    /// Starts every step that depends on nothing.
    pub fn start(&mut self, io: &mut impl Io) -> Result<()> {
        self.ready.extend((0..).zip(&self.missing).filter(|(_, m)| **m == 0).map(|(i, _)| i));
        self.run(io)
    }

    /// Records that a step started earlier is done, and starts what waited for it.
    pub fn complete(&mut self, step: u32, io: &mut impl Io) -> Result<()> {
        debug_assert!(self.is_started(step), "step {step} completes once, after its start");
        self.finish(step);
        self.run(io)
    }

    fn finish(&mut self, step: u32) {
        self.state[step as usize] = State::Done;
        self.left -= 1;
        // Depth first: the piece just reduced leaves before the next is reduced.
        for &next in self.schedule.successors(step).iter().rev() {
            let missing = &mut self.missing[next as usize];
            *missing -= 1;
            if *missing == 0 {
                self.ready.push_front(next);
            }
        }
    }

    fn run(&mut self, io: &mut impl Io) -> Result<()> {
        while let Some(step) = self.ready.pop_front() {
            self.state[step as usize] = State::Started;
            let started = match &self.schedule.steps[step as usize] {
                Step::Send { to, tag, span } => io.send(step, *to, *tag, *span)?,
                Step::Recv { from, tag, span } => io.recv(step, *from, *tag, *span)?,
                Step::Barrier { ordinal } => io.barrier(step, *ordinal)?,
                Step::Reduce { from, to, finish } => io.reduce(step, from, to, *finish)?,
            };
            if started == Started::Done {
                self.finish(step);
            }
        }
        Ok(())
    }
}
