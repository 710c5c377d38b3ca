//! NCCL's structures for network plugins, versions 7, 8 and 11, as its headers lay them out on 64-bit Linux.

use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::mem::{offset_of, size_of};

/// Any pointer of C's.
pub type Ptr = *mut c_void;

/// `ncclDebugLogger_t`.
pub type Logger = Option<unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...)>;

/// `NCCL_PTR_HOST`: memory that the processor can read.
pub(crate) const PTR_HOST: c_int = 1;
/// `NCCL_MAX_NET_SIZE_BYTES`.
pub(crate) const MAX_MESSAGE: usize = 1 << 40;

/// `ncclNetProperties_v7_t`.
#[repr(C)]
#[derive(Debug)]
pub struct PropsV7 {
    pub(crate) name: *const c_char,
    pub(crate) pci_path: *const c_char,
    pub(crate) guid: u64,
    pub(crate) ptr_support: c_int,
    pub(crate) speed: c_int,
    pub(crate) port: c_int,
    pub(crate) latency: f32,
    pub(crate) max_comms: c_int,
    pub(crate) max_recvs: c_int,
    pub(crate) net_device_type: c_int,
    pub(crate) net_device_version: c_int,
}

/// `ncclNetProperties_v8_t`.
#[repr(C)]
#[derive(Debug)]
pub struct PropsV8 {
    pub(crate) name: *const c_char,
    pub(crate) pci_path: *const c_char,
    pub(crate) guid: u64,
    pub(crate) ptr_support: c_int,
    pub(crate) reg_is_global: c_int,
    pub(crate) speed: c_int,
    pub(crate) port: c_int,
    pub(crate) latency: f32,
    pub(crate) max_comms: c_int,
    pub(crate) max_recvs: c_int,
    pub(crate) net_device_type: c_int,
    pub(crate) net_device_version: c_int,
}

/// `ncclNetVDeviceProps_v11_t`.
#[repr(C)]
#[derive(Debug)]
pub struct VProps {
    pub(crate) ndevs: c_int,
    pub(crate) devs: [c_int; 4],
}

/// `ncclNetProperties_v11_t`.
#[repr(C)]
#[derive(Debug)]
pub struct PropsV11 {
    pub(crate) name: *const c_char,
    pub(crate) pci_path: *const c_char,
    pub(crate) guid: u64,
    pub(crate) ptr_support: c_int,
    pub(crate) reg_is_global: c_int,
    pub(crate) force_flush: c_int,
    pub(crate) speed: c_int,
    pub(crate) port: c_int,
    pub(crate) latency: f32,
    pub(crate) max_comms: c_int,
    pub(crate) max_recvs: c_int,
    pub(crate) net_device_type: c_int,
    pub(crate) net_device_version: c_int,
    pub(crate) vprops: VProps,
    pub(crate) max_p2p_bytes: usize,
    pub(crate) max_coll_bytes: usize,
    pub(crate) max_multi_request_size: c_int,
}

type Close = unsafe extern "C" fn(Ptr) -> c_int;
type GetDeviceMr = Option<unsafe extern "C" fn(Ptr, Ptr, *mut Ptr) -> c_int>;
type IrecvConsumed = Option<unsafe extern "C" fn(Ptr, c_int, Ptr) -> c_int>;
type RegMr = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, *mut Ptr) -> c_int;
type RegMrDmaBuf = Option<unsafe extern "C" fn(Ptr, Ptr, usize, c_int, u64, c_int, *mut Ptr) -> c_int>;
type Accept = unsafe extern "C" fn(Ptr, *mut Ptr, *mut Ptr) -> c_int;
type Test = unsafe extern "C" fn(Ptr, *mut c_int, *mut c_int) -> c_int;
type Flush = unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut c_int, *mut Ptr, *mut Ptr) -> c_int;
type IsendInt = unsafe extern "C" fn(Ptr, Ptr, c_int, c_int, Ptr, *mut Ptr) -> c_int;
type IrecvInt =
    unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut c_int, *mut c_int, *mut Ptr, *mut Ptr) -> c_int;

