//! all_gather and reduce_scatter among hosts of which some have several ranks: what crosses to another host crosses
//! once, and the ranks of a host share it.
//!
//! Let a host have L ranks. The blocks of another host's ranks, one after another, are cut into L shares of about the
//! same length, whatever the lengths of the blocks. In a reduce_scatter the i-th rank of a host sums share i for all
//! ranks of its host, and sends each stretch of it to the rank that owns it. In an all_gather it receives share i from
//! the owners, and hands it to the others of its host. So a host sends, of S elements on all hosts, those of the other
//! hosts' blocks in a reduce_scatter, and its own blocks once to each other host in an all_gather: with equal blocks
//! on H hosts, S (H-1)/H either way, which is the least that a host can send. Among hosts of L ranks each, with equal
//! blocks, a share is a block, and rank i of a host exchanges messages with the i-th ranks of the others only.
//!
//! Inside a host ranks read and write each other's memory, or pass through bounce buffers, or send messages
//! ([`Inside`]); hosts may differ in that, as what they send each other does not depend on it.
//!
//! **Order of sums.** The ranks of a host are summed in the order of their places, then the hosts in theirs, as in
//! [`hierarchical::all_reduce`](crate::topology::hierarchical::all_reduce): block j has the bits that an AllReduce by
//! that schedule gives it.

use crate::schedule::{Buf, Builder, Loc, Place, Schedule, Span, even_shares, share_spans};
use crate::topology::Shape;
use crate::topology::blocks::Blocks;
use crate::topology::hierarchical::Standing;

/// How the ranks of this host exchange what they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inside {
    /// By messages.
    Messages,
    /// Through bounce buffers of so many elements.
    Buffers(usize),
    /// Each accesses the memory of the others: their inputs in a reduce_scatter, their outputs in an all_gather.
    Memory,
}

/// Sums, on their way to another host, of this many pieces are in memory at a time: so few that they stay in the cache.
const SLOTS: usize = 4;

/// The fewest pieces that a rank is ahead of those that come from its counterpart.
const LEAST_WINDOW: usize = 2;

/// A stretch of a block, as one message or one step.
#[derive(Clone, Copy, Debug)]
struct Part {
    owner: Place,
    /// Where it lies when all blocks lie one after another.
    start: usize,
    len: usize,
}

impl Part {
    fn span(self, buf: Buf) -> Span {
        Span::new(buf, self.start, self.len)
    }

    /// The parts of at most `most` elements that it consists of.
    fn cut(self, most: usize) -> impl Iterator<Item = Part> {
        let pieces = self.span(Buf::In).pieces(most);
        pieces.map(move |s| Part { owner: self.owner, start: s.start, len: s.len })
    }
}

/// What a schedule of this file is a function of.
struct Plan<'a> {
    at: Standing<'a>,
    me: Place,
    piece: usize,
    blocks: Blocks<'a>,
    /// Where each rank's block begins.
    starts: Vec<usize>,
    window: usize,
}

impl<'a> Plan<'a> {
    fn new(shape: Shape, hosts: &'a [Vec<Place>], blocks: Blocks<'a>, window: usize) -> Self {
        let Shape { me, world, piece, .. } = shape;
        let lengths: Vec<usize> = (0..world).map(|place| blocks.len(place)).collect();
        let starts = share_spans(Buf::In, 0, &lengths).iter().map(|span| span.start).collect();
        // What two ranks send each other is the same, piece by piece, if hosts and blocks are. Else one may have to send
        // before it has received anything, and waits for nothing.
        let alike = hosts.iter().all(|ranks| ranks.len() == hosts[0].len())
            && (0..world).all(|place| blocks.len(place) == blocks.len(0));
        let others = hosts.len().saturating_sub(1).max(1);
        let window = if alike { (window / others).max(LEAST_WINDOW) } else { usize::MAX };
        Self { at: Standing::of(me, hosts), me, piece, blocks, starts, window }
    }

