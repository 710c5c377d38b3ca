//! The driver, and devices with their primary contexts: those that PyTorch and the CUDA runtime use.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

use libloading::os::unix::Library as Handle;

use crate::error::{Error, Result};
use crate::search;

pub(crate) type Context = *mut c_void;
pub(crate) type RawStream = *mut c_void;
pub(crate) type RawEvent = *mut c_void;
/// `CUdeviceptr`.
pub(crate) type Address = u64;

/// `CUDA_ERROR_NOT_READY`.
pub(crate) const NOT_READY: c_int = 600;

macro_rules! table {
    ($( $field:ident = $symbol:literal : fn($($argument:ty),*) ; )*) => {
        /// The driver's functions.
        pub(crate) struct Table {
            $( pub(crate) $field: unsafe extern "C" fn($($argument),*) -> c_int, )*
        }

        impl Table {
            fn read(library: &Handle, path: &str) -> Result<Self> {
                // SAFETY: the types are those of `cuda.h`; the names are of the versions that it
                // maps the plain ones to.
                unsafe {
                    Ok(Self { $( $field: *library.get(concat!($symbol, "\0").as_bytes()).map_err(|_| {
                        Error::MissingSymbol { path: path.to_owned(), symbol: $symbol }
                    })?, )* })
                }
            }
        }
    };
}

table! {
    init = "cuInit": fn(c_uint);
    get_error_name = "cuGetErrorName": fn(c_int, *mut *const c_char);
    device_get_count = "cuDeviceGetCount": fn(*mut c_int);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    primary_retain = "cuDevicePrimaryCtxRetain": fn(*mut Context, c_int);
    primary_release = "cuDevicePrimaryCtxRelease_v2": fn(c_int);
    push = "cuCtxPushCurrent_v2": fn(Context);
    pop = "cuCtxPopCurrent_v2": fn(*mut Context);
    capture_mode = "cuThreadExchangeStreamCaptureMode": fn(*mut c_int);
    stream_create = "cuStreamCreateWithPriority": fn(*mut RawStream, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2": fn(RawStream);
    stream_query = "cuStreamQuery": fn(RawStream);
    stream_synchronize = "cuStreamSynchronize": fn(RawStream);
    stream_wait_event = "cuStreamWaitEvent": fn(RawStream, RawEvent, c_uint);
    event_create = "cuEventCreate": fn(*mut RawEvent, c_uint);
    event_destroy = "cuEventDestroy_v2": fn(RawEvent);
    event_record = "cuEventRecord": fn(RawEvent, RawStream);
    event_query = "cuEventQuery": fn(RawEvent);
    event_synchronize = "cuEventSynchronize": fn(RawEvent);
    mem_alloc = "cuMemAlloc_v2": fn(*mut Address, usize);
    mem_free = "cuMemFree_v2": fn(Address);
    to_device = "cuMemcpyHtoDAsync_v2": fn(Address, *const c_void, usize, RawStream);
    to_host = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, Address, usize, RawStream);
}

/// The driver. Cheap to clone.
#[derive(Clone)]
pub struct Cuda {
    table: Arc<Table>,
    path: Arc<str>,
}

impl std::fmt::Debug for Cuda {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cuda({})", self.path)
    }
}

impl Cuda {
    /// Loads `libcuda.so.1`, or the file that `TRIGRAM_CUDA_LIB` names, and starts it.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] where no driver is installed, [`Error::NoDevice`] where it finds no GPU.
    pub fn load() -> Result<Self> {
        Self::open(search::cuda()?)
    }

    /// Loads the driver from a file.
    ///
    /// # Errors
    ///
    /// As for [`Cuda::load`].
    pub fn load_file(file: &std::path::Path) -> Result<Self> {
        Self::open(search::file(file, "libcuda.so.1")?)
    }

    fn open((handle, path): (Handle, String)) -> Result<Self> {
        let cuda = Self { table: Arc::new(Table::read(&handle, &path)?), path: path.into() };
        std::mem::forget(handle); // the driver has threads: never unloaded
        // SAFETY: no flags are defined.
        let code = unsafe { (cuda.table.init)(0) };
        match cuda.check("cuInit", code) {
            Ok(()) => Ok(cuda),
            Err(Error::Cuda { what, .. }) => Err(Error::NoDevice { wanted: 0, reason: what }),
            Err(e) => Err(e),
        }
    }

    /// How many GPUs there are.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`]
    pub fn devices(&self) -> Result<i32> {
        let mut count = 0;
        // SAFETY: it writes one integer.
        self.check("cuDeviceGetCount", unsafe { (self.table.device_get_count)(&mut count) })?;
        Ok(count)
    }

    /// The GPU of a number, with its primary context.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`] beyond the last; [`Error::Cuda`] where its context cannot be had.
    pub fn device(&self, number: i32) -> Result<Device> {
        let count = self.devices()?;
        if !(0..count).contains(&number) {
            return Err(Error::NoDevice { wanted: number, reason: format!("there are {count}") });
        }
        let (mut handle, mut context) = (0, std::ptr::null_mut());
        // SAFETY: each writes one value.
        unsafe {
            self.check("cuDeviceGet", (self.table.device_get)(&mut handle, number))?;
            let code = (self.table.primary_retain)(&mut context, handle);
            self.check("cuDevicePrimaryCtxRetain", code)?;
        }
        Ok(Device(Arc::new(Primary { cuda: self.clone(), number, handle, context })))
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// An error for a code that is not success.
    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: it writes a pointer to a literal, or nothing.
        unsafe { (self.table.get_error_name)(code, &mut name) };
        let what = match name.is_null() {
            true => String::new(),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(name) }.to_string_lossy().into(),
        };
        Err(Error::Cuda { call, code, what })
    }
}

/// A GPU. Cheap to clone; its primary context lives as long as any clone.
#[derive(Clone)]
pub struct Device(Arc<Primary>);

struct Primary {
    cuda: Cuda,
    number: i32,
    handle: c_int,
    context: Context,
}

// SAFETY: contexts may be used from any thread; they are made current where they are.
unsafe impl Send for Primary {}
// SAFETY: as above.
unsafe impl Sync for Primary {}

impl Drop for Primary {
    fn drop(&mut self) {
        // SAFETY: it was retained once.
        unsafe { (self.cuda.table.primary_release)(self.handle) };
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({})", self.0.number)
    }
}

impl Device {
    /// Its number.
    pub fn number(&self) -> i32 {
        self.0.number
    }

    /// From now on this thread may ask for events and make memory while another captures a graph: it
    /// promises to leave the captured streams alone.
    ///
    /// # Errors
    ///
    /// [`Error::Cuda`]
    pub fn ignore_captures(&self) -> Result<()> {
        let mut relaxed = 2;
        // SAFETY: it reads and writes one integer.
        let code = unsafe { (self.0.cuda.table.capture_mode)(&mut relaxed) };
        self.0.cuda.check("cuThreadExchangeStreamCaptureMode", code)
    }

    pub(crate) fn cuda(&self) -> &Cuda {
        &self.0.cuda
    }

    /// Makes it this thread's device for as long as the guard lives.
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context is retained while `self` lives.
        let code = unsafe { (self.0.cuda.table.push)(self.0.context) };
        self.0.cuda.check("cuCtxPushCurrent", code)?;
        Ok(Entered { device: self, _thread: PhantomData })
    }
}

/// See [`Device::enter`]. Stays on its thread.
pub(crate) struct Entered<'a> {
    device: &'a Device,
    _thread: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: it was pushed on this thread, and guards end in the reverse order.
        unsafe { (self.device.0.cuda.table.pop)(&mut context) };
    }
}
