//! Every topology, worlds 1 to 17, odd lengths, in the simulator: each Send meets its Recv, nobody
//! waits for ever, the result is right and bit-identical on all ranks, the bytes are the formula's.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use proptest::prelude::*;
use trigram_core::planner::{self, Call, Layout, Lent, Opening};
use trigram_core::schedule::{Buf, Loc, Place, Schedule, Step, even_shares};
use trigram_core::signature::{Collective, Via};
use trigram_core::sim::{self, Net, Rank, Report};
use trigram_core::topology::blocks::Blocks;
use trigram_core::topology::two_level::Inside;
use trigram_core::topology::{
    Shape, bounce, direct, hierarchical, recursive_doubling, ring, scatter_gather, shared, tree, two_level,
};
use trigram_core::{DType, ReduceOp};

const LENGTHS: [usize; 8] = [0, 1, 2, 3, 16, 17, 64, 257];

/// Values whose float sums depend on the order of addition.
fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7919 + i * 104_729) % 1_000_003) as f32 * 1.000_1e-3 - 300.0
}

fn input(rank: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| value(rank, i)).collect()
}

fn bytes(v: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(v).to_vec()
}

fn floats(b: &[u8]) -> Vec<f32> {
    b.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
}

fn close(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-4 * (1.0 + y.abs()))
}

/// Two schedules agree if, for every ordered pair, the k-th send has the k-th receive's length.
fn assert_matched(schedules: &[Schedule]) {
    for (a, from) in schedules.iter().enumerate() {
        for (b, to) in schedules.iter().enumerate() {
            let (me, peer) = (a as Place, b as Place);
            assert_eq!(from.sent_to(peer), to.received_from(me), "{a} to {b}");
        }
    }
}

fn simulate(
    schedules: Vec<Schedule>,
    input: impl Fn(usize) -> Vec<f32>,
    out: Option<usize>,
    hosts: &[Vec<Place>],
    op: ReduceOp,
    seed: u64,
) -> Report {
    assert_matched(&schedules);
    let mut net = Net::uniform(schedules.len(), 1e-5, 1e8);
    net.jitter = if seed == 0 { 0.0 } else { 1e-3 };
    let ranks = schedules
        .into_iter()
        .enumerate()
        .map(|(r, schedule)| Rank {
            schedule: Arc::new(schedule),
            input: bytes(&input(r)),
            output: out.map(|n| vec![0xee; n * 4]),
        })
        .collect();
    sim::run(ranks, hosts, DType::F32, op, &net, seed).unwrap()
}

fn one_host(world: u32) -> Vec<Vec<Place>> {
    vec![(0..world).collect()]
}

fn all_reduces(world: u32, len: usize, piece: usize) -> Vec<(&'static str, Vec<Schedule>)> {
    let shape = |me| Shape { me, world, len, piece };
    let all = |f: &dyn Fn(Shape) -> Schedule| (0..world).map(|me| f(shape(me))).collect::<Vec<_>>();
    // Shares that leave one rank nothing and give another most.
    let mut shares = even_shares(len - len / 2, world as usize);
    shares[0] += len / 2;
    if world > 2 {
        shares[0] += std::mem::take(&mut shares[1]);
    }
    vec![
        ("ring", all(&ring::all_reduce)),
        ("tree", all(&tree::all_reduce)),
        ("recursive_doubling", all(&recursive_doubling::all_reduce)),
        ("scatter_gather", all(&|s| scatter_gather::all_reduce(s, &even_shares(len, world as usize), 0))),
        ("uneven scatter_gather", all(&|s| scatter_gather::all_reduce(s, &shares, 0))),
        ("wide scatter_gather", all(&|s| scatter_gather::all_reduce(s, &shares, usize::MAX))),
        // Ranks need not agree on the window.
        (
            "mixed scatter_gather",
            all(&|s| scatter_gather::all_reduce(s, &shares, s.me as usize * usize::from(s.me > 1) * 9)),
        ),
        ("shared", all(&shared::all_reduce)),
        ("one shot", all(&|s| shared::one_shot(Collective::AllReduce, 0, s, Blocks::Equal(s.len)))),
        (
            "bounce buffers",
            all(&|s| bounce::bounce(Collective::AllReduce, 0, s, Blocks::Equal(s.len), 200.max(len))),
        ),
    ]
}

