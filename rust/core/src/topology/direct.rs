//! The other collectives, by direct messages between those who have and those who need.
//!
//! On a switch each moves the least bytes possible, in one or two hops. Rooted collectives end
//! with a [dissemination barrier](barrier): no collective returns before every rank has entered
//! it, so that ranks which disagree find out in the call where they disagree.

use crate::schedule::{Buf, Builder, Place, Schedule, Span, even_shares, share_spans};
use crate::topology::Shape;
use crate::topology::blocks::{self, Blocks, messages};

/// Hensgen, Finkel and Manber's dissemination barrier, 1988: `ceil(log2 p)` rounds of tokens.
pub fn barrier(shape: Shape) -> Schedule {
    let mut b = Builder::new(shape.me, true);
    agree(&mut b, shape);
    b.finish()
}

pub(crate) fn agree(b: &mut Builder, shape: Shape) {
    let mut by = 1;
    while by < shape.world {
        b.send(shape.after(by), Span::TOKEN);
        b.recv(shape.before(by), Span::TOKEN);
        by *= 2;
    }
}

/// `Out` of `root` to all, in place. Up to `small` elements the root sends to all; above, it
/// scatters shares and everybody passes its share on, so that no rank sends more than about `2 n`.
///
/// Source: van de Geijn's scatter and all-gather, 1994.
pub fn broadcast(shape: Shape, root: u32, small: usize) -> Schedule {
    let mut b = Builder::new(shape.me, true);
    let peers: Vec<Place> = (0..shape.world).collect();
    let whole = Span::new(Buf::Out, 0, shape.len);
    broadcast_among(&mut b, &peers, shape.me as usize, root as usize, whole, shape.piece, small);
    agree(&mut b, shape);
    b.finish()
}

/// The pieces in which [`broadcast_among`] `n` peers moves `whole`, in order.
pub(crate) fn broadcast_pieces(whole: Span, n: usize, piece: usize, small: usize) -> Vec<Span> {
    if whole.len <= small || n <= 2 {
        return whole.pieces(piece).collect();
    }
    let shares = share_spans(whole.buf, whole.start, &even_shares(whole.len, n - 1));
    let rounds = shares[0].len.div_ceil(piece.max(1));
    (0..rounds).flat_map(|k| shares.iter().filter_map(move |share| share.piece(k, piece))).collect()
}

/// Broadcast of `whole` from the `root`-th of `peers`, of which this rank is the `me`-th.
pub(crate) fn broadcast_among(
    b: &mut Builder,
    peers: &[Place],
    me: usize,
    root: usize,
    whole: Span,
    piece: usize,
    small: usize,
) {
    let n = peers.len();
    let scatter = whole.len > small && n > 2;
    let shares = even_shares(whole.len, n.saturating_sub(1).max(1));
    let mut ends = shares.iter().scan(whole.start, |end, share| {
        *end += share;
        Some(*end)
    });
    let ends: Vec<usize> = ends.by_ref().collect();
    for span in broadcast_pieces(whole, n, piece, small) {
        // Who passes this piece on: the root keeps no share, the others have room for one each.
        let owner = if scatter {
            let share = ends.partition_point(|&end| end <= span.start);
            (root + 1 + share) % n
        } else {
            root
        };
        let others = (1..n).map(|d| (me + d) % n);
        if me == root && owner != root {
            b.send(peers[owner], span);
        } else if me == owner {
            if owner != root {
                b.recv(peers[root], span);
            }
            others.filter(|&i| i != root).for_each(|i| b.send(peers[i], span));
        } else {
            b.recv(peers[owner], span);
        }
    }
}

/// `In` of every rank, its block, to `Out` of all, in rank order.
pub fn all_gather(shape: Shape, blocks: Blocks<'_>) -> Schedule {
    let Shape { me, world, piece, .. } = shape;
    let mut b = Builder::new(me, false);
    let own = Span::new(Buf::In, 0, blocks.len(me));
    for k in 0..blocks.longest().div_ceil(piece.max(1)).max(1) {
        if let Some(span) = blocks::message(own, k, piece) {
            (1..world).for_each(|d| b.send(shape.after(d), span));
        }
        for from in (1..world).map(|d| shape.before(d)) {
            if let Some(span) = blocks::message(blocks.span(Buf::Out, from), k, piece) {
                b.recv(from, span);
            }
        }
    }
    b.copy(own, blocks.span(Buf::Out, me));
    b.finish()
}

/// `In`, a block for each rank: block j of every rank, summed in rank order, to `Out` of rank j.
pub fn reduce_scatter(shape: Shape, blocks: Blocks<'_>) -> Schedule {
    let Shape { me, world, piece, .. } = shape;
    let mut b = Builder::new(me, false);
    let len = blocks.len(me);
    let mine = blocks.span(Buf::In, me);
    let landings: Vec<Span> = (0..world).map(|p| if p == me { mine } else { b.scratch(len) }).collect();
    for k in 0..blocks.longest().div_ceil(piece.max(1)).max(1) {
        for to in (1..world).map(|d| shape.after(d)) {
            if let Some(span) = blocks::message(blocks.span(Buf::In, to), k, piece) {
                b.send(to, span);
            }
        }
        for from in (1..world).map(|d| shape.before(d)) {
            if let Some(span) = blocks::message(landings[from as usize], k, piece) {
                b.recv(from, span);
            }
        }
        if let Some(out) = Span::new(Buf::Out, 0, len).piece(k, piece) {
            let parts: Vec<Span> = landings.iter().filter_map(|l| l.piece(k, piece)).collect();
            b.fold(&parts, out, true);
        }
    }
    b.finish()
}

