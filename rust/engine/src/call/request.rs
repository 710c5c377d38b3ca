//! What a caller asks for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use trigram_core::planner::Call;
use trigram_core::schedule::Place;
use trigram_core::signature::{Collective, Signature, Via};
use trigram_core::update::Rule;
use trigram_core::{DType, ReduceOp};

use crate::group::members::Members;
use crate::sys::clock;
use crate::sys::completion::Completion;
use crate::sys::runs::Runs;

/// The most elements of a call that a helper takes part in: a peer decides the size, so it must be bounded.
const LARGEST_HELPED: usize = 1 << 30;

/// The most bytes of a small call, see [`Request::is_small`].
const SMALL: usize = 64 << 10;

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
    /// Input and output where they are lists of tensors; then the addresses of `tensors` mean nothing.
    pub lists: Option<Box<(Runs, Runs)>>,
    /// For messages between two ranks: the peer, the user's tag, and whether we send.
    pub message: Option<Message>,
    /// For a consistency check: the signature of the call that this one stands for, which the ranks compare.
    pub declared: Option<Signature>,
    /// The backward pass that it belongs to, see [`Signature::in_pass`].
    pub pass: u16,
    /// What an update does with the values of this rank's part.
    pub update: Option<Box<Update>>,
}

/// How one rank updates its part of the weights, see [`trigram_core::update`].
#[derive(Debug)]
pub struct Update {
    /// In the order of their places, which do not overlap; values between them stay as they are.
    pub pieces: Vec<Piece>,
    /// The arithmetic of the pieces.
    pub rules: Vec<Rule>,
    /// Whether products and sums are fused multiply-adds.
    pub fused: bool,
}

/// Values that are updated alike.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// The first value in the bucket.
    pub start: usize,
    /// The one after the last.
    pub stop: usize,
    /// The first of those at the end of their parameter that round otherwise.
    pub flipped_from: usize,
    /// Which of the rules.
    pub rule: usize,
    /// The state of the values, as many as there are; null where the rule needs none. The caller keeps them valid until
    /// the call's completion handle is resolved, and leaves them alone.
    pub states: [*mut u8; 2],
}

// SAFETY: as for `Tensors`: the addresses are used while the progress lock is held.
unsafe impl Send for Piece {}
// SAFETY: as above.
unsafe impl Sync for Piece {}

impl Update {
    /// Whether pieces are in order, have a rule and its states, and lie in `len` values.
    fn is_sound(&self, len: usize) -> bool {
        let mut last = 0;
        self.pieces.iter().all(|piece| {
            let follows = last <= piece.start && piece.start <= piece.stop && piece.stop <= len;
            last = piece.stop;
            let has_states = |rule: &Rule| piece.states[..rule.states()].iter().all(|s| !s.is_null());
            follows && self.rules.get(piece.rule).is_some_and(has_states)
        })
    }
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
        Self {
            call,
            op: ReduceOp::Sum,
            tensors,
            lists: None,
            message: None,
            declared: None,
            pass: 0,
            update: None,
        }
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

    /// With input and output in lists of tensors: their addresses and bytes.
    #[allow(clippy::type_complexity)] // as it comes from Python
    pub fn in_lists(mut self, lists: Option<(Vec<(usize, usize)>, Vec<(usize, usize)>)>) -> Self {
        self.lists = lists.map(|(inputs, outputs)| Box::new((Runs::new(inputs), Runs::new(outputs))));
        self
    }

