//! What can go wrong, as NCCL counts it.

use std::ffi::c_int;
use std::io;

/// A failure: the code that NCCL gets, and the sentence that its log gets.
#[derive(Debug, Clone)]
pub(crate) struct Error {
    /// Which of `ncclResult_t`.
    pub(crate) code: c_int,
    /// What happened.
    pub(crate) message: String,
}

/// What most functions return.
pub(crate) type Result<T> = std::result::Result<T, Error>;

/// `ncclSuccess`.
pub(crate) const SUCCESS: c_int = 0;

impl Error {
    /// The operating system refused something.
    pub(crate) fn system(what: impl Into<String>) -> Self {
        Self { code: 2, message: what.into() }
    }

    /// A fault of this plugin.
    pub(crate) fn internal(what: impl Into<String>) -> Self {
        Self { code: 3, message: what.into() }
    }

    /// An argument that makes no sense.
    pub(crate) fn argument(what: impl Into<String>) -> Self {
        Self { code: 4, message: what.into() }
    }

    /// The two sides do not agree on what to do, or a setting is wrong.
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self { code: 5, message: what.into() }
    }

    /// The peer is gone, or speaks nonsense.
    pub(crate) fn remote(what: impl Into<String>) -> Self {
        Self { code: 6, message: what.into() }
    }

    /// A system call failed.
    pub(crate) fn io(what: &str, e: &io::Error) -> Self {
        Self::system(format!("{what}: {e}"))
    }
}

/// Whether a call on a socket is to be made again later.
pub(crate) fn is_later(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::WouldBlock
}

/// Whether a call was interrupted by a signal, and is to be made again now.
pub(crate) fn is_interrupted(e: &io::Error) -> bool {
    e.kind() == io::ErrorKind::Interrupted
}
