//! Collectives inside one host, on each other's memory.
//!
//! Every shared schedule opens with a barrier: no rank passes it before all have entered the call, and there the
//! engine compares signatures. After it a rank may read (`Pull`) and write (`Push`) its peers' memory as the schedule
//! says; a closing barrier holds every rank until the last has finished.
//!
//! Payloads that fit the inline buffer need no closing barrier: each rank copies its part into its buffer before the
//! opening barrier and reads the others' after it, and a buffer is not used again before all ranks have left the call.

use crate::schedule::{Buf, Builder, Loc, Place, Schedule, Span, even_shares, share_spans};
use crate::signature::Collective;
use crate::topology::Shape;
use crate::topology::blocks::Blocks;

/// The sources of one piece of a rank's output: folded in this order.
pub(super) struct Pull {
    pub out: Span,
    /// Of each source, where it begins.
    pub from: Vec<(Place, usize)>,
    /// Which block of the sources' inputs it is; 0 where they have one.
    pub block: usize,
}

/// What rank `me` needs from whom.
pub(super) fn pulls(what: Collective, root: Place, shape: Shape, blocks: Blocks<'_>) -> Vec<Pull> {
    let Shape { me, world, len, .. } = shape;
    let whole = Span::new(Buf::Out, 0, len);
    let own = Span::new(Buf::Out, 0, blocks.len(me));
    let all = |at: usize| (0..world).map(|p| (p, at)).collect::<Vec<_>>();
    let (mine, at) = (me as usize, blocks.start(me));
    let each = |block: usize, at: usize| -> Vec<Pull> {
        let pull = |p| Pull { out: blocks.span(Buf::Out, p), from: vec![(p, at)], block };
        (0..world).map(pull).collect()
    };
    match what {
        Collective::AllReduce => vec![Pull { out: whole, from: all(0), block: 0 }],
        Collective::Reduce if me == root => vec![Pull { out: whole, from: all(0), block: 0 }],
        Collective::ReduceScatter => vec![Pull { out: own, from: all(at), block: mine }],
        Collective::Broadcast if me != root => vec![Pull { out: whole, from: vec![(root, 0)], block: 0 }],
        Collective::Scatter => vec![Pull { out: whole, from: vec![(root, at)], block: mine }],
        Collective::AllGather => each(0, 0),
        Collective::Gather if me == root => each(0, 0),
        Collective::AllToAll => each(mine, at),
        _ => vec![],
    }
}

/// Elements of input that a rank gives to a collective; 0 if nobody reads from it.
pub fn contribution(what: Collective, root: Place, shape: Shape, blocks: Blocks<'_>) -> usize {
    let Shape { me, world, len, .. } = shape;
    match what {
        Collective::ReduceScatter | Collective::AllToAll | Collective::Update => blocks.start(world),
        Collective::Scatter if me == root => blocks.start(world),
        Collective::Broadcast if me == root => len,
        Collective::AllGather => blocks.len(me),
        Collective::AllReduce | Collective::Reduce | Collective::Gather => len,
        _ => 0,
    }
}

pub(super) const fn in_place(what: Collective) -> bool {
    matches!(what, Collective::AllReduce | Collective::Broadcast | Collective::Barrier)
}

/// A payload that fits the inline buffer: copy it there, pass a barrier, read every rank's buffer.
pub fn one_shot(what: Collective, root: Place, shape: Shape, blocks: Blocks<'_>) -> Schedule {
    let mut b = Builder::new(shape.me, in_place(what));
    let given = contribution(what, root, shape, blocks);
    b.copy(Span::new(Buf::In, 0, given), Span::new(Buf::Bounce, 0, given));
    b.barrier();
    pull_from(&mut b, Buf::Bounce, pulls(what, root, shape, blocks), usize::MAX);
    b.finish()
}

/// Registered memory: pass a barrier, read straight from the peers' input, pass another.
pub fn direct(what: Collective, root: Place, shape: Shape, blocks: Blocks<'_>) -> Schedule {
    if what == Collective::AllReduce {
        return all_reduce(shape);
    }
    let mut b = Builder::new(shape.me, in_place(what));
    b.barrier();
    pull_from(&mut b, Buf::In, pulls(what, root, shape, blocks), shape.piece);
    b.barrier();
    b.finish()
}

fn pull_from(b: &mut Builder, source: Buf, pulls: Vec<Pull>, piece: usize) {
    for pull in pulls {
        for out in pull.out.pieces(piece) {
            let at = out.start - pull.out.start;
            let from: Vec<Loc> = (pull.from.iter())
                .map(|&(place, start)| Loc { place, span: Span::new(source, start + at, out.len) })
                .collect();
            let to = Loc { place: b.me(), span: out };
            b.reduce(&from, &[to], true);
        }
    }
}

/// Rank r sums slice r of all buffers and writes the sum back into all: `2 n` bytes move per rank,
/// and nothing is copied or queued. This is the floor of a collective inside a host.
pub fn all_reduce(shape: Shape) -> Schedule {
    let Shape { me, world, len, piece } = shape;
    let mut b = Builder::new(me, true);
    let slices = share_spans(Buf::Out, 0, &even_shares(len, world as usize));
    b.barrier();
    for span in slices[me as usize].pieces(piece) {
        let everywhere: Vec<Loc> = (0..world).map(|place| Loc { place, span }).collect();
        b.reduce(&everywhere, &everywhere, true);
    }
    b.barrier();
    b.finish()
}

/// Rank r sums block r of all inputs, updates its state and its block of the output with it, and writes that into the
/// same place of all outputs: what an all_reduce moves, and nothing is moved for the update.
pub fn update(shape: Shape, blocks: Blocks<'_>) -> Schedule {
    let Shape { me, world, piece, .. } = shape;
    let mut b = Builder::new(me, false);
    b.barrier();
    for span in blocks.span(Buf::In, me).pieces(piece) {
        let everywhere =
            |buf| -> Vec<Loc> { (0..world).map(|place| Loc { place, span: Span { buf, ..span } }).collect() };
        b.reduce(&everywhere(Buf::In), &everywhere(Buf::Out), true);
    }
    b.barrier();
    b.finish()
}