/// `In` of all, summed in rank order, to `Out` of `root`: each rank sums a share, the root collects.
pub fn reduce(shape: Shape, root: u32) -> Schedule {
    let Shape { me, world, len, piece } = shape;
    let mut b = Builder::new(me, false);
    let shares = even_shares(len, world as usize);
    let spans = share_spans(Buf::In, 0, &shares);
    let share = |buf: Buf, p: u32| Span { buf, ..spans[p as usize] };
    let mine = share(Buf::In, me);
    let landings: Vec<Span> = (0..world).map(|p| if p == me { mine } else { b.scratch(mine.len) }).collect();
    let sum = if me == root { share(Buf::Out, me) } else { b.scratch(mine.len) };
    let rounds = shares[0].div_ceil(piece.max(1));
    for k in 0..rounds {
        for to in (1..world).map(|d| shape.after(d)) {
            if let Some(span) = share(Buf::In, to).piece(k, piece) {
                b.send(to, span);
            }
        }
        if let Some(sum) = sum.piece(k, piece) {
            for from in (1..world).map(|d| shape.before(d)) {
                if let Some(span) = landings[from as usize].piece(k, piece) {
                    b.recv(from, span);
                }
            }
            let parts: Vec<Span> = landings.iter().filter_map(|&l| l.piece(k, piece)).collect();
            b.fold(&parts, sum, true);
            if me != root {
                b.send(root, sum);
            }
        }
        if me == root {
            for from in (1..world).map(|d| shape.before(d)) {
                if let Some(span) = share(Buf::Out, from).piece(k, piece) {
                    b.recv(from, span);
                }
            }
        }
    }
    agree(&mut b, shape);
    b.finish()
}

/// `In` of every rank to `Out` (`world * len`) of `root`, in rank order.
pub fn gather(shape: Shape, root: u32) -> Schedule {
    let Shape { me, world, len, piece } = shape;
    let mut b = Builder::new(me, false);
    let own = Span::new(Buf::In, 0, len);
    if me == root {
        for from in (1..world).map(|d| shape.before(d)) {
            let block = Span::new(Buf::Out, from as usize * len, len);
            block.pieces(piece).for_each(|span| b.recv(from, span));
        }
        b.copy(own, Span::new(Buf::Out, me as usize * len, len));
    } else {
        own.pieces(piece).for_each(|span| b.send(root, span));
    }
    agree(&mut b, shape);
    b.finish()
}

/// Block j of `In` (`world * len`) of `root` to `Out` (`len`) of rank j.
pub fn scatter(shape: Shape, root: u32) -> Schedule {
    let Shape { me, world, len, piece } = shape;
    let mut b = Builder::new(me, false);
    let own = Span::new(Buf::Out, 0, len);
    if me == root {
        for to in (1..world).map(|d| shape.after(d)) {
            let block = Span::new(Buf::In, to as usize * len, len);
            block.pieces(piece).for_each(|span| b.send(to, span));
        }
        b.copy(Span::new(Buf::In, me as usize * len, len), own);
    } else {
        own.pieces(piece).for_each(|span| b.recv(root, span));
    }
    agree(&mut b, shape);
    b.finish()
}

/// Block j of rank i's `In` to block i of rank j's `Out`. `send[j]` and `recv[j]` are the lengths
/// of this rank's blocks to and from rank j; the blocks lie one after another.
pub fn all_to_all(shape: Shape, send: &[usize], recv: &[usize]) -> Schedule {
    let Shape { me, world, piece, .. } = shape;
    let mut b = Builder::new(me, false);
    let (sent, received) = (share_spans(Buf::In, 0, send), share_spans(Buf::Out, 0, recv));
    let (input, output) = (|p: u32| sent[p as usize], |p: u32| received[p as usize]);
    for d in 1..world {
        let to = shape.after(d);
        messages(input(to), piece).for_each(|span| b.send(to, span));
        let from = shape.before(d);
        messages(output(from), piece).for_each(|span| b.recv(from, span));
    }
    b.copy(input(me), output(me));
    agree(&mut b, shape);
    b.finish()
}

/// One message of `In` to `to`.
pub fn send(me: u32, to: u32, len: usize, piece: usize) -> Schedule {
    let mut b = Builder::new(me, false);
    messages(Span::new(Buf::In, 0, len), piece).for_each(|span| b.send(to, span));
    b.finish()
}

/// One message from `from` to `Out`.
pub fn recv(me: u32, from: u32, len: usize, piece: usize) -> Schedule {
    let mut b = Builder::new(me, false);
    messages(Span::new(Buf::Out, 0, len), piece).for_each(|span| b.recv(from, span));
    b.finish()
}