fn check_all_reduce(world: u32, len: usize, piece: usize, seed: u64) {
    let n = world as usize;
    let sum: Vec<f32> = (0..len).map(|i| (1..n).fold(value(0, i), |a, r| a + value(r, i))).collect();
    for op in [ReduceOp::Sum, ReduceOp::Avg] {
        let scale = if op == ReduceOp::Avg { n as f32 } else { 1.0 };
        let want: Vec<f32> = sum.iter().map(|x| x / scale).collect();
        for (name, schedules) in all_reduces(world, len, piece) {
            let label = format!("{name} world {world} len {len} piece {piece} {op:?}");
            let report = simulate(schedules, |r| input(r, len), None, &one_host(world), op, seed);
            for (r, out) in report.output.iter().enumerate() {
                assert_eq!(out, &report.output[0], "{label}: rank {r} holds other bits");
            }
            let got = floats(&report.output[0]);
            assert!(close(&got, &want), "{label}: {got:?} is not {want:?}");
            if name.contains("scatter_gather") || name.contains("sh") {
                assert_eq!(got, want, "{label}: sums go in rank order");
            }
        }
    }
}

#[test]
fn all_reduce_is_right_for_every_world_and_odd_lengths() {
    for world in 1..=17 {
        for len in LENGTHS {
            for piece in [1, 5, 1000] {
                if len > 64 && piece == 1 {
                    continue;
                }
                check_all_reduce(world, len, piece, 0);
            }
        }
    }
}

#[test]
fn bytes_are_the_formula() {
    for world in 2..=17u64 {
        let len = 16 * 9 * 5 * 7 * 11 * 13 * 17; // divides by every world
        for (name, schedules) in all_reduces(world as u32, len, 1 << 30) {
            let n = len as u64 * 4;
            let report = |s: Vec<Schedule>| {
                let sent: Vec<u64> =
                    s.iter().map(|s| s.traffic().iter().map(|t| t.sent as u64 * 4).sum()).collect();
                (*sent.iter().max().unwrap(), sent.iter().sum::<u64>())
            };
            let (most, total) = report(schedules);
            match name {
                "ring" | "scatter_gather" => {
                    assert_eq!(most, 2 * (world - 1) * n / world, "{name} {world}");
                    assert_eq!(total, 2 * (world - 1) * n, "{name} {world}");
                }
                // Each tree edge carries half of the message up and down.
                "tree" => {
                    assert_eq!(total, 2 * (world - 1) * n, "{name} {world}");
                    assert!(most <= 2 * n, "{name} {world}");
                }
                "recursive_doubling" => {
                    let core = 1 << world.ilog2();
                    let surplus = world - core;
                    assert_eq!(total, (core * u64::from(core.ilog2()) + 2 * surplus) * n);
                }
                "shared" | "one shot" | "bounce buffers" => assert_eq!(total, 0),
                _ => assert_eq!(total, 2 * (world - 1) * n, "{name} {world}"),
            }
        }
    }
}

/// What each collective must leave on rank `me`; `None` where the output is not defined.
fn expect(what: Collective, root: usize, me: usize, n: usize, len: usize) -> Option<Vec<f32>> {
    let column = |at: usize| -> Vec<f32> {
        (0..len).map(|i| (1..n).fold(value(0, at + i), |a, r| a + value(r, at + i))).collect()
    };
    let block = |r: usize, at: usize| (0..len).map(|i| value(r, at + i)).collect::<Vec<_>>();
    match what {
        Collective::Reduce => (me == root).then(|| column(0)),
        Collective::Broadcast => Some(block(root, 0)),
        Collective::AllGather => Some((0..n).flat_map(|r| block(r, 0)).collect()),
        Collective::ReduceScatter => Some(column(me * len)),
        Collective::Gather => (me == root).then(|| (0..n).flat_map(|r| block(r, 0)).collect()),
        Collective::Scatter => Some(block(root, me * len)),
        Collective::AllToAll => Some((0..n).flat_map(|r| block(r, me * len)).collect()),
        Collective::AllReduce => Some(column(0)),
        _ => None,
    }
}

