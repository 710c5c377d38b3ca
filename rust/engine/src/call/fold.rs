//! A sum of spans whose addresses are known: what a reduction does once its call has said where everything lies.

use trigram_core::{DType, ReduceOp, Result, reduce};

use crate::lanes::task::Work;
use crate::sys::copy::copy_past_cache;

/// Bytes reduced at a time: all tiles of one reduction stay in the first-level cache.
pub(crate) const TILE: usize = 8 << 10;
/// Bytes of each operand that a lane sums before it looks whether somebody waits for it.
const LOOK: usize = 16 * TILE;
/// Most reductions have few operands; more take a vector.
const FEW: usize = 8;

#[repr(align(64))]
struct Tile([u8; TILE]);

/// Where a source and a destination begin; there may be more of one than of the other.
pub(crate) type Ends = (*mut u8, *mut u8);

/// Sums `len` bytes of each source into each destination.
pub(crate) struct Fold {
    few: [Ends; FEW],
    many: Vec<Ends>,
    sources: usize,
    destinations: usize,
    pub(crate) len: usize,
    /// How far it has come.
    at: usize,
    dtype: DType,
    op: ReduceOp,
    divide_by: Option<u32>,
    /// The sources are the destinations, in the same order.
    in_place: bool,
    /// Which destinations are written past the cache, if the only source is copied: a bit for each of the first 64.
    past_cache: u64,
}

// SAFETY: the memory is that of one call on this host, which takes the sum back before it goes away; between the barriers
// of its schedule nobody else writes to it.
unsafe impl Send for Fold {}

/// What is summed, and how.
pub(crate) struct Sum {
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    pub(crate) divide_by: Option<u32>,
    pub(crate) in_place: bool,
    pub(crate) past_cache: u64,
}

impl Fold {
    /// Of so many sources and destinations, whose addresses are still to be set.
    pub(crate) fn new(sum: Sum, sources: usize, destinations: usize, len: usize) -> Self {
        let Sum { dtype, op, divide_by, in_place, past_cache } = sum;
        let count = sources.max(destinations);
        let none = (std::ptr::null_mut(), std::ptr::null_mut());
        let many = if count > FEW { vec![none; count] } else { Vec::new() };
        let few = [none; FEW];
        Self { few, many, sources, destinations, len, at: 0, dtype, op, divide_by, in_place, past_cache }
    }

    /// The addresses, sources and destinations side by side.
    pub(crate) fn ends(&mut self) -> &mut [Ends] {
        let count = self.sources.max(self.destinations);
        if self.many.is_empty() { &mut self.few[..count] } else { &mut self.many }
    }

    /// Sums the next bytes of each operand, so many at most.
    pub(crate) fn advance(&mut self, most: usize) -> Result<()> {
        let (from, end) = (self.at, self.len.min(self.at.saturating_add(most)));
        self.at = end;
        let ends: &[Ends] = if self.many.is_empty() { &self.few } else { &self.many };
        let (sources, destinations) = (&ends[..self.sources], &ends[..self.destinations]);
        // SAFETY: as for all below: whoever set the addresses has checked that `len` bytes follow each of them, in memory of
        // the call, and nobody else writes to it meanwhile. No slice outlives its tile.
        let source = |end: &Ends, at: usize, n: usize| unsafe {
            std::slice::from_raw_parts(end.0.add(at).cast_const(), n)
        };
        if let ([only], None) = (sources, self.divide_by.filter(|_| self.op == ReduceOp::Avg)) {
            for (i, (_, to)) in destinations.iter().enumerate().filter(|(_, (_, to))| *to != only.0) {
                let past_cache = self.past_cache.checked_shr(i as u32).is_some_and(|bits| bits & 1 == 1);
                let copy = if past_cache { copy_past_cache } else { std::ptr::copy_nonoverlapping };
                // SAFETY: as above; the spans are different ones of a schedule, which do not overlap.
                unsafe { copy(only.0.add(from).cast_const(), to.add(from), end - from) };
            }
            return Ok(());
        }
        if self.in_place && self.many.is_empty() {
            let mut slices: [&mut [u8]; FEW] = Default::default();
            for (slice, (at, _)) in slices.iter_mut().zip(sources) {
                // SAFETY: as above; the spans are of different ranks and so do not overlap.
                *slice = unsafe { std::slice::from_raw_parts_mut(at.add(from), end - from) };
            }
            return reduce::fold_into_all(self.dtype, self.op, self.divide_by, &mut slices[..self.sources]);
        }
        // A single destination that is no source is written directly.
        let apart = self.destinations == 1 && sources.iter().all(|e| e.0 != ends[0].1);
        let mut few: [&[u8]; FEW] = [&[]; FEW];
        let mut many: Vec<&[u8]> = Vec::new();
        // Zeroed only if used: most reductions write directly to their destination.
        let mut zeroed;
        let block: &mut [u8] = if apart {
            &mut []
        } else {
            zeroed = Tile([0; TILE]);
            &mut zeroed.0
        };
        let mut at = from;
        while at < end {
            let n = TILE.min(end - at);
            let operands: &[&[u8]] = if sources.len() <= FEW {
                few.iter_mut().zip(sources).for_each(|(s, e)| *s = source(e, at, n));
                &few[..sources.len()]
            } else {
                many.clear();
                many.extend(sources.iter().map(|e| source(e, at, n)));
                &many
            };
            if apart {
                // SAFETY: as above, and it is none of the sources.
                let out = unsafe { std::slice::from_raw_parts_mut(ends[0].1.add(at), n) };
                reduce::fold(self.dtype, self.op, self.divide_by, operands, out)?;
            } else {
                let out = &mut block[..n];
                reduce::fold(self.dtype, self.op, self.divide_by, operands, out)?;
                for (_, to) in destinations {
                    // SAFETY: as above; the block is private.
                    unsafe { std::ptr::copy_nonoverlapping(out.as_ptr(), to.add(at), n) };
                }
            }
            at += n;
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.at >= self.len
    }
}

/// A sum that a lane makes.
pub(crate) struct Summing {
    pub(crate) fold: Fold,
    pub(crate) outcome: Result<()>,
}

impl Work for Summing {
    fn run(&mut self, stop: &dyn Fn() -> bool) {
        while !self.fold.is_done() && self.outcome.is_ok() && !stop() {
            self.outcome = self.fold.advance(LOOK);
        }
    }
}
