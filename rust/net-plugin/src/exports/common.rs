//! What the versions share. Nothing panics into C, and each pointer is looked at before it is used.

use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError, RwLock};

use crate::abi::{Logger, PTR_HOST, Ptr};
use crate::connect;
use crate::device::{self, Device};
use crate::error::{Error, Result, SUCCESS};
use crate::handle;
use crate::listen::Listener;
use crate::log;
use crate::region::Region;
use crate::request::{Connection, End, Request};
use crate::settings::Settings;

/// What `NCCL_NET` is compared with.
pub(super) const NAME: &CStr = c"Trigram";

/// As many as NCCL's own socket transport allows.
pub(super) const MAX_COMMS: c_int = 65_536;

static SETTINGS: RwLock<Option<Settings>> = RwLock::new(None);

/// Runs a call of NCCL's.
pub(super) fn guard(what: &str, call: impl FnOnce() -> Result<()>) -> c_int {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(e)) => e.code,
        Err(_) => {
            let e =
                Error::internal(format!("{what} panicked: this is a bug in the plugin; please report it"));
            log::warn(&e.message);
            e.code
        }
    }
}

/// Writes to where C wants an answer.
///
/// # Safety
///
/// `to` is null or can be written.
pub(super) unsafe fn answer<T>(to: *mut T, value: T) -> Result<()> {
    if to.is_null() {
        return Err(Error::argument("NCCL passed no memory for the result"));
    }
    // SAFETY: not null, so as this function demands. It need not hold a value before.
    unsafe { to.write(value) };
    Ok(())
}

pub(super) fn init(logger: Logger) -> Result<()> {
    log::use_logger(logger);
    let ready = Settings::read().and_then(|settings| Ok((settings, device::find()?)));
    let (settings, devices) = ready.inspect_err(|e| log::warn(&e.message))?;
    let before = SETTINGS.write().unwrap_or_else(PoisonError::into_inner).replace(settings);
    if before != Some(settings) {
        let all = devices.iter().enumerate().map(|(number, device)| {
            let name = device.name.to_string_lossy();
            format!("[{number}] {name} {} at {} Mbit/s", device.ip, device.speed)
        });
        log::info(&format!(
            "version {}, {} streams per connection, chunks of {} bytes, {}",
            env!("CARGO_PKG_VERSION"),
            settings.streams,
            settings.chunk,
            all.collect::<Vec<_>>().join(", ")
        ));
    }
    Ok(())
}

fn settings() -> Result<Settings> {
    let settings = *SETTINGS.read().unwrap_or_else(PoisonError::into_inner);
    settings.ok_or_else(|| Error::usage("NCCL did not call init first"))
}

pub(super) unsafe extern "C" fn devices(count: *mut c_int) -> c_int {
    guard("devices", || {
        let found = c_int::try_from(device::find()?.len()).unwrap_or(c_int::MAX);
        // SAFETY: NCCL gives room for a number.
        unsafe { answer(count, found) }
    })
}