const OTHERS: [Collective; 8] = [
    Collective::Reduce,
    Collective::Broadcast,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
    Collective::Barrier,
];

fn check(
    what: Collective,
    schedules: Vec<Schedule>,
    root: usize,
    len: usize,
    hosts: &[Vec<Place>],
    seed: u64,
) {
    let n = schedules.len();
    let out = match what {
        Collective::AllReduce | Collective::Broadcast | Collective::Barrier => None,
        Collective::AllGather | Collective::Gather | Collective::AllToAll => Some(n * len),
        _ => Some(len),
    };
    let report = simulate(schedules, |r| input(r, n * len), out, hosts, ReduceOp::Sum, seed);
    for me in 0..n {
        if let Some(want) = expect(what, root, me, n, len) {
            let got = floats(&report.output[me]);
            let got = &got[..want.len()];
            assert!(close(got, &want), "{what:?} world {n} len {len} rank {me}: {got:?} {want:?}");
        }
    }
    if what == Collective::AllReduce {
        assert!(report.output.iter().all(|o| o[..len * 4] == report.output[0][..len * 4]), "bits differ");
    }
}

fn direct_schedule(what: Collective, s: Shape, root: u32) -> Schedule {
    let even = vec![s.len; s.world as usize];
    match what {
        Collective::Reduce => direct::reduce(s, root),
        Collective::Broadcast => direct::broadcast(s, root, 16),
        Collective::AllGather => direct::all_gather(s, Blocks::Equal(s.len)),
        Collective::ReduceScatter => direct::reduce_scatter(s, Blocks::Equal(s.len)),
        Collective::Gather => direct::gather(s, root),
        Collective::Scatter => direct::scatter(s, root),
        Collective::AllToAll => direct::all_to_all(s, &even, &even),
        _ => direct::barrier(s),
    }
}

#[test]
fn other_collectives_are_right_by_messages_and_by_shared_memory() {
    for world in 1..=9u32 {
        for len in [0, 1, 5, 40] {
            for what in OTHERS {
                for root in [0, world - 1] {
                    let of = |f: &dyn Fn(Shape) -> Schedule| -> Vec<Schedule> {
                        (0..world).map(|me| f(Shape { me, world, len, piece: 7 })).collect()
                    };
                    let go = |s| check(what, s, root as usize, len, &one_host(world), u64::from(root));
                    go(of(&|s| direct_schedule(what, s, root)));
                    go(of(&|s| shared::one_shot(what, root, s, Blocks::Equal(s.len))));
                    go(of(&|s| shared::direct(what, root, s, Blocks::Equal(s.len))));
                    go(of(&|s| bounce::bounce(what, root, s, Blocks::Equal(s.len), 36)));
                }
            }
        }
    }
}

/// Between two barriers nobody reads or writes what another rank writes, however fast each goes.
fn assert_no_conflict(schedules: &[Schedule]) {
    let mut touched: Vec<(u32, usize, bool, Loc)> = Vec::new(); // epoch, rank, whether it writes, where
    for (rank, schedule) in schedules.iter().enumerate() {
        let mut epoch = 0;
        for step in &schedule.steps {
            match step {
                Step::Barrier { .. } => epoch += 1,
                Step::Reduce { from, to, .. } => {
                    touched.extend(from.iter().map(|&l| (epoch, rank, false, l)));
                    touched.extend(to.iter().map(|&l| (epoch, rank, true, l)));
                }
                _ => {}
            }
        }
    }
    let overlap = |a: Loc, b: Loc| {
        a.place == b.place
            && (a.span.buf == b.span.buf)
            && a.span.start < b.span.start + b.span.len
            && b.span.start < a.span.start + a.span.len
    };
    for &(epoch, rank, _, at) in touched.iter().filter(|t| t.2) {
        for other in touched.iter().filter(|o| o.0 == epoch && o.1 != rank) {
            assert!(
                !overlap(at, other.3),
                "rank {rank} writes {at:?} as rank {} is at {:?}",
                other.1,
                other.3
            );
        }
    }
}

