//! The one place where an [`Error`] becomes a Python exception (invariant ERR-1).
//!
//! The classes live in `trigram/errors.py`, because some derive from two bases.

use pyo3::prelude::*;
use trigram_core::Error;

/// The exception of an error: an instance of a class of `trigram.errors`.
pub(crate) fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    let (class, rank) = match error {
        Error::PeerLost { rank, .. } => ("PeerLostError", Some(*rank)),
        Error::Timeout { .. } => ("TimeoutError", None),
        Error::Mismatch { .. } => ("MismatchError", None),
        Error::Corrupt { rank, .. } => ("CorruptError", Some(*rank)),
        Error::Unsupported(_) => ("UnsupportedError", None),
        Error::Misuse(_) => ("MisuseError", None),
        Error::Config(_) => ("ConfigError", None),
        Error::Auth(_) => ("AuthError", None),
        Error::Aborted(_) | Error::SentAway(_) | Error::Stopped { .. } => ("AbortedError", None),
        Error::Io { .. } => ("IoError", None),
    };
    let make = || -> PyResult<PyErr> {
        let class = py.import("trigram.errors")?.getattr(class)?;
        let made = match rank {
            Some(rank) => class.call1((error.to_string(), rank))?,
            None => class.call1((error.to_string(),))?,
        };
        Ok(PyErr::from_value(made))
    };
    make().unwrap_or_else(|other| other)
}

/// Raises the error of a result.
pub(crate) trait Raise<T> {
    /// The value, or the exception.
    fn raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> Raise<T> for trigram_core::Result<T> {
    fn raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|e| to_python(py, &e))
    }
}
