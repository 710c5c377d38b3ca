//! One error type. Its kinds are named by who is to blame, so that a caller can decide what to do
//! without reading the text: wait for a new peer, mend the script, report a bug.
//!
//! Invariant ERR-1: this is the only error type of the workspace, and exactly one file
//! (`rust/python/src/errors.rs`) maps it to Python exceptions.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Shorthand for results with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, by who is to blame.
///
/// An error travels: the first rank that fails tells the others (invariant ERR-3), so the type is
/// cloneable and serializable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Error {
    /// A peer died, left, or cannot be reached. `rank` is its rank in the world.
    #[error("{what}: rank {rank} is gone ({why}); restart it, or the job")]
    PeerLost {
        /// World rank of the lost peer.
        rank: u32,
        /// The operation that noticed.
        what: String,
        /// How it was noticed.
        why: String,
    },
    /// A deadline passed. The peers named were alive, or never came.
    #[error("{what}: timed out after {seconds:.1} s waiting for {waiting_for}", seconds = *.millis as f64 / 1e3)]
    Timeout {
        /// The operation that waited.
        what: String,
        /// How long it waited, in milliseconds.
        millis: u64,
        /// For whom: "rank 3", "ranks 1, 2".
        waiting_for: String,
    },
    /// Ranks called different things at the same place of their program.
    #[error("ranks disagree on call {call} of group {group}: {sides}; every rank must make the same call")]
    Mismatch {
        /// The group's name.
        group: String,
        /// The number of the call in that group, from 0.
        call: u64,
        /// Both sides, each with its rank.
        sides: String,
    },
    /// Bytes arrived that no correct peer sends.
    #[error("corrupt data from rank {rank}: {what}")]
    Corrupt {
        /// World rank that the bytes came from.
        rank: u32,
        /// What was wrong with them.
        what: String,
    },
    /// The request is well formed, but this cannot be done.
    #[error("{0}")]
    Unsupported(String),
    /// The caller broke a rule of the interface.
    #[error("{0}")]
    Misuse(String),
    /// A setting is wrong: an environment variable, an interface name, an address.
    #[error("{0}")]
    Config(String),
    /// A peer could not prove that it belongs to this job.
    #[error("{0}")]
    Auth(String),
    /// The operation was aborted on purpose, here or by another rank.
    #[error("{0}")]
    Aborted(String),
    /// Who runs the job has sent a rank away. All ranks believe it at once, also where they hear that rank.
    #[error("{0}")]
    SentAway(String),
    /// A rank has stopped making calls on its GPU, and tells the others.
    #[error("{why}")]
    Stopped {
        /// How many collectives of the communicator have ended on it: they end on the others too.
        done: u64,
        /// Its error.
        why: String,
    },
    /// The operating system refused something.
    #[error("{what}: {why}")]
    Io {
        /// What was attempted.
        what: String,
        /// The system's answer.
        why: String,
    },
}

impl Error {
    /// An [`Error::Io`] from what was attempted and the system's answer.
    pub fn io(what: impl Into<String>, why: impl fmt::Display) -> Self {
        Error::Io { what: what.into(), why: why.to_string() }
    }

    /// Whether a rank of which this is said is gone for all, however well others hear it.
    pub fn is_final(&self) -> bool {
        matches!(self, Error::Corrupt { .. } | Error::SentAway(_))
    }

    /// An [`Error::Misuse`].
    pub fn misuse(what: impl Into<String>) -> Self {
        Error::Misuse(what.into())
    }
}

/// "rank 3" or "ranks 1, 2 and 5".
pub fn name_ranks(ranks: &[u32]) -> String {
    match ranks {
        [] => "nobody".to_string(),
        [one] => format!("rank {one}"),
        [most @ .., last] => {
            let most: Vec<String> = most.iter().map(u32::to_string).collect();
            format!("ranks {} and {last}", most.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_named_as_people_say_them() {
        assert_eq!(name_ranks(&[3]), "rank 3");
        assert_eq!(name_ranks(&[1, 2, 5]), "ranks 1, 2 and 5");
    }
}