#[test]
fn nobody_writes_what_another_reads() {
    for world in 2..=5u32 {
        for len in [0, 1, 7, 400, 1000] {
            let of = |f: &dyn Fn(Shape) -> Schedule| -> Vec<Schedule> {
                (0..world).map(|me| f(Shape { me, world, len, piece: 64 })).collect()
            };
            for what in [&OTHERS[..], &[Collective::AllReduce]].concat() {
                assert_no_conflict(&of(&|s| bounce::bounce(what, world - 1, s, Blocks::Equal(s.len), 600)));
                assert_no_conflict(&of(&|s| shared::direct(what, world - 1, s, Blocks::Equal(s.len))));
                assert_no_conflict(&of(&|s| shared::one_shot(what, world - 1, s, Blocks::Equal(s.len))));
            }
        }
    }
}

/// Every rank gets the sum of all inputs, of which each has computed its block.
#[test]
fn an_update_reaches_all_ranks() {
    for world in 2..=5u32 {
        for lengths in [vec![0, 40, 7, 300, 1], vec![64; 5]] {
            let lengths = &lengths[..world as usize];
            let (blocks, total) = (Blocks::Of(lengths), lengths.iter().sum());
            let shape = |me| Shape { me, world, len: blocks.longest(), piece: 16 };
            let schedules: Vec<Schedule> = (0..world).map(|me| shared::update(shape(me), blocks)).collect();
            assert_no_conflict(&schedules);
            let own = blocks.span(Buf::Out, 0);
            for step in &schedules[0].steps {
                if let Step::Reduce { to, .. } = step {
                    assert!(to.iter().all(|l| l.span.start + l.span.len <= own.start + own.len));
                }
            }
            let hosts = one_host(world);
            let given = |r| input(r, total);
            let report = simulate(schedules, given, Some(total), &hosts, ReduceOp::Sum, u64::from(world));
            let want: Vec<f32> =
                (0..total).map(|i| (1..world as usize).fold(value(0, i), |a, r| a + value(r, i))).collect();
            for (me, output) in report.output.iter().enumerate() {
                assert_eq!(floats(output), want, "world {world} {lengths:?} rank {me}");
            }
        }
    }
}

/// Hosts of given sizes; ranks are dealt round-robin when `dealt`, in blocks otherwise.
fn hosts_of(sizes: &[usize], dealt: bool) -> Vec<Vec<Place>> {
    let mut hosts: Vec<Vec<Place>> = vec![vec![]; sizes.len()];
    let mut next = 0;
    while hosts.iter().zip(sizes).any(|(h, s)| h.len() < *s) {
        for (h, s) in hosts.iter_mut().zip(sizes) {
            let take = if dealt { 1.min(s - h.len()) } else { s - h.len() };
            for _ in 0..take {
                h.push(next);
                next += 1;
            }
        }
    }
    hosts
}

#[test]
fn hierarchies_are_right_and_cross_between_hosts_once() {
    for sizes in [&[2, 2][..], &[1, 3], &[3, 2, 2], &[4, 1, 2], &[2, 2, 2, 2]] {
        for dealt in [false, true] {
            let hosts = hosts_of(sizes, dealt);
            let world: usize = sizes.iter().sum();
            for len in [1, 3, 50, 240] {
                let of = |f: &dyn Fn(Shape) -> Schedule| -> Vec<Schedule> {
                    (0..world as u32).map(|me| f(Shape { me, world: world as u32, len, piece: 16 })).collect()
                };
                for direct in [false, true] {
                    let s = of(&|s| hierarchical::all_reduce(s, &hosts, direct, 0));
                    let crossing: usize = crossing(&s, &hosts);
                    assert_eq!(crossing, 2 * (hosts.len() - 1) * len, "{sizes:?} {len}");
                    check(Collective::AllReduce, s, 0, len, &hosts, 1);
                }
                for root in 0..world as u32 {
                    let s = of(&|s| hierarchical::broadcast(s, &hosts, root, 20));
                    assert_eq!(crossing(&s, &hosts), (hosts.len() - 1) * len);
                    check(Collective::Broadcast, s, root as usize, len, &hosts, 1);
                }
            }
        }
    }
}

