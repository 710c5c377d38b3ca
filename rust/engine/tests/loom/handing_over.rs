//! How work gets to a lane and back: `lanes/queue.rs` and `lanes/task.rs` are real, lanes are `Shared::work` (`pool.rs`)
//! without its looks before it sleeps.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::check;
use crate::lanes::queue::Queue;
use crate::lanes::task::{Run, Task, Work};

#[test]
fn a_lane_is_woken_for_all_that_waits() {
    check(Some(3), || {
        let queue = Arc::new(Queue::new(2));
        let lanes: Vec<_> = (0..2)
            .map(|_| {
                let queue = queue.clone();
                thread::spawn(move || {
                    // A lost wake-up is a deadlock.
                    assert!(queue.wait().is_some());
                    queue.done();
                })
            })
            .collect();
        queue.push(1, false);
        queue.push(2, true);
        lanes.into_iter().for_each(|lane| lane.join().unwrap());
    });
}

#[test]
fn what_waits_for_a_core_begins_when_there_is_one() {
    check(Some(3), || {
        let queue = Arc::new(Queue::new(0));
        let lane = {
            let queue = queue.clone();
            thread::spawn(move || {
                assert_eq!(queue.wait(), Some(7));
                queue.done();
                assert_eq!(queue.wait(), None);
            })
        };
        let pushed = {
            let queue = queue.clone();
            thread::spawn(move || queue.push(7, true))
        };
        queue.set_most(1);
        pushed.join().unwrap();
        // The thread that drives takes only what no lane will begin with.
        assert_eq!(queue.take(), None);
        while queue.has_work() {
            thread::yield_now();
        }
        queue.close();
        lane.join().unwrap();
    });
}

/// Writes to memory that is not its own.
struct Writing(Arc<UnsafeCell<u32>>);

// SAFETY: whoever hands it over touches the memory only after it has taken it back.
unsafe impl Send for Writing {}

impl Work for Writing {
    fn run(&mut self, stop: &dyn Fn() -> bool) {
        for _ in 0..2 {
            if stop() {
                return;
            }
            // SAFETY: as above.
            self.0.with_mut(|at| unsafe { *at += 1 });
        }
    }
}

#[test]
fn what_is_taken_back_is_left_alone() {
    check(None, || {
        let memory = Arc::new(UnsafeCell::new(0));
        let queue = Arc::new(Queue::new(1));
        let lane = {
            let queue: Arc<Queue<std::sync::Arc<dyn Run>>> = queue.clone();
            thread::spawn(move || {
                while let Some(work) = queue.wait() {
                    work.run();
                    queue.done();
                }
            })
        };
        let task = Task::new(Writing(memory.clone()));
        queue.push(task.shared(), false);
        let finished = task.is_finished();
        let work = task.recall().expect("it is taken back once");
        // loom fails the test if the lane is still there.
        let written = work.0.with(|at| unsafe { *at });
        assert!(written == 2 || written < 2 && !finished, "{written} {finished}");
        assert!(task.recall().is_none());
        queue.close();
        lane.join().unwrap();
    });
}

#[test]
fn a_task_that_is_dropped_is_taken_back() {
    check(None, || {
        let memory = Arc::new(UnsafeCell::new(0));
        let task = Task::new(Writing(memory.clone()));
        let shared = task.shared();
        let lane = thread::spawn(move || shared.run());
        drop(task);
        memory.with_mut(|at| unsafe { *at = 9 });
        lane.join().unwrap();
    });
}
