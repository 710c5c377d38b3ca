//! Topologies of several hosts of several ranks: each value crosses between hosts once.

use std::sync::Arc;

use trigram_core::schedule::{Buf, Loc, Place, Schedule, Step, even_shares};
use trigram_core::signature::Collective;
use trigram_core::sim::{self, Net, Rank};
use trigram_core::topology::blocks::Blocks;
use trigram_core::topology::two_level::Inside;
use trigram_core::topology::{Shape, bounce, direct, hierarchical, shared, two_level};
use trigram_core::{DType, ReduceOp};

use crate::run::{assert_no_conflict, check, close, floats, input, simulate, value};

/// Hosts of given sizes; ranks are dealt round-robin when `dealt`, in blocks otherwise.
pub(crate) fn hosts_of(sizes: &[usize], dealt: bool) -> Vec<Vec<Place>> {
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
