//! AllReduce by scatter-gather: every rank reduces a share of the elements for all.
//!
//! Each rank sends share j of its data to rank j, sums the copies of its own share in rank order,
//! and sends the result to all. Two hops whatever the world, `2 (p-1)/p n` bytes with equal
//! shares, and *shares may be unequal*, so that a slow link carries less: see the derivation in
//! `ARCHITECTURE.md`. A piece's result leaves as soon as that piece is reduced, so sending and
//! receiving overlap throughout.
//!
//! Every sum happens in one place, in rank order: 16-bit floats lose nothing on the way, and
//! shares do not change the bits of a result.

use crate::schedule::{Buf, Builder, Place, Schedule, Span, share_spans};
use crate::topology::Shape;

/// In place on `Out`. `shares[i]` elements are reduced by rank i; they add up to `shape.len`.
pub fn all_reduce(shape: Shape, shares: &[usize]) -> Schedule {
    let mut b = Builder::new(shape.me, true);
    let peers: Vec<Place> = (0..shape.world).collect();
    let whole = Span::new(Buf::Out, 0, shape.len);
    among(&mut b, &peers, shape.me as usize, whole, shares, shape.piece);
    b.finish()
}

/// Scatter-gather of `whole` among `peers`, of which this rank is the `me`-th.
pub(crate) fn among(
    b: &mut Builder,
    peers: &[Place],
    me: usize,
    whole: Span,
    shares: &[usize],
    piece: usize,
) {
    let n = peers.len();
    let spans = share_spans(whole.buf, whole.start, shares);
    let mine = spans[me];
    let landings: Vec<Span> = (0..n).map(|i| if i == me { mine } else { b.scratch(mine.len) }).collect();
    let most = shares.iter().copied().max().unwrap_or(0);
    // Everybody starts with the rank after itself, so that no rank is sent to by all at once.
    let after = |d: usize| (me + d) % n;
    let before = |d: usize| (me + n - d) % n;
    for k in 0..most.div_ceil(piece.max(1)) {
        for i in (1..n).map(after) {
            if let Some(span) = spans[i].piece(k, piece) {
                b.send(peers[i], span);
            }
        }
        if let Some(own) = mine.piece(k, piece).filter(|_| n > 1) {
            for i in (1..n).map(before) {
                b.recv(peers[i], landings[i].like(own, mine));
            }
            let copies: Vec<Span> = landings.iter().map(|l| l.like(own, mine)).collect();
            b.fold(&copies, own, true);
            for i in (1..n).map(after) {
                b.send(peers[i], own);
            }
        }
        for i in (1..n).map(before) {
            if let Some(span) = spans[i].piece(k, piece) {
                b.recv(peers[i], span);
            }
        }
    }
}
