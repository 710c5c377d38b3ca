//! Which schedule serves a call.
//!
//! The choice depends only on what all ranks know alike (the signature, the hosts), or on what the
//! ranks of one host have told each other at the first barrier (whether memory is registered), because
//! ranks that chose differently would wait for each other for ever.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::schedule::{Place, Schedule, even_shares};
use crate::signature::{Collective, Via};
use crate::topology::blocks::Blocks;
use crate::topology::{
    Shape, balance, bounce, direct, hierarchical, recursive_doubling, ring, scatter_gather, shared, tree,
    two_level,
};
use crate::tuning::Tuned;

/// Bytes of the inline buffer in each rank's operation slot: a payload that fits moves through it alone.
pub const INLINE_BYTES: usize = 16 << 10;

/// Bytes of a bounce buffer. Payloads that are not in registered memory and exceed [`INLINE_BYTES`] pass through it.
pub const BOUNCE_BYTES: usize = 768 << 10;

/// Largest message, in bytes: small enough to stay in a core's cache between arrival and sum.
pub const PIECE_BYTES: usize = 256 << 10;

/// The same where every rank has a host to itself: there a message costs system calls, and wakes a rank.
pub const WIRE_PIECE_BYTES: usize = 512 << 10;

/// Smallest piece that a message is cut into, in bytes: below, the cost of a message shows.
pub const LEAST_PIECE_BYTES: usize = 128 << 10;

/// Pieces that a rank sends in a scatter-gather before the result of the first comes back, to all others together: so
/// few that what is under way stays in the cache between send, sum and receipt.
pub const WINDOW_PIECES: usize = 6;

/// Up to here latency decides, and a message takes `log p` hops; less where links are known to be slow.
pub const SMALL_BYTES: usize = 32 << 10;

/// The same in worlds of a power of two: between two ranks, where recursive doubling sends no more bytes than
/// scatter-gather, and in one hop; among more, once links are known to be fast.
pub const DOUBLING_BYTES: usize = 128 << 10;

/// Where the bytes of a call pass a link in less time than this, in seconds, latency decides: it is about what the
/// messages cost that scatter-gather has more than recursive doubling.
const SMALL_SECONDS: f64 = 1e-4;

/// From this many ranks on, a ring spares large calls the many flows to one receiver that scatter-gather has.
const RING_WORLD: u32 = 3;

/// They are large if their bytes take this many seconds for each rank: its 2 (p - 1) hops must not show.
const RING_SECONDS: f64 = 3e-4;

/// Where links carry more bytes per second than this, copies limit a call and not links, and scatter-gather copies less:
/// what it has under way stays in the cache.
const RING_RATE: f64 = 3e8;

/// From here on unequal links are worth unequal shares.
pub const BALANCED_BYTES: usize = 1 << 20;

/// A collective call: everything a schedule is a function of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// Which collective.
    pub what: Collective,
    /// Element type.
    pub dtype: DType,
    /// Elements, as the collective counts them.
    pub len: usize,
    /// Place of the root.
    pub root: Place,
    /// What the caller asked for.
    pub via: Via,
    /// Lengths that differ: to and from each peer in an all_to_all; of each rank's block, twice, in an all_gather or
    /// reduce_scatter, whose `len` is then that of the longest.
    pub splits: Option<(Vec<usize>, Vec<usize>)>,
}

impl Call {
    /// The blocks that ranks give or get.
    pub fn blocks(&self) -> Blocks<'_> {
        match (self.what, &self.splits) {
            (Collective::AllGather | Collective::ReduceScatter | Collective::Update, Some((lengths, _))) => {
                Blocks::Of(lengths)
            }
            _ => Blocks::Equal(self.len),
        }
    }

    /// Whether its lengths are known to the two ranks that exchange them, and to nobody else.
    pub fn is_pairwise(&self) -> bool {
        self.what == Collective::AllToAll && self.splits.is_some()
    }
}

