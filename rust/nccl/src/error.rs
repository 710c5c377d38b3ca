//! What can go wrong, by who is to blame.

use std::time::Duration;

/// One place in which a library was looked for, and why it was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// A path or a name that the loader resolves, with what made us look there.
    pub place: String,
    /// What the loader said.
    pub reason: String,
}

/// Everything that this crate returns in place of a result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library is nowhere.
    #[error("{library} was not found; {advice}; looked for {}", list(.tried))]
    NotFound {
        /// What was looked for.
        library: &'static str,
        /// Where, in order.
        tried: Vec<Attempt>,
        /// What to do.
        advice: &'static str,
    },
    /// A library lacks a function that every supported version has.
    #[error(
        "{path} has no function {symbol}: the file is damaged, or it is another library of the same name"
    )]
    MissingSymbol {
        /// The library.
        path: String,
        /// The function.
        symbol: &'static str,
    },
    /// The library lacks a function that newer versions have.
    #[error("{what} needs NCCL {least} or newer; {path} is {found}")]
    TooOld {
        /// What was wanted.
        what: &'static str,
        /// The library.
        path: String,
        /// Its version.
        found: String,
        /// The first version that has it.
        least: &'static str,
    },
    /// There is no such GPU.
    #[error("no CUDA device {wanted}: {reason}")]
    NoDevice {
        /// Its number.
        wanted: i32,
        /// How many there are, or why none can be used.
        reason: String,
    },
    /// NCCL refused a call, or a communicator has failed.
    #[error("{call} failed: NCCL reports {what} ({code}){}", because(.detail))]
    Nccl {
        /// The function, or what was under way.
        call: &'static str,
        /// `ncclResult_t`.
        code: i32,
        /// What that code means.
        what: String,
        /// NCCL's last error, which may be another thread's: there is one per process.
        detail: String,
    },
    /// The driver refused a call.
    #[error("{call} failed: CUDA reports {what} ({code})")]
    Cuda {
        /// The function.
        call: &'static str,
        /// `CUresult`.
        code: i32,
        /// Its name.
        what: String,
    },
    /// A rule of this interface was broken by the caller.
    #[error("{0}")]
    Misuse(String),
    /// NCCL has not got on with something in time. The communicator can only be aborted.
    #[error("{call}: NCCL did not finish within {after:?}; a rank is missing or cannot be reached")]
    Timeout {
        /// What was under way.
        call: &'static str,
        /// How long it was waited for.
        after: Duration,
    },
    /// The communicator was aborted, here.
    #[error("{0}: the communicator was aborted")]
    Aborted(&'static str),
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

fn list(tried: &[Attempt]) -> String {
    let places: Vec<String> = tried.iter().map(|t| format!("{} ({})", t.place, t.reason)).collect();
    places.join(", ")
}

fn because(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {text}") }
}
