//! Worlds of several hosts with several ranks each: every byte crosses between hosts once.
//!
//! `hosts` lists the places of each host, all ranks alike. Inside a host ranks exchange over
//! shared memory, by messages or, where memory is registered, directly; between hosts the i-th
//! ranks of all hosts form a rail and carry slice i.

use crate::schedule::{Buf, Builder, Loc, Place, Schedule, Span, even_shares, share_spans};
use crate::topology::blocks::{Blocks, messages};
use crate::topology::scatter_gather::Cut;
use crate::topology::{Shape, direct, scatter_gather};

/// Where a rank stands among the hosts.
struct Standing<'a> {
    hosts: &'a [Vec<Place>],
    host: usize,
    index: usize,
}

impl<'a> Standing<'a> {
    fn of(me: Place, hosts: &'a [Vec<Place>]) -> Self {
        let found = hosts
            .iter()
            .enumerate()
            .find_map(|(host, ranks)| ranks.iter().position(|&r| r == me).map(|index| (host, index)));
        let (host, index) = found.unwrap_or_default();
        Self { hosts, host, index }
    }

    fn local(&self) -> &'a [Place] {
        &self.hosts[self.host]
    }

    /// The rank of another host that stands in for this host's `index`-th.
    fn counterpart(&self, host: usize, index: usize) -> Place {
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

/// `In` of every rank, its block, to `Out` of all: a block crosses to each other host once and is passed on.
pub fn all_gather(shape: Shape, hosts: &[Vec<Place>], blocks: Blocks<'_>) -> Schedule {
    let Shape { me, piece, .. } = shape;
    let at = Standing::of(me, hosts);
    let mut b = Builder::new(me, false);
    let block = |p: Place| blocks.span(Buf::Out, p);
    let input = Span::new(Buf::In, 0, blocks.len(me));
    b.copy(input, block(me));
    for span in messages(input, piece) {
        for host in (0..hosts.len()).filter(|&h| h != at.host) {
            b.send(at.counterpart(host, at.index), span);
        }
        at.local().iter().filter(|&&p| p != me).for_each(|&p| b.send(p, span));
    }
    // Own host first, as every rank sends its own block before it passes others on.
    let (here, there): (Vec<usize>, Vec<usize>) = (0..hosts.len()).partition(|&h| h == at.host);
    for host in here.into_iter().chain(there) {
        for (index, &owner) in hosts[host].iter().enumerate().filter(|(_, o)| **o != me) {
            let relay = at.counterpart(at.host, index);
            for span in messages(block(owner), piece) {
                if host == at.host {
                    b.recv(owner, span);
                } else if relay == me {
                    b.recv(owner, span);
                    at.local().iter().filter(|&&p| p != me).for_each(|&p| b.send(p, span));
                } else {
                    b.recv(relay, span);
                }
            }
        }
    }
    b.finish()
}

/// Block j of every rank's `In`, summed, to `Out` of rank j: each host sums its ranks' parts
/// before they cross.
pub fn reduce_scatter(shape: Shape, hosts: &[Vec<Place>], blocks: Blocks<'_>) -> Schedule {
    let Shape { me, piece, .. } = shape;
    let at = Standing::of(me, hosts);
    let local = at.local();
    let mut b = Builder::new(me, false);
    let block = |p: Place| blocks.span(Buf::In, p);
    // My parts for others: to the rank on my host that sums that block (the owner, if it is here).
    for (host, ranks) in hosts.iter().enumerate() {
        for (index, &owner) in ranks.iter().enumerate() {
            let summer = if host == at.host { owner } else { at.counterpart(at.host, index) };
            if summer != me {
                messages(block(owner), piece).for_each(|span| b.send(summer, span));
            }
        }
    }
    // The blocks that I sum, of other hosts' ranks and then my own.
    let mut parts: Vec<Span> = Vec::with_capacity(hosts.len());
    for (host, ranks) in hosts.iter().enumerate() {
        for (index, &owner) in ranks.iter().enumerate() {
            let summer = if host == at.host { owner } else { at.counterpart(at.host, index) };
            if summer != me {
                continue;
            }
            let len = blocks.len(owner);
            let landings: Vec<Span> =
                local.iter().map(|&p| if p == me { block(owner) } else { b.scratch(len) }).collect();
            let sum = b.scratch(len);
            for span in messages(sum, piece) {
                let part = |landing: &Span| if len == 0 { span } else { landing.like(span, sum) };
                for (&peer, landing) in local.iter().zip(&landings).filter(|(p, _)| **p != me) {
                    b.recv(peer, part(landing));
                }
                if len > 0 {
                    let copies: Vec<Span> = landings.iter().map(part).collect();
                    b.fold(&copies, span, false);
                }
                if owner != me {
                    b.send(owner, span);
                }
            }
            if owner == me {
                parts.push(sum);
            }
        }
        if host != at.host {
            let landing = b.scratch(blocks.len(me));
            let summer = at.counterpart(host, at.index);
            messages(landing, piece).for_each(|span| b.recv(summer, span));
            parts.push(landing);
        }
    }
    let out = Span::new(Buf::Out, 0, blocks.len(me));
    for span in out.pieces(piece) {
        let copies: Vec<Span> = parts.iter().map(|p| p.like(span, out)).collect();
        b.fold(&copies, span, true);
    }
    b.finish()
}