/// What the ranks of each host may do inside it, by host: all alike, and each host something else.
fn insides(hosts: &[Vec<Place>]) -> Vec<Vec<Inside>> {
    let kinds = [Inside::Messages, Inside::Buffers(97), Inside::Memory];
    let of = |k: usize, step: usize| (0..hosts.len()).map(|h| kinds[(k + step * h) % 3]).collect();
    [(0, 0), (1, 0), (2, 0), (0, 1), (1, 2)].map(|(k, step)| of(k, step)).to_vec()
}

/// The schedules of all ranks, of which those of a host exchange what they have as that host does.
fn two_level(
    what: Collective,
    hosts: &[Vec<Place>],
    blocks: Blocks<'_>,
    insides: &[Inside],
    piece: usize,
    window: usize,
) -> Vec<Schedule> {
    let world = hosts.iter().map(Vec::len).sum::<usize>() as u32;
    let len = match blocks {
        Blocks::Equal(len) => len,
        Blocks::Of(_) => blocks.longest(),
    };
    let of = |me: u32| {
        let inside = insides[hosts.iter().position(|h| h.contains(&me)).unwrap()];
        let shape = Shape { me, world, len, piece };
        match what {
            Collective::AllGather => two_level::all_gather(shape, hosts, blocks, inside, window),
            _ => two_level::reduce_scatter(shape, hosts, blocks, inside, window),
        }
    };
    (0..world).map(of).collect()
}

/// All worlds of 1 to 17 ranks, on hosts of equal and of unequal sizes.
fn worlds_of_hosts() -> Vec<Vec<Vec<Place>>> {
    let mut all = Vec::new();
    for world in 1..=17 {
        for count in [1, 2, 3, 5].into_iter().filter(|&count| count <= world) {
            let mut uneven = vec![1; count];
            uneven[count / 2] += world - count;
            for sizes in [even_shares(world, count), uneven] {
                all.extend([hosts_of(&sizes, false), hosts_of(&sizes, true)]);
            }
        }
    }
    all
}

#[test]
fn blocks_between_hosts_are_right_and_cross_once() {
    for (case, hosts) in worlds_of_hosts().iter().enumerate() {
        let world: usize = hosts.iter().map(Vec::len).sum();
        for len in [[1, 48], [5, 131]][case % 2] {
            let insides = insides(hosts);
            let inside = &insides[(case + len) % insides.len()];
            for what in [Collective::AllGather, Collective::ReduceScatter] {
                // A narrow window, none, and one that ranks do not agree on.
                for window in [0, usize::MAX] {
                    let s = two_level(what, hosts, Blocks::Equal(len), inside, 16, window);
                    for (host, ranks) in hosts.iter().enumerate() {
                        let mine = ranks.len() * len;
                        let bound = match what {
                            Collective::AllGather => (hosts.len() - 1) * mine,
                            _ => world * len - mine,
                        };
                        let sent = sent_by(&s, hosts, host);
                        assert_eq!(sent.iter().sum::<usize>(), bound, "{what:?} {hosts:?} {len}");
                        // The sums of a host leave through all of its ranks alike.
                        if what == Collective::ReduceScatter {
                            let spread = sent.iter().max().unwrap() - sent.iter().min().unwrap();
                            assert!(spread < hosts.len(), "{hosts:?} {len}: {sent:?}");
                        }
                    }
                    if what == Collective::AllGather {
                        for ranks in hosts {
                            let got: Vec<usize> =
                                ranks.iter().map(|&p| received_from_abroad(&s, hosts, p)).collect();
                            let spread = got.iter().max().unwrap() - got.iter().min().unwrap();
                            assert!(spread < hosts.len(), "{hosts:?} {len}: {got:?}");
                        }
                    }
                    if world <= 6 {
                        assert_no_conflict(&s);
                    }
                    check(what, s, 0, len, hosts, 1 + case as u64);
                }
                let mixed: Vec<Schedule> = (two_level(what, hosts, Blocks::Equal(len), inside, 16, 0)
                    .into_iter())
                .zip(two_level(what, hosts, Blocks::Equal(len), inside, 16, usize::MAX))
                .enumerate()
                .map(|(rank, (narrow, wide))| if rank % 2 == 0 { narrow } else { wide })
                .collect();
                check(what, mixed, 0, len, hosts, 2 + case as u64);
            }
        }
    }
}