/// A group as schedules see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// This rank's place.
    pub me: Place,
    /// Ranks in the group.
    pub world: u32,
    /// The places of each host, ordered by their first.
    pub hosts: Vec<Vec<Place>>,
    /// How many of the last places only help: they have no data of their own, and reduce for the others.
    pub helpers: u32,
    /// What was measured for groups like this; the constants above hold without.
    pub tuned: Option<Tuned>,
    /// Whether it has two ranks and an answer of the other takes long, as both know.
    pub far: bool,
}

impl Layout {
    /// The ranks that have data.
    pub fn workers(&self) -> u32 {
        self.world - self.helpers
    }

    /// Whether all ranks are on one host.
    pub fn is_one_host(&self) -> bool {
        self.hosts.len() == 1
    }

    /// Whether every rank has a host to itself.
    pub fn is_flat(&self) -> bool {
        self.hosts.len() == self.world as usize
    }
}

/// What the ranks of a host let each other touch in a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Lent {
    /// Nothing: messages go through pipes.
    #[default]
    Nothing,
    /// A bounce buffer each.
    BounceBuffers,
    /// All contributions: they are registered memory.
    Inputs,
    /// All outputs, which peers write to: they are registered memory.
    Outputs,
}

/// What the ranks of a group know alike of their links.
#[derive(Clone, Copy, Debug, Default)]
pub struct Links<'a> {
    /// Bytes per second by place; empty while nobody knows.
    pub rates: &'a [f64],
    /// Whether they have held for a while. Around a ring every link carries what the slowest does, which one it
    /// is cannot be measured: when rates change, scatter-gather finds out.
    pub steady: bool,
    /// Whether one of this rank's links takes so long that [`WINDOW_PIECES`] would leave it idle. Ranks need not agree
    /// on this: a peer with a wider window keeps what comes early.
    pub far: bool,
}

/// What a call needs before its schedule can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// The payload fits the inline buffer: copy, pass a barrier, read.
    OneShot,
    /// A barrier of the ranks of this host comes first; there they say whether their memory is registered.
    Barrier,
    /// No other rank of this host shares memory: messages carry the signature.
    Messages,
}

/// How a call begins on this group. All ranks of a host agree, as it depends on the call alone.
pub fn opening(call: &Call, layout: &Layout) -> Opening {
    // A helper need not be asked beforehand.
    let local = layout.helpers == 0 && layout.hosts.iter().any(|h| h.len() > 1 && h.contains(&layout.me));
    if !local || layout.world == 1 {
        return Opening::Messages;
    }
    let fits = layout.is_one_host()
        && !call.is_pairwise()
        && call.what != Collective::Update // each rank writes to the others' memory
        && matches!(call.via, Via::Auto | Via::Shared)
        && inline_bytes(call, layout) <= INLINE_BYTES;
    if fits { Opening::OneShot } else { Opening::Barrier }
}

/// The most bytes that any rank would copy into its inline buffer.
pub fn inline_bytes(call: &Call, layout: &Layout) -> usize {
    let len = match call.what {
        Collective::ReduceScatter | Collective::Update => call.blocks().start(layout.world),
        Collective::AllToAll | Collective::Scatter => call.len.saturating_mul(layout.world as usize),
        _ => call.len,
    };
    len.saturating_mul(call.dtype.size())
}

fn shape(call: &Call, layout: &Layout, piece_bytes: usize) -> Shape {
    Shape {
        me: layout.me,
        world: layout.world,
        len: call.len,
        piece: (piece_bytes / call.dtype.size()).max(1),
    }
}

/// The schedule of a call whose payload fits the inline buffer.
pub fn one_shot(call: &Call, layout: &Layout) -> Schedule {
    shared::one_shot(call.what, call.root, shape(call, layout, INLINE_BYTES), call.blocks())
}

/// Elements of input that this rank gives to the collective, which its peers may read directly.
pub fn contribution(call: &Call, layout: &Layout) -> usize {
    shared::contribution(call.what, call.root, shape(call, layout, PIECE_BYTES), call.blocks())
}

