//! Collectives inside one host, on memory that its owner alone can see.
//!
//! Every rank has a *bounce buffer*, a small area that its peers may read ([`Buf::Bounce`], larger than the
//! inline buffer of an operation slot). Payloads go through it in chunks: small enough that what one rank puts on
//! its buffer is still in the cache when the others take it, in turn on different parts of the
//! buffer, so that one barrier per chunk orders everything.
//!
//! A part is written again only after a barrier that all ranks reach when they have read it. For an
//! AllReduce, which puts both contributions and sums in the buffer, that takes three parts, else two.

use crate::schedule::{Buf, Builder, Loc, Place, Schedule, Span, even_shares, share_spans};
use crate::signature::Collective;
use crate::topology::Shape;
use crate::topology::blocks::Blocks;
use crate::topology::shared::{Pull, contribution, in_place, pulls};

/// A collective through bounce buffers of `buffer` elements. AllToAll has equal splits.
pub fn bounce(what: Collective, root: Place, shape: Shape, blocks: Blocks<'_>, buffer: usize) -> Schedule {
    let mut b = Builder::new(shape.me, in_place(what));
    b.barrier(); // only here the ranks find out that they need bounce buffers
    match what {
        Collective::AllReduce => all_reduce(&mut b, shape, buffer / 3),
        _ => pull(&mut b, what, root, shape, blocks, buffer / 2),
    }
    b.finish()
}

/// Stretches of `0..len` of about the same length, at most `most`, that start on a cache line.
fn chunks(len: usize, most: usize) -> Vec<(usize, usize)> {
    let count = len.div_ceil(most.max(1)).max(1);
    let each = len.div_ceil(count).next_multiple_of(64).min(most.max(1)).max(1);
    (0..len.div_ceil(each)).map(|k| (k * each, each.min(len - k * each))).collect()
}

/// Rank r sums slice r of a chunk. Its own contribution and its own result never touch the buffer
/// for its own sake: it reads and writes them where they are.
fn all_reduce(b: &mut Builder, shape: Shape, part: usize) {
    let Shape { me, world, len, .. } = shape;
    let chunks = chunks(len, part);
    let slice = |k: usize, r: u32| {
        let (at, n) = chunks[k];
        share_spans(Buf::Out, at, &even_shares(n, world as usize))[r as usize]
    };
    let on_buffer =
        |k: usize, span: Span| Span::new(Buf::Bounce, k % 3 * part + span.start - chunks[k].0, span.len);
    let others = || (1..world).map(|by| shape.after(by));
    let give = |b: &mut Builder, k: usize| {
        others().for_each(|r| b.copy(slice(k, r), on_buffer(k, slice(k, r))));
    };
    let sum = |b: &mut Builder, k: usize| {
        let own = slice(k, me);
        let buffered = on_buffer(k, own);
        let from: Vec<Loc> =
            (0..world).map(|place| Loc { place, span: if place == me { own } else { buffered } }).collect();
        let to = [own, buffered].map(|span| Loc { place: me, span });
        if own.len > 0 {
            b.reduce(&from, &to[..if world > 1 { 2 } else { 1 }], true);
        }
    };
    let take = |b: &mut Builder, k: usize| {
        for place in others() {
            let out = slice(k, place);
            if out.len > 0 {
                b.reduce(&[Loc { place, span: on_buffer(k, out) }], &[Loc { place: me, span: out }], false);
            }
        }
    };
    for k in 0..=chunks.len() {
        if k < chunks.len() {
            give(b, k);
        }
        b.barrier();
        if k < chunks.len() {
            sum(b, k);
        }
        if k > 0 {
            take(b, k - 1);
        }
    }
}

/// Everybody copies what it gives to its buffer, and takes what it needs from the others'.
fn pull(b: &mut Builder, what: Collective, root: Place, shape: Shape, lengths: Blocks<'_>, part: usize) {
    let Shape { me, world, .. } = shape;
    let len = shape.len.max(lengths.longest());
    // Whoever gives blocks to each rank puts the same stretch of all of them in its buffer.
    let per_rank = matches!(what, Collective::ReduceScatter | Collective::AllToAll | Collective::Scatter);
    let blocks = if per_rank { world as usize } else { 1 };
    let room = part / blocks;
    let chunks = chunks(len, room);
    let given = contribution(what, root, shape, lengths);
    let given: Vec<Span> = match what {
        Collective::Reduce | Collective::Gather if me == root => vec![],
        _ if given == 0 => vec![],
        _ if per_rank => (0..world).map(|p| lengths.span(Buf::In, p)).collect(),
        _ => vec![Span::new(Buf::In, 0, given)],
    };
    // What of a block is in the k-th chunk; blocks that are shorter than others have less of it.
    let cut = |block: Span, k: usize| {
        let (at, n) = chunks[k];
        let n = n.min(block.len.saturating_sub(at));
        (n > 0).then(|| Span::new(block.buf, block.start + at, n))
    };
    let give = |b: &mut Builder, k: usize| {
        for (block, span) in given.iter().enumerate().filter(|&(p, _)| blocks == 1 || p != me as usize) {
            if let Some(from) = cut(*span, k) {
                b.copy(from, Span::new(Buf::Bounce, k % 2 * part + block * room, from.len));
            }
        }
    };
    let pulls = pulls(what, root, shape, lengths);
    let take = |b: &mut Builder, k: usize| {
        for Pull { out, from, block } in &pulls {
            let Some(to) = cut(*out, k) else { continue };
            let source = |&(place, start): &(Place, usize)| {
                let span = match place == me {
                    true => Span::new(Buf::In, start + to.start - out.start, to.len),
                    false => Span::new(Buf::Bounce, k % 2 * part + block * room, to.len),
                };
                Loc { place, span }
            };
            let from: Vec<Loc> = from.iter().map(source).collect();
            b.reduce(&from, &[Loc { place: me, span: to }], true);
        }
    };
    for k in 0..=chunks.len() {
        if k < chunks.len() {
            give(b, k);
        }
        if k > 0 {
            take(b, k - 1);
        }
        if k < chunks.len() {
            b.barrier();
        }
    }
}
