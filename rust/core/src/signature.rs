//! What ranks compare to find out that they disagree.
//!
//! Every collective call is summed up in 24 bytes. They travel in each message's header and lie in
//! the operation slot of each rank, so a rank that called something else is found before a number is
//! touched, and the error can name both sides.

use std::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::dtype::{DType, ReduceOp};

/// Which collective was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[allow(missing_docs)] // the names are torch.distributed's
pub enum Collective {
    AllReduce = 1,
    Reduce = 2,
    Broadcast = 3,
    Barrier = 4,
    AllGather = 5,
    ReduceScatter = 6,
    Gather = 7,
    Scatter = 8,
    AllToAll = 9,
    SendRecv = 10,
    /// An all_reduce whose result updates weights instead of being kept.
    Update = 11,
}

impl Collective {
    /// Every collective, in the order of the codes.
    pub const ALL: [Collective; 11] = {
        use Collective::*;
        [
            AllReduce,
            Reduce,
            Broadcast,
            Barrier,
            AllGather,
            ReduceScatter,
            Gather,
            Scatter,
            AllToAll,
            SendRecv,
            Update,
        ]
    };

    /// The name users type.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::Reduce => "reduce",
            Collective::Broadcast => "broadcast",
            Collective::Barrier => "barrier",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::AllToAll => "all_to_all",
            Collective::SendRecv => "send/recv",
            Collective::Update => "update",
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|c| *c as u8 == code)
    }

    const fn reduces(self) -> bool {
        matches!(
            self,
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter | Collective::Update
        )
    }

    const fn is_rooted(self) -> bool {
        matches!(self, Collective::Reduce | Collective::Broadcast | Collective::Gather | Collective::Scatter)
    }
}

/// How the caller wants it done; part of the signature because all ranks must follow one schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Via {
    /// The planner's choice.
    #[default]
    Auto = 0,
    /// Each other's memory, inside one host.
    Shared = 1,
    /// Reduce-scatter and all-gather around a ring.
    Ring = 2,
    /// Double binary tree.
    Tree = 3,
    /// Recursive doubling.
    RecursiveDoubling = 4,
    /// Every rank reduces a share.
    ScatterGather = 5,
}

impl Via {
    /// Every choice, in the order of the codes.
    pub const ALL: [Via; 6] =
        [Via::Auto, Via::Shared, Via::Ring, Via::Tree, Via::RecursiveDoubling, Via::ScatterGather];

    /// The name users type.
    pub const fn name(self) -> &'static str {
        match self {
            Via::Auto => "auto",
            Via::Shared => "shared",
            Via::Ring => "ring",
            Via::Tree => "tree",
            Via::RecursiveDoubling => "recursive_doubling",
            Via::ScatterGather => "scatter_gather",
        }
    }

    /// The choice of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|v| v.name() == name)
    }
}

/// The sum of one call: two ranks may work together if and only if theirs are equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Signature {
    /// Elements per rank, as the collective counts them.
    pub count: u64,
    /// What else must agree: [`Signature::PAIRWISE`], [`Signature::DEVICE`], a sum of lengths that differ by rank, and
    /// the pass.
    pub extra: u64,
    /// Root's place in the group, for rooted collectives.
    pub root: u32,
    collective: u8,
    dtype: u8,
    op: u8,
    via: u8,
}

impl Signature {
    /// In [`Signature::extra`]: the call is on GPU memory, and its data travels elsewhere.
    pub const DEVICE: u64 = 1 << 32;

    /// In [`Signature::extra`]: a receive that also takes a shorter message, of any dtype, as the first part of its
    /// memory.
    pub const SHORTER: u64 = 1 << 33;

    const PASS: u32 = 48;

    /// The same call as part of a backward pass; 0: of none. The low byte counts passes since the last update of the
    /// weights, from 1: a rank that makes more passes than others between two updates is found by it. The high byte
    /// counts those that have been completed since one failed, which is found where others have completed that one.
    #[must_use]
    pub fn in_pass(mut self, pass: u16) -> Self {
        self.extra |= u64::from(pass) << Self::PASS;
        self
    }

    /// See [`Signature::in_pass`].
    pub fn pass(&self) -> u16 {
        (self.extra >> Self::PASS) as u16
    }

    /// In [`Signature::extra`]: each pair of ranks has lengths of its own, which no other rank knows.
    pub const PAIRWISE: u64 = 1;

    /// What [`Signature::extra`] has of lengths that all ranks know, for them to compare: never 0, nor a flag, nor a
    /// pass.
    pub fn sum_of(lengths: &[usize]) -> u64 {
        let mut sum = 0xcbf2_9ce4_8422_2325u64;
        for &len in lengths {
            sum = (sum ^ len as u64).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(29);
        }
        (sum | 2) & !(Self::DEVICE | Self::PAIRWISE | (u64::MAX << Self::PASS))
    }