/// Elements that each rank of a host sends to other hosts.
fn sent_by(schedules: &[Schedule], hosts: &[Vec<Place>], host: usize) -> Vec<usize> {
    let of = |&me: &Place| {
        let away = schedules[me as usize].traffic().iter().filter(|t| !hosts[host].contains(&t.peer));
        away.map(|t| t.sent).sum()
    };
    hosts[host].iter().map(of).collect()
}

fn received_from_abroad(schedules: &[Schedule], hosts: &[Vec<Place>], me: Place) -> usize {
    let host = hosts.iter().find(|h| h.contains(&me)).unwrap();
    schedules[me as usize].traffic().iter().filter(|t| !host.contains(&t.peer)).map(|t| t.received).sum()
}

/// Block j of a reduce_scatter has the bits of an AllReduce among the same hosts, whatever the ranks of a host may access:
/// f32, and 16-bit floats, which are rounded once per host (ADR 6).
#[test]
fn a_reduce_scatter_has_the_bits_of_the_all_reduce() {
    for sizes in [&[2, 2][..], &[3, 1], &[2, 3, 2]] {
        for dealt in [false, true] {
            let hosts = hosts_of(sizes, dealt);
            let (world, len) = (sizes.iter().sum::<usize>(), 37);
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let values = |rank: usize| -> Vec<u8> {
                    let floats = (0..world * len).map(|i| value(rank, i) / 64.0);
                    match dtype {
                        DType::F32 => floats.flat_map(f32::to_le_bytes).collect(),
                        // Any 16 bits but those of infinities and nans.
                        _ => floats.flat_map(|x| (x.to_bits() as u16 & 0xbfff).to_le_bytes()).collect(),
                    }
                };
                let simulate = |schedules: Vec<Schedule>, out: Option<usize>| {
                    let ranks = (schedules.into_iter().enumerate())
                        .map(|(rank, schedule)| Rank {
                            schedule: Arc::new(schedule),
                            input: values(rank),
                            output: out.map(|n| vec![0xee; n]),
                        })
                        .collect();
                    let net = Net::uniform(world, 1e-5, 1e8);
                    sim::run(ranks, &hosts, dtype, ReduceOp::Avg, &net, 5).unwrap().output
                };
                let shape = |me| Shape { me, world: world as u32, len: world * len, piece: 16 };
                let all = (0..world as u32).map(|me| hierarchical::all_reduce(shape(me), &hosts, false, 0));
                let whole = simulate(all.collect(), None);
                let size = len * dtype.size();
                for inside in insides(&hosts) {
                    let blocks = Blocks::Equal(len);
                    let s = two_level(Collective::ReduceScatter, &hosts, blocks, &inside, 16, 0);
                    for (rank, block) in simulate(s, Some(size)).iter().enumerate() {
                        assert_eq!(
                            block,
                            &whole[rank][rank * size..][..size],
                            "{sizes:?} {dtype:?} {inside:?}"
                        );
                    }
                }
            }
        }
    }
}

