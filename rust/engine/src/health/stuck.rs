//! What a rank tells others when all its threads wait in one call ([`trigram_core::wire::Kind::Stuck`]).

use serde::{Deserialize, Serialize};
use trigram_core::wire::Frame;

/// The most bytes of such a message.
pub(crate) const MOST_BYTES: usize = 1 << 20;

/// The most characters of a group's name that are sent.
const MOST_NAME: usize = 200;

/// The payload.
#[derive(Debug, Serialize, Deserialize)]
struct Payload {
    group: String,
    lacks: Option<Lack>,
}

/// A call of the receiver that the sender has not made, by group and number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Lack {
    pub(crate) group: u64,
    pub(crate) call: u64,
    /// Of a message: the direction, as in its frames.
    pub(crate) tag: u32,
    /// The members of the group of the call in which the sender waits: all are to hear that it has failed.
    pub(crate) ranks: Vec<u32>,
}

/// A peer whose threads all wait in one call.
#[derive(Debug)]
pub(crate) struct StuckPeer {
    /// The group, number and signature of that call.
    pub(crate) frame: Frame,
    /// What the peer calls the group.
    pub(crate) group: String,
    /// A call in which this rank waited, and which the peer had not made then.
    pub(crate) lacks: Option<Lack>,
}

impl StuckPeer {
    /// The payload of a message about a call of the group with this name.
    pub(crate) fn encode(group: &str, lacks: Option<Lack>) -> Option<Vec<u8>> {
        let group = group.chars().take(MOST_NAME).collect();
        postcard::to_stdvec(&Payload { group, lacks }).ok()
    }

    /// What a message says.
    pub(crate) fn decode(frame: &Frame, payload: &[u8]) -> Option<Self> {
        let Payload { group, lacks } = postcard::from_bytes(payload).ok()?;
        Some(Self { frame: *frame, group, lacks })
    }
}
