//! How callers hand work to the thread that drives it: a model of `Engine::{start, command}` and
//! `Driver::{background, drive, leave, take_inbox}` (`driver.rs`). The bell, the completion handles and what asks the
//! background thread to drive are real.

use std::time::Duration;

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use loom::sync::{Arc, Mutex, MutexGuard};
use loom::thread;

use crate::check;
use crate::host::doorbell_words::Words;
use crate::runtime::background::{Background, Duty};
use crate::sys::completion::Completion;

struct Shared {
    progress: Mutex<Vec<Arc<Completion>>>,
    inbox: Mutex<Vec<Arc<Completion>>>,
    waiting: AtomicUsize,
    closed: AtomicBool,
    background: Background,
    bell: Words,
}

impl Shared {
    fn command(&self, completion: Arc<Completion>) {
        let mut inbox = self.inbox.lock().unwrap();
        inbox.push(completion);
        self.waiting.store(inbox.len(), Ordering::Release);
        drop(inbox);
        self.bell.ring(|| unreachable!());
        self.background.wake();
    }

    /// Begins a job in this thread if it can, and leaves it behind.
    fn start(&self, completion: Arc<Completion>) {
        match self.progress.try_lock() {
            Ok(mut jobs) if self.waiting.load(Ordering::Acquire) == 0 => {
                jobs.push(completion);
                self.leave(jobs);
            }
            _ => self.command(completion),
        }
    }

    fn leave(&self, jobs: MutexGuard<'_, Vec<Arc<Completion>>>) {
        let urgent = !jobs.is_empty();
        drop(jobs);
        fence(Ordering::SeqCst);
        if urgent || self.waiting.load(Ordering::Acquire) > 0 {
            self.background.wake();
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
            let duty = self.background.next();
            if duty == Duty::End || self.closed.load(Ordering::Acquire) {
                return;
            }
            let locked = match self.progress.try_lock() {
                Err(_) => {
                    self.background.change(duty, Duty::Rest, || true);
                    self.progress.try_lock()
                }
                locked => locked,
            };
            let Ok(mut jobs) = locked else { continue };
            self.background.wake();
            self.drive(&mut jobs);
            let is_over = || jobs.is_empty() && self.waiting.load(Ordering::Acquire) == 0;
            self.background.change(Duty::Drive, Duty::Rest, is_over);
        }
    }

    fn shutdown(&self) {
        self.closed.store(true, Ordering::Release);
        self.bell.ring(|| unreachable!());
        self.background.end();
    }
}

fn shared() -> Arc<Shared> {
    Arc::new(Shared {
        progress: Mutex::default(),
        inbox: Mutex::default(),
        waiting: AtomicUsize::new(0),
        closed: AtomicBool::new(false),
        background: Background::new(),
        bell: Words::default(),
    })
}

/// What is asked for in either way is done, though another thread holds the progress lock now and then.
#[test]
fn what_is_left_behind_finds_a_thread() {
    check(Some(2), || {
        let shared = shared();
        let background = shared.clone();
        let background = thread::spawn(move || background.background());
        let other = shared.clone();
        let other = thread::spawn(move || {
            let jobs = other.progress.lock().unwrap();
            other.leave(jobs);
        });
        let completion = Arc::new(Completion::default());
        shared.start(completion.clone());
        assert_eq!(completion.wait(None, &mut || Ok(())), Ok(Some(Ok(()))));
        other.join().unwrap();
        shared.shutdown();
        background.join().unwrap();
    });
}

#[test]
fn what_is_asked_for_is_done_and_the_end_is_heard() {
    check(Some(3), || {
        let shared = shared();
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
