//! Finds ranks that have made different calls, and makes the error that names both sides.

use trigram_core::signature::Signature;
use trigram_core::wire::CallId;
use trigram_core::{Error, Result};

use crate::group::members::Members;

/// Compares what the ranks of this host have called.
pub(crate) fn agree(members: &Members, call: CallId, mine: &Signature) -> Result<()> {
    let mut sides: Vec<(u32, Signature)> = Vec::new();
    for place in members.local_places() {
        let theirs = match members.op_slot(place, call) {
            Some(op_slot) => op_slot.signature(),
            None => *mine,
        };
        if sides.iter().all(|s| s.1 != theirs) {
            sides.push((members.ranks[place as usize], theirs));
        }
    }
    let all_agree = |a: &Signature| sides.iter().all(|b| a.agrees(&b.1));
    if sides.iter().all(|a| all_agree(&a.1)) { Ok(()) } else { Err(mismatch(members, call, &sides)) }
}

/// Whether a rank of this host has lengths that only it and one other rank know.
pub(crate) fn is_pairwise(members: &Members, call: CallId) -> bool {
    let mut slots = members.local_places().filter_map(|place| members.op_slot(place, call));
    slots.any(|op_slot| op_slot.signature().extra & Signature::PAIRWISE != 0)
}

pub(crate) fn mismatch(members: &Members, call: CallId, sides: &[(u32, Signature)]) -> Error {
    let helps = |rank| members.place_of(rank).is_some_and(|p| p >= members.layout.workers());
    let did = |rank| if helps(rank) { "was asked to help in" } else { "called" };
    let sides: Vec<String> =
        sides.iter().map(|&(rank, s)| format!("rank {rank} {} {s}", did(rank))).collect();
    let call = call.0 & 0xffff_ffff;
    Error::Mismatch { group: members.name.clone(), call, sides: sides.join(", ") }
}