    fn local(&self) -> &'a [Place] {
        self.at.local()
    }

    fn peers(&self) -> impl Iterator<Item = Place> + 'a {
        let me = self.me;
        self.local().iter().copied().filter(move |&p| p != me)
    }

    /// The other hosts, beginning with the one after this rank's, so that not all send to the same one.
    fn other_hosts(&self) -> impl Iterator<Item = usize> + 'a {
        let (n, host) = (self.at.hosts.len(), self.at.host);
        (1..n).map(move |d| (host + d) % n)
    }

    /// Share `i` of `n` of the blocks of these ranks, in pieces.
    fn share(&self, ranks: &[Place], i: usize, n: usize) -> Vec<Part> {
        let total: usize = ranks.iter().map(|&p| self.blocks.len(p)).sum();
        let shares = even_shares(total, n);
        let from: usize = shares[..i].iter().sum();
        let to = from + shares[i];
        let mut at = 0;
        let mut parts = Vec::new();
        for &owner in ranks {
            let (begin, end) = (at, at + self.blocks.len(owner));
            at = end;
            let (lo, hi) = (begin.max(from), end.min(to));
            if lo < hi {
                let part = Part { owner, start: self.starts[owner as usize] + lo - begin, len: hi - lo };
                parts.extend(part.cut(self.piece));
            }
        }
        parts
    }

    /// This rank's block, in pieces.
    fn own(&self, place: Place) -> Vec<Part> {
        let (start, len) = (self.starts[place as usize], self.blocks.len(place));
        Part { owner: place, start, len }.cut(self.piece).collect()
    }

    /// What the `i`-th rank of this host sums for others, or receives from them: its shares of all other hosts' blocks,
    /// in turns.
    fn foreign(&self, i: usize) -> Vec<Part> {
        let n = self.local().len();
        in_turns(self.other_hosts().map(|h| self.share(&self.at.hosts[h], i, n)).collect())
    }

    /// The stretches of this rank's block that each rank of the other hosts sends to it, or gets from it: who, and which.
    fn abroad(&self) -> Vec<(Place, Part)> {
        let of = |h: usize| {
            let ranks = &self.at.hosts[h];
            let lists = (0..ranks.len()).map(|i| {
                let parts = self.share(self.local(), i, ranks.len());
                parts.into_iter().filter(|p| p.owner == self.me).map(|p| (ranks[i], p)).collect()
            });
            in_turns(lists.collect())
        };
        in_turns(self.other_hosts().map(of).collect())
    }

    /// The owners of empty blocks on a host, with the rank of another host that stands in for each there.
    fn empty_on(&self, host: usize, elsewhere: usize) -> Vec<(Place, Place)> {
        (self.at.hosts[host].iter().enumerate())
            .filter(|(_, owner)| self.blocks.len(**owner) == 0)
            .map(|(index, &owner)| (owner, self.at.counterpart(elsewhere, index)))
            .collect()
    }

    /// Whether this rank reaches others of its host by messages.
    fn by_messages(&self, inside: Inside) -> bool {
        inside == Inside::Messages && self.local().len() > 1
    }
}

/// One of each list, then the next of each.
fn in_turns<T: Copy>(lists: Vec<Vec<T>>) -> Vec<T> {
    let longest = lists.iter().map(Vec::len).max().unwrap_or_default();
    (0..longest).flat_map(|k| lists.iter().filter_map(move |list| list.get(k).copied())).collect()
}

/// Messages to and from the ranks of other hosts, of which those that go are at most a window ahead of those that come.
struct Exchange {
    window: usize,
    /// Of each peer, how many messages have gone to it, and the steps that receive those from it.
    peers: std::collections::BTreeMap<Place, (usize, Vec<Option<u32>>)>,
}

impl Exchange {
    fn new(window: usize) -> Self {
        Self { window, peers: std::collections::BTreeMap::new() }
    }

    fn send(&mut self, b: &mut Builder, to: Place, span: Span) {
        let (sent, received) = self.peers.entry(to).or_default();
        let before = sent.checked_sub(self.window).and_then(|n| received.get(n).copied().flatten());
        *sent += 1;
        before.into_iter().for_each(|step| b.wait_for(step));
        b.send(to, span);
    }

    fn recv(&mut self, b: &mut Builder, from: Place, span: Span) {
        b.recv(from, span);
        let (_, received) = self.peers.entry(from).or_default();
        received.push(b.last());
    }
}

