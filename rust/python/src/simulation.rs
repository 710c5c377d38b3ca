//! The simulator for Python: how long a collective takes over given links.

use std::sync::Arc;

use pyo3::prelude::*;
use trigram_core::planner::{Call, Layout, Lent, Links, schedule};
use trigram_core::signature::{Collective, Via};
use trigram_core::sim::{self, Net, Rank};
use trigram_core::{DType, ReduceOp};
use trigram_engine::bootstrap::tuning_file;

use crate::errors::Raise;

/// Seconds of an AllReduce of `len` float32 between hosts with a rank each, by the schedule that the engine takes there
/// once it knows the rates (bytes per second, one for each host), with what `trigram bench --tune` has measured on this
/// machine. Moves the bytes in memory: costs as much as a sum.
#[pyfunction]
pub(crate) fn simulate_all_reduce(
    py: Python<'_>,
    len: usize,
    latency: f64,
    rates: Vec<f64>,
) -> PyResult<f64> {
    py.detach(|| {
        let world = rates.len() as u32;
        let hosts: Vec<Vec<u32>> = (0..world).map(|p| vec![p]).collect();
        let tuned = tuning_file::read()?.into_iter().find(|tuned| tuned.world == world);
        let links = Links { rates: &rates, steady: true, far: false };
        let (what, via) = (Collective::AllReduce, Via::Auto);
        let call = Call { what, dtype: DType::F32, len, root: 0, via, splits: None };
        let ranks = (0..world).map(|me| {
            let layout = Layout { me, world, hosts: hosts.clone(), helpers: 0, tuned, far: false };
            let schedule = Arc::new(schedule(&call, &layout, Lent::Nothing, links)?);
            Ok(Rank { schedule, input: vec![0; len * 4], output: None })
        });
        let ranks = ranks.collect::<trigram_core::Result<Vec<_>>>()?;
        let net = Net { latency, rate: rates.clone(), jitter: 0.0 };
        Ok(sim::run(ranks, &hosts, DType::F32, ReduceOp::Sum, &net, 0)?.time)
    })
    .raise(py)
}
