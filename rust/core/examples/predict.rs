//! How long an AllReduce takes over given links, by the simulator: no network, no clock.
//!
//! ```sh
//! cargo run --release -p trigram-core --example predict -- ring 26214400 60e-6 118.5e6,118.5e6,59e6
//! ```
//!
//! Arguments: the schedule (or `auto`), bytes of float32, seconds of latency, and bytes per second of
//! each host's link. Several schedules and sizes may be given with commas; each line of the output is
//! schedule, bytes and milliseconds.
#![allow(clippy::print_stdout)] // an example shows what it does
#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use trigram_core::planner::{Call, Layout, Lent, Links, schedule};
use trigram_core::signature::{Collective, Via};
use trigram_core::sim::{self, Net, Rank};
use trigram_core::{DType, ReduceOp};

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [vias, sizes, latency, rates] = &args[..] else {
        panic!("arguments: SCHEDULES BYTES LATENCY RATES; see the head of this file");
    };
    let rates: Vec<f64> = rates.split(',').map(|r| r.parse().unwrap()).collect();
    let world = rates.len() as u32;
    let links = Links { rates: &rates, steady: false, far: false };
    let hosts: Vec<Vec<u32>> = (0..world).map(|p| vec![p]).collect();
    for via in vias.split(',') {
        let way = Via::ALL.into_iter().find(|v| v.name() == via).unwrap_or_default();
        for size in sizes.split(',') {
            let bytes: usize = size.parse().unwrap();
            let len = bytes / 4;
            let call =
                Call { what: Collective::AllReduce, dtype: DType::F32, len, root: 0, via: way, splits: None };
            let ranks = (0..world).map(|me| {
                let layout = Layout { me, world, hosts: hosts.clone(), helpers: 0, tuned: None, far: false };
                let schedule = Arc::new(schedule(&call, &layout, Lent::Nothing, links).unwrap());
                Rank { schedule, input: vec![0; len * 4], output: None }
            });
            let net = Net { latency: latency.parse().unwrap(), rate: rates.clone(), jitter: 0.0 };
            let report = sim::run(ranks.collect(), &hosts, DType::F32, ReduceOp::Sum, &net, 0).unwrap();
            println!("{via} {bytes} {:.6}", report.time * 1e3);
        }
    }
}
