//! Streams, and the events that order them.

use std::sync::Arc;

use super::Device;
use super::driver::{NOT_READY, RawEvent, RawStream};
use crate::error::Result;

/// Work on a stream does not wait for the legacy default stream.
const NON_BLOCKING: u32 = 1;
/// Events without times cost less.
const NO_TIMING: u32 = 2;

/// An order of work on a device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Device,
    raw: RawStream,
    owned: bool,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.owned
            && let Ok(_entered) = self.device.enter()
        {
            // SAFETY: it was made here; the driver ends what is on it first.
            unsafe { (self.device.cuda().table().stream_destroy)(self.raw) };
        }
    }
}

impl Stream {
    /// A stream of its own. Lower numbers of `priority` go first; 0 is the usual one.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Cuda`]
    pub fn new(device: &Device, priority: i32) -> Result<Self> {
        let _entered = device.enter()?;
        let (cuda, mut raw) = (device.cuda(), std::ptr::null_mut());
        // SAFETY: it writes one handle.
        let code = unsafe { (cuda.table().stream_create)(&mut raw, NON_BLOCKING, priority) };
        cuda.check("cuStreamCreateWithPriority", code)?;
        Ok(Self(Arc::new(Inner { device: device.clone(), raw, owned: true })))
    }

    /// Somebody else's, PyTorch's `torch.cuda.Stream.cuda_stream` for one; 0 is the default stream.
    ///
    /// # Safety
    ///
    /// It is a stream of this device's primary context, and outlives all that is made with it.
    pub unsafe fn from_raw(device: &Device, raw: usize) -> Self {
        Self(Arc::new(Inner { device: device.clone(), raw: raw as RawStream, owned: false }))
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// `CUstream`.
    pub fn raw(&self) -> *mut std::ffi::c_void {
        self.0.raw
    }

    /// Waits until everything given to it so far is done.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Cuda`]
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.0.device.enter()?;
        let cuda = self.0.device.cuda();
        // SAFETY: the stream is alive.
        cuda.check("cuStreamSynchronize", unsafe { (cuda.table().stream_synchronize)(self.0.raw) })
    }

    /// Whether everything given to it so far is done.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Cuda`], where the work itself has failed too.
    pub fn is_idle(&self) -> Result<bool> {
        let _entered = self.0.device.enter()?;
        let cuda = self.0.device.cuda();
        // SAFETY: the stream is alive.
        match unsafe { (cuda.table().stream_query)(self.0.raw) } {
            NOT_READY => Ok(false),
            code => cuda.check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// What is given to it from now on comes after `event`.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Cuda`]
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        let _entered = self.0.device.enter()?;
        let cuda = self.0.device.cuda();
        // SAFETY: both are alive.
        let code = unsafe { (cuda.table().stream_wait_event)(self.0.raw, event.raw, 0) };
        cuda.check("cuStreamWaitEvent", code)
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: RawEvent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_entered) = self.device.enter() {
            // SAFETY: it was made here; the driver keeps it while it is waited for.
            unsafe { (self.device.cuda().table().event_destroy)(self.raw) };
        }
    }
}

impl Event {
    /// The point at which everything given to `stream` so far is done.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Cuda`]
    pub fn record(stream: &Stream) -> Result<Self> {
        let device = stream.device().clone();
        let _entered = device.enter()?;
        let (cuda, mut raw) = (device.cuda(), std::ptr::null_mut());
        // SAFETY: it writes one handle.
        cuda.check("cuEventCreate", unsafe { (cuda.table().event_create)(&mut raw, NO_TIMING) })?;
        let event = Self { device: device.clone(), raw };
        // SAFETY: both are alive.
        cuda.check("cuEventRecord", unsafe { (cuda.table().event_record)(raw, stream.raw()) })?;
        Ok(event)
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether it has been reached.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Cuda`]
    pub fn is_reached(&self) -> Result<bool> {
        let _entered = self.device.enter()?;
        let cuda = self.device.cuda();
        // SAFETY: it is alive.
        match unsafe { (cuda.table().event_query)(self.raw) } {
            NOT_READY => Ok(false),
            code => cuda.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits until it has been reached.
    ///
    /// # Errors
    ///
    /// [`crate::Error::Cuda`]
    pub fn synchronize(&self) -> Result<()> {
        let _entered = self.device.enter()?;
        let cuda = self.device.cuda();
        // SAFETY: it is alive.
        cuda.check("cuEventSynchronize", unsafe { (cuda.table().event_synchronize)(self.raw) })
    }
}
