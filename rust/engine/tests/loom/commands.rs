//! How callers hand work to the thread that drives it: a model of `Engine::{run, command, wake_background}` and
//! `Driver::{background, drive, take_inbox}` (`driver.rs`). The bell and the completion handles are real.

use std::time::Duration;

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use crate::check;
use crate::host::doorbell_words::Words;
use crate::sys::completion::Completion;

struct Shared {
    progress: Mutex<Vec<Arc<Completion>>>,
    inbox: Mutex<Vec<Arc<Completion>>>,
    waiting: AtomicUsize,
    closed: AtomicBool,
    idle: Mutex<bool>,
    work: Condvar,
    bell: Words,
}

impl Shared {
    fn command(&self, completion: Arc<Completion>) {
        let mut inbox = self.inbox.lock().unwrap();
        inbox.push(completion);
        self.waiting.store(inbox.len(), Ordering::Release);
        drop(inbox);
        self.bell.ring(|| unreachable!());
        self.wake_background();
    }

    fn wake_background(&self) {
        let mut idle = self.idle.lock().unwrap();
        if *idle {
            *idle = false;
            self.work.notify_one();
        }
    }

    fn take_inbox(&self, jobs: &mut Vec<Arc<Completion>>) {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut inbox = self.inbox.lock().unwrap();
        self.waiting.store(0, Ordering::Release);
        jobs.append(&mut inbox);
    }

    /// Every job is done as soon as it is seen.
    fn poll(jobs: &mut Vec<Arc<Completion>>) -> bool {
        let moved = !jobs.is_empty();
        jobs.drain(..).for_each(|active| active.resolve(Ok(())));
        moved
    }

    fn drive(&self, jobs: &mut Vec<Arc<Completion>>) {
        loop {
            self.take_inbox(jobs);
            let moved = Self::poll(jobs);
            if self.closed.load(Ordering::Acquire)
                || jobs.is_empty() && self.waiting.load(Ordering::Acquire) == 0
            {
                return;
            }
            if moved {
                continue;
            }
            let seen = self.bell.arm(false);
            if self.waiting.load(Ordering::Acquire) > 0 || self.closed.load(Ordering::Acquire) {
                self.bell.disarm();
                continue;
            }
            self.bell.sleep(seen, Duration::MAX);
        }
    }

    fn background(&self) {
        loop {
            let mut idle = self.idle.lock().unwrap();
            while *idle && !self.closed.load(Ordering::Acquire) {
                idle = self.work.wait(idle).unwrap();
            }
            drop(idle);
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let mut jobs = self.progress.lock().unwrap();
            self.drive(&mut jobs);
            let mut idle = self.idle.lock().unwrap();
            *idle = jobs.is_empty() && self.waiting.load(Ordering::Acquire) == 0;
        }
    }

    fn shutdown(&self) {
        self.closed.store(true, Ordering::Release);
        self.bell.ring(|| unreachable!());
        *self.idle.lock().unwrap() = false;
        self.work.notify_all();
    }
}

#[test]
fn what_is_asked_for_is_done_and_the_end_is_heard() {
    check(Some(3), || {
        let shared = Arc::new(Shared {
            progress: Mutex::default(),
            inbox: Mutex::default(),
            waiting: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            idle: Mutex::new(true),
            work: Condvar::new(),
            bell: Words::default(),
        });
        let background = shared.clone();
        let background = thread::spawn(move || background.background());
        for _ in 0..2 {
            let completion = Arc::new(Completion::default());
            shared.command(completion.clone());
            assert_eq!(completion.wait(None, &mut || Ok(())), Ok(Some(Ok(()))));
        }
        shared.shutdown();
        background.join().unwrap();
    });
}