/// `ncclNet_v7_t` and `ncclNet_v8_t`, which differ in the properties and in the size that regMr takes.
#[repr(C)]
#[derive(Debug)]
pub struct Net<Props, MrSize> {
    pub(crate) name: *const c_char,
    pub(crate) init: unsafe extern "C" fn(Logger) -> c_int,
    pub(crate) devices: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(crate) get_properties: unsafe extern "C" fn(c_int, *mut Props) -> c_int,
    pub(crate) listen: unsafe extern "C" fn(c_int, Ptr, *mut Ptr) -> c_int,
    pub(crate) connect: unsafe extern "C" fn(c_int, Ptr, *mut Ptr, *mut Ptr) -> c_int,
    pub(crate) accept: Accept,
    pub(crate) reg_mr: unsafe extern "C" fn(Ptr, Ptr, MrSize, c_int, *mut Ptr) -> c_int,
    pub(crate) reg_mr_dma_buf: RegMrDmaBuf,
    pub(crate) dereg_mr: unsafe extern "C" fn(Ptr, Ptr) -> c_int,
    pub(crate) isend: IsendInt,
    pub(crate) irecv: IrecvInt,
    pub(crate) iflush: Flush,
    pub(crate) test: Test,
    pub(crate) close_send: Close,
    pub(crate) close_recv: Close,
    pub(crate) close_listen: Close,
    pub(crate) get_device_mr: GetDeviceMr,
    pub(crate) irecv_consumed: IrecvConsumed,
}

/// `ncclNet_v7_t`.
pub type NetV7 = Net<PropsV7, c_int>;
/// `ncclNet_v8_t`.
pub type NetV8 = Net<PropsV8, usize>;

type IsendV11 = unsafe extern "C" fn(Ptr, Ptr, usize, c_int, Ptr, Ptr, *mut Ptr) -> c_int;
type IrecvV11 =
    unsafe extern "C" fn(Ptr, c_int, *mut Ptr, *mut usize, *mut c_int, *mut Ptr, *mut Ptr, *mut Ptr) -> c_int;

/// `ncclNet_v11_t`.
#[repr(C)]
#[derive(Debug)]
pub struct NetV11 {
    pub(crate) name: *const c_char,
    pub(crate) init: unsafe extern "C" fn(*mut Ptr, u64, Ptr, Logger, Ptr) -> c_int,
    pub(crate) devices: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(crate) get_properties: unsafe extern "C" fn(c_int, *mut PropsV11) -> c_int,
    pub(crate) listen: unsafe extern "C" fn(Ptr, c_int, Ptr, *mut Ptr) -> c_int,
    pub(crate) connect: unsafe extern "C" fn(Ptr, c_int, Ptr, *mut Ptr, *mut Ptr) -> c_int,
    pub(crate) accept: Accept,
    pub(crate) reg_mr: RegMr,
    pub(crate) reg_mr_dma_buf: RegMrDmaBuf,
    pub(crate) dereg_mr: unsafe extern "C" fn(Ptr, Ptr) -> c_int,
    pub(crate) isend: IsendV11,
    pub(crate) irecv: IrecvV11,
    pub(crate) iflush: Flush,
    pub(crate) test: Test,
    pub(crate) close_send: Close,
    pub(crate) close_recv: Close,
    pub(crate) close_listen: Close,
    pub(crate) get_device_mr: GetDeviceMr,
    pub(crate) irecv_consumed: IrecvConsumed,
    pub(crate) make_vdevice: Option<unsafe extern "C" fn(*mut c_int, *mut VProps) -> c_int>,
    pub(crate) finalize: unsafe extern "C" fn(Ptr) -> c_int,
    pub(crate) set_net_attr: Option<unsafe extern "C" fn(Ptr, Ptr) -> c_int>,
}

// SAFETY: nothing writes to a table, and what its pointers lead to is static.
unsafe impl<P, S> Sync for Net<P, S> {}
// SAFETY: as above.
unsafe impl Sync for NetV11 {}

const _: () = {
    assert!(size_of::<PropsV7>() == 56 && offset_of!(PropsV7, speed) == 28);
    assert!(size_of::<PropsV8>() == 64 && offset_of!(PropsV8, speed) == 32);
    assert!(size_of::<PropsV11>() == 112 && offset_of!(PropsV11, speed) == 36);
    assert!(offset_of!(PropsV11, vprops) == 64 && offset_of!(PropsV11, max_p2p_bytes) == 88);
    assert!(
        offset_of!(PropsV11, max_coll_bytes) == 96 && offset_of!(PropsV11, max_multi_request_size) == 104
    );
    assert!(size_of::<NetV7>() == 152 && size_of::<NetV8>() == 152 && size_of::<NetV11>() == 176);
    assert!(offset_of!(NetV8, isend) == 80 && offset_of!(NetV11, isend) == 80);
    assert!(offset_of!(NetV8, test) == 104 && offset_of!(NetV11, test) == 104);
    assert!(offset_of!(NetV11, make_vdevice) == 152 && offset_of!(NetV11, finalize) == 160);
};
