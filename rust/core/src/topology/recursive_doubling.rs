//! AllReduce by recursive doubling: in round k, exchange everything with the rank at distance 2^k.
//!
//! `log2 p` rounds of the whole message: the choice for small messages. A world that is not a
//! power of two folds its surplus ranks into partners first and sends them the result at the end.
//!
//! Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
//! MPICH", 2005.

use crate::schedule::{Buf, Builder, Schedule, Span};
use crate::topology::Shape;

/// In place on `Out`. Both partners add the lower rank's part first, so all get the same bits.
pub fn all_reduce(shape: Shape) -> Schedule {
    let Shape { me, world, len, piece } = shape;
    let mut b = Builder::new(me, true);
    let all = Span::new(Buf::Out, 0, len);
    let core = 1 << world.ilog2(); // the largest power of two that fits
    let surplus = world - core;
    if me >= core {
        let partner = me - core;
        all.pieces(piece).for_each(|span| b.send(partner, span));
        all.pieces(piece).for_each(|span| b.recv(partner, span));
        return b.finish();
    }
    let rounds = core.ilog2();
    let has_surplus = me < surplus;
    if has_surplus {
        let landing = b.scratch(len);
        for (own, land) in all.pieces(piece).zip(landing.pieces(piece)) {
            b.recv(me + core, land);
            b.fold(&[own, land], own, rounds == 0);
        }
    }
    for round in 0..rounds {
        let partner = me ^ (1 << round);
        let landing = b.scratch(len);
        for (own, land) in all.pieces(piece).zip(landing.pieces(piece)) {
            b.send(partner, own);
            b.recv(partner, land);
            let ordered = if me < partner { [own, land] } else { [land, own] };
            b.fold(&ordered, own, round == rounds - 1);
        }
    }
    if has_surplus {
        all.pieces(piece).for_each(|span| b.send(me + core, span));
    }
    b.finish()
}
