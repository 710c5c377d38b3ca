//! What a rank tells others when all its threads wait in one call ([`trigram_core::wire::Kind::Stuck`]).

use serde::{Deserialize, Serialize};
use trigram_core::wire::{CallId, Frame};

/// The most bytes of such a message.
pub(crate) const MOST_BYTES: usize = 1024;

/// The most characters of a group's name that are sent.
const MOST_NAME: usize = 200;

/// The payload.
#[derive(Debug, Serialize, Deserialize)]
struct Payload {
    group: String,
    lacks: Option<(u64, u64)>,
}

/// A peer whose threads all wait in one call.
#[derive(Debug)]
pub(crate) struct StuckPeer {
    /// The group, number and signature of that call.
    pub(crate) frame: Frame,
    /// What the peer calls the group.
    pub(crate) group: String,
    /// A call in which this rank waited, and which the peer had not made then.
    pub(crate) lacks: Option<(u64, CallId)>,
}

impl StuckPeer {
    /// The payload of a message about a call of the group with this name; `lacks`: the call of the receiver, by group and
    /// number, that this rank has not made.
    pub(crate) fn encode(group: &str, lacks: Option<(u64, CallId)>) -> Option<Vec<u8>> {
        let group = group.chars().take(MOST_NAME).collect();
        postcard::to_stdvec(&Payload { group, lacks: lacks.map(|(group, call)| (group, call.0)) }).ok()
    }

    /// What a message says.
    pub(crate) fn decode(frame: &Frame, payload: &[u8]) -> Option<Self> {
        let Payload { group, lacks } = postcard::from_bytes(payload).ok()?;
        Some(Self { frame: *frame, group, lacks: lacks.map(|(group, call)| (group, CallId(call))) })
    }
}
