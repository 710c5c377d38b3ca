//! Memory at the same place on all ranks, which NCCL's symmetric kernels read and write directly.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use crate::communicator::{Communicator, refuse_in_group};
use crate::cuda::{Data, Device};
use crate::error::{Error, Result};
use crate::library::Nccl;

const REGISTER: &str = "ncclCommWindowRegister";
/// `NCCL_WIN_REQUIRED_ALIGNMENT`
const ALIGNMENT: u64 = 4096;
/// `NCCL_WIN_COLL_SYMMETRIC`: every rank's buffers lie at the same offset in their windows.
const SYMMETRIC: c_int = 1;

/// Device memory from NCCL, of the kind that windows need. Freed when it is dropped; then what uses it must be over.
#[derive(Debug)]
pub struct Memory {
    nccl: Nccl,
    device: Device,
    address: u64,
    bytes: usize,
}

// SAFETY: an address is no thread's own.
unsafe impl Send for Memory {}

impl Memory {
    /// Where it is.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let (Some(free), Ok(_entered)) = (self.nccl.table.mem_free, self.device.enter()) {
            // SAFETY: NCCL has allocated it, and nobody else frees it.
            unsafe { free(self.address as *mut c_void) };
        }
    }
}

impl Nccl {
    /// Allocates device memory that other ranks of the host can map.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] before 2.19; [`Error::Nccl`].
    pub fn allocate(&self, device: &Device, bytes: usize) -> Result<Memory> {
        let Some(allocate) = self.table.mem_alloc else {
            return Err(self.too_old("ncclMemAlloc", "2.19"));
        };
        let _entered = device.enter()?;
        let mut at = null_mut();
        // SAFETY: it writes one address; the device is current.
        self.check("ncclMemAlloc", unsafe { allocate(&mut at, bytes) })?;
        Ok(Memory { nccl: self.clone(), device: device.clone(), address: at as u64, bytes })
    }
}

/// Memory of all ranks of a communicator, registered together. Ends when it is dropped; then what uses it must be over.
#[derive(Debug)]
pub struct Window {
    communicator: Communicator,
    handle: *mut c_void,
}

// SAFETY: the handle is used by one thread at a time, under the communicator's lock.
unsafe impl Send for Window {}

impl Drop for Window {
    fn drop(&mut self) {
        let handle = self.handle;
        let _ = self.communicator.0.call("ncclCommWindowDeregister", |table, comm| {
            // SAFETY: the handle is this communicator's.
            table.comm_window_deregister.map_or(0, |deregister| unsafe { deregister(comm, handle) })
        });
    }
}

impl Communicator {
    /// Registers memory as a symmetric window: collectives on it, at the same offset on all ranks, need no copies. All ranks call it, in
    /// the same order, with as many bytes. None: this communicator has no windows (its ranks cannot map each other's memory), and
    /// collectives on the memory are as ever.
    ///
    /// # Errors
    ///
    /// [`Error::TooOld`] before 2.27.3; [`Error::Misuse`] unless the address is a multiple of 4096 and something is there, and
    /// inside of [`Nccl::group`]; [`Error::Nccl`], for memory that was not allocated with [`Nccl::allocate`] or likewise among
    /// others; [`Error::Timeout`].
    pub fn register_window(&self, data: Data<'_>) -> Result<Option<Window>> {
        let Some(register) = self.0.nccl.table.comm_window_register else {
            return Err(self.0.nccl.too_old(REGISTER, "2.27.3"));
        };
        refuse_in_group(REGISTER)?;
        let bytes = data.count() * data.data_type().size();
        if bytes == 0 || !data.address().is_multiple_of(ALIGNMENT) {
            let at = data.address();
            return Err(Error::Misuse(format!(
                "{REGISTER}: {bytes} bytes at {at:#x}: a window begins at a multiple of {ALIGNMENT} and is not empty"
            )));
        }
        // NCCL writes the handle from a thread of its own, as for a split.
        let place: *mut *mut c_void = Box::into_raw(Box::new(null_mut()));
        // SAFETY: the memory is there; the place lives until the call is over.
        let made = self
            .0
            .call(REGISTER, |_, comm| unsafe { register(comm, data.pointer(), bytes, place, SYMMETRIC) });
        made.and_then(|()| self.0.settle(REGISTER, self.0.timeout()))?;
        // SAFETY: the communicator is quiet, so nobody writes it any more.
        let handle = *unsafe { Box::from_raw(place) };
        Ok((!handle.is_null()).then(|| Window { communicator: self.clone(), handle }))
    }
}
