//! Translates a call for NCCL: into its own collectives, or into grouped messages where it has none.

use nccl_rs::{Communicator, Data, DataMut, DataType, Nccl, Op};
use trigram_core::signature::Collective;
use trigram_core::{DType, Error, ReduceOp, Result};

use crate::call::request::{Request, Tensors};

/// What one rank gives to NCCL for a request.
pub(crate) struct NcclCall<'a> {
    what: Collective,
    op: Op,
    root: u32,
    inp: Data<'a>,
    out: Data<'a>,
    /// Parts that are sent to and received from each rank, for calls that NCCL does not have.
    parts: Vec<(bool, u32, Data<'a>)>,
}

impl NcclCall<'_> {
    pub(crate) fn of(request: &Request, me: u32, size: u32) -> Result<Self> {
        let Request { call, op, tensors, .. } = request;
        let (kind, units) = elements(call.what, call.dtype)?;
        let (what, len, root) = (call.what, call.len, call.root);
        let Tensors { input, input_len, output, output_len } = *tensors;
        let width = call.dtype.size();
        // SAFETY: the request's maker promises that its memory is valid.
        let data = |at: usize, count: usize| unsafe { Data::from_raw(at as u64, count * units, kind) };
        let (inp, out) = (data(input as usize, input_len / width), data(output as usize, output_len / width));
        let part = |base: usize, k: usize| data(base + k * len * width, len);
        let mut parts = Vec::new();
        match what {
            Collective::Gather => {
                parts.push((true, root, inp));
                if me == root {
                    parts.extend((0..size).map(|r| (false, r, part(output as usize, r as usize))));
                }
            }
            Collective::Scatter => {
                if me == root {
                    parts.extend((0..size).map(|r| (true, r, part(input as usize, r as usize))));
                }
                parts.push((false, root, out));
            }
            Collective::AllToAll => {
                let equal = vec![len; size as usize];
                let (sent, received) = call.splits.clone().unwrap_or((equal.clone(), equal));
                for (sends, base, lengths) in
                    [(true, input as usize, sent), (false, output as usize, received)]
                {
                    let mut at = base;
                    for (r, count) in (0..size).zip(lengths) {
                        parts.push((sends, r, data(at, count)));
                        at += count * width;
                    }
                }
            }
            // Unequal parts: each is reduced by, or broadcast from, its owner.
            Collective::ReduceScatter | Collective::AllGather if call.splits.is_some() => {
                let base = if what == Collective::AllGather { output as usize } else { input as usize };
                let mut at = base;
                for (r, count) in (0..size).zip(call.splits.iter().flat_map(|s| s.0.clone())) {
                    parts.push((false, r, data(at, count)));
                    at += count * width;
                }
            }
            Collective::Barrier | Collective::SendRecv | Collective::Update => {
                return Err(Error::Unsupported(format!("{} takes no GPU tensor", what.name())));
            }
            _ => {}
        }
        let op = operator(*op, call.dtype)?;
        Ok(Self { what, op, root, inp, out, parts })
    }

    pub(crate) fn run(&self, comm: &Communicator, nccl: &Nccl) -> nccl_rs::Result<()> {
        let in_place = self.inp.address() == self.out.address();
        let inp = (!in_place).then_some(self.inp);
        // SAFETY: as for the request; memory that is read and written at the same time is the same buffer.
        let out = unsafe { raw_mut(&self.out) };
        match self.what {
            Collective::AllReduce => comm.all_reduce(inp, out, self.op),
            // Other ranks than the root have no output, and none is written.
            Collective::Reduce if self.out.address() == 0 => {
                // SAFETY: as above.
                comm.reduce(None, unsafe { raw_mut(&self.inp) }, self.op, self.root)
            }
            Collective::Reduce => comm.reduce(inp, out, self.op, self.root),
            Collective::Broadcast => comm.broadcast(out, self.root),
            Collective::ReduceScatter if !self.parts.is_empty() => nccl.group(|| {
                self.parts.iter().try_for_each(|(_, owner, data)| {
                    // SAFETY: as above.
                    comm.reduce(None, unsafe { raw_mut(data) }, self.op, *owner)
                })
            }),
            Collective::AllGather if !self.parts.is_empty() => nccl.group(|| {
                self.parts.iter().try_for_each(|(_, owner, data)| {
                    // SAFETY: as above.
                    comm.broadcast(unsafe { raw_mut(data) }, *owner)
                })
            }),
            Collective::AllGather => comm.all_gather(self.inp, out),
            Collective::ReduceScatter => comm.reduce_scatter(self.inp, out, self.op),
            _ => nccl.group(|| {
                self.parts.iter().try_for_each(|(sends, peer, data)| match sends {
                    true => comm.send(*data, *peer),
                    // SAFETY: as above.
                    false => comm.recv(unsafe { raw_mut(data) }, *peer),
                })
            }),
        }
    }
}

/// The same memory, writable.
///
/// # Safety
///
/// As for [`DataMut::from_raw`].
pub(crate) unsafe fn raw_mut<'a>(data: &Data<'a>) -> DataMut<'a> {
    // SAFETY: passed on to the caller.
    unsafe { DataMut::from_raw(data.address(), data.count(), data.data_type()) }
}

/// As what NCCL takes the elements of a call, and how many of that each of them is: complex numbers are summed as pairs,
/// and what NCCL does not know is moved as bytes.
pub(crate) fn elements(what: Collective, dtype: DType) -> Result<(DataType, usize)> {
    let reduces = matches!(what, Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter);
    match dtype {
        DType::C64 if reduces => Ok((DataType::Float32, 2)),
        DType::C128 if reduces => Ok((DataType::Float64, 2)),
        DType::I16 | DType::C64 | DType::C128 if !reduces => Ok((DataType::Uint8, dtype.size())),
        _ => Ok((data_type(dtype)?, 1)),
    }
}

fn data_type(dtype: DType) -> Result<DataType> {
    Ok(match dtype {
        DType::F32 => DataType::Float32,
        DType::F64 => DataType::Float64,
        DType::F16 => DataType::Float16,
        DType::BF16 => DataType::Bfloat16,
        DType::I8 => DataType::Int8,
        DType::U8 | DType::Bool => DataType::Uint8,
        DType::I32 => DataType::Int32,
        DType::I64 => DataType::Int64,
        // They are only moved.
        DType::F8E4M3 | DType::F8E5M2 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz => DataType::Uint8,
        DType::I16 | DType::C64 | DType::C128 => {
            return Err(Error::Unsupported(format!(
                "NCCL has no {}; use a CPU tensor, or a view of the tensor as another dtype",
                dtype.name()
            )));
        }
    })
}

fn operator(op: ReduceOp, dtype: DType) -> Result<Op> {
    Ok(match (op, dtype) {
        // For zeros and ones, max is or, and min is and.
        (ReduceOp::Bor | ReduceOp::Sum, DType::Bool) => Op::MAX,
        (ReduceOp::Band | ReduceOp::Prod, DType::Bool) => Op::MIN,
        (ReduceOp::Sum, _) => Op::SUM,
        (ReduceOp::Avg, _) => Op::AVG,
        (ReduceOp::Min, _) => Op::MIN,
        (ReduceOp::Max, _) => Op::MAX,
        (ReduceOp::Prod, _) => Op::PROD,
        (ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor, _) => {
            let (op, dtype) = (op.name(), dtype.name());
            return Err(Error::Unsupported(format!(
                "NCCL cannot reduce {dtype} with {op}; use a CPU tensor"
            )));
        }
    })
}