/// `In` of every rank, a block for each rank, summed: block j to `Out` of rank j.
///
/// `window`: how many pieces a rank sends to all others together before what it receives from them comes, where hosts
/// and blocks are alike; ranks need not agree on it.
pub fn reduce_scatter(
    shape: Shape,
    hosts: &[Vec<Place>],
    blocks: Blocks<'_>,
    inside: Inside,
    window: usize,
) -> Schedule {
    let plan = &Plan::new(shape, hosts, blocks, window);
    let (me, local) = (plan.me, plan.local());
    let mut b = Builder::new(me, false);
    if !plan.by_messages(inside) && local.len() > 1 {
        b.barrier();
    }
    tell_of_sums(&mut b, plan, inside);
    // Sums for other hosts first, so that links are in use from the beginning.
    let units: Vec<Vec<Part>> =
        (0..local.len()).map(|i| [plan.foreign(i), plan.own(local[i])].concat()).collect();
    let mine = &units[plan.at.index];
    let abroad = plan.abroad();
    let alone = local.len() == 1;
    let landings: Vec<Option<Span>> =
        (0..hosts.len()).map(|h| (h != plan.at.host).then(|| b.scratch(blocks.len(me)))).collect();
    let slots = Slots::new(&mut b, if alone { 0 } else { plan.piece.min(longest(mine)) });
    let out = |part: Part| Span::new(Buf::Out, part.start - plan.starts[me as usize], part.len);
    let mut exchange = Exchange::new(plan.window);
    let mut coming = abroad.iter();
    // Of each sum of mine there is: it leaves, or stays in `Out` until the others come.
    let mut sums = 0;
    let target = |part: Part, nth: usize| if part.owner == me { out(part) } else { slots.at(nth, part.len) };
    let mut is_there = |b: &mut Builder, part: Part, nth: usize| {
        if part.owner != me {
            let sum = if alone { part.span(Buf::In) } else { target(part, nth) };
            exchange.send(b, part.owner, sum);
        }
        if let Some(&(from, part)) = coming.next() {
            exchange.recv(b, from, landing(&landings, plan, from, part));
        }
    };
    match inside {
        _ if alone => {
            for part in mine {
                is_there(&mut b, *part, 0);
            }
        }
        Inside::Memory => {
            for &part in mine {
                let from: Vec<Loc> =
                    local.iter().map(|&place| Loc { place, span: part.span(Buf::In) }).collect();
                b.reduce(&from, &[Loc { place: me, span: target(part, sums) }], false);
                is_there(&mut b, part, sums);
                sums += 1;
            }
        }
        Inside::Messages => {
            for (&peer, unit) in local.iter().zip(&units).filter(|(p, _)| **p != me) {
                unit.iter().for_each(|part| b.send(peer, part.span(Buf::In)));
            }
            let room: usize = mine.iter().map(|part| part.len).sum();
            let landings: Vec<(Place, Span)> = plan.peers().map(|p| (p, b.scratch(room))).collect();
            let mut at = 0;
            for &part in mine {
                let copy = |place: Place| match landings.iter().find(|l| l.0 == place) {
                    Some((_, landing)) => Span::new(landing.buf, landing.start + at, part.len),
                    None => part.span(Buf::In),
                };
                plan.peers().for_each(|p| b.recv(p, copy(p)));
                let copies: Vec<Span> = local.iter().map(|&p| copy(p)).collect();
                b.fold(&copies, target(part, sums), false);
                is_there(&mut b, part, sums);
                at += part.len;
                sums += 1;
            }
        }
        Inside::Buffers(size) => {
            let rounds = Rounds::new(&units, size / 2 / local.len());
            for k in 0..=rounds.count {
                for i in (0..local.len()).filter(|&i| local[i] != me) {
                    if let Some((chunk, _)) = rounds.chunk(i, k) {
                        b.copy(chunk.span(Buf::In), rounds.place(i, k, chunk));
                    }
                }
                if let Some((chunk, last)) = k.checked_sub(1).and_then(|k| rounds.chunk(plan.at.index, k)) {
                    let part = mine[sums];
                    let span = |place: Place| match place == me {
                        true => chunk.span(Buf::In),
                        false => rounds.place(plan.at.index, k - 1, chunk),
                    };
                    let from: Vec<Loc> =
                        local.iter().map(|&place| Loc { place, span: span(place) }).collect();
                    let sum = target(part, sums).like(chunk.span(Buf::In), part.span(Buf::In));
                    b.reduce(&from, &[Loc { place: me, span: sum }], false);
                    if last {
                        is_there(&mut b, part, sums);
                        sums += 1;
                    }
                }
                if k < rounds.count {
                    b.meet();
                }
            }
        }
    }
    for &(from, part) in coming {
        exchange.recv(&mut b, from, landing(&landings, plan, from, part));
    }
    for part in plan.own(me) {
        let own = if alone { part.span(Buf::In) } else { out(part) };
        let copy =
            |landing: &Option<Span>| landing.map_or(own, |l| l.like(out(part), Span { start: 0, ..l }));
        let copies: Vec<Span> = landings.iter().map(copy).collect();
        b.fold(&copies, out(part), true);
    }
    if inside == Inside::Memory && !alone {
        b.meet(); // others read my input until then
    }
    b.finish()
}

