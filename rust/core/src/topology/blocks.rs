//! The blocks of an all_gather or a reduce_scatter: what each rank gives or gets.
//!
//! They lie one after another, in the order of their owners, and may differ in length. An empty block is sent as a token:
//! whoever receives nothing must still hear that the others are in the call.

use crate::schedule::{Buf, Place, Span};

/// The lengths of all blocks, in elements.
#[derive(Clone, Copy, Debug)]
pub enum Blocks<'a> {
    /// All of the same length.
    Equal(usize),
    /// By place.
    Of(&'a [usize]),
}

impl Blocks<'_> {
    /// The length of the block of `place`.
    pub fn len(&self, place: Place) -> usize {
        match self {
            Self::Equal(len) => *len,
            Self::Of(lengths) => lengths.get(place as usize).copied().unwrap_or_default(),
        }
    }

    /// Where the block of `place` begins; that of the world size is the end of all.
    pub fn start(&self, place: Place) -> usize {
        match self {
            Self::Equal(len) => place as usize * len,
            Self::Of(lengths) => lengths.iter().take(place as usize).sum(),
        }
    }

    /// The block of `place` in `buf`.
    pub fn span(&self, buf: Buf, place: Place) -> Span {
        Span::new(buf, self.start(place), self.len(place))
    }

    /// The length of the longest.
    pub fn longest(&self) -> usize {
        match self {
            Self::Equal(len) => *len,
            Self::Of(lengths) => lengths.iter().copied().max().unwrap_or_default(),
        }
    }
}

/// The k-th piece of a block as a message: an empty block is one token.
pub(crate) fn message(block: Span, k: usize, piece: usize) -> Option<Span> {
    match block.len {
        0 => (k == 0).then_some(Span::TOKEN),
        _ => block.piece(k, piece),
    }
}

/// All pieces of a block as messages.
pub(crate) fn messages(block: Span, piece: usize) -> impl Iterator<Item = Span> + Clone {
    (0..).map_while(move |k| message(block, k, piece))
}
