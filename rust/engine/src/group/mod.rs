//! The job and its groups, as this rank sees them: which ranks there are, on which hosts, and what memory the ranks of
//! this host share.
//!
//! Uses [`crate::sys`] and [`crate::host`].

pub mod members;
pub mod retired;
pub mod world;
