//! Whether a call would write into memory that it, or a peer, still reads.
//!
//! Schedules read and write at the same time, so what a call reads and what it writes lie apart, or are the same place:
//! the whole tensor of a call in place, or this rank's own part of the larger one.

use trigram_core::schedule::Place;
use trigram_core::signature::Collective;

use crate::call::request::Request;
use crate::sys::runs::Runs;

impl Request {
    /// Whether input and output overlap in another way than that.
    pub(crate) fn overlaps(&self, me: Place) -> bool {
        let whole = |at: *const u8, len: usize| Runs::new(vec![(at as usize, len)]);
        let own;
        let (input, output) = match self.lists.as_deref() {
            Some((input, output)) => (input, output),
            None => {
                let t = &self.tensors;
                let apart = t.input.addr() + t.input_len <= t.output.addr()
                    || t.output.addr() + t.output_len <= t.input.addr();
                let in_place = (t.input.addr(), t.input_len) == (t.output.addr(), t.output_len)
                    && matches!(
                        self.call.what,
                        Collective::AllReduce | Collective::Reduce | Collective::Broadcast
                    );
                if apart || in_place {
                    return false; // the usual cases, of short calls too: nothing is allocated
                }
                own = (whole(t.input, t.input_len), whole(t.output, t.output_len));
                (&own.0, &own.1)
            }
        };
        if input.is_empty() || output.is_empty() || !input.meets(output) {
            return false;
        }
        let is_same = input.starts_as(output, 0) && input.len() == output.len();
        let lengths = self.call.splits.as_ref().map(|s| &s.0);
        let before = match lengths {
            Some(lengths) => lengths.iter().take(me as usize).sum(),
            None => self.call.len * me as usize,
        };
        let start = before * self.call.dtype.size();
        let is_own = match self.call.what {
            Collective::AllGather | Collective::Gather => input.starts_as(output, start),
            Collective::ReduceScatter | Collective::Scatter => output.starts_as(input, start),
            Collective::AllToAll => false,
            _ => is_same,
        };
        // Parts of different lengths may be given as the whole of both.
        !(is_own || is_same && lengths.is_some() && self.call.what != Collective::AllToAll)
    }
}
