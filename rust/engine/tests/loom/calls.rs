//! Two ranks in calls of one group, as `Scheduling::step`, `Scheduling::reap` and `Calls::fail` go through them.

use loom::sync::Arc;
use loom::thread;
use trigram_core::signature::{Collective, Signature, Via};
use trigram_core::{DType, ReduceOp};

use crate::host::doorbell_words::Words;
use crate::host::op_slot::{LANES, Lane};
use crate::sys::atomics::{Byte, copy_in, copy_out};
use crate::sys::memory::Place;
use crate::{check, sleep_until};

/// A rank's board: one lane, and a byte that stands for its slot, or for the memory that it lends.
struct Board {
    bell: Words,
    lane: Lane,
    memory: Byte,
}

impl Board {
    fn pair() -> Arc<[Board; 2]> {
        let new = || Board { bell: Words::default(), lane: Lane::default(), memory: Byte::new(0) };
        Arc::new([new(), new()])
    }

    fn write(&self, value: u8) {
        // SAFETY: one byte; loom sees to it that nobody else is at it.
        unsafe { copy_in(&raw const value, &raw const self.memory, 1) };
    }

    fn read(&self) -> u8 {
        let mut value = 0;
        // SAFETY: as above.
        unsafe { copy_out(&raw const self.memory, &raw mut value, 1) };
        value
    }
}

fn signature(call: u64) -> Signature {
    Signature::new(Collective::AllReduce, DType::F32, ReduceOp::Sum, Via::Auto, 0, 100 + call)
}

/// Calls of one group one after another, whose payload fits the slot.
fn run(boards: &[Board; 2], me: usize, calls: u64) {
    let (mine, theirs) = (&boards[me], &boards[1 - me]);
    for call in 0..calls {
        sleep_until(&mine.bell, || mine.lane.is_free_for(call) && theirs.lane.is_free_for(call));
        mine.lane.describe(&signature(call), Some(Place { segment: call, offset: 8 * me }), None);
        mine.write(call as u8 + 10 * me as u8);
        mine.lane.arrive(call, 0);
        theirs.bell.ring(|| unreachable!());
        sleep_until(&mine.bell, || theirs.lane.has_arrived(call, 0));
        assert_eq!(theirs.lane.signature(), signature(call));
        assert_eq!(theirs.lane.input(), Some(Place { segment: call, offset: 8 * (1 - me) }));
        assert_eq!(theirs.read(), call as u8 + 10 * (1 - me) as u8);
        mine.lane.leave(call);
        theirs.bell.ring(|| unreachable!());
    }
}

#[test]
fn a_lane_is_reused_when_all_have_left_it() {
    assert_eq!(LANES, 1);
    check(Some(2), || {
        let boards = Board::pair();
        let other = boards.clone();
        let one = thread::spawn(move || run(&other, 1, 2));
        run(&boards, 0, 2);
        one.join().unwrap();
    });
}

/// Rank 1 gives a call up that it has entered, and takes its memory back as soon as nobody is inside who may read it.
fn give_up(boards: &[Board; 2]) {
    let (mine, theirs) = (&boards[1], &boards[0]);
    mine.lane.describe(&signature(0), None, None);
    mine.lane.arrive(0, 0);
    theirs.bell.ring(|| unreachable!());
    mine.lane.fail(0);
    mine.lane.leave(0);
    theirs.bell.ring(|| unreachable!());
    sleep_until(&mine.bell, || !theirs.lane.is_inside(0));
    mine.write(99);
}

#[test]
fn memory_of_a_failed_call_is_not_read_any_more() {
    check(Some(4), || {
        let boards = Board::pair();
        let other = boards.clone();
        let one = thread::spawn(move || give_up(&other));
        let (mine, theirs) = (&boards[0], &boards[1]);
        mine.lane.describe(&signature(0), None, None);
        mine.lane.arrive(0, 0);
        theirs.bell.ring(|| unreachable!());
        sleep_until(&mine.bell, || theirs.lane.has_arrived(0, 0));
        if !theirs.lane.has_failed(0) {
            assert_eq!(theirs.read(), 0);
        }
        mine.lane.leave(0);
        theirs.bell.ring(|| unreachable!());
        one.join().unwrap();
    });
}
