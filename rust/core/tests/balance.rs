//! Shares by rates, in the simulator: right sums, and a time near the bound that no AllReduce beats.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use proptest::prelude::*;
use trigram_core::planner::WINDOW_PIECES;
use trigram_core::schedule::{Schedule, even_shares};
use trigram_core::sim::{self, Net, Rank, Report};
use trigram_core::topology::{Shape, balance, ring, scatter_gather};
use trigram_core::{DType, ReduceOp};

const GIGABIT: f64 = 118e6;

/// An AllReduce of `len` whole numbers over links of these rates; checks every sum.
fn simulate(len: usize, rates: &[f64], schedule: impl Fn(Shape) -> Schedule) -> Report {
    simulate_aided(len, rates, 0, schedule)
}

/// The same, where the last ranks have no memory at all and only help.
fn simulate_aided(len: usize, rates: &[f64], helpers: usize, schedule: impl Fn(Shape) -> Schedule) -> Report {
    let world = rates.len();
    let workers = world - helpers;
    let value = |rank: usize, i: usize| ((rank * 31 + i * 17) % 1000) as f32;
    let ranks = (0..world)
        .map(|me| Rank {
            schedule: Arc::new(schedule(Shape {
                me: me as u32,
                world: world as u32,
                len,
                piece: (len / world / 16).clamp(256, 64 << 10),
            })),
            input: (0..if me < workers { len } else { 0 }).flat_map(|i| value(me, i).to_le_bytes()).collect(),
            output: None,
        })
        .collect();
    let hosts: Vec<Vec<u32>> = (0..world as u32).map(|r| vec![r]).collect();
    let net = Net { latency: 1e-4, rate: rates.to_vec(), jitter: 0.0 };
    let report = sim::run(ranks, &hosts, DType::F32, ReduceOp::Sum, &net, 1).unwrap();
    for i in 0..len {
        let sum: f32 = (0..workers).map(|r| value(r, i)).sum();
        for (rank, out) in report.output[..workers].iter().enumerate() {
            assert_eq!(out[i * 4..][..4], sum.to_le_bytes(), "element {i} on rank {rank}");
        }
    }
    report
}

fn balanced(len: usize, rates: &[f64]) -> f64 {
    let shares = balance::shares(len, rates, 0);
    let time = simulate(len, rates, |s| scatter_gather::all_reduce(s, &shares, WINDOW_PIECES)).time;
    time / balance::bound(len as f64 * 4.0, rates, 0)
}

fn one_at_half(world: usize) -> Vec<f64> {
    let mut rates = vec![GIGABIT; world];
    rates[world - 1] /= 2.0;
    rates
}

#[test]
fn four_hosts_one_at_half_rate() {
    let (len, rates) = (1 << 20, one_at_half(4));
    let bound = balance::bound(len as f64 * 4.0, &rates, 0);
    assert!(balanced(len, &rates) < 1.08, "{}", balanced(len, &rates));
    let around = simulate(len, &rates, ring::all_reduce).time / bound;
    assert!(around > 1.45, "a ring: {around}");
    let even = simulate(len, &rates, |s| scatter_gather::all_reduce(s, &even_shares(len, 4), WINDOW_PIECES))
        .time
        / bound;
    assert!(even > 1.45, "equal shares: {even}");
}

#[test]
fn eight_hosts_one_at_half_rate() {
    let (len, rates) = (1 << 20, one_at_half(8));
    assert!(balanced(len, &rates) < 1.12, "{}", balanced(len, &rates));
}

/// Nearly all goes through the first rank, and no link has anything to spare.
#[test]
fn one_rank_reduces_nearly_all() {
    let rates = [0.877, 0.407, 0.348, 0.444].map(|r| r * GIGABIT);
    assert!(balanced(200_000, &rates) < 1.15, "{}", balanced(200_000, &rates));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Any rates: right, and never far from the bound.
    #[test]
    fn any_rates(rates in proptest::collection::vec(0.2f64..1.0, 3..9), len in 200_000usize..300_000) {
        let rates: Vec<f64> = rates.iter().map(|r| r * GIGABIT).collect();
        let over = balanced(len, &rates);
        prop_assert!(over < 1.35, "{over} of the bound at {rates:?}");
    }

    /// Helpers of any number and rate: right, and never far from the bound, which they never make worse.
    #[test]
    fn helpers_help(workers in 2usize..6, helpers in proptest::collection::vec(0.2f64..4.0, 1..4)) {
        let len = 250_000;
        let rates: Vec<f64> =
            std::iter::repeat_n(1.0, workers).chain(helpers.iter().copied()).map(|r| r * GIGABIT).collect();
        let shares = balance::shares(len, &rates, helpers.len());
        let schedule = |s: Shape| scatter_gather::aided(s, &shares, workers as u32);
        let time = simulate_aided(len, &rates, helpers.len(), schedule).time;
        let bound = balance::bound(len as f64 * 4.0, &rates, helpers.len());
        prop_assert!(bound <= balance::bound(len as f64 * 4.0, &rates[..workers], 0) + 1e-9);
        prop_assert!(time / bound < 1.45, "{} of the bound at {rates:?}", time / bound);
    }

    /// Shares always add up, and the same rates in another unit give the same shares.
    #[test]
    fn shares_add_up(rates in proptest::collection::vec(0.0f64..10.0, 1..20), len in 0usize..100_000) {
        let shares = balance::shares(len, &rates, 0);
        prop_assert_eq!(shares.len(), rates.len());
        prop_assert_eq!(shares.iter().sum::<usize>(), len);
        let doubled: Vec<f64> = rates.iter().map(|r| r * 2.0).collect();
        prop_assert_eq!(balance::shares(len, &doubled, 0), shares);
    }
}
