//! What a communicator can be given beside data: memory known in advance, and reductions of its own.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use crate::communicator::Communicator;
use crate::cuda::Data;
use crate::error::Result;
use crate::types::{Element, Op};

/// Memory that NCCL knows, so that it need not copy it on the way. Ends when it is dropped; then
/// what uses it must be over.
#[derive(Debug)]
pub struct Registration {
    communicator: Communicator,
    handle: *mut c_void,
}

// SAFETY: the handle is used by one thread at a time, under the communicator's lock.
unsafe impl Send for Registration {}

impl Drop for Registration {
    fn drop(&mut self) {
        let handle = self.handle;
        let _ = self.communicator.0.call("ncclCommDeregister", |table, comm| match table.comm_deregister {
            // SAFETY: the handle is this communicator's.
            Some(deregister) => unsafe { deregister(comm, handle) },
            None => 0,
        });
    }
}

/// `scalar * x`, summed: see [`Communicator::pre_mul_sum`].
#[derive(Debug)]
pub struct PreMulSum {
    communicator: Communicator,
    op: c_int,
}

impl PreMulSum {
    /// For collectives of this communicator, on values of the scalar's type.
    pub fn op(&self) -> Op {
        Op(self.op)
    }
}

impl Drop for PreMulSum {
    fn drop(&mut self) {
        let op = self.op;
        // SAFETY: it is this communicator's; collectives that were given it may be under way still.
        let _ =
            self.communicator.0.call("ncclRedOpDestroy", |t, comm| unsafe { (t.red_op_destroy)(op, comm) });
    }
}

impl Communicator {
    /// Registers memory for collectives that need not copy it.
    ///
    /// # Errors
    ///
    /// [`crate::Error::TooOld`] before 2.19, [`crate::Error::Nccl`]
    pub fn register(&self, data: Data<'_>) -> Result<Registration> {
        let Some(register) = self.0.nccl.table.comm_register else {
            return Err(self.0.nccl.too_old("ncclCommRegister", "2.19"));
        };
        let (mut handle, bytes) = (null_mut(), data.count() * data.data_type().size());
        // SAFETY: the memory is there; it writes one handle.
        self.0.call("ncclCommRegister", |_, comm| unsafe {
            register(comm, data.pointer(), bytes, &mut handle)
        })?;
        Ok(Registration { communicator: self.clone(), handle })
    }

    /// A sum in which each rank's values are first multiplied by its scalar: a weighted average,
    /// without a pass over the data.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Nccl`], for types other than floats among others.
    pub fn pre_mul_sum<T: Element>(&self, scalar: T) -> Result<PreMulSum> {
        const IMMEDIATE: c_int = 1; // read before the call returns
        let (mut op, mut scalar) = (0, scalar);
        let (at, kind) = (std::ptr::from_mut(&mut scalar).cast(), T::DATA_TYPE as c_int);
        // SAFETY: the scalar is of the type named, and read at once; it writes one integer.
        self.0.call("ncclRedOpCreatePreMulSum", |t, comm| unsafe {
            (t.red_op_create_pre_mul_sum)(&mut op, at, kind, IMMEDIATE, comm)
        })?;
        Ok(PreMulSum { communicator: self.clone(), op })
    }
}
