//! Ranks as threads of one process, whose only connections are queues.

use std::sync::Arc;
use std::time::Duration;

use trigram_engine::group::world::{Patience, World};
use trigram_engine::host::control_segment::ControlSegment;
use trigram_engine::lanes::pool::Wanted;
use trigram_engine::link::frames::{Rx, Tx};
use trigram_engine::runtime::engine::Engine;
use trigram_engine::transport::mem;
use trigram_engine::transport::stream::{Receiver, Sender};

/// The two ends of a connection.
pub(crate) type Ends = (Box<dyn Sender>, Box<dyn Receiver>);

/// As long as what takes so long on a machine that does nothing else takes now.
#[allow(dead_code)] // each test is a crate of its own, and not all use it
pub(crate) fn patient(quiet: Duration) -> Duration {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let mut loads = load.split([' ', '/']).map(|each| each.parse().unwrap_or(0.0));
    let (average, running) = (loads.next().unwrap_or(0.0), loads.nth(2).unwrap_or(0.0));
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    quiet.mul_f64((f64::max(average, running) / cores).max(1.0))
}

/// Engines of `n` ranks, of which one is lost after `limit` without a heartbeat; `wrap` gets the ends of each connection,
/// and the ranks it leads from and to.
pub(crate) fn engines(
    n: usize,
    limit: Duration,
    wrap: impl Fn(Ends, usize, usize) -> Ends,
) -> Vec<Arc<Engine>> {
    let controls: Vec<ControlSegment> = (0..n).map(|_| ControlSegment::create().unwrap()).collect();
    let mut tx: Vec<Vec<Option<Tx>>> = (0..n).map(|_| (0..n).map(|_| None).collect()).collect();
    let mut rx: Vec<Vec<Option<Rx>>> = (0..n).map(|_| (0..n).map(|_| None).collect()).collect();
    for a in 0..n {
        for b in (0..n).filter(|&b| b != a) {
            let (out, inn) = wrap(mem::one_way(controls[b].bell().clone(), controls[a].bell().clone()), a, b);
            tx[a][b] = Some(Tx::new(out));
            rx[b][a] = Some(Rx::new(a as u32, inn));
        }
    }
    let ranks = controls.into_iter().zip(tx).zip(rx).enumerate();
    let make = |(rank, ((control, tx), rx)): (usize, ((ControlSegment, _), _))| {
        let world = World {
            tuning: Vec::new(),
            rank: rank as u32,
            host_of: (0..n).collect(),
            far: Vec::new(),
            through: Vec::new(),
            passing: None,
            bell: control.bell().clone(),
            control: Some(control),
            neighbours: Default::default(),
            arena: Arc::default(),
            retired: Arc::default(),
            patience: Patience { limit, ..Patience::default() },
            lanes: Wanted::Exactly { lanes: rank % 3, least: 1, sums: 2 },
        };
        Arc::new(Engine::new(Arc::new(world), tx, rx).unwrap())
    };
    ranks.map(make).collect()
}