/// What ranks that share a host may access of each other's memory in a call if it is registered, and how many elements
/// of this rank's.
pub fn lendable(call: &Call, layout: &Layout) -> (Lent, usize) {
    match is_two_level(call, layout) && call.what == Collective::AllGather {
        true => (Lent::Outputs, call.blocks().start(layout.world)),
        false => (Lent::Inputs, contribution(call, layout)),
    }
}

/// Whether the blocks of a call pass through hosts of several ranks.
fn is_two_level(call: &Call, layout: &Layout) -> bool {
    matches!(call.what, Collective::AllGather | Collective::ReduceScatter)
        && !layout.is_flat()
        && !layout.is_one_host()
}

/// Whether rates may matter to a call: an AllReduce whose way is open, among ranks with a link each.
fn has_links(call: &Call, layout: &Layout) -> bool {
    call.what == Collective::AllReduce
        && matches!(call.via, Via::Auto | Via::ScatterGather)
        && layout.is_flat()
        && layout.world > 2
}

/// Whether the schedule of a call depends on the rates of the links.
pub fn goes_by_rates(call: &Call, layout: &Layout) -> bool {
    let small = call.via == Via::Auto
        && layout.tuned.is_none()
        && call.len * call.dtype.size() <= most_small_bytes(layout.world);
    has_links(call, layout) && (small || layout.helpers > 0 || is_balanced(call, layout))
}

/// Whether a call is worth declaring rates with, and shares that follow them.
pub fn is_balanced(call: &Call, layout: &Layout) -> bool {
    has_links(call, layout) && call.len * call.dtype.size() >= BALANCED_BYTES
}

fn most_small_bytes(world: u32) -> usize {
    if world.is_power_of_two() { DOUBLING_BYTES } else { SMALL_BYTES }
}

/// The bytes up to which recursive doubling is faster: a power of two, so that a rate that is measured a little
/// differently tomorrow chooses the same; or what was measured.
fn small_bytes(layout: &Layout, rates: &[f64]) -> usize {
    if let Some(tuned) = layout.tuned {
        return (tuned.doubling as usize).min(BALANCED_BYTES - 1);
    }
    let world = layout.world;
    let most = most_small_bytes(world);
    if rates.is_empty() {
        return if world == 2 { most } else { SMALL_BYTES };
    }
    let slowest = rates.iter().fold(f64::INFINITY, |a, &b| a.min(b));
    let bytes = (slowest * SMALL_SECONDS).min(most as f64) as usize;
    1 << bytes.max(1).ilog2()
}

/// Whether a ring serves an AllReduce best: among many, of much, on links that are known to be equal.
fn is_ring(call: &Call, layout: &Layout, links: Links<'_>) -> bool {
    let bytes = call.len * call.dtype.size();
    let may_win = layout.world >= RING_WORLD
        && layout.helpers == 0
        && is_balanced(call, layout)
        && links.steady
        && balance::is_equal(links.rates);
    let seconds = RING_SECONDS * f64::from(layout.world);
    may_win
        && match layout.tuned {
            Some(tuned) => tuned.ring.is_some_and(|least| bytes as u64 >= least),
            None => links.rates.iter().all(|rate| *rate < RING_RATE && bytes as f64 / rate > seconds),
        }
}

/// Whether the ranks of a host may pass this call through their bounce buffers.
pub fn uses_bounce_buffers(call: &Call, layout: &Layout) -> bool {
    (layout.is_one_host() || is_two_level(call, layout))
        && layout.world > 1
        && layout.helpers == 0
        && call.len > 0
        && !call.is_pairwise()
        && matches!(call.via, Via::Auto | Via::Shared)
        && !matches!(call.what, Collective::Barrier | Collective::SendRecv | Collective::Update)
}

/// Whether the ranks of a host may read or write each other's memory in this call.
pub fn may_lend(call: &Call, layout: &Layout) -> bool {
    matches!(call.what, Collective::AllReduce | Collective::Update) || uses_bounce_buffers(call, layout)
}

