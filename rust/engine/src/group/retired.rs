//! Stages of groups that are gone, kept until no peer reads from them any more.

use std::sync::{Mutex, PoisonError};

use crate::host::control_segment::Board;
use crate::sys::memory::Block;

/// Stages of groups that have been let go, until no peer reads from them any more.
#[derive(Debug, Default)]
pub struct Retired(Mutex<Vec<Stage>>);

#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) _block: Block,
    pub(crate) group: u64,
    /// One more than the last call that used it.
    pub(crate) call: u64,
    /// Boards of the ranks that may read it, and where each has the group.
    pub(crate) readers: Vec<(Board, usize)>,
}

impl Stage {
    fn is_read(&self) -> bool {
        self.call > 0
            && self.readers.iter().any(|(board, found)| {
                board.has_group(*found, self.group) && board.lane(*found, self.call - 1).left() < self.call
            })
    }
}

impl Retired {
    pub(crate) fn add(&self, stage: Stage) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(stage);
        self.sweep();
    }

    /// Gives back the stages that nobody reads any more.
    pub fn sweep(&self) {
        let mut stages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let read = std::mem::take(&mut *stages).into_iter().filter(Stage::is_read).collect();
        *stages = read;
    }
}