/// Where a part of this rank's block lands that a rank of another host sends.
fn landing(landings: &[Option<Span>], plan: &Plan<'_>, from: Place, part: Part) -> Span {
    let host = Standing::of(from, plan.at.hosts).host;
    let at = part.start - plan.starts[plan.me as usize];
    landings[host].map_or(Span::TOKEN, |l| Span::new(l.buf, l.start + at, part.len))
}

/// Owners of empty blocks in a reduce_scatter hear of the others by tokens.
fn tell_of_sums(b: &mut Builder, plan: &Plan<'_>, inside: Inside) {
    let (me, host) = (plan.me, plan.at.host);
    let by_messages = plan.by_messages(inside);
    let mut told: Vec<(Place, Place)> = plan.other_hosts().flat_map(|h| plan.empty_on(h, host)).collect();
    told.extend(plan.empty_on(host, host));
    if by_messages {
        told.iter().filter(|(_, by)| *by != me).for_each(|&(_, by)| b.send(by, Span::TOKEN));
        for _ in told.iter().filter(|(_, by)| *by == me) {
            plan.peers().for_each(|p| b.recv(p, Span::TOKEN));
        }
    }
    told.iter()
        .filter(|&&(owner, by)| by == me && owner != me)
        .for_each(|&(owner, _)| b.send(owner, Span::TOKEN));
    if plan.blocks.len(me) == 0 {
        plan.other_hosts().for_each(|h| b.recv(plan.at.counterpart(h, plan.at.index), Span::TOKEN));
    }
}

/// `In` of every rank, its block, to `Out` of all, in rank order. `window`: see [`reduce_scatter`].
pub fn all_gather(
    shape: Shape,
    hosts: &[Vec<Place>],
    blocks: Blocks<'_>,
    inside: Inside,
    window: usize,
) -> Schedule {
    let plan = &Plan::new(shape, hosts, blocks, window);
    let (me, local) = (plan.me, plan.local());
    let alone = local.len() == 1;
    let mut b = Builder::new(me, false);
    if !plan.by_messages(inside) && !alone {
        b.barrier();
    }
    tell_of_blocks(&mut b, plan, inside);
    let units: Vec<Vec<Part>> =
        (0..local.len()).map(|i| [plan.own(local[i]), plan.foreign(i)].concat()).collect();
    let input = |part: Part| Span::new(Buf::In, part.start - plan.starts[me as usize], part.len);
    if inside == Inside::Messages {
        for part in plan.own(me) {
            plan.peers().for_each(|p| b.send(p, input(part)));
        }
    }
    let mut exchange = Exchange::new(plan.window);
    let mut coming = plan.foreign(plan.at.index).into_iter();
    for (to, part) in plan.abroad() {
        exchange.send(&mut b, to, input(part));
        if let Some(part) = coming.next() {
            exchange.recv(&mut b, part.owner, part.span(Buf::Out));
        }
    }
    coming.for_each(|part| exchange.recv(&mut b, part.owner, part.span(Buf::Out)));
    let own = Span::new(Buf::In, 0, blocks.len(me));
    match inside {
        _ if alone => b.copy(own, blocks.span(Buf::Out, me)),
        Inside::Memory => {
            for &part in &units[plan.at.index] {
                let span = part.span(Buf::Out);
                let to: Vec<Loc> = match part.owner == me {
                    true => local.iter().map(|&place| Loc { place, span }).collect(),
                    false => plan.peers().map(|place| Loc { place, span }).collect(),
                };
                let from = if part.owner == me { input(part) } else { span };
                b.reduce(&[Loc { place: me, span: from }], &to, false);
            }
            b.barrier();
        }
        Inside::Messages => {
            b.copy(own, blocks.span(Buf::Out, me));
            for (&relay, unit) in local.iter().zip(&units) {
                for part in unit.iter().filter(|part| part.owner != me) {
                    if relay == me {
                        plan.peers().for_each(|p| b.send(p, part.span(Buf::Out)));
                    } else {
                        b.recv(relay, part.span(Buf::Out));
                    }
                }
            }
        }
        Inside::Buffers(size) => {
            b.copy(own, blocks.span(Buf::Out, me));
            let rounds = Rounds::new(&units, size / 2 / local.len());
            for k in 0..=rounds.count {
                if let Some((chunk, _)) = rounds.chunk(plan.at.index, k) {
                    let from = if chunk.owner == me { input(chunk) } else { chunk.span(Buf::Out) };
                    b.copy(from, rounds.place(plan.at.index, k, chunk));
                }
                for i in (0..local.len()).filter(|&i| local[i] != me) {
                    if let Some((chunk, _)) = k.checked_sub(1).and_then(|k| rounds.chunk(i, k)) {
                        let from = Loc { place: local[i], span: rounds.place(i, k - 1, chunk) };
                        b.reduce(&[from], &[Loc { place: me, span: chunk.span(Buf::Out) }], false);
                    }
                }
                if k < rounds.count {
                    b.meet();
                }
            }
        }
    }
    b.finish()
}