    /// The same request in the form in which all ranks write it: parts of equal lengths without lengths, `len` that of
    /// the longest part, and for parts in place, where input and output are the same whole, this rank's own.
    pub(crate) fn normal(mut self, me: Place) -> Self {
        let Some((lengths, received)) = &self.call.splits else { return self };
        let is_equal = lengths.iter().all(|len| Some(len) == lengths.first());
        if self.call.what == Collective::AllToAll {
            if is_equal && lengths == received {
                self.call.len = lengths.first().copied().unwrap_or_default();
                self.call.splits = None;
            }
            return self;
        }
        let (size, me) = (self.call.dtype.size(), me as usize);
        let tensors = &mut self.tensors;
        let whole = lengths.iter().sum::<usize>() * size;
        let in_place = self.lists.is_none()
            && tensors.input.addr() == tensors.output.addr()
            && (tensors.input_len, tensors.output_len) == (whole, whole);
        if let (true, Some(before), Some(own)) = (in_place, lengths.get(..me), lengths.get(me)) {
            let start = before.iter().sum::<usize>() * size;
            if self.call.what == Collective::AllGather {
                (tensors.input, tensors.input_len) = (tensors.input.wrapping_add(start), own * size);
            } else {
                (tensors.output, tensors.output_len) = (tensors.output.wrapping_add(start), own * size);
            }
        }
        self.call.len = lengths.iter().copied().max().unwrap_or_default();
        if is_equal {
            self.call.splits = None;
        }
        self
    }

    /// Whether it is no update, or one of values that it can reach.
    pub(crate) fn has_sound_update(&self) -> bool {
        let t = &self.tensors;
        match (&self.update, self.call.what == Collective::Update) {
            (None, is_one) => !is_one,
            (Some(_), false) => false,
            (Some(update), true) => {
                self.call.dtype == DType::F32
                    && self.op == ReduceOp::Avg
                    && self.lists.is_none()
                    && update.is_sound(t.input_len.min(t.output_len) / DType::F32.size())
            }
        }
    }

    /// Bytes of this rank's payload: of the larger of input and output.
    pub(crate) fn nbytes(&self) -> usize {
        match self.lists.as_deref() {
            Some((inputs, outputs)) => inputs.len().max(outputs.len()),
            None => self.tensors.input_len.max(self.tensors.output_len),
        }
    }

    /// Whether it is so small that the thread that starts it may begin it: it takes less time than to wake another thread.
    pub(crate) fn is_small(&self) -> bool {
        self.lists.is_none() && self.nbytes() <= SMALL
    }

    /// The signature that ranks compare.
    pub fn signature(&self) -> Signature {
        if let Some(declared) = self.declared {
            return declared;
        }
        let call = &self.call;
        let mut signature =
            Signature::new(call.what, call.dtype, self.op, call.via, call.root, call.len as u64);
        if let Some((lengths, _)) = &call.splits {
            (signature.count, signature.extra) = match call.is_pairwise() {
                true => (0, Signature::PAIRWISE), // each message is checked by its own length
                false => (lengths.iter().sum::<usize>() as u64, Signature::sum_of(lengths)),
            };
        }
        if self.message.is_some_and(|message| message.shorter) {
            signature.extra |= Signature::SHORTER;
        }
        signature.in_pass(self.pass)
    }
}

/// A message between two ranks.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// The other rank's place in the group, or [`Message::ANY`].
    pub peer: Place,
    /// The user's tag.
    pub tag: u32,
    /// Whether this rank sends.
    pub sends: bool,
    /// A receive: whether a message of fewer bytes, of any dtype, is right too.
    pub shorter: bool,
}

impl Message {
    /// As the peer of a receive: it takes the message of any rank that comes first.
    pub const ANY: Place = Place::MAX;

    /// Whether this receives a message of any rank, and none has been found yet.
    pub fn is_from_any(&self) -> bool {
        !self.sends && self.peer == Self::ANY
    }
}

/// A call on its way from the caller's thread to the one that drives.
pub struct Submission {
    /// The group.
    pub members: Arc<Members>,
    /// What the caller asks for.
    pub request: Request,
    /// The handle on which the caller waits.
    pub completion: Arc<Completion>,
    /// When the caller made the call, in ticks of [`crate::sys::clock`].
    pub made: u64,
    /// How long the call may take.
    pub limit: Option<Duration>,
}

impl Submission {
    /// A call that is made now.
    pub fn new(
        members: Arc<Members>,
        request: Request,
        completion: Arc<Completion>,
        limit: Option<Duration>,
    ) -> Self {
        Self { members, request, completion, made: clock::ticks(), limit }
    }

    /// When the call times out.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let waited = self.limit.map(|_| clock::since(self.made)).unwrap_or_default();
        self.limit.and_then(|limit| Instant::now().checked_add(limit.saturating_sub(waited)))
    }
}
