//! AllReduce around a ring: reduce-scatter, then all-gather.
//!
//! Each rank talks to its two neighbours only and moves `2 (p-1)/p n`, the least possible, in
//! `2 (p-1)` hops: good for large messages on equal links, poor for small ones.
//!
//! Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
//! workstations", 2009.

use crate::schedule::{Buf, Builder, Schedule, Span, even_shares, share_spans};
use crate::topology::Shape;

/// In place on `Out`. Partial sums round at every hop.
pub fn all_reduce(shape: Shape) -> Schedule {
    let Shape { me, world, len, piece } = shape;
    let mut b = Builder::new(me, true);
    let chunks = share_spans(Buf::Out, 0, &even_shares(len, world as usize));
    let chunk = |i: u32| chunks[(i % world) as usize];
    let (next, prev) = (shape.after(1), shape.before(1));
    // Two landing places, so that a chunk may arrive while the one before it is being added.
    let most = chunks[0].len;
    let landing = [b.scratch(most), b.scratch(most)];
    for hop in 0..world - 1 {
        let (out, inn) = (chunk(me + world - hop), chunk(me + 2 * world - hop - 1));
        let landing = Span { len: inn.len, ..landing[hop as usize % 2] };
        for span in out.pieces(piece) {
            b.send(next, span);
        }
        let last = hop == world - 2;
        for (own, land) in inn.pieces(piece).zip(landing.pieces(piece)) {
            b.recv(prev, land);
            b.fold(&[land, own], own, last);
        }
    }
    for hop in 0..world - 1 {
        for span in chunk(me + 1 + world - hop).pieces(piece) {
            b.send(next, span);
        }
        for span in chunk(me + world - hop).pieces(piece) {
            b.recv(prev, span);
        }
    }
    b.finish()
}