/// A rank's own block may lie in the memory of all blocks: a schedule reads it before it writes there.
#[test]
fn blocks_in_place_are_right() {
    for sizes in [&[2, 2][..], &[3, 1], &[2, 3, 2]] {
        let (hosts, len) = (hosts_of(sizes, true), 37);
        for inside in insides(&hosts) {
            for what in [Collective::AllGather, Collective::ReduceScatter] {
                let schedules = two_level(what, &hosts, Blocks::Equal(len), &inside, 16, 0);
                for (me, schedule) in schedules.iter().enumerate() {
                    // The values of the block that a span of its own tensor, or of the one of all blocks, has.
                    let of_block = |at: &Loc, own: Buf| -> Vec<usize> {
                        let first = if at.span.buf == own { 0 } else { me * len };
                        let span = at.span.start..at.span.start + at.span.len;
                        span.filter_map(|i| i.checked_sub(first)).filter(|&i| i < len).collect()
                    };
                    let own = if what == Collective::AllGather { Buf::In } else { Buf::Out };
                    let mut read = vec![false; len];
                    for step in &schedule.steps {
                        let Step::Reduce { from, to, .. } = step else { continue };
                        let mine = |buf| move |l: &&Loc| l.place as usize == me && l.span.buf == buf;
                        for i in from.iter().filter(mine(Buf::In)).flat_map(|l| of_block(l, own)) {
                            read[i] = true;
                        }
                        for i in to.iter().filter(mine(Buf::Out)).flat_map(|l| of_block(l, own)) {
                            assert!(
                                read[i],
                                "{what:?} {inside:?}: rank {me} writes value {i} before it reads it"
                            );
                        }
                    }
                    assert!(read.iter().all(|&read| read), "{what:?} {inside:?}: rank {me}");
                }
            }
        }
    }
}

/// Blocks of different lengths, some empty, of which no rank gives or gets the same.
#[test]
fn blocks_of_different_lengths_are_right_everywhere() {
    for sizes in [&[1][..], &[2], &[3], &[5], &[2, 2], &[1, 3], &[3, 2, 2], &[4, 1, 2], &[1, 1, 1]] {
        for (dealt, scale) in [(false, 1), (true, 7), (false, 40)] {
            let hosts = hosts_of(sizes, dealt);
            let world: usize = sizes.iter().sum();
            let patterns: [&dyn Fn(usize) -> usize; 3] =
                [&|p| p * 3 % 4 * scale, &|p| usize::from(p + 1 == world) * 5 * scale, &|p| {
                    (world - p) * scale
                }];
            for lengths in patterns.map(|f| (0..world).map(f).collect::<Vec<usize>>()) {
                let blocks = Blocks::Of(&lengths);
                let total: usize = lengths.iter().sum();
                let of = |f: &dyn Fn(Shape) -> Schedule| -> Vec<Schedule> {
                    let shape = |me| Shape { me, world: world as u32, len: blocks.longest(), piece: 16 };
                    (0..world as u32).map(|me| f(shape(me))).collect()
                };
                for what in [Collective::AllGather, Collective::ReduceScatter] {
                    let mut ways: Vec<Vec<Schedule>> =
                        insides(&hosts).iter().map(|i| two_level(what, &hosts, blocks, i, 16, 0)).collect();
                    let two_levels = ways.len();
                    ways.iter().for_each(|way| assert_no_conflict(way));
                    if hosts.len() == 1 || hosts.len() == world {
                        ways.push(match what {
                            Collective::AllGather => of(&|s| direct::all_gather(s, blocks)),
                            _ => of(&|s| direct::reduce_scatter(s, blocks)),
                        });
                    }
                    if hosts.len() == 1 {
                        ways.push(of(&|s| shared::one_shot(what, 0, s, blocks)));
                        ways.push(of(&|s| shared::direct(what, 0, s, blocks)));
                        ways.push(of(&|s| bounce::bounce(what, 0, s, blocks, 72)));
                        ways[two_levels..].iter().for_each(|way| assert_no_conflict(way));
                    }
                    for (way, schedules) in ways.into_iter().enumerate() {
                        let label = format!("{what:?} {sizes:?} {lengths:?} way {way}");
                        let report = simulate(
                            schedules,
                            |r| input(r, total),
                            Some(total),
                            &hosts,
                            ReduceOp::Sum,
                            1 + way as u64,
                        );
                        for me in 0..world {
                            let at = blocks.start(me as u32);
                            let want: Vec<f32> = match what {
                                Collective::AllGather => {
                                    (0..world).flat_map(|r| input(r, lengths[r])).collect()
                                }
                                _ => (0..lengths[me])
                                    .map(|i| (1..world).fold(value(0, at + i), |a, r| a + value(r, at + i)))
                                    .collect(),
                            };
                            let got = floats(&report.output[me]);
                            assert!(close(&got[..want.len()], &want), "{label} rank {me}: {got:?} {want:?}");
                        }
                    }
                }
            }
        }
    }
}

