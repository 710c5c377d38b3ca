//! Topologies in which every rank is alike, by messages and through the memory of one host.

use std::sync::Arc;

use trigram_core::schedule::{Buf, Schedule, Step, even_shares};
use trigram_core::signature::Collective;
use trigram_core::sim::{self, Net, Rank};
use trigram_core::topology::blocks::Blocks;
use trigram_core::topology::{Shape, bounce, direct, recursive_doubling, ring, scatter_gather, shared, tree};
use trigram_core::{DType, ReduceOp};

use crate::run::{OTHERS, assert_no_conflict, check, close, floats, input, one_host, simulate, value};

const LENGTHS: [usize; 8] = [0, 1, 2, 3, 16, 17, 64, 257];

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

pub(crate) fn check_all_reduce(world: u32, len: usize, piece: usize, seed: u64) {
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
