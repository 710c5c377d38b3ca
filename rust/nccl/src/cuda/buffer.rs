//! Memory on a device, used in the order of one stream.
//!
//! A collective returns before it is done, so a borrow says nothing about when memory is free. The
//! stream does: a [`Buffer`] belongs to a stream, communicators of that stream take it, and reading,
//! writing and freeing it come after all that was given to the stream before.

use std::ffi::c_void;
use std::marker::PhantomData;

use super::Stream;
use super::driver::Address;
use crate::error::{Error, Result};
use crate::types::{DataType, Element};

/// `len` values on a device.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    stream: Stream,
    address: Address,
    len: usize,
    _values: PhantomData<T>,
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.address != 0 {
            let _ = self.stream.synchronize();
            if let Ok(_entered) = self.stream.device().enter() {
                // SAFETY: it was allocated here, and nothing given to its stream is under way.
                unsafe { (self.stream.device().cuda().table().mem_free)(self.address) };
            }
        }
    }
}

impl<T: Element> Buffer<T> {
    /// A copy of `values`, for use on `stream`.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`], where memory is short, say.
    pub fn from_slice(stream: &Stream, values: &[T]) -> Result<Self> {
        let _entered = stream.device().enter()?;
        let (cuda, mut address) = (stream.device().cuda(), 0);
        if !values.is_empty() {
            // SAFETY: it writes one address.
            let code = unsafe { (cuda.table().mem_alloc)(&mut address, size_of_val(values)) };
            cuda.check("cuMemAlloc", code)?;
        }
        let mut buffer = Self { stream: stream.clone(), address, len: values.len(), _values: PhantomData };
        buffer.write(values)?;
        Ok(buffer)
    }

    /// How many values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes all values, after what was given to the stream so far.
    ///
    /// # Errors
    ///
    /// [`Error::Misuse`] for another number of values, [`Error::Cuda`]
    pub fn write(&mut self, values: &[T]) -> Result<()> {
        if values.len() != self.len {
            return Err(Error::Misuse(format!(
                "a buffer of {} values cannot take {}",
                self.len,
                values.len()
            )));
        }
        if !values.is_empty() {
            let _entered = self.stream.device().enter()?;
            let (cuda, bytes) = (self.stream.device().cuda(), size_of_val(values));
            let from = values.as_ptr().cast::<c_void>();
            // SAFETY: both sides are as long; the host's is held until the copy is done.
            let code = unsafe { (cuda.table().to_device)(self.address, from, bytes, self.stream.raw()) };
            cuda.check("cuMemcpyHtoDAsync", code)?;
        }
        self.stream.synchronize()
    }

    /// All values, after what was given to the stream so far.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`]
    pub fn read(&self) -> Result<Vec<T>> {
        let mut values = Vec::with_capacity(self.len);
        if self.len > 0 {
            let _entered = self.stream.device().enter()?;
            let (cuda, bytes) = (self.stream.device().cuda(), self.len * size_of::<T>());
            let to = values.as_mut_ptr() as *mut c_void;
            // SAFETY: both sides are as long; the host's is held until the copy is done.
            let code = unsafe { (cuda.table().to_host)(to, self.address, bytes, self.stream.raw()) };
            cuda.check("cuMemcpyDtoHAsync", code)?;
            self.stream.synchronize()?;
            // SAFETY: the copy has written them, and any bits are a value.
            unsafe { values.set_len(self.len) };
        }
        Ok(values)
    }

    /// To be read by a collective.
    pub fn data(&self) -> Data<'_> {
        let (address, count, stream) = (self.address, self.len, self.stream.raw());
        Data { address, count, data_type: T::DATA_TYPE, stream: Some(stream), _memory: PhantomData }
    }

    /// To be written by a collective.
    pub fn data_mut(&mut self) -> DataMut<'_> {
        let (address, count, stream) = (self.address, self.len, self.stream.raw());
        DataMut(Data { address, count, data_type: T::DATA_TYPE, stream: Some(stream), _memory: PhantomData })
    }
}

/// Memory that a collective reads.
#[derive(Clone, Copy, Debug)]
pub struct Data<'a> {
    address: Address,
    count: usize,
    data_type: DataType,
    /// The stream that it must be used on; None: the caller answers for the order.
    stream: Option<*mut c_void>,
    _memory: PhantomData<&'a ()>,
}

impl Data<'_> {
    /// Somebody else's memory, PyTorch's `Tensor.data_ptr()` for one.
    ///
    /// # Safety
    ///
    /// `count` values of the type are there, on the communicator's device (or in memory that it
    /// reaches), and nobody writes or frees them before the collective is done.
    pub unsafe fn from_raw(address: u64, count: usize, data_type: DataType) -> Self {
        Self { address, count, data_type, stream: None, _memory: PhantomData }
    }

    /// How many values.
    pub fn count(&self) -> usize {
        self.count
    }

    /// What they are.
    pub fn data_type(&self) -> DataType {
        self.data_type
    }

    /// Where they are.
    pub fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn pointer(&self) -> *mut c_void {
        self.address as *mut c_void
    }

    /// A part of it.
    pub(crate) fn part(&self, at: usize, count: usize) -> Self {
        Self { address: self.address + (at * self.data_type.size()) as u64, count, ..*self }
    }

    /// Refuses memory of another stream.
    pub(crate) fn on(&self, stream: &Stream) -> Result<()> {
        match self.stream {
            Some(mine) if mine != stream.raw() => {
                Err(Error::Misuse("a buffer belongs to another stream than the communicator".into()))
            }
            _ => Ok(()),
        }
    }
}

/// Memory that a collective writes.
#[derive(Debug)]
pub struct DataMut<'a>(pub(crate) Data<'a>);

impl DataMut<'_> {
    /// Somebody else's memory.
    ///
    /// # Safety
    ///
    /// As for [`Data::from_raw`], and nobody reads it either before the collective is done.
    pub unsafe fn from_raw(address: u64, count: usize, data_type: DataType) -> Self {
        // SAFETY: passed on to the caller.
        Self(unsafe { Data::from_raw(address, count, data_type) })
    }
}
