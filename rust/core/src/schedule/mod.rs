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

mod builder;

use std::sync::{Arc, LazyLock};

pub use builder::Builder;

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
    /// A small area that every rank on the host can read: the inline buffer
    /// ([`crate::planner::INLINE_BYTES`]), or a bounce buffer ([`crate::planner::BOUNCE_BYTES`]) that larger
    /// payloads pass through in chunks.
    Bounce = 3,
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
    /// every step after it, or after and before the reductions only ([`Builder::meet`]).
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
    /// Elements of [`Buf::Bounce`] written.
    pub bounce: usize,
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
    /// The schedule without steps, the same for all.
    pub fn empty() -> Arc<Self> {
        static EMPTY: LazyLock<Arc<Schedule>> = LazyLock::new(Arc::default);
        EMPTY.clone()
    }

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

/// Splits `len` elements into `parts` stretches that differ by at most one, the longer first.
pub fn even_shares(len: usize, parts: usize) -> Vec<usize> {
    (0..parts).map(|i| len / parts + usize::from(i < len % parts)).collect()
}

/// The stretch of each part when `shares` lie one after another from `base`.
pub fn share_spans(buf: Buf, base: usize, shares: &[usize]) -> Vec<Span> {
    let mut at = base;
    let span = |&len| {
        let span = Span::new(buf, at, len);
        at += len;
        span
    };
    shares.iter().map(span).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_span() {
        let p: Vec<Span> = Span::new(Buf::In, 3, 10).pieces(4).collect();
        assert_eq!(p.iter().map(|s| (s.start, s.len)).collect::<Vec<_>>(), [(3, 4), (7, 4), (11, 2)]);
        assert_eq!(Span::new(Buf::In, 3, 0).pieces(4).count(), 0);
    }
}