/// Elements sent from one host to another.
fn crossing(schedules: &[Schedule], hosts: &[Vec<Place>]) -> usize {
    let host = |p: Place| hosts.iter().position(|h| h.contains(&p));
    let of = |(me, s): (u32, &Schedule)| -> usize {
        s.traffic().iter().filter(|t| host(t.peer) != host(me)).map(|t| t.sent).sum()
    };
    (0..).zip(schedules).map(of).sum()
}

#[test]
fn a_schedule_for_ten_thousand_ranks_is_small() {
    for f in [ring::all_reduce, tree::all_reduce, recursive_doubling::all_reduce] {
        let s = f(Shape { me: 4321, world: 10_000, len: 6_553_600, piece: 65_536 });
        assert!(s.steps.len() < 60_000, "{}", s.steps.len());
    }
}

#[test]
fn a_lost_message_is_a_named_deadlock() {
    let shape = |me| Shape { me, world: 3, len: 5, piece: 5 };
    let wrong = vec![ring::all_reduce(shape(0)), ring::all_reduce(shape(1)), tree::all_reduce(shape(2))];
    let ranks = (wrong.into_iter())
        .map(|s| Rank { schedule: Arc::new(s), input: vec![0; 20], output: None })
        .collect();
    let net = Net::uniform(3, 1e-5, 1e8);
    let e = sim::run(ranks, &one_host(3), DType::F32, ReduceOp::Sum, &net, 0);
    assert!(e.is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever the planner chooses, all ranks choose alike and arrive, in any order of arrival.
    #[test]
    fn whatever_the_planner_chooses_works(
        world in 1u32..=17,
        len in 0usize..600,
        what in proptest::sample::select([&OTHERS[..], &[Collective::AllReduce]].concat()),
        via in proptest::sample::select(Via::ALL.to_vec()),
        hosts in 1usize..4,
        dealt in any::<bool>(),
        lent in proptest::collection::vec(
            proptest::sample::select(vec![Lent::Nothing, Lent::BounceBuffers, Lent::Inputs]), 3
        ),
        seed in 1u64..1_000_000,
    ) {
        let hosts = (hosts as u32).min(world) as usize;
        let hosts = hosts_of(&even_shares(world as usize, hosts), dealt);
        let root = seed as u32 % world;
        let via = if what == Collective::AllReduce { via } else { Via::Auto };
        let call = Call { what, dtype: DType::F32, len, root, via, splits: None };
        let layout = |me| Layout { me, world, hosts: hosts.clone(), helpers: 0, tuned: None, far: false };
        let schedules: Result<Vec<Schedule>, _> = (0..world).map(|me| {
            let layout = layout(me);
            // Hosts may differ in what their ranks lend each other.
            let lent = lent[hosts.iter().position(|h| h.contains(&me)).unwrap()];
            let lent = if lent == Lent::Inputs { planner::lendable(&call, &layout).0 } else { lent };
            match planner::opening(&call, &layout) {
                Opening::OneShot => Ok(planner::one_shot(&call, &layout)),
                Opening::Barrier => planner::schedule(&call, &layout, lent, planner::Links::default()),
                Opening::Messages => planner::schedule(&call, &layout, Lent::Nothing, planner::Links::default()),
            }
        }).collect();
        if let Ok(schedules) = schedules {
            check(what, schedules, root as usize, len, &hosts, seed);
        }
    }

    /// Adversarial timing: random delays shuffle every arrival.
    #[test]
    fn arrival_order_changes_nothing(world in 2u32..=9, len in 0usize..90, piece in 1usize..20, seed in 1u64..1_000_000) {
        check_all_reduce(world, len, piece, seed);
    }
}
