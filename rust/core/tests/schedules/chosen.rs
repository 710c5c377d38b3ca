//! What the planner chooses, for any call and in any order of arrival.

use proptest::prelude::*;
use trigram_core::DType;
use trigram_core::planner::{self, Call, Layout, Lent, Opening};
use trigram_core::schedule::{Schedule, even_shares};
use trigram_core::signature::{Collective, Via};

use crate::among_ranks::check_all_reduce;
use crate::between_hosts::hosts_of;
use crate::run::{OTHERS, check};

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
