//! Writes schedules, and finds out which steps must wait for which.
//!
//! Every memory has a history: which step last wrote each stretch of it, and which have read it
//! since. A step waits for the writer of what it reads, and for the writer and readers of what it writes.

use std::collections::BTreeMap;

use crate::schedule::{Buf, Loc, Place, Schedule, Span, Step, Traffic};

/// Which steps last touched a stretch of memory.
#[derive(Clone, Debug, Default)]
struct Cell {
    end: usize,
    writer: Option<u32>,
    readers: Vec<u32>,
}

impl Cell {
    /// Records that `step` touches all of it and calls `dep` with the steps it must wait for.
    fn touch(&mut self, step: u32, write: bool, dep: &mut impl FnMut(u32)) {
        self.writer.filter(|&w| w != step).into_iter().for_each(&mut *dep);
        if write {
            self.readers.drain(..).filter(|&r| r != step).for_each(dep);
            self.writer = Some(step);
        } else {
            self.readers.push(step);
        }
    }
}

/// One memory's history: stretches that do not overlap, by first element.
#[derive(Debug, Default)]
struct Memory {
    cells: BTreeMap<usize, Cell>,
}

impl Memory {
    /// Makes `at` a border between cells.
    fn split(&mut self, at: usize) {
        if let Some((&start, cell)) = self.cells.range_mut(..at).next_back()
            && start < at
            && at < cell.end
        {
            let tail = cell.clone();
            cell.end = at;
            self.cells.insert(at, tail);
        }
    }

    /// Records that `step` touches `start..end` and calls `dep` with the steps it must wait for.
    fn touch(&mut self, start: usize, end: usize, step: u32, write: bool, mut dep: impl FnMut(u32)) {
        // Most steps touch what one step before them has touched, or what nobody has.
        match self.cells.range_mut(..end).next_back() {
            Some((&first, cell)) if first == start && cell.end == end => {
                return cell.touch(step, write, &mut dep);
            }
            Some((_, cell)) if cell.end > start => {}
            _ => {
                let mut cell = Cell { end, ..Cell::default() };
                cell.touch(step, write, &mut dep);
                self.cells.insert(start, cell);
                return;
            }
        }
        self.split(start);
        self.split(end);
        let inside: Vec<usize> = self.cells.range(start..end).map(|(&s, _)| s).collect();
        for at in &inside {
            let Some(cell) = self.cells.get_mut(at) else { continue };
            cell.touch(step, write, &mut dep);
        }
        if write {
            for at in inside {
                self.cells.remove(&at);
            }
            let cell = Cell { end, writer: Some(step), readers: Vec::new() };
            self.cells.insert(start, cell);
        } else {
            // Stretches that nobody has touched yet: remember the reader.
            let mut at = start;
            while at < end {
                let next = self.cells.range(at..).next().map_or(end, |(&s, _)| s.min(end));
                if next > at {
                    let cell = Cell { end: next, writer: None, readers: vec![step] };
                    self.cells.insert(at, cell);
                }
                at = self.cells.range(next..).next().map_or(end, |(_, c)| c.end).min(end).max(next);
            }
        }
    }
}

/// Writes a schedule step by step, as a sequential program would run it.
#[derive(Debug)]
pub struct Builder {
    me: Place,
    in_place: bool,
    steps: Vec<Step>,
    deps: Vec<(u32, u32)>,
    memory: [Memory; 4],
    tokens: Memory,
    /// The last barrier, and the last that messages wait for too.
    fence: Option<u32>,
    full_fence: Option<u32>,
    fenced: usize,
    /// Messages that the barriers since the last full one do not wait for.
    beside: Vec<u32>,
    barriers: u32,
    scratch: usize,
    bounce: usize,
    traffic: BTreeMap<Place, (u32, Traffic)>,
}

impl Builder {
    /// A schedule for the rank at `me`. `in_place`: `In` and `Out` are the same memory.
    pub fn new(me: Place, in_place: bool) -> Self {
        Self {
            me,
            in_place,
            steps: Vec::new(),
            deps: Vec::new(),
            memory: Default::default(),
            tokens: Memory::default(),
            fence: None,
            full_fence: None,
            fenced: 0,
            beside: Vec::new(),
            barriers: 0,
            scratch: 0,
            bounce: 0,
            traffic: BTreeMap::new(),
        }
    }

