//! How a rank that sleeps is woken, by a thread of its own or by another process.
//!
//! Whoever has published something for a rank *rings* it. Ringing is a memory fence and a load
//! unless the rank really sleeps: then it is one system call. A rank sleeps on a futex in shared
//! memory when only ranks of its host can wake it soon, and in `epoll` (on an eventfd of its own
//! among its sockets) otherwise.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::thread::futex;
use rustix::time::Timespec;
use trigram_core::{Error, Result};

use crate::fork::Watched;
use crate::memory::Segment;

/// The shared words of a doorbell.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Words {
    /// Counts the rings that found somebody asleep; the futex.
    count: AtomicU32,
    /// How the owner sleeps: one of the constants below.
    asleep: AtomicU32,
}

const AWAKE: u32 = 0;
const ON_FUTEX: u32 = 1;
const ON_EVENT: u32 = 2;

/// A rank's doorbell, as its owner and as its peers see it.
#[derive(Clone, Debug)]
pub struct Doorbell {
    board: Arc<Segment>,
    offset: usize,
    event: Arc<Event>,
}

#[derive(Debug)]
struct Event {
    _watched: Watched,
    fd: OwnedFd,
}

impl Doorbell {
    /// The doorbell whose words lie at `offset` of a board, with its owner's eventfd.
    pub fn new(board: Arc<Segment>, offset: usize, event: OwnedFd) -> Self {
        let event = Event { _watched: Watched::new(&event), fd: event };
        Self { board, offset, event: Arc::new(event) }
    }

    /// A new eventfd for a doorbell.
    pub fn event() -> Result<OwnedFd> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("creating an eventfd", e))
    }

    fn words(&self) -> &Words {
        let len = size_of::<Words>();
        let at = self.board.at(self.offset, len).map_or(std::ptr::dangling(), |p| p.as_ptr().cast());
        // SAFETY: the board is mapped as long as `self` lives and is larger than the offset
        // (checked when it was mapped, see `Board::map`); the words are atomics.
        unsafe { &*at }
    }

    /// The eventfd, for the owner's epoll and for passing to peers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.fd.as_fd()
    }

    /// Wakes the owner if it sleeps. Everything written before is visible to it when it wakes.
    pub fn ring(&self) {
        let words = self.words();
        // Pairs with the fence in `arm`: either we see that it sleeps, or it sees what we wrote.
        fence(Ordering::SeqCst);
        if words.asleep.load(Ordering::Relaxed) == AWAKE {
            return;
        }
        match words.asleep.swap(AWAKE, Ordering::AcqRel) {
            ON_FUTEX => {
                words.count.fetch_add(1, Ordering::Release);
                // A failed wake-up means that nobody waits.
                let _ = futex::wake(&words.count, futex::Flags::empty(), i32::MAX as u32);
            }
            ON_EVENT => {
                // Full or interrupted: the owner is being woken anyway.
                let _ = rustix::io::write(&self.event.fd, &1u64.to_ne_bytes());
            }
            _ => {}
        }
    }

    /// Says that the owner is about to sleep. It must look once more for work before it does.
    pub fn arm(&self, on_event: bool) -> u32 {
        let words = self.words();
        let seen = words.count.load(Ordering::Acquire);
        words.asleep.store(if on_event { ON_EVENT } else { ON_FUTEX }, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        seen
    }

    /// The owner found work after all, or has woken.
    pub fn disarm(&self) {
        self.words().asleep.store(AWAKE, Ordering::Relaxed);
    }

    /// Sleeps until rung, for at most `limit`. `seen` is from [`Doorbell::arm`].
    pub fn sleep(&self, seen: u32, limit: Duration) {
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        // Rung already, timed out or interrupted: in each case the caller looks for itself.
        let _ = futex::wait(&self.words().count, futex::Flags::empty(), seen, Some(&limit));
        self.disarm();
    }

    /// Forgets the rings that came through the eventfd.
    pub fn drain(&self) {
        let _ = rustix::io::read(&self.event.fd, &mut [0u8; 8]);
    }
}
