//! Version 8: NCCL 2.20 and later; registrations have sizes of any length.

use std::ffi::c_int;

use super::common::{self, NAME};
use crate::abi::{Logger, NetV8, PTR_HOST, PropsV8, Ptr};

/// What NCCL looks up.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclNetPlugin_v8: NetV8 = NetV8 {
    name: NAME.as_ptr(),
    init,
    devices: common::devices,
    get_properties,
    listen,
    connect,
    accept: common::accept,
    reg_mr,
    reg_mr_dma_buf: None,
    dereg_mr: common::dereg_mr,
    isend,
    irecv,
    iflush: common::iflush,
    test: common::test,
    close_send: common::close,
    close_recv: common::close,
    close_listen: common::close_listen,
    get_device_mr: None,
    irecv_consumed: None,
};

unsafe extern "C" fn init(logger: Logger) -> c_int {
    common::guard("init", || common::init(logger))
}

unsafe extern "C" fn get_properties(dev: c_int, to: *mut PropsV8) -> c_int {
    common::properties(dev, to, |device| PropsV8 {
        name: device.name.as_ptr(),
        pci_path: common::pci_path(device),
        guid: u64::from(dev.unsigned_abs()),
        ptr_support: PTR_HOST,
        reg_is_global: 0,
        speed: device.speed,
        port: 0,
        latency: 0.0,
        max_comms: common::MAX_COMMS,
        max_recvs: 1,
        net_device_type: 0,
        net_device_version: 0,
    })
}

unsafe extern "C" fn listen(dev: c_int, handle: Ptr, comm: *mut Ptr) -> c_int {
    common::listen(dev, handle, comm)
}

unsafe extern "C" fn connect(dev: c_int, handle: Ptr, comm: *mut Ptr, device_handle: *mut Ptr) -> c_int {
    common::connect(dev, handle, comm, device_handle)
}

unsafe extern "C" fn reg_mr(_comm: Ptr, _data: Ptr, _size: usize, kind: c_int, handle: *mut Ptr) -> c_int {
    common::reg_mr(kind, handle)
}

unsafe extern "C" fn isend(
    comm: Ptr,
    data: Ptr,
    size: c_int,
    _tag: c_int,
    _handle: Ptr,
    request: *mut Ptr,
) -> c_int {
    common::isend(comm, data, size.try_into().ok(), request)
}

unsafe extern "C" fn irecv(
    comm: Ptr,
    n: c_int,
    data: *mut Ptr,
    sizes: *mut c_int,
    _tags: *mut c_int,
    _handles: *mut Ptr,
    request: *mut Ptr,
) -> c_int {
    // SAFETY: NCCL gives arrays of `n` elements.
    let first = unsafe { common::first(n, data, sizes) };
    common::irecv(comm, n, first, request)
}
