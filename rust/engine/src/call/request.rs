//! What a caller asks for.

use std::sync::Arc;
use std::time::Instant;

use trigram_core::planner::Call;
use trigram_core::schedule::Place;
use trigram_core::signature::{Collective, Signature, Via};
use trigram_core::{DType, ReduceOp};

use crate::group::members::Members;
use crate::sys::completion::Completion;

/// Elements of a call that a helper takes part in, at most: a peer's word is no reason for more memory.
const LARGEST_HELPED: usize = 1 << 30;

/// A caller's memory. The caller keeps it valid until its completion handle is resolved.
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

// SAFETY: addresses only; they are followed while the progress lock is held.
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
    /// What peers compare in place of this call: that of a call elsewhere, which this one stands for.
    pub declared: Option<Signature>,
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
        Self { call, op: ReduceOp::Sum, tensors, message: None, declared: None }
    }

    /// What a helper does in a call of this signature. One that no helper can take part in does not match,
    /// and fails.
    pub fn helping(signature: &Signature) -> Self {
        let Some((dtype, op, via)) = signature.how() else { return Self::nothing() };
        let Some(len) = usize::try_from(signature.count).ok().filter(|len| *len <= LARGEST_HELPED) else {
            return Self::nothing();
        };
        let call = Call { what: Collective::AllReduce, dtype, len, root: 0, via, splits: None };
        Self { call, op, ..Self::nothing() }
    }

    /// What peers compare of it.
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
        signature
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

/// A call, on its way from a caller's thread.
pub struct Submission {
    /// The group.
    pub members: Arc<Members>,
    /// What is asked.
    pub request: Request,
    /// Where the caller waits.
    pub completion: Arc<Completion>,
    /// When it is given up.
    pub deadline: Option<Instant>,
}