/// A device's properties, in the structure of a version.
pub(super) fn properties<P>(number: c_int, to: *mut P, make: impl FnOnce(&'static Device) -> P) -> c_int {
    guard("getProperties", || {
        let device = device::get(number)?;
        // SAFETY: NCCL gives room for the structure of this version.
        unsafe { answer(to, make(device)) }
    })
}

/// A device's place on the buses, or null.
pub(super) fn pci_path(device: &'static Device) -> *const c_char {
    device.pci_path.as_ref().map_or(std::ptr::null(), |path| path.as_ptr())
}

pub(super) fn listen(dev: c_int, to: Ptr, comm: *mut Ptr) -> c_int {
    guard("listen", || {
        let (listener, handle) =
            Listener::new(device::get(dev)?.ip, settings()?).inspect_err(|e| log::warn(&e.message))?;
        // SAFETY: NCCL gives room for a handle's bytes.
        unsafe { answer(to.cast::<[u8; handle::SIZE]>(), handle.write())? };
        let listener = Box::into_raw(Box::new(Mutex::new(listener)));
        // SAFETY: NCCL gives room for a pointer.
        unsafe { answer(comm, listener.cast()) }
    })
}

pub(super) fn connect(dev: c_int, from: Ptr, comm: *mut Ptr, device_handle: *mut Ptr) -> c_int {
    guard("connect", || {
        // SAFETY: NCCL gives room for a pointer.
        unsafe { answer(comm, null_mut())? };
        no_device_handle(device_handle);
        device::get(dev)?;
        // SAFETY: NCCL gives a handle's bytes, which are ours during the call.
        let bytes = unsafe { from.cast::<[u8; handle::SIZE]>().as_mut() };
        let bytes = bytes.ok_or_else(|| Error::argument("NCCL passed no handle"))?;
        match connect::connect(bytes, settings()?)? {
            // SAFETY: NCCL gives room for a pointer.
            Some(sender) => unsafe { answer(comm, Connection::give(End::Send(sender))) },
            None => Ok(()),
        }
    })
}

pub(super) unsafe extern "C" fn accept(listener: Ptr, comm: *mut Ptr, device_handle: *mut Ptr) -> c_int {
    guard("accept", || {
        // SAFETY: NCCL gives room for a pointer.
        unsafe { answer(comm, null_mut())? };
        no_device_handle(device_handle);
        // SAFETY: NCCL gives what `listen` gave, and closes it after the call.
        let listener = unsafe { listener.cast::<Mutex<Listener>>().as_ref() };
        let listener = listener.ok_or_else(|| Error::argument("NCCL passed no listener"))?;
        let mut listener = listener.lock().unwrap_or_else(PoisonError::into_inner);
        match listener.accept()? {
            // SAFETY: NCCL gives room for a pointer.
            Some(receiver) => unsafe { answer(comm, Connection::give(End::Recv(receiver))) },
            None => Ok(()),
        }
    })
}

fn no_device_handle(to: *mut Ptr) {
    if !to.is_null() {
        // SAFETY: NCCL gives room for a pointer, or null.
        unsafe { to.write(null_mut()) };
    }
}

pub(super) fn reg_mr(kind: c_int, handle: *mut Ptr) -> c_int {
    guard("regMr", || {
        // SAFETY: NCCL gives room for a pointer.
        unsafe { answer(handle, null_mut())? };
        // Sockets need no registration.
        if kind == PTR_HOST { Ok(()) } else { Err(Error::argument("only host memory can be registered")) }
    })
}

pub(super) unsafe extern "C" fn dereg_mr(_comm: Ptr, _handle: Ptr) -> c_int {
    SUCCESS
}

/// `size`: `None` if it is less than zero.
pub(super) fn isend(comm: Ptr, data: Ptr, size: Option<usize>, request: *mut Ptr) -> c_int {
    guard("isend", || post(comm, data, size, request, true))
}

/// `first`: the first buffer's address and size, of `n`.
pub(super) fn irecv(comm: Ptr, n: c_int, first: Option<(Ptr, Option<usize>)>, request: *mut Ptr) -> c_int {
    guard("irecv", || {
        // SAFETY: NCCL gives room for a pointer.
        unsafe { answer(request, null_mut())? };
        match first {
            Some((data, size)) if n == 1 => post(comm, data, size, request, false),
            _ => Err(Error::argument(format!(
                "NCCL asked to receive into {n} buffers at once; the plugin supports 1"
            ))),
        }
    })
}

/// The first of C's arrays of buffers and sizes.
///
/// # Safety
///
/// Each is null or has `n` elements.
pub(super) unsafe fn first<S: Copy + TryInto<usize>>(
    n: c_int,
    data: *mut Ptr,
    sizes: *mut S,
) -> Option<(Ptr, Option<usize>)> {
    if n < 1 || data.is_null() || sizes.is_null() {
        return None;
    }
    // SAFETY: neither is null and each has an element.
    unsafe { Some((*data, (*sizes).try_into().ok())) }
}

fn post(comm: Ptr, data: Ptr, size: Option<usize>, request: *mut Ptr, sending: bool) -> Result<()> {
    // SAFETY: NCCL gives room for a pointer, which may hold anything.
    unsafe { answer(request, null_mut())? };
    // SAFETY: NCCL gives what connect or accept gave, and closes it after the call.
    let connection = unsafe { Connection::at(comm)? };
    let size = size.ok_or_else(|| Error::argument("NCCL passed a negative message size"))?;
    if data.is_null() && size > 0 {
        return Err(Error::argument("NCCL passed no buffer"));
    }
    // SAFETY: NCCL leaves the buffer alone until the request is done or the connection is closed.
    let region = unsafe { Region::new(data.cast(), size) };
    match connection.post(region, sending)? {
        // SAFETY: as above.
        Some(posted) => unsafe { answer(request, posted) },
        None => Ok(()),
    }
}

pub(super) unsafe extern "C" fn iflush(
    _comm: Ptr,
    _n: c_int,
    _data: *mut Ptr,
    _sizes: *mut c_int,
    _handles: *mut Ptr,
    request: *mut Ptr,
) -> c_int {
    guard("iflush", || {
        // SAFETY: NCCL gives room for a pointer.
        unsafe { answer(request, null_mut())? };
        Err(Error::internal("host memory needs no flush"))
    })
}

pub(super) unsafe extern "C" fn test(request: Ptr, done: *mut c_int, sizes: *mut c_int) -> c_int {
    guard("test", || {
        // SAFETY: NCCL gives room for a number.
        unsafe { answer(done, 0)? };
        // SAFETY: NCCL gives what isend or irecv gave, and closes the connection after the call.
        let request = unsafe { Request::at(request)? };
        let Some(size) = request.test()? else { return Ok(()) };
        if !sizes.is_null() {
            // SAFETY: NCCL gives room for a number, or null.
            unsafe { sizes.write(c_int::try_from(size).unwrap_or(c_int::MAX)) };
        }
        // SAFETY: NCCL gives room for a number.
        unsafe { answer(done, 1) }
    })
}

/// closeSend and closeRecv.
pub(super) unsafe extern "C" fn close(comm: Ptr) -> c_int {
    guard("close", || {
        if !comm.is_null() {
            // SAFETY: NCCL gives what connect or accept gave, for the last time.
            unsafe { Connection::close(comm) };
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn close_listen(comm: Ptr) -> c_int {
    guard("closeListen", || {
        if !comm.is_null() {
            // SAFETY: NCCL gives what `listen` gave, for the last time.
            drop(unsafe { Box::from_raw(comm.cast::<Mutex<Listener>>()) });
        }
        Ok(())
    })
}
