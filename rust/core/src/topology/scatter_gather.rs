//! AllReduce by scatter-gather: every rank reduces a share of the elements for all.
//!
//! Each rank sends share j of its data to rank j, sums the copies of its own share in rank order,
//! and sends the result to all. Two hops whatever the world, `2 (p-1)/p n` bytes with equal
//! shares, and *shares may be unequal*, so that a slow link carries less: see the derivation in
//! `ARCHITECTURE.md`. A piece's result leaves as soon as that piece is reduced, so sending and
//! receiving overlap throughout.
//!
//! Ranks without data of their own may take shares too ([`aided`]): helpers, the spare machines that
//! BytePS (Jiang et al., OSDI 2020) puts to use.
//!
//! Every sum happens in one place, in rank order: 16-bit floats lose nothing on the way, and
//! shares do not change the bits of a result.

use crate::schedule::{Buf, Builder, Place, Schedule, Span, share_spans};
use crate::topology::Shape;

/// Pieces are multiples of this many elements: cache lines.
const GRAIN: usize = 64;

/// A rank may be so many pieces ahead of a result, whatever the window.
const LEAST_WINDOW: usize = 2;
/// The same where shares differ, because links limit and one rank reduces more than others. With two, that rank's link
/// is idle while the results of slower ones come back, for up to a third of the time.
const LEAST_UNEVEN_WINDOW: usize = 3;

/// In place on `Out`. `shares[i]` elements are reduced by rank i; they add up to `shape.len`.
/// `window`: how many pieces a rank sends to all others together before the result of the first comes back.
pub fn all_reduce(shape: Shape, shares: &[usize], window: usize) -> Schedule {
    with(shape, shares, shape.world, window)
}

/// As [`all_reduce`], of the first `workers` ranks: the others have no data and only reduce their shares.
/// No window: a fast helper may have more under way than the others together.
pub fn aided(shape: Shape, shares: &[usize], workers: u32) -> Schedule {
    with(shape, shares, workers, usize::MAX)
}

fn with(shape: Shape, shares: &[usize], workers: u32, window: usize) -> Schedule {
    let mut b = Builder::new(shape.me, true);
    let peers: Vec<Place> = (0..shape.world).collect();
    let whole = Span::new(Buf::Out, 0, shape.len);
    let cut = Cut { shares, piece: shape.piece, window };
    between(&mut b, &peers, workers as usize, shape.me as usize, whole, cut);
    // A helper with nothing to do hears of the call all the same.
    for helper in (workers..shape.world).filter(|&h| shares[h as usize] == 0) {
        if shape.me < workers {
            b.send(helper, Span::TOKEN);
        } else if shape.me == helper {
            (0..workers).for_each(|worker| b.recv(worker, Span::TOKEN));
        }
    }
    b.finish()
}

/// Scatter-gather of `whole` among `peers`, of which this rank is the `me`-th.
pub(crate) fn among(b: &mut Builder, peers: &[Place], me: usize, whole: Span, cut: Cut<'_>) {
    between(b, peers, peers.len(), me, whole, cut);
}

/// How a scatter-gather cuts what it sums.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut<'a> {
    /// Elements that each rank reduces.
    pub(crate) shares: &'a [usize],
    /// Elements of a piece.
    pub(crate) piece: usize,
    /// See [`all_reduce`].
    pub(crate) window: usize,
}

/// The same, where only the first `workers` peers have data.
fn between(
    b: &mut Builder,
    peers: &[Place],
    workers: usize,
    me: usize,
    whole: Span,
    Cut { shares, piece, window }: Cut<'_>,
) {
    let n = peers.len();
    let works = me < workers;
    let spans = share_spans(whole.buf, whole.start, shares);
    // All shares are cut into as many pieces, so that every link is in use from the first to the last.
    let rounds = shares.iter().copied().max().unwrap_or(0).div_ceil(piece.max(1));
    let piece = |i: usize| shares[i].div_ceil(rounds.max(1)).next_multiple_of(GRAIN);
    let is_even = shares.iter().max() <= shares.iter().min().map(|least| least + GRAIN).as_ref();
    let least = if is_even { LEAST_WINDOW } else { LEAST_UNEVEN_WINDOW };
    let window = (window / n.saturating_sub(1).max(1)).max(least).min(rounds);
    // A helper makes its sums in scratch memory.
    let mine = if works { spans[me] } else { b.scratch(spans[me].len) };
    let landing = piece(me) * window;
    let landings: Vec<Span> =
        (0..workers).map(|i| if i == me { mine } else { b.scratch(landing.min(mine.len)) }).collect();
    // The steps that receive results, by peer and piece.
    let mut results = vec![None; rounds * n];
    // Everybody starts with the rank after itself, so that no rank is sent to by all at once.
    let after = |d: usize| (me + d) % n;
    let before = |d: usize| (me + n - d) % n;
    for k in 0..rounds {
        for i in (1..n).map(after).filter(|_| works) {
            if let Some(span) = spans[i].piece(k, piece(i)) {
                if let Some(before) = k.checked_sub(window).and_then(|before| results[before * n + i]) {
                    b.wait_for(before);
                }
                b.send(peers[i], span);
            }
        }
        if let Some(own) = mine.piece(k, piece(me)).filter(|_| n > 1) {
            let copy = |i: usize| match i == me {
                true => own,
                false => {
                    Span { start: landings[i].start + k % window * piece(me), len: own.len, ..landings[i] }
                }
            };
            for i in (1..n).map(before).filter(|&i| i < workers) {
                b.recv(peers[i], copy(i));
            }
            let copies: Vec<Span> = (0..workers).map(copy).collect();
            b.fold(&copies, own, true);
            for i in (1..n).map(after).filter(|&i| i < workers) {
                b.send(peers[i], own);
            }
        }
        for i in (1..n).map(before).filter(|_| works) {
            if let Some(span) = spans[i].piece(k, piece(i)) {
                b.recv(peers[i], span);
                results[k * n + i] = b.last();
            }
        }
    }
}
