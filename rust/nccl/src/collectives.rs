//! The collectives. Each is given to the communicator's stream and returns before it is done.
//!
//! Counts are checked against each other before NCCL sees them; that ranks call the same thing with
//! the same counts is theirs to see to, as always with NCCL.

use std::ffi::c_int;

use crate::communicator::Communicator;
use crate::cuda::{Data, DataMut};
use crate::error::{Error, Result};
use crate::types::Op;

impl Communicator {
    /// `out` becomes the combination of all ranks' `inp`; None: of what `out` holds.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] where counts, types or streams do not fit; [`Error::Nccl`],
    /// [`Error::Timeout`], [`Error::Aborted`]. So for all of these.
    pub fn all_reduce(&self, inp: Option<Data<'_>>, out: DataMut<'_>, op: Op) -> Result<()> {
        let (inp, out) = (inp.unwrap_or(out.0), out.0);
        self.fits("all_reduce", &inp, &out, 1, 1)?;
        let (count, kind, stream) = (inp.count(), inp.data_type() as c_int, self.stream().raw());
        // SAFETY: whoever made the two answers for the memory until the stream has passed.
        self.0.call("ncclAllReduce", |t, comm| unsafe {
            (t.all_reduce)(inp.pointer(), out.pointer(), count, kind, op.0, comm, stream)
        })
    }

    /// `out` of rank `root` becomes the combination of all ranks' `inp`; None: of what `out` holds.
    /// Elsewhere `out` is not written.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::all_reduce`].
    pub fn reduce(&self, inp: Option<Data<'_>>, out: DataMut<'_>, op: Op, root: u32) -> Result<()> {
        let (inp, out) = (inp.unwrap_or(out.0), out.0);
        self.fits("reduce", &inp, &out, 1, 1)?;
        let root = self.peer("reduce", root)?;
        let (count, kind, stream) = (inp.count(), inp.data_type() as c_int, self.stream().raw());
        // SAFETY: as in `all_reduce`.
        self.0.call("ncclReduce", |t, comm| unsafe {
            (t.reduce)(inp.pointer(), out.pointer(), count, kind, op.0, root, comm, stream)
        })
    }

    /// `out` becomes what rank `root` holds in it.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::all_reduce`].
    pub fn broadcast(&self, out: DataMut<'_>, root: u32) -> Result<()> {
        let out = out.0;
        out.on(self.stream())?;
        let root = self.peer("broadcast", root)?;
        let (count, kind, stream) = (out.count(), out.data_type() as c_int, self.stream().raw());
        // SAFETY: as in `all_reduce`.
        self.0.call("ncclBroadcast", |t, comm| unsafe {
            (t.broadcast)(out.pointer(), out.pointer(), count, kind, root, comm, stream)
        })
    }

    /// `out` becomes all ranks' `inp`, in their order. In place: `inp` is this rank's part of `out`.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::all_reduce`].
    pub fn all_gather(&self, inp: Data<'_>, out: DataMut<'_>) -> Result<()> {
        let out = out.0;
        self.fits("all_gather", &inp, &out, self.size() as usize, 1)?;
        let (count, kind, stream) = (inp.count(), inp.data_type() as c_int, self.stream().raw());
        // SAFETY: as in `all_reduce`.
        self.0.call("ncclAllGather", |t, comm| unsafe {
            (t.all_gather)(inp.pointer(), out.pointer(), count, kind, comm, stream)
        })
    }

    /// `out` of rank i becomes the combination of the i-th parts of all ranks' `inp`.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::all_reduce`].
    pub fn reduce_scatter(&self, inp: Data<'_>, out: DataMut<'_>, op: Op) -> Result<()> {
        let out = out.0;
        self.fits("reduce_scatter", &inp, &out, 1, self.size() as usize)?;
        let (count, kind, stream) = (out.count(), inp.data_type() as c_int, self.stream().raw());
        // SAFETY: as in `all_reduce`.
        self.0.call("ncclReduceScatter", |t, comm| unsafe {
            (t.reduce_scatter)(inp.pointer(), out.pointer(), count, kind, op.0, comm, stream)
        })
    }

    /// Sends to a rank that receives as much. Between two ranks that send to each other, in a group.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::all_reduce`].
    pub fn send(&self, inp: Data<'_>, to: u32) -> Result<()> {
        inp.on(self.stream())?;
        let peer = self.peer("send", to)?;
        let (count, kind, stream) = (inp.count(), inp.data_type() as c_int, self.stream().raw());
        // SAFETY: as in `all_reduce`.
        self.0.call("ncclSend", |t, comm| unsafe { (t.send)(inp.pointer(), count, kind, peer, comm, stream) })
    }

    /// Receives from a rank that sends as much.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::all_reduce`].
    pub fn recv(&self, out: DataMut<'_>, from: u32) -> Result<()> {
        let out = out.0;
        out.on(self.stream())?;
        let peer = self.peer("recv", from)?;
        let (count, kind, stream) = (out.count(), out.data_type() as c_int, self.stream().raw());
        // SAFETY: as in `all_reduce`.
        self.0.call("ncclRecv", |t, comm| unsafe { (t.recv)(out.pointer(), count, kind, peer, comm, stream) })
    }

    /// Part j of `inp` goes to rank j; the parts meant for this rank come in `out`, in rank order.
    ///
    /// # Errors
    ///
    /// As for [`Communicator::all_reduce`].
    pub fn all_to_all(&self, inp: Data<'_>, out: DataMut<'_>) -> Result<()> {
        let out = out.0;
        self.fits("all_to_all", &inp, &out, 1, 1)?;
        let ranks = self.size() as usize;
        if !inp.count().is_multiple_of(ranks) {
            let count = inp.count();
            return Err(Error::Misuse(format!(
                "all_to_all: {count} values cannot be split equally among {ranks} ranks"
            )));
        }
        let part = inp.count() / ranks;
        self.0.nccl.group(|| {
            (0..ranks).try_for_each(|peer| {
                self.send(inp.part(peer * part, part), peer as u32)?;
                self.recv(DataMut(out.part(peer * part, part)), peer as u32)
            })
        })
    }

    fn peer(&self, what: &str, rank: u32) -> Result<c_int> {
        match c_int::try_from(rank) {
            Ok(peer) if rank < self.size() => Ok(peer),
            _ => Err(Error::Misuse(format!("{what}: there is no rank {rank} among {} ranks", self.size()))),
        }
    }

    /// `inp` and `out` are of one type and this stream; times their factors they are as long.
    fn fits(
        &self,
        what: &str,
        inp: &Data<'_>,
        out: &Data<'_>,
        inp_times: usize,
        out_times: usize,
    ) -> Result<()> {
        inp.on(self.stream())?;
        out.on(self.stream())?;
        let (a, b) = (inp.count() * inp_times, out.count() * out_times);
        if inp.data_type() != out.data_type() || a != b {
            return Err(Error::Misuse(format!(
                "{what} among {} ranks: an input of {} values of {:?} does not fit an output of {} of {:?}",
                self.size(),
                inp.count(),
                inp.data_type(),
                out.count(),
                out.data_type()
            )));
        }
        Ok(())
    }
}
