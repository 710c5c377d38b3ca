//! The protocols of shared memory, in every order that the processor and the compiler may show.
//!
//! `src/host/{pipe,op_slot,doorbell_words}.rs`, `src/lanes/{queue,task}.rs`, `src/sys/completion.rs` and
//! `src/runtime/background.rs` are compiled here as they are, over loom's atomics (see `src/sys/atomics.rs`). What uses them is written down anew, as small as it gets: the order in which
//! `drive/scheduling.rs` calls an operation slot, and how `runtime/driver.rs` passes on what it is asked for. `make test-loom`
//! runs it.
#![cfg(trigram_loom)]
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

#[path = "../../src/sys"]
mod sys {
    #[path = "../../tests/loom/atomics.rs"]
    pub(crate) mod atomics;
    pub mod completion;
    pub mod fork {
        /// As in `src/sys/fork.rs`.
        pub fn is_child() -> bool {
            false
        }
    }
    pub mod serving {
        /// As in `src/sys/serving.rs`.
        pub const LOOK_INTERVAL: std::time::Duration = std::time::Duration::from_millis(1);
        pub fn note() {}
        pub fn is_active() -> bool {
            false
        }
        pub fn is_due() -> bool {
            false
        }
    }
    pub mod memory {
        /// As in `src/sys/memory.rs`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct SegmentOffset {
            pub segment: u64,
            pub offset: usize,
        }
    }
}
#[path = "../../src/host"]
mod host {
    pub mod doorbell_words;
    pub mod op_slot;
    pub mod pipe;
}

#[path = "../../src/lanes"]
mod lanes {
    pub mod queue;
    pub mod task;
}

#[path = "../../src/runtime"]
mod runtime {
    pub mod background;
}

mod calls;
mod commands;
mod handing_over;

use std::time::Duration;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;

use host::doorbell_words::Words;
use host::pipe::{PIPE, Pipe};
use sys::atomics::Byte;
use sys::completion::Completion;

/// Runs a model; `preemptions`: how often at most a thread is stopped where it would go on, `None`: ever so often.
fn check(preemptions: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

/// Polls until it is over, and sleeps where nothing has moved, as `Driver::drive` and `Driver::sleep` do.
fn drive(bell: &Words, poll: impl Fn() -> Polled) {
    loop {
        match poll() {
            Polled::Over => return,
            Polled::Moved => continue,
            Polled::Nothing => {}
        }
        let seen = bell.arm(false);
        match poll() {
            Polled::Nothing => bell.sleep(seen, Duration::MAX),
            Polled::Over => return bell.disarm(),
            Polled::Moved => bell.disarm(),
        }
    }
}

/// What a look at everything came to.
enum Polled {
    Over,
    Moved,
    Nothing,
}

/// Sleeps until `done`.
fn sleep_until(bell: &Words, done: impl Fn() -> bool) {
    drive(bell, || if done() { Polled::Over } else { Polled::Nothing });
}

#[test]
fn a_ring_is_never_missed() {
    check(Some(3), || {
        let both = Arc::new((Words::default(), AtomicU32::new(0)));
        let ringers: Vec<_> = (0..2)
            .map(|_| {
                let both = both.clone();
                thread::spawn(move || {
                    both.1.fetch_add(1, Ordering::Relaxed);
                    both.0.ring(|| unreachable!());
                })
            })
            .collect();
        sleep_until(&both.0, || both.1.load(Ordering::Relaxed) == 2);
        ringers.into_iter().for_each(|r| r.join().unwrap());
    });
}

/// Bytes through a ring of [`PIPE`], each side sleeping when it can do nothing.
struct Link {
    pipe: Pipe,
    ring: [Byte; PIPE],
    reader: Words,
    writer: Words,
}

#[test]
fn a_pipe_loses_nothing_and_both_sides_sleep() {
    check(Some(3), || {
        let link = Arc::new(Link {
            pipe: Pipe::default(),
            ring: std::array::from_fn(|_| Byte::new(0)),
            reader: Words::default(),
            writer: Words::default(),
        });
        let sent = [1, 2, 3, 4, 5];
        let writer = {
            let link = link.clone();
            thread::spawn(move || {
                let at = std::cell::Cell::new(0);
                drive(&link.writer, || {
                    // SAFETY: this thread is the only writer, and the ring is the pipe's.
                    let n = unsafe { link.pipe.write(link.ring.as_ptr().cast_mut(), &sent[at.get()..]) };
                    at.set(at.get() + n);
                    if n > 0 {
                        link.reader.ring(|| unreachable!());
                    }
                    match n {
                        _ if at.get() == sent.len() => Polled::Over,
                        0 => Polled::Nothing,
                        _ => Polled::Moved,
                    }
                });
            })
        };
        let got = std::cell::RefCell::new(Vec::<u8>::new());
        drive(&link.reader, || {
            let mut into = [0; 2];
            // SAFETY: this thread is the only reader, and the ring is the pipe's.
            let (n, waits) = unsafe { link.pipe.read(link.ring.as_ptr(), &mut into) };
            if waits {
                link.writer.ring(|| unreachable!());
            }
            got.borrow_mut().extend(&into[..n]);
            match n {
                _ if got.borrow().len() == sent.len() => Polled::Over,
                0 => Polled::Nothing,
                _ => Polled::Moved,
            }
        });
        writer.join().unwrap();
        assert_eq!(got.into_inner(), sent);
    });
}

#[test]
fn a_waiting_caller_is_woken() {
    check(None, || {
        let completion = Arc::new(Completion::default());
        let other = completion.clone();
        let waiter = thread::spawn(move || other.wait(None, &mut || Ok(())));
        completion.resolve(Ok(()));
        assert!(completion.is_done());
        assert_eq!(waiter.join().unwrap(), Ok(Some(Ok(()))));
    });
}
