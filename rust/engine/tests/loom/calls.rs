//! Two ranks in calls of one group, as `Scheduling::step`, `Scheduling::reap` and `Calls::fail` go through them.

use loom::sync::Arc;
use loom::sync::atomic::Ordering;
use loom::thread;
use trigram_core::signature::{Collective, Signature, Via};
use trigram_core::{DType, ReduceOp};

use crate::host::doorbell_words::Words;
use crate::host::op_slot::{OP_SLOTS, OpSlot};
use crate::sys::atomics::{Byte, copy_in, copy_out, fence};
use crate::sys::memory::SegmentOffset;
use crate::{check, sleep_until};

/// A rank's control segment: one operation slot, and a byte that stands for its slot, or for the memory that it lends.
struct ControlSegment {
    bell: Words,
    op_slot: OpSlot,
    memory: Byte,
}

impl ControlSegment {
    fn pair() -> Arc<[ControlSegment; 2]> {
        let new =
            || ControlSegment { bell: Words::default(), op_slot: OpSlot::default(), memory: Byte::new(0) };
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

/// A rank arrives at a call, as in `Members::arrive`: who finds that all have arrived wakes the others.
fn arrive(mine: &OpSlot, others: &[(&OpSlot, &Words)], call: u64) {
    mine.arrive(call, 0);
    fence(Ordering::SeqCst);
    if others.iter().all(|(slot, _)| slot.has_arrived(call, 0)) {
        others.iter().for_each(|(_, bell)| bell.ring(|| unreachable!()));
    }
}

/// Calls of one group one after another, whose payload fits the slot.
fn run(controls: &[ControlSegment; 2], me: usize, calls: u64) {
    let (mine, theirs) = (&controls[me], &controls[1 - me]);
    for call in 0..calls {
        sleep_until(&mine.bell, || mine.op_slot.is_free_for(call) && theirs.op_slot.is_free_for(call));
        mine.op_slot.describe(&signature(call), Some(SegmentOffset { segment: call, offset: 8 * me }), None);
        mine.write(call as u8 + 10 * me as u8);
        arrive(&mine.op_slot, &[(&theirs.op_slot, &theirs.bell)], call);
        sleep_until(&mine.bell, || theirs.op_slot.has_arrived(call, 0));
        assert_eq!(theirs.op_slot.signature(), signature(call));
        assert_eq!(theirs.op_slot.lent(), Some(SegmentOffset { segment: call, offset: 8 * (1 - me) }));
        assert_eq!(theirs.read(), call as u8 + 10 * (1 - me) as u8);
        mine.op_slot.leave(call);
        theirs.bell.ring(|| unreachable!());
    }
}

#[test]
fn a_lane_is_reused_when_all_have_left_it() {
    assert_eq!(OP_SLOTS, 1);
    check(Some(2), || {
        let controls = ControlSegment::pair();
        let other = controls.clone();
        let one = thread::spawn(move || run(&other, 1, 2));
        run(&controls, 0, 2);
        one.join().unwrap();
    });
}

#[test]
fn the_last_of_three_wakes_the_others() {
    check(Some(2), || {
        let new = || (OpSlot::default(), Words::default());
        let ranks = Arc::new([new(), new(), new()]);
        let run = |ranks: &[(OpSlot, Words); 3], me: usize| {
            let others = [1, 2].map(|by| &ranks[(me + by) % 3]).map(|(slot, bell)| (slot, bell));
            arrive(&ranks[me].0, &others, 0);
            sleep_until(&ranks[me].1, || others.iter().all(|(slot, _)| slot.has_arrived(0, 0)));
        };
        let others: Vec<_> = [1, 2]
            .map(|me| {
                let ranks = ranks.clone();
                thread::spawn(move || run(&ranks, me))
            })
            .into();
        run(&ranks, 0);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

/// A rank's slots of two calls, each with its payload.
struct TwoSlots {
    bell: Words,
    slots: [(OpSlot, Byte); 2],
}

/// One-shot calls: a rank learns from a peer's arrival at a call which slots the peer has left, and does not look at those.
fn run_one_shots(ranks: &[TwoSlots; 2], me: usize) {
    let (mine, theirs) = (&ranks[me], &ranks[1 - me]);
    let mut left_before = 0;
    for call in 0..3 {
        let i = call as usize % 2;
        assert!(left_before + 2 > call, "the slot is still in use");
        let ((slot, payload), (their_slot, their_payload)) = (&mine.slots[i], &theirs.slots[i]);
        slot.describe_one_shot(&signature(call), call);
        let value = call as u8 + 10 * me as u8;
        // SAFETY: one byte; loom sees to it that nobody else is at it.
        unsafe { copy_in(&raw const value, &raw const *payload, 1) };
        arrive(slot, &[(their_slot, &theirs.bell)], call);
        sleep_until(&mine.bell, || their_slot.has_arrived(call, 0));
        let mut value = 0;
        // SAFETY: as above.
        unsafe { copy_out(&raw const *their_payload, &raw mut value, 1) };
        assert_eq!((their_slot.signature(), value), (signature(call), call as u8 + 10 * (1 - me) as u8));
        left_before = their_slot.left_before();
        slot.leave(call);
    }
}

#[test]
fn a_slot_is_reused_when_a_later_arrival_says_that_it_was_left() {
    check(Some(2), || {
        let new = || TwoSlots {
            bell: Words::default(),
            slots: std::array::from_fn(|_| (OpSlot::default(), Byte::new(0))),
        };
        let ranks = Arc::new([new(), new()]);
        let other = ranks.clone();
        let one = thread::spawn(move || run_one_shots(&other, 1));
        run_one_shots(&ranks, 0);
        one.join().unwrap();
    });
}

/// Rank 1 gives a call up that it has entered, and takes its memory back as soon as nobody is inside who may read it.
fn abort(controls: &[ControlSegment; 2]) {
    let (mine, theirs) = (&controls[1], &controls[0]);
    mine.op_slot.describe(&signature(0), None, None);
    arrive(&mine.op_slot, &[(&theirs.op_slot, &theirs.bell)], 0);
    mine.op_slot.fail(0);
    mine.op_slot.leave(0);
    theirs.bell.ring(|| unreachable!());
    sleep_until(&mine.bell, || !theirs.op_slot.is_inside(0));
    mine.write(99);
}

#[test]
fn memory_of_a_failed_call_is_not_read_any_more() {
    check(Some(4), || {
        let controls = ControlSegment::pair();
        let other = controls.clone();
        let one = thread::spawn(move || abort(&other));
        let (mine, theirs) = (&controls[0], &controls[1]);
        mine.op_slot.describe(&signature(0), None, None);
        arrive(&mine.op_slot, &[(&theirs.op_slot, &theirs.bell)], 0);
        sleep_until(&mine.bell, || theirs.op_slot.has_arrived(0, 0));
        if !theirs.op_slot.has_failed(0) {
            assert_eq!(theirs.read(), 0);
        }
        mine.op_slot.leave(0);
        theirs.bell.ring(|| unreachable!());
        one.join().unwrap();
    });
}
