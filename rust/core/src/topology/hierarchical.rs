//! all_reduce and broadcast among hosts of several ranks each: every byte crosses between hosts once.
//!
//! `hosts` lists the places of each host, all ranks alike. Inside a host ranks exchange over
//! shared memory, by messages or, where memory is registered, directly; between hosts the i-th
//! ranks of all hosts form a rail and carry slice i.

use crate::schedule::{Buf, Builder, Loc, Place, Schedule, Span, even_shares, share_spans};
use crate::topology::scatter_gather::Cut;
use crate::topology::{Shape, direct, scatter_gather};

/// Where a rank stands among the hosts.
pub(crate) struct Standing<'a> {
    pub(crate) hosts: &'a [Vec<Place>],
    pub(crate) host: usize,
    pub(crate) index: usize,
}

impl<'a> Standing<'a> {
    pub(crate) fn of(me: Place, hosts: &'a [Vec<Place>]) -> Self {
        let found = hosts
            .iter()
            .enumerate()
            .find_map(|(host, ranks)| ranks.iter().position(|&r| r == me).map(|index| (host, index)));
        let (host, index) = found.unwrap_or_default();
        Self { hosts, host, index }
    }

    pub(crate) fn local(&self) -> &'a [Place] {
        &self.hosts[self.host]
    }

    /// The rank of another host that stands in for this host's `index`-th.
    pub(crate) fn counterpart(&self, host: usize, index: usize) -> Place {
        let ranks = &self.hosts[host];
        ranks[index % ranks.len()]
    }
}

/// AllReduce in place on `Out`: reduce inside each host, scatter-gather between the hosts, and
/// back. `direct`: `Out` is registered memory on every rank of *this* host, so ranks read and
/// write each other's instead of sending messages; hosts may differ in that.
///
/// `window`: see [`scatter_gather::all_reduce`].
///
/// Sums are taken in place order within a host and in host order between them.
pub fn all_reduce(shape: Shape, hosts: &[Vec<Place>], direct: bool, window: usize) -> Schedule {
    let Shape { me, len, piece, .. } = shape;
    let at = Standing::of(me, hosts);
    let local = at.local();
    let mut b = Builder::new(me, true);
    let rails = hosts.iter().map(Vec::len).min().unwrap_or(1).max(1);
    let slices = share_spans(Buf::Out, 0, &even_shares(len, rails));
    let everywhere = |span: Span| -> Vec<Loc> { local.iter().map(|&place| Loc { place, span }).collect() };
    let elsewhere =
        |span: Span| -> Vec<Loc> { everywhere(span).into_iter().filter(|l| l.place != me).collect() };
    let own = (at.index < rails).then(|| slices[at.index]);
    let shares: Vec<usize> = own.map_or_else(Vec::new, |s| even_shares(s.len, hosts.len()));
    // Pieces follow the shares between the hosts, so that one piece is one message all the way.
    let pieces_of = |slice: Span, shares: &[usize]| -> Vec<Span> {
        share_spans(slice.buf, slice.start, shares).iter().flat_map(|share| share.pieces(piece)).collect()
    };
    if direct {
        b.barrier();
    } else {
        for rail in (0..rails).filter(|&r| local[r] != me) {
            let slice = slices[rail];
            for span in pieces_of(slice, &even_shares(slice.len, hosts.len())) {
                b.send(local[rail], span);
            }
        }
    }
    if let Some(slice) = own {
        let landings: Vec<Span> =
            (local.iter()).map(|&p| if p == me || direct { slice } else { b.scratch(slice.len) }).collect();
        for span in pieces_of(slice, &shares) {
            let to = Loc { place: me, span };
            if direct {
                b.reduce(&everywhere(span), &[to], false);
                continue;
            }
            for (&peer, landing) in local.iter().zip(&landings).filter(|(p, _)| **p != me) {
                b.recv(peer, landing.like(span, slice));
            }
            let copies: Vec<Span> = landings.iter().map(|l| l.like(span, slice)).collect();
            b.fold(&copies, span, false);
        }
        let rail: Vec<Place> = hosts.iter().map(|ranks| ranks[at.index]).collect();
        scatter_gather::among(&mut b, &rail, at.host, slice, Cut { shares: &shares, piece, window });
        for span in pieces_of(slice, &shares) {
            let from = Loc { place: me, span };
            if direct {
                b.reduce(&[from], &elsewhere(span), false);
            } else {
                local.iter().filter(|&&p| p != me).for_each(|&p| b.send(p, span));
            }
        }
    }
    if direct {
        b.barrier();
    } else {
        for rail in (0..rails).filter(|&r| local[r] != me) {
            let slice = slices[rail];
            for span in pieces_of(slice, &even_shares(slice.len, hosts.len())) {
                b.recv(local[rail], span);
            }
        }
    }
    b.finish()
}

/// `Out` of `root` to all, in place: one rank of each host receives it and passes it on inside.
pub fn broadcast(shape: Shape, hosts: &[Vec<Place>], root: Place, small: usize) -> Schedule {
    let Shape { me, len, piece, .. } = shape;
    let at = Standing::of(me, hosts);
    let from = Standing::of(root, hosts);
    let mut b = Builder::new(me, true);
    let leaders: Vec<Place> =
        (hosts.iter().enumerate()).map(|(h, ranks)| if h == from.host { root } else { ranks[0] }).collect();
    let whole = Span::new(Buf::Out, 0, len);
    let leader = leaders[at.host];
    if me == leader {
        direct::broadcast_among(&mut b, &leaders, at.host, from.host, whole, piece, small);
    }
    for span in direct::broadcast_pieces(whole, leaders.len(), piece, small) {
        if me == leader {
            at.local().iter().filter(|&&p| p != me).for_each(|&p| b.send(p, span));
        } else {
            b.recv(leader, span);
        }
    }
    direct::agree(&mut b, shape);
    b.finish()
}
