//! A collective for one rank, as data.
//!
//! A [`Schedule`] is a list of [`Step`]s with dependencies. Topologies write steps in the order in
//! which a sequential program would do them; the [`Builder`] watches which memory each step reads
//! and writes and derives the dependencies, so that steps which do not touch the same memory run
//! in any order, at the same time. A topology therefore cannot forget a dependency within its own
//! memory; between ranks, messages and barriers order things.
//!
//! Lengths are in elements and no address appears, so one schedule serves every tensor of that
//! length, every dtype and operator, and the simulator.

use std::collections::BTreeMap;

/// A rank's place in its group, from 0.
pub type Place = u32;

/// The memories that a step may name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Buf {
    /// The caller's input. For in-place collectives the same memory as `Out`.
    In = 0,
    /// The caller's output.
    Out = 1,
    /// Private memory of [`Schedule::scratch`] elements, uninitialised.
    Scratch = 2,
    /// A small area that every rank on the host can read, for payloads that fit ([`crate::planner::SLOT_BYTES`]).
    Slot = 3,
}

/// A stretch of one of this rank's memories, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Which memory.
    pub buf: Buf,
    /// First element.
    pub start: usize,
    /// Number of elements; 0 is a token, which orders things and carries nothing.
    pub len: usize,
}

impl Span {
    /// `len` elements of `buf` from `start`.
    pub const fn new(buf: Buf, start: usize, len: usize) -> Self {
        Self { buf, start, len }
    }

    /// What a message carries that only says "I am here".
    pub const TOKEN: Span = Span::new(Buf::Scratch, 0, 0);

    /// The k-th piece when the span is cut into pieces of at most `piece` elements.
    pub fn piece(self, k: usize, piece: usize) -> Option<Span> {
        let at = k * piece.max(1);
        (at < self.len).then(|| Span::new(self.buf, self.start + at, piece.max(1).min(self.len - at)))
    }

    /// Cuts the span into pieces of at most `piece` elements, so that they pipeline. An empty span
    /// has none.
    pub fn pieces(self, piece: usize) -> impl Iterator<Item = Span> + Clone {
        (0..).map_while(move |k| self.piece(k, piece))
    }

    /// The stretch of this span that lies where `part` lies in `whole`.
    pub(crate) fn like(self, part: Span, whole: Span) -> Span {
        Span::new(self.buf, self.start + part.start - whole.start, part.len)
    }
}

/// A stretch of memory of any rank on this host: `Pull` when read, `Push` when written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loc {
    /// Whose memory.
    pub place: Place,
    /// Where in it.
    pub span: Span,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send a span to a peer; done when the memory may be written again.
    Send {
        /// The receiver.
        to: Place,
        /// The ordinal of this message among those to that peer.
        tag: u32,
        /// What to send.
        span: Span,
    },
    /// Receive a span from a peer; done when it has all arrived.
    Recv {
        /// The sender.
        from: Place,
        /// The ordinal of this message among those from that peer.
        tag: u32,
        /// Where it goes.
        span: Span,
    },
    /// Fold sources, in this order, and write the result to every destination. Sources and
    /// destinations may be peers' memory (inside a host, between barriers) and may be the same
    /// spans, but do not overlap otherwise. A copy is a fold of one source.
    Reduce {
        /// What is read, in the order of the sum.
        from: Vec<Loc>,
        /// What is written.
        to: Vec<Loc>,
        /// Whether this is the result (then an average is divided) or a partial sum.
        finish: bool,
    },
    /// Wait for all ranks of the group on this host. Ordered after every step before it and before
    /// every step after it.
    Barrier {
        /// The ordinal of this barrier.
        ordinal: u32,
    },
}

/// A collective for one rank: steps, and which must wait for which.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// The steps, in program order.
    pub steps: Vec<Step>,
    /// Elements of scratch memory needed.
    pub scratch: usize,
    /// Elements of the slot written.
    pub slot: usize,
    missing: Vec<u32>,
    next: Vec<u32>,
    next_at: Vec<u32>,
    inbox: Vec<(Place, u32, u32)>,
    traffic: Vec<Traffic>,
}

