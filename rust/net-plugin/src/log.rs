//! NCCL's log, which it hands to `init`.

use std::ffi::{CStr, CString, c_int, c_ulong};
use std::sync::{PoisonError, RwLock};

use crate::abi::Logger;

const WARN: c_int = 2;
const INFO: c_int = 3;
/// `NCCL_ALL`: warnings are shown whatever subsystems the user chose.
const EVERYTHING: c_ulong = c_ulong::MAX;
/// `NCCL_INIT | NCCL_NET`: the former is shown by default.
const NETWORK: c_ulong = 0x11;

static LOGGER: RwLock<Logger> = RwLock::new(None);

/// From now on, lines go to this logger.
pub(crate) fn use_logger(logger: Logger) {
    if logger.is_some() {
        *LOGGER.write().unwrap_or_else(PoisonError::into_inner) = logger;
    }
}

/// A line for `NCCL_DEBUG=WARN` and above.
pub(crate) fn warn(line: &str) {
    write(WARN, EVERYTHING, line);
}

/// A line for `NCCL_DEBUG=INFO` and above.
pub(crate) fn info(line: &str) {
    write(INFO, NETWORK, line);
}

fn write(level: c_int, flags: c_ulong, line: &str) {
    const FORMAT: &CStr = c"%s";
    const FILE: &CStr = c"net-plugin";
    let logger = *LOGGER.read().unwrap_or_else(PoisonError::into_inner);
    let Ok(text) = CString::new(format!("NET/Trigram : {line}").replace('\0', " ")) else { return };
    if let Some(log) = logger {
        // SAFETY: NCCL's function takes these types; the strings end with zero and outlive the call; the
        // format takes the one string that follows.
        unsafe { log(level, flags, FILE.as_ptr(), 0, FORMAT.as_ptr(), text.as_ptr()) };
    }
}
