//! Version 11: NCCL 2.28 and later; a context per communicator, and messages of any size.

use std::ffi::c_int;

use super::common::{self, NAME};
use crate::abi::{Logger, MAX_MESSAGE, NetV11, PTR_HOST, PropsV11, Ptr, VProps};
use crate::error::SUCCESS;

/// What NCCL looks up.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "NCCL's name")]
pub static ncclNetPlugin_v11: NetV11 = NetV11 {
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
    make_vdevice: None,
    finalize,
    set_net_attr: None,
};

/// All contexts: nothing of ours differs between communicators, but NCCL wants a pointer that is not null.
static CONTEXT: u8 = 0;

unsafe extern "C" fn init(
    context: *mut Ptr,
    _communicator: u64,
    _config: Ptr,
    logger: Logger,
    _profiler: Ptr,
) -> c_int {
    common::guard("init", || {
        common::init(logger)?;
        // SAFETY: NCCL gives room for a pointer.
        unsafe { common::answer(context, (&raw const CONTEXT).cast_mut().cast()) }
    })
}

unsafe extern "C" fn finalize(_context: Ptr) -> c_int {
    SUCCESS
}

unsafe extern "C" fn get_properties(dev: c_int, to: *mut PropsV11) -> c_int {
    common::properties(dev, to, |device| PropsV11 {
        name: device.name.as_ptr(),
        pci_path: common::pci_path(device),
        guid: u64::from(dev.unsigned_abs()),
        ptr_support: PTR_HOST,
        reg_is_global: 0,
        force_flush: 0,
        speed: device.speed,
        port: 0,
        latency: 0.0,
        max_comms: common::MAX_COMMS,
        max_recvs: 1,
        net_device_type: 0,
        net_device_version: 0,
        vprops: VProps { ndevs: 1, devs: [dev, 0, 0, 0] },
        max_p2p_bytes: MAX_MESSAGE,
        max_coll_bytes: MAX_MESSAGE,
        max_multi_request_size: 1,
    })
}

unsafe extern "C" fn listen(_context: Ptr, dev: c_int, handle: Ptr, comm: *mut Ptr) -> c_int {
    common::listen(dev, handle, comm)
}

unsafe extern "C" fn connect(
    _context: Ptr,
    dev: c_int,
    handle: Ptr,
    comm: *mut Ptr,
    device_handle: *mut Ptr,
) -> c_int {
    common::connect(dev, handle, comm, device_handle)
}

unsafe extern "C" fn reg_mr(_comm: Ptr, _data: Ptr, _size: usize, kind: c_int, handle: *mut Ptr) -> c_int {
    common::reg_mr(kind, handle)
}

unsafe extern "C" fn isend(
    comm: Ptr,
    data: Ptr,
    size: usize,
    _tag: c_int,
    _handle: Ptr,
    _profile: Ptr,
    request: *mut Ptr,
) -> c_int {
    common::isend(comm, data, Some(size), request)
}

unsafe extern "C" fn irecv(
    comm: Ptr,
    n: c_int,
    data: *mut Ptr,
    sizes: *mut usize,
    _tags: *mut c_int,
    _handles: *mut Ptr,
    _profiles: *mut Ptr,
    request: *mut Ptr,
) -> c_int {
    // SAFETY: NCCL gives arrays of `n` elements.
    let first = unsafe { common::first(n, data, sizes) };
    common::irecv(comm, n, first, request)
}