    /// This rank's place.
    pub fn me(&self) -> Place {
        self.me
    }

    /// `len` more elements of scratch memory.
    pub fn scratch(&mut self, len: usize) -> Span {
        let span = Span::new(Buf::Scratch, self.scratch, len);
        self.scratch += len;
        span
    }

    fn touch(&mut self, span: Span, write: bool) {
        let step = self.steps.len() as u32;
        let buf = if self.in_place && span.buf == Buf::In { Buf::Out } else { span.buf };
        // A token orders what it is part of: it is a cell of a memory of its own.
        let (memory, start, end) = match span.len {
            0 => (&mut self.tokens, 0, 1),
            n => (&mut self.memory[buf as usize], span.start, span.start + n),
        };
        let deps = &mut self.deps;
        memory.touch(start, end, step, write, |before| deps.push((step, before)));
        if span.buf == Buf::Bounce && write {
            self.bounce = self.bounce.max(span.start + span.len);
        }
    }

    fn push(&mut self, step: Step) {
        let fence = match step {
            Step::Send { .. } | Step::Recv { .. } => self.full_fence,
            Step::Reduce { .. } | Step::Barrier { .. } => self.fence,
        };
        if let Some(fence) = fence {
            self.deps.push((self.steps.len() as u32, fence));
        }
        self.steps.push(step);
    }

    fn traffic(&mut self, peer: Place) -> &mut (u32, Traffic) {
        self.traffic.entry(peer).or_insert_with(|| (0, Traffic { peer, ..Traffic::default() }))
    }

    /// Send `span` to `to`.
    pub fn send(&mut self, to: Place, span: Span) {
        let (sent, traffic) = self.traffic(to);
        let tag = *sent;
        *sent += 1;
        traffic.sent += span.len;
        self.touch(span, false);
        self.push(Step::Send { to, tag, span });
    }

    /// Receive `span` from `from`.
    pub fn recv(&mut self, from: Place, span: Span) {
        let (_, traffic) = self.traffic(from);
        let tag = traffic.messages;
        traffic.messages += 1;
        traffic.received += span.len;
        self.touch(span, true);
        self.push(Step::Recv { from, tag, span });
    }

    /// Fold `from`, in that order, into each of `to`.
    pub fn reduce(&mut self, from: &[Loc], to: &[Loc], finish: bool) {
        let me = self.me;
        from.iter().filter(|l| l.place == me).for_each(|l| self.touch(l.span, false));
        to.iter().filter(|l| l.place == me).for_each(|l| self.touch(l.span, true));
        self.push(Step::Reduce { from: from.to_vec(), to: to.to_vec(), finish });
    }

    /// Fold own spans, in that order, into one own span.
    pub fn fold(&mut self, from: &[Span], to: Span, finish: bool) {
        let from: Vec<Loc> = from.iter().map(|&span| self.own(span)).collect();
        let to = self.own(to);
        self.reduce(&from, &[to], finish);
    }

    /// Copy an own span to another; nothing where they are the same memory.
    pub fn copy(&mut self, from: Span, to: Span) {
        let same = from.start == to.start
            && (from.buf == to.buf
                || self.in_place && matches!((from.buf, to.buf), (Buf::In, Buf::Out) | (Buf::Out, Buf::In)));
        if from.len > 0 && !same {
            self.fold(&[from], to, false);
        }
    }

    /// Wait for all ranks of the group on this host.
    pub fn barrier(&mut self) {
        let step = self.steps.len() as u32;
        let beside = std::mem::take(&mut self.beside);
        self.deps.extend(beside.into_iter().chain(self.fenced as u32..step).map(|before| (step, before)));
        self.pass();
        self.full_fence = Some(step);
    }

    /// The same for reductions and copies only: messages before and after it go on beside it. For schedules whose
    /// messages are in memory that no other rank accesses.
    pub fn meet(&mut self) {
        let step = self.steps.len() as u32;
        let is_message = |s: &u32| matches!(self.steps[*s as usize], Step::Send { .. } | Step::Recv { .. });
        let (messages, folds): (Vec<u32>, Vec<u32>) = (self.fenced as u32..step).partition(is_message);
        self.beside.extend(messages);
        self.deps.extend(folds.into_iter().map(|before| (step, before)));
        self.pass();
    }