    /// Whether two ranks may work together in this call. In an all_to_all each rank may give its lengths or none: those
    /// that two ranks have for each other are compared when they exchange them. A receive may take what is shorter.
    pub fn agrees(&self, other: &Self) -> bool {
        if self.collective() == Some(Collective::SendRecv) && self.extra ^ other.extra == Self::SHORTER {
            let (most, sent) = if self.extra & Self::SHORTER != 0 { (self, other) } else { (other, self) };
            let fits = sent.nbytes().zip(most.nbytes()).is_some_and(|(sent, most)| sent <= most);
            return fits && sent.collective == most.collective;
        }
        let mut theirs = *other;
        let pairwise = (self.extra | other.extra) & Self::PAIRWISE != 0;
        if pairwise && self.collective() == Some(Collective::AllToAll) {
            theirs.count = self.count;
            theirs.extra = other.extra & !Self::PAIRWISE | self.extra & Self::PAIRWISE;
        }
        *self == theirs
    }

    /// The bytes of its elements; `None` if there can be no such memory.
    fn nbytes(&self) -> Option<u64> {
        self.count.checked_mul(DType::from_code(self.dtype).ok()?.size() as u64)
    }

    /// The dtype of its elements; `None` if it was made by another version.
    pub fn dtype(&self) -> Option<DType> {
        DType::from_code(self.dtype).ok()
    }

    /// The signature of a call.
    pub fn new(collective: Collective, dtype: DType, op: ReduceOp, via: Via, root: u32, count: u64) -> Self {
        Self {
            count,
            extra: 0,
            root,
            collective: collective as u8,
            dtype: dtype as u8,
            op: op as u8,
            via: via as u8,
        }
    }

    /// Element type, operator and way of the call; `None` if the bytes came from a corrupt peer.
    pub fn how(&self) -> Option<(DType, ReduceOp, Via)> {
        let via = Via::ALL.get(self.via as usize).copied()?;
        Some((DType::from_code(self.dtype).ok()?, ReduceOp::from_code(self.op).ok()?, via))
    }

    /// The codes of the collective, the element type, the operator and the way, unchecked.
    pub const fn codes(&self) -> [u8; 4] {
        [self.collective, self.dtype, self.op, self.via]
    }

    /// The collective called; `None` if the bytes came from a corrupt peer.
    pub fn collective(&self) -> Option<Collective> {
        Collective::from_code(self.collective)
    }
}

/// As a user would write the call: `all_reduce(sum, float32, 1000 elements)`.
impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(collective) = self.collective() else {
            return write!(f, "an unknown operation ({})", self.collective);
        };
        write!(f, "{}(", collective.name())?;
        if collective.reduces() {
            let op = ReduceOp::from_code(self.op).map_or("unknown op", ReduceOp::name);
            write!(f, "{op}, ")?;
        }
        let dtype = DType::from_code(self.dtype).map_or("unknown dtype", DType::name);
        write!(f, "{dtype}, {} elements", self.count)?;
        if collective.is_rooted() {
            write!(f, ", root {}", self.root)?;
        }
        if let Some(via) = Via::ALL.get(self.via as usize).filter(|v| **v != Via::Auto) {
            write!(f, ", via {}", via.name())?;
        }
        match self.extra & !(Self::DEVICE | u64::MAX << Self::PASS) {
            0 => {}
            Self::PAIRWISE => write!(f, ", lengths by rank")?,
            sum => write!(f, ", lengths by rank with sum {sum:x}")?,
        }
        if self.extra & Self::DEVICE != 0 {
            write!(f, ", on a GPU")?;
        }
        if self.pass() != 0 {
            write!(f, ", backward pass {}", self.pass() & 0xff)?;
            match self.pass() >> 8 {
                0 => {}
                counter => write!(f, ", counter {counter}")?,
            }
        }
        write!(f, ")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_as_the_call_was_written() {
        let s = Signature::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, Via::Ring, 0, 1000);
        assert_eq!(s.to_string(), "all_reduce(sum, float32, 1000 elements, via ring)");
        let s = Signature::new(Collective::Broadcast, DType::I64, ReduceOp::Sum, Via::Auto, 2, 7);
        assert_eq!(s.to_string(), "broadcast(int64, 7 elements, root 2)");
        let s = s.in_pass(3);
        assert_eq!(
            (s.to_string().as_str(), s.pass()),
            ("broadcast(int64, 7 elements, root 2, backward pass 3)", 3)
        );
    }

    #[test]
    fn survives_arbitrary_bytes() {
        let s = Signature::read_from_bytes(&[0xff; size_of::<Signature>()]).unwrap();
        assert!(s.to_string().contains("unknown"));
    }
}