/// The schedule of a call. `lent`: what all ranks of this host lend each other; `links` matter to calls that
/// [`goes_by_rates`].
///
/// # Errors
///
/// [`Error::Unsupported`] where the caller asked for a way that this call cannot take.
pub fn schedule(call: &Call, layout: &Layout, lent: Lent, links: Links<'_>) -> Result<Schedule> {
    let bytes = call.len * call.dtype.size();
    // At least four pieces of a share, so that sums and messages overlap in calls of a megabyte too.
    let share = bytes / layout.world.max(1) as usize;
    let most = if layout.is_flat() { WIRE_PIECE_BYTES } else { PIECE_BYTES };
    let s = shape(call, layout, (share / 4).next_multiple_of(64).clamp(LEAST_PIECE_BYTES, most));
    let window = if links.far { usize::MAX } else { WINDOW_PIECES };
    let small = SMALL_BYTES / call.dtype.size();
    if call.what != Collective::AllReduce && call.via != Via::Auto {
        return Err(Error::Unsupported(format!(
            "{} takes no via (got {}); only all_reduce offers a choice",
            call.what.name(),
            call.via.name()
        )));
    }
    if layout.helpers > 0 {
        return aided(call, layout, s, links.rates);
    }
    // An all_to_all whose parts are empty here may have others elsewhere.
    if call.len == 0 && call.what != Collective::AllToAll {
        return Ok(direct::barrier(s));
    }
    if call.what == Collective::Update {
        if !layout.is_one_host() || lent != Lent::Inputs {
            return Err(Error::Unsupported(
                "update: the gradients and the weights of all ranks must be registered memory of one host"
                    .into(),
            ));
        }
        return Ok(shared::update(s, call.blocks()));
    }
    if layout.is_one_host() && uses_bounce_buffers(call, layout) {
        match lent {
            Lent::Inputs => return Ok(shared::direct(call.what, call.root, s, call.blocks())),
            Lent::BounceBuffers => {
                let buffer = BOUNCE_BYTES / call.dtype.size();
                return Ok(bounce::bounce(call.what, call.root, s, call.blocks(), buffer));
            }
            Lent::Nothing | Lent::Outputs => {}
        }
    }
    let inside = match lent {
        Lent::Nothing => two_level::Inside::Messages,
        Lent::BounceBuffers => two_level::Inside::Buffers(BOUNCE_BYTES / call.dtype.size()),
        Lent::Inputs | Lent::Outputs => two_level::Inside::Memory,
    };
    let rates =
        if goes_by_rates(call, layout) && links.rates.len() == s.world as usize { links.rates } else { &[] };
    let hosts = &layout.hosts;
    let flat = layout.is_flat() || layout.is_one_host();
    Ok(match call.what {
        Collective::AllReduce => match call.via {
            Via::Auto if !flat && bytes > SMALL_BYTES => {
                hierarchical::all_reduce(s, hosts, lent == Lent::Inputs, window)
            }
            // 16-bit floats are summed in one place, whatever the size (invariant NUM-3).
            // Far ranks send each other everything: as many bytes as by scatter-gather, in one hop of two.
            Via::Auto if (layout.far || bytes <= small_bytes(layout, rates)) && !call.dtype.is_half() => {
                recursive_doubling::all_reduce(s)
            }
            Via::Auto if is_ring(call, layout, links) && !call.dtype.is_half() => ring::all_reduce(s),
            Via::Auto | Via::ScatterGather if is_balanced(call, layout) && !rates.is_empty() => {
                scatter_gather::all_reduce(s, &balance::shares(call.len, rates, 0), window)
            }
            Via::Auto | Via::ScatterGather => {
                scatter_gather::all_reduce(s, &even_shares(call.len, s.world as usize), window)
            }
            Via::Ring => ring::all_reduce(s),
            Via::Tree => tree::all_reduce(s),
            Via::RecursiveDoubling => recursive_doubling::all_reduce(s),
            Via::Shared if layout.world == 1 => recursive_doubling::all_reduce(s),
            Via::Shared if !layout.is_one_host() => {
                return Err(Error::Unsupported(format!(
                    "via shared works inside one host; this group spans {}",
                    hosts.len()
                )));
            }
            Via::Shared => {
                return Err(Error::Unsupported(
                    "via shared: these ranks share no memory; leave via out".to_string(),
                ));
            }
        },
        Collective::Reduce => direct::reduce(s, call.root),
        Collective::Broadcast if !flat => hierarchical::broadcast(s, hosts, call.root, small),
        Collective::Broadcast => direct::broadcast(s, call.root, small),
        Collective::AllGather if !flat => two_level::all_gather(s, hosts, call.blocks(), inside, window),
        Collective::AllGather => direct::all_gather(s, call.blocks()),
        Collective::ReduceScatter if !flat => {
            two_level::reduce_scatter(s, hosts, call.blocks(), inside, window)
        }
        Collective::ReduceScatter => direct::reduce_scatter(s, call.blocks()),
        Collective::Gather => direct::gather(s, call.root),
        Collective::Scatter => direct::scatter(s, call.root),
        Collective::AllToAll => match &call.splits {
            Some((send, recv)) => direct::all_to_all(s, send, recv),
            None => {
                let even = vec![call.len; s.world as usize];
                direct::all_to_all(s, &even, &even)
            }
        },
        Collective::Barrier | Collective::SendRecv | Collective::Update => direct::barrier(s),
    })
}