/// Of empty blocks in an all_gather the others hear by tokens.
fn tell_of_blocks(b: &mut Builder, plan: &Plan<'_>, inside: Inside) {
    let (me, host) = (plan.me, plan.at.host);
    let by_messages = plan.by_messages(inside);
    if plan.blocks.len(me) == 0 {
        plan.other_hosts().for_each(|h| b.send(plan.at.counterpart(h, plan.at.index), Span::TOKEN));
    }
    let foreign: Vec<(Place, Place)> = plan.other_hosts().flat_map(|h| plan.empty_on(h, host)).collect();
    let heard: Vec<Place> = foreign.iter().filter(|(_, by)| *by == me).map(|(owner, _)| *owner).collect();
    if by_messages {
        if plan.blocks.len(me) == 0 {
            plan.peers().for_each(|p| b.send(p, Span::TOKEN));
        }
        let here = plan.local().iter().filter(|&&p| p != me && plan.blocks.len(p) == 0);
        here.for_each(|&p| b.recv(p, Span::TOKEN));
    }
    for owner in heard {
        b.recv(owner, Span::TOKEN);
        if by_messages {
            plan.peers().for_each(|p| b.send(p, Span::TOKEN));
        }
    }
    if by_messages {
        foreign.iter().filter(|(_, by)| *by != me).for_each(|&(_, by)| b.recv(by, Span::TOKEN));
    } else if !foreign.is_empty() && plan.local().len() > 1 {
        b.barrier();
    }
}

/// Memory for the sums that go to other hosts, used in turn.
struct Slots(Span, usize);

impl Slots {
    fn new(b: &mut Builder, piece: usize) -> Self {
        Self(b.scratch(SLOTS * piece), piece)
    }

    fn at(&self, nth: usize, len: usize) -> Span {
        Span::new(self.0.buf, self.0.start + nth % SLOTS * self.1, len)
    }
}

fn longest(parts: &[Part]) -> usize {
    parts.iter().map(|part| part.len).max().unwrap_or_default()
}

/// What each rank of a host puts through the bounce buffers from barrier to barrier: chunk k of unit i lies in area i
/// of the buffers' half k mod 2.
struct Rounds {
    /// By unit: chunks, and whether one is the last of its part.
    chunks: Vec<Vec<(Part, bool)>>,
    count: usize,
    room: usize,
}

impl Rounds {
    fn new(units: &[Vec<Part>], room: usize) -> Self {
        let room = room.max(1);
        let cut = |part: &Part| {
            let end = part.start + part.len;
            part.cut(room).map(move |chunk| (chunk, chunk.start + chunk.len == end))
        };
        let chunks: Vec<Vec<(Part, bool)>> =
            units.iter().map(|unit| unit.iter().flat_map(cut).collect()).collect();
        let count = chunks.iter().map(Vec::len).max().unwrap_or_default();
        Self { chunks, count, room }
    }

    fn chunk(&self, unit: usize, k: usize) -> Option<(Part, bool)> {
        self.chunks[unit].get(k).copied()
    }

    fn place(&self, unit: usize, k: usize, chunk: Part) -> Span {
        Span::new(Buf::Bounce, (k % 2 * self.chunks.len() + unit) * self.room, chunk.len)
    }
}