/// What goes between this rank and one peer in a whole schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The peer.
    pub peer: Place,
    /// Elements sent to it.
    pub sent: usize,
    /// Elements received from it.
    pub received: usize,
    /// Messages received from it.
    pub messages: u32,
}

impl Schedule {
    /// How many steps each step waits for, in order of the steps.
    pub fn missing(&self) -> &[u32] {
        &self.missing
    }

    /// The steps that wait for `step`.
    pub fn successors(&self, step: u32) -> &[u32] {
        let (a, b) = (self.next_at[step as usize], self.next_at[step as usize + 1]);
        &self.next[a as usize..b as usize]
    }

    /// The `Recv` step that message `tag` of peer `from` belongs to.
    pub fn recv_step(&self, from: Place, tag: u32) -> Option<u32> {
        self.inbox.binary_search_by_key(&(from, tag), |&(f, t, _)| (f, t)).ok().map(|i| self.inbox[i].2)
    }

    /// What goes to and from each peer that this schedule exchanges messages with.
    pub fn traffic(&self) -> &[Traffic] {
        &self.traffic
    }

    /// Elements sent to a peer.
    pub fn sent_to(&self, peer: Place) -> usize {
        self.traffic.iter().find(|t| t.peer == peer).map_or(0, |t| t.sent)
    }

    /// Elements received from a peer.
    pub fn received_from(&self, peer: Place) -> usize {
        self.traffic.iter().find(|t| t.peer == peer).map_or(0, |t| t.received)
    }
}

/// Which steps last touched a stretch of memory.
#[derive(Clone, Debug, Default)]
struct Cell {
    end: usize,
    writer: Option<u32>,
    readers: Vec<u32>,
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
        self.split(start);
        self.split(end);
        let inside: Vec<usize> = self.cells.range(start..end).map(|(&s, _)| s).collect();
        for at in &inside {
            let Some(cell) = self.cells.get_mut(at) else { continue };
            cell.writer.filter(|&w| w != step).iter().for_each(|&w| dep(w));
            if write {
                cell.readers.iter().filter(|&&r| r != step).for_each(|&r| dep(r));
            } else {
                cell.readers.push(step);
            }
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
    fence: Option<u32>,
    fenced: usize,
    barriers: u32,
    scratch: usize,
    slot: usize,
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
            fenced: 0,
            barriers: 0,
            scratch: 0,
            slot: 0,
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
        if span.buf == Buf::Slot && write {
            self.slot = self.slot.max(span.start + span.len);
        }
    }

    fn push(&mut self, step: Step) {
        if let Some(fence) = self.fence {
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
        self.deps.extend((self.fenced as u32..step).map(|before| (step, before)));
        self.push(Step::Barrier { ordinal: self.barriers });
        self.barriers += 1;
        self.fence = Some(step);
        self.fenced = self.steps.len();
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
            slot: self.slot,
            missing,
            next,
            next_at,
            inbox,
            traffic: self.traffic.into_values().map(|(_, t)| t).collect(),
        }
    }
}

/// Splits `len` elements into `parts` stretches that differ by at most one, the longer first.
pub fn even_shares(len: usize, parts: usize) -> Vec<usize> {
    (0..parts).map(|i| len / parts + usize::from(i < len % parts)).collect()
}

/// The stretch of part `i` when `shares` lie one after another from `base`.
pub fn share_span(buf: Buf, base: usize, shares: &[usize], i: usize) -> Span {
    Span::new(buf, base + shares[..i].iter().sum::<usize>(), shares[i])
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
    fn pieces_cover_the_span() {
        let p: Vec<Span> = Span::new(Buf::In, 3, 10).pieces(4).collect();
        assert_eq!(p.iter().map(|s| (s.start, s.len)).collect::<Vec<_>>(), [(3, 4), (7, 4), (11, 2)]);
        assert_eq!(Span::new(Buf::In, 3, 0).pieces(4).count(), 0);
    }
}