    fn pass(&mut self) {
        let step = self.steps.len() as u32;
        self.push(Step::Barrier { ordinal: self.barriers });
        self.barriers += 1;
        self.fence = Some(step);
        self.fenced = self.steps.len();
    }

    /// The step written last.
    pub fn last(&self) -> Option<u32> {
        (self.steps.len() as u32).checked_sub(1)
    }

    /// The step written next waits for `step`, whatever memory the two touch.
    pub fn wait_for(&mut self, step: u32) {
        self.deps.push((self.steps.len() as u32, step));
    }

    fn own(&self, span: Span) -> Loc {
        Loc { place: self.me, span }
    }

    /// The finished schedule.
    pub fn finish(mut self) -> Schedule {
        self.deps.sort_unstable();
        self.deps.dedup();
        let n = self.steps.len();
        let mut missing = vec![0u32; n];
        let mut next_at = vec![0u32; n + 1];
        for &(step, before) in &self.deps {
            missing[step as usize] += 1;
            next_at[before as usize + 1] += 1;
        }
        for i in 0..n {
            next_at[i + 1] += next_at[i];
        }
        let mut fill = next_at.clone();
        let mut next = vec![0u32; self.deps.len()];
        for &(step, before) in &self.deps {
            next[fill[before as usize] as usize] = step;
            fill[before as usize] += 1;
        }
        let mut inbox: Vec<(Place, u32, u32)> = (0..)
            .zip(&self.steps)
            .filter_map(|(i, step)| match step {
                Step::Recv { from, tag, .. } => Some((*from, *tag, i)),
                _ => None,
            })
            .collect();
        inbox.sort_unstable();
        Schedule {
            steps: self.steps,
            scratch: self.scratch,
            bounce: self.bounce,
            missing,
            next,
            next_at,
            inbox,
            traffic: self.traffic.into_values().map(|(_, t)| t).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deps(s: &Schedule) -> Vec<u32> {
        s.missing().to_vec()
    }

    #[test]
    fn steps_on_different_memory_are_independent() {
        let mut b = Builder::new(0, true);
        b.send(1, Span::new(Buf::Out, 0, 10));
        b.recv(1, Span::new(Buf::Out, 10, 10));
        assert_eq!(deps(&b.finish()), [0, 0]);
    }

    #[test]
    fn hazards_become_dependencies() {
        let mut b = Builder::new(0, true);
        b.send(1, Span::new(Buf::In, 0, 10)); // reads
        b.recv(1, Span::new(Buf::Out, 5, 10)); // writes part of it (same memory): waits for 0
        b.send(2, Span::new(Buf::Out, 12, 1)); // reads what 1 wrote
        b.recv(1, Span::new(Buf::Out, 0, 20)); // writes over all: waits for 0, 1 and 2
        let s = b.finish();
        assert_eq!(deps(&s), [0, 1, 1, 3]);
        assert_eq!(s.successors(0), [1, 3]);
    }

    #[test]
    fn tokens_are_ordered() {
        let mut b = Builder::new(0, true);
        b.send(1, Span::TOKEN);
        b.recv(1, Span::TOKEN);
        b.send(2, Span::TOKEN);
        assert_eq!(deps(&b.finish()), [0, 1, 1]);
    }

    #[test]
    fn barriers_fence() {
        let mut b = Builder::new(0, false);
        b.send(1, Span::new(Buf::In, 0, 1));
        b.recv(1, Span::new(Buf::Out, 0, 1));
        b.barrier();
        b.send(1, Span::new(Buf::In, 0, 1));
        assert_eq!(deps(&b.finish()), [0, 0, 2, 1]);
    }

    #[test]
    fn messages_pass_a_meeting() {
        let mut b = Builder::new(0, false);
        b.send(1, Span::new(Buf::In, 0, 1));
        b.copy(Span::new(Buf::In, 1, 1), Span::new(Buf::Bounce, 0, 1));
        b.meet(); // waits for the copy
        b.recv(1, Span::new(Buf::Out, 0, 1));
        b.copy(Span::new(Buf::In, 2, 1), Span::new(Buf::Bounce, 1, 1)); // waits for the meeting
        b.barrier(); // waits for all five
        b.send(1, Span::new(Buf::In, 3, 1));
        let s = b.finish();
        assert_eq!(deps(&s), [0, 0, 1, 0, 1, 4, 1]);
        assert_eq!((s.successors(1), s.successors(2)), (&[2][..], &[4, 5][..]));
    }
}
