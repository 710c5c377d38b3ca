//! What a caller asks for.

use std::sync::Arc;
use std::time::Instant;

use trigram_core::planner::Call;
use trigram_core::schedule::Place;
use trigram_core::signature::{Collective, Signature, Via};
use trigram_core::{DType, ReduceOp};

use crate::group::members::Members;
use crate::sys::completion::Completion;

/// The most elements of a call that a helper takes part in: a peer decides the size, so it must be bounded.
const LARGEST_HELPED: usize = 1 << 30;

/// A caller's memory. The caller keeps it valid until the call's completion handle is resolved.
#[derive(Clone, Copy, Debug)]
pub struct Tensors {
    /// What the call reads.
    pub input: *const u8,
    /// Bytes of it.
    pub input_len: usize,
    /// What it writes; the same memory for in-place collectives.
    pub output: *mut u8,
    /// Bytes of it.
    pub output_len: usize,
}

// SAFETY: these are addresses only; they are used while the progress lock is held.
unsafe impl Send for Tensors {}

/// What a caller asks for.
#[derive(Debug)]
pub struct Request {
    /// The collective and its sizes.
    pub call: Call,
    /// How contributions combine.
    pub op: ReduceOp,
    /// The memory.
    pub tensors: Tensors,
    /// For messages between two ranks: the peer, the user's tag, and whether we send.
    pub message: Option<Message>,
    /// For a consistency check: the signature of the call that this one stands for, which the ranks compare.
    pub declared: Option<Signature>,
    /// The backward pass that it belongs to, see [`Signature::in_pass`].
    pub pass: u16,
}

impl Request {
    /// A call that touches no memory.
    pub fn nothing() -> Self {
        let tensors =
            Tensors { input: std::ptr::null(), input_len: 0, output: std::ptr::null_mut(), output_len: 0 };
        let call = Call {
            what: Collective::Barrier,
            dtype: DType::U8,
            len: 0,
            root: 0,
            via: Via::Auto,
            splits: None,
        };
        Self { call, op: ReduceOp::Sum, tensors, message: None, declared: None, pass: 0 }
    }

    /// What a helper does in a call with this signature. For a call that no helper can take part in: an empty call,
    /// which does not match and so fails.
    pub fn helping(signature: &Signature) -> Self {
        let Some((dtype, op, via)) = signature.how() else { return Self::nothing() };
        let Some(len) = usize::try_from(signature.count).ok().filter(|len| *len <= LARGEST_HELPED) else {
            return Self::nothing();
        };
        let call = Call { what: Collective::AllReduce, dtype, len, root: 0, via, splits: None };
        Self { call, op, pass: signature.pass(), ..Self::nothing() }
    }

    /// The signature that ranks compare.
    pub fn signature(&self) -> Signature {
        if let Some(declared) = self.declared {
            return declared;
        }
        let call = &self.call;
        let mut signature =
            Signature::new(call.what, call.dtype, self.op, call.via, call.root, call.len as u64);
        if call.what == Collective::AllToAll && call.splits.is_some() {
            signature.count = 0; // lengths differ by rank; each message is checked by its own
            signature.extra = 1;
        }
        signature.in_pass(self.pass)
    }
}

/// A message between two ranks.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// The other rank's place in the group.
    pub peer: Place,
    /// The user's tag.
    pub tag: u32,
    /// Whether this rank sends.
    pub sends: bool,
}

/// A call on its way from the caller's thread to the one that drives.
pub struct Submission {
    /// The group.
    pub members: Arc<Members>,
    /// What the caller asks for.
    pub request: Request,
    /// The handle on which the caller waits.
    pub completion: Arc<Completion>,
    /// When the call times out.
    pub deadline: Option<Instant>,
}
