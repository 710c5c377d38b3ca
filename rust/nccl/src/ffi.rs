//! NCCL's functions, as found in a library. Nothing here decides anything.

use std::ffi::{c_char, c_int, c_void};

use libloading::os::unix::Library as Handle;

use crate::config::RawConfig;
use crate::error::{Error, Result};
use crate::types::UniqueId;

/// `ncclComm_t`.
pub(crate) type Comm = *mut c_void;
/// `cudaStream_t`, which is a `CUstream`.
pub(crate) type RawStream = *mut c_void;
/// `ncclResult_t`.
pub(crate) type Code = c_int;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const IN_PROGRESS: Code = 7;

/// Defines the table, and how it is read from a library.
macro_rules! table {
    (required { $( $field:ident = $symbol:literal : fn($($argument:ty),*) -> $out:ty ; )* }
     optional { $( $maybe:ident = $maybe_symbol:literal : fn($($maybe_argument:ty),*) -> $maybe_out:ty ; )* }) => {
        /// One pointer per function; those below `optional` are not in every supported version.
        #[derive(Clone, Copy)]
        pub(crate) struct Table {
            $( pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $out, )*
            $( pub(crate) $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) -> $maybe_out>, )*
        }

        impl Table {
            /// Reads it. The library must never be closed.
            pub(crate) fn read(library: &Handle, path: &str) -> Result<Self> {
                // SAFETY: the types are those of NCCL's header, whose C interface does not change
                // between versions; functions of other versions are looked up as optional.
                unsafe {
                    Ok(Self {
                        $( $field: *library.get($symbol).map_err(|_| {
                            Error::MissingSymbol { path: path.to_owned(), symbol: name($symbol) }
                        })?, )*
                        $( $maybe: library.get($maybe_symbol).ok().map(|symbol| *symbol), )*
                    })
                }
            }
        }
    };
}

/// A symbol as text, without its closing zero.
fn name(symbol: &'static [u8]) -> &'static str {
    std::str::from_utf8(symbol.strip_suffix(b"\0").unwrap_or(symbol)).unwrap_or("?")
}

table! {
    required {
    get_unique_id = b"ncclGetUniqueId\0": fn(*mut UniqueId) -> Code;
    get_error_string = b"ncclGetErrorString\0": fn(Code) -> *const c_char;
    get_last_error = b"ncclGetLastError\0": fn(Comm) -> *const c_char;
    comm_init_rank_config = b"ncclCommInitRankConfig\0":
        fn(*mut Comm, c_int, UniqueId, c_int, *mut RawConfig) -> Code;
    comm_split = b"ncclCommSplit\0": fn(Comm, c_int, c_int, *mut Comm, *mut RawConfig) -> Code;
    comm_finalize = b"ncclCommFinalize\0": fn(Comm) -> Code;
    comm_destroy = b"ncclCommDestroy\0": fn(Comm) -> Code;
    comm_abort = b"ncclCommAbort\0": fn(Comm) -> Code;
    comm_get_async_error = b"ncclCommGetAsyncError\0": fn(Comm, *mut Code) -> Code;
    comm_count = b"ncclCommCount\0": fn(Comm, *mut c_int) -> Code;
    comm_user_rank = b"ncclCommUserRank\0": fn(Comm, *mut c_int) -> Code;
    red_op_create_pre_mul_sum = b"ncclRedOpCreatePreMulSum\0":
        fn(*mut c_int, *mut c_void, c_int, c_int, Comm) -> Code;
    red_op_destroy = b"ncclRedOpDestroy\0": fn(c_int, Comm) -> Code;
    all_reduce = b"ncclAllReduce\0":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, RawStream) -> Code;
    reduce = b"ncclReduce\0":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, RawStream) -> Code;
    broadcast = b"ncclBroadcast\0":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, RawStream) -> Code;
    all_gather = b"ncclAllGather\0": fn(*const c_void, *mut c_void, usize, c_int, Comm, RawStream) -> Code;
    reduce_scatter = b"ncclReduceScatter\0":
        fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, RawStream) -> Code;
    send = b"ncclSend\0": fn(*const c_void, usize, c_int, c_int, Comm, RawStream) -> Code;
    recv = b"ncclRecv\0": fn(*mut c_void, usize, c_int, c_int, Comm, RawStream) -> Code;
    group_start = b"ncclGroupStart\0": fn() -> Code;
    group_end = b"ncclGroupEnd\0": fn() -> Code;
    }
    optional {
    comm_register = b"ncclCommRegister\0": fn(Comm, *mut c_void, usize, *mut *mut c_void) -> Code;
    comm_deregister = b"ncclCommDeregister\0": fn(Comm, *mut c_void) -> Code;
    mem_alloc = b"ncclMemAlloc\0": fn(*mut *mut c_void, usize) -> Code;
    mem_free = b"ncclMemFree\0": fn(*mut c_void) -> Code;
    comm_window_register = b"ncclCommWindowRegister\0":
        fn(Comm, *mut c_void, usize, *mut *mut c_void, c_int) -> Code;
    comm_window_deregister = b"ncclCommWindowDeregister\0": fn(Comm, *mut c_void) -> Code;
    comm_shrink = b"ncclCommShrink\0":
        fn(Comm, *mut c_int, c_int, *mut Comm, *mut RawConfig, c_int) -> Code;
    comm_revoke = b"ncclCommRevoke\0": fn(Comm, c_int) -> Code;
    comm_get_unique_id = b"ncclCommGetUniqueId\0": fn(Comm, *mut UniqueId) -> Code;
    comm_grow = b"ncclCommGrow\0":
        fn(Comm, c_int, *const UniqueId, c_int, *mut Comm, *mut RawConfig) -> Code;
    }
}
