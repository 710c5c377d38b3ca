//! Pure functions from `(place, world, length)` to a [`Schedule`](crate::schedule::Schedule).
//!
//! A topology is one file. It writes the steps of one rank in the order of a sequential program;
//! the builder finds the parallelism. All ranks must get matching schedules: the k-th message that
//! rank a sends to b is the k-th that b receives from a, with the same length. The tests in
//! `rust/core/tests` hold this for every topology, worlds 1 to 17 and odd lengths.

pub mod balance;
pub mod blocks;
pub mod bounce;
pub mod direct;
pub mod hierarchical;
pub mod recursive_doubling;
pub mod ring;
pub mod scatter_gather;
pub mod shared;
pub mod tree;
pub mod two_level;

/// What every topology is a function of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// This rank's place in the group.
    pub me: u32,
    /// Ranks in the group.
    pub world: u32,
    /// Elements, as the collective counts them.
    pub len: usize,
    /// Largest message, in elements.
    pub piece: usize,
}

impl Shape {
    /// The rank `by` places further round.
    pub(crate) fn after(&self, by: u32) -> u32 {
        (self.me + by) % self.world
    }

    /// The rank `by` places back round.
    pub(crate) fn before(&self, by: u32) -> u32 {
        (self.me + self.world - by % self.world) % self.world
    }
}