/// The schedule of a call in which some ranks only help.
fn aided(call: &Call, layout: &Layout, shape: Shape, rates: &[f64]) -> Result<Schedule> {
    if call.what != Collective::AllReduce || call.via != Via::Auto {
        return Err(Error::Unsupported(format!(
            "{} via {}: a group with helpers offers all_reduce only, and chooses via itself",
            call.what.name(),
            call.via.name()
        )));
    }
    if call.len == 0 {
        return Ok(direct::barrier(shape));
    }
    let equal = vec![1.0; layout.world as usize];
    let rates = if rates.len() == equal.len() { rates } else { &equal };
    let shares = balance::shares(call.len, rates, layout.helpers as usize);
    Ok(scatter_gather::aided(shape, &shares, layout.workers()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(what: Collective, len: usize, via: Via) -> Call {
        Call { what, dtype: DType::F32, len, root: 0, via, splits: None }
    }

    #[test]
    fn openings() {
        let one = Layout { me: 0, world: 2, hosts: vec![vec![0, 1]], helpers: 0, tuned: None, far: false };
        let flat =
            Layout { me: 0, world: 2, hosts: vec![vec![0], vec![1]], helpers: 0, tuned: None, far: false };
        assert_eq!(opening(&call(Collective::AllReduce, 10, Via::Auto), &one), Opening::OneShot);
        assert_eq!(opening(&call(Collective::AllReduce, 10_000, Via::Auto), &one), Opening::Barrier);
        assert_eq!(opening(&call(Collective::AllReduce, 10, Via::Ring), &one), Opening::Barrier);
        assert_eq!(opening(&call(Collective::AllReduce, 10, Via::Auto), &flat), Opening::Messages);
    }

    #[test]
    fn links_choose() {
        let flat = |world| Layout {
            me: 0,
            world,
            hosts: (0..world).map(|p| vec![p]).collect(),
            helpers: 0,
            tuned: None,
            far: false,
        };
        let steps = |world, bytes: usize, rate: f64, steady| {
            let rates = vec![rate; world as usize];
            let links = Links { rates: &rates, steady, far: false };
            let call = call(Collective::AllReduce, bytes / 4, Via::Auto);
            schedule(&call, &flat(world), Lent::Nothing, links).unwrap().steps
        };
        let by = |world, bytes: usize, make: &dyn Fn(Shape) -> Schedule| {
            let layout = flat(world);
            let share = bytes / world as usize;
            let piece = (share / 4).next_multiple_of(64).clamp(LEAST_PIECE_BYTES, WIRE_PIECE_BYTES);
            make(shape(&call(Collective::AllReduce, bytes / 4, Via::Auto), &layout, piece)).steps
        };
        let scattered =
            |s: Shape| scatter_gather::all_reduce(s, &even_shares(s.len, s.world as usize), WINDOW_PIECES);
        let (mega, giga) = (12.5e6, 1.2e8);
        assert_eq!(steps(4, 8 << 10, giga, true), by(4, 8 << 10, &recursive_doubling::all_reduce));
        assert_eq!(steps(4, 8 << 10, mega, true), by(4, 8 << 10, &scattered));
        assert_eq!(steps(2, 64 << 10, giga, true), by(2, 64 << 10, &recursive_doubling::all_reduce));
        assert_eq!(steps(8, 64 << 10, 10.0 * giga, true), by(8, 64 << 10, &recursive_doubling::all_reduce));
        assert_eq!(steps(3, 64 << 10, 10.0 * giga, true), by(3, 64 << 10, &scattered));
        assert_eq!(steps(2, 1 << 20, giga, true), by(2, 1 << 20, &scattered));
        assert_eq!(steps(8, 1 << 20, giga, true), by(8, 1 << 20, &ring::all_reduce));
        assert_eq!(steps(8, 1 << 20, giga, false), by(8, 1 << 20, &scattered));
        assert_eq!(steps(8, 1 << 20, 100.0 * giga, true), by(8, 1 << 20, &scattered));
        assert_eq!(steps(4, 4 << 20, giga, true), by(4, 4 << 20, &ring::all_reduce));
        assert_eq!(steps(4, 4 << 20, 10.0 * giga, true), by(4, 4 << 20, &scattered));
        let far = |call: Call| {
            schedule(&call, &Layout { far: true, ..flat(2) }, Lent::Nothing, Links::default()).unwrap().steps
        };
        let bytes = 8 << 20;
        let exchanged = by(2, bytes, &recursive_doubling::all_reduce);
        assert_eq!(far(call(Collective::AllReduce, bytes / 4, Via::Auto)), exchanged);
        // 16-bit floats are summed in one place.
        let halves = Call { dtype: DType::F16, ..call(Collective::AllReduce, bytes / 4, Via::Auto) };
        assert_ne!(far(halves), exchanged);
    }

    #[test]
    fn what_was_measured_holds() {
        let hosts: Vec<Vec<Place>> = (0..4).map(|p| vec![p]).collect();
        let tuned = Some(Tuned { world: 4, doubling: 300 << 10, ring: Some(8 << 20) });
        let layout = Layout { me: 0, world: 4, hosts, helpers: 0, tuned, far: false };
        let is = |bytes: usize, rate: f64, make: &dyn Fn(Shape) -> Schedule| {
            let rates = [rate; 4];
            let call = call(Collective::AllReduce, bytes / 4, Via::Auto);
            let share = bytes / 4;
            let piece = (share / 4).next_multiple_of(64).clamp(LEAST_PIECE_BYTES, WIRE_PIECE_BYTES);
            let links = Links { rates: &rates, steady: true, far: false };
            let chosen = schedule(&call, &layout, Lent::Nothing, links).unwrap();
            chosen.steps == make(shape(&call, &layout, piece)).steps
        };
        // Neither depends on rates any more.
        for rate in [1e7, 1e10] {
            assert!(is(256 << 10, rate, &recursive_doubling::all_reduce));
            assert!(!is(512 << 10, rate, &recursive_doubling::all_reduce));
            assert!(!is(4 << 20, rate, &ring::all_reduce));
            assert!(is(8 << 20, rate, &ring::all_reduce));
        }
        let small = call(Collective::AllReduce, 1 << 10, Via::Auto);
        assert!(!goes_by_rates(&small, &layout) && goes_by_rates(&small, &Layout { tuned: None, ..layout }));
    }

    #[test]
    fn impossible_ways_say_why() {
        let flat =
            Layout { me: 0, world: 2, hosts: vec![vec![0], vec![1]], helpers: 0, tuned: None, far: false };
        let e =
            schedule(&call(Collective::AllReduce, 10, Via::Shared), &flat, Lent::Nothing, Links::default());
        assert!(e.unwrap_err().to_string().contains("spans 2"));
        let e = schedule(&call(Collective::Broadcast, 10, Via::Ring), &flat, Lent::Nothing, Links::default());
        assert!(e.unwrap_err().to_string().contains("broadcast takes no via"));
    }
}
