//! A sum of spans whose addresses are known: what a reduction does once its call has said where everything lies.

use std::ops::Range;

use trigram_core::{DType, ReduceOp, Result, reduce};

use crate::lanes::task::Work;
use crate::sys::copy::copy_past_cache;

/// Bytes reduced at a time: all tiles of one reduction stay in the first-level cache.
pub(crate) const TILE: usize = 8 << 10;
/// Bytes of each operand that a lane sums before it looks whether somebody waits for it.
const LOOK: usize = 16 * TILE;
/// Most reductions have few operands; more take a vector.
pub(crate) const FEW: usize = 8;

#[repr(align(64))]
struct Tile([u8; TILE]);

/// Where a source and a destination begin; there may be more of one than of the other.
pub(crate) type Ends = (*mut u8, *mut u8);

/// What is summed, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum {
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    pub(crate) divide_by: Option<u32>,
    /// How many there are.
    pub(crate) sources: usize,
    pub(crate) destinations: usize,
    /// The sources are the destinations, in the same order.
    pub(crate) in_place: bool,
    /// Which destinations are written past the cache, if the only source is copied: a bit for each of the first 64.
    pub(crate) past_cache: u64,
}

impl Sum {
    /// Sums these bytes of each source into each destination, whose addresses are `ends`.
    ///
    /// # Safety
    ///
    /// `range.end` bytes follow each address, in memory of one call on this host. Nobody else writes to it meanwhile. Those
    /// of sources that are not at the same address as a destination do not overlap it.
    pub(crate) unsafe fn make(&self, ends: &[Ends], range: Range<usize>) -> Result<()> {
        let (from, end) = (range.start, range.end);
        let (sources, destinations) = (&ends[..self.sources], &ends[..self.destinations]);
        // SAFETY: as the caller promises; no slice outlives its tile.
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
        if self.in_place && sources.len() <= FEW {
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
}

/// A sum that a lane makes.
pub(crate) struct Summing {
    sum: Sum,
    ends: Vec<Ends>,
    len: usize,
    at: usize,
    pub(crate) outcome: Result<()>,
}

// SAFETY: the memory is that of a call, which takes the sum back before it goes away.
unsafe impl Send for Summing {}

impl Summing {
    /// Of `len` bytes of each operand.
    ///
    /// # Safety
    ///
    /// As for [`Sum::make`], until the work has been taken back.
    pub(crate) unsafe fn new(sum: Sum, ends: Vec<Ends>, len: usize) -> Self {
        Self { sum, ends, len, at: 0, outcome: Ok(()) }
    }
}

impl Work for Summing {
    fn run(&mut self, stop: &dyn Fn() -> bool) {
        while self.at < self.len && self.outcome.is_ok() && !stop() {
            let end = self.len.min(self.at + LOOK);
            // SAFETY: as promised to `Summing::new`.
            self.outcome = unsafe { self.sum.make(&self.ends, self.at..end) };
            self.at = end;
        }
    }
}
