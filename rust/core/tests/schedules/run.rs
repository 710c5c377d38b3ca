//! Runs schedules in the simulator, and what must come out.

use std::sync::Arc;

use trigram_core::schedule::{Loc, Place, Schedule, Step};
use trigram_core::signature::Collective;
use trigram_core::sim::{self, Net, Rank, Report};
use trigram_core::{DType, ReduceOp};

/// Values whose float sums depend on the order of addition.
pub(crate) fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7919 + i * 104_729) % 1_000_003) as f32 * 1.000_1e-3 - 300.0
}

pub(crate) fn input(rank: usize, n: usize) -> Vec<f32> {
    (0..n).map(|i| value(rank, i)).collect()
}

pub(crate) fn bytes(v: &[f32]) -> Vec<u8> {
    bytemuck::cast_slice(v).to_vec()
}

pub(crate) fn floats(b: &[u8]) -> Vec<f32> {
    b.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
}

pub(crate) fn close(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-4 * (1.0 + y.abs()))
}

/// Two schedules agree if, for every ordered pair, the k-th send has the k-th receive's length.
pub(crate) fn assert_matched(schedules: &[Schedule]) {
    for (a, from) in schedules.iter().enumerate() {
        for (b, to) in schedules.iter().enumerate() {
            let (me, peer) = (a as Place, b as Place);
            assert_eq!(from.sent_to(peer), to.received_from(me), "{a} to {b}");
        }
    }
}

pub(crate) fn simulate(
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

pub(crate) fn one_host(world: u32) -> Vec<Vec<Place>> {
    vec![(0..world).collect()]
}

/// What each collective must leave on rank `me`; `None` where the output is not defined.
pub(crate) fn expect(what: Collective, root: usize, me: usize, n: usize, len: usize) -> Option<Vec<f32>> {
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

pub(crate) const OTHERS: [Collective; 8] = [
    Collective::Reduce,
    Collective::Broadcast,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
    Collective::Barrier,
];

pub(crate) fn check(
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

/// Between two barriers nobody reads or writes what another rank writes, however fast each goes.
pub(crate) fn assert_no_conflict(schedules: &[Schedule]) {
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
