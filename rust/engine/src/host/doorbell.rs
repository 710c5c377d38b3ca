//! Wakes a rank that sleeps, from a thread of its own or from another process.
//!
//! A rank that has published something for another *rings* its doorbell. That costs a memory fence and a load, and a
//! system call only if the other rank really sleeps. A rank sleeps on a futex in shared memory when only ranks of its
//! host can wake it soon, and otherwise in `epoll`, with an eventfd of its own among its sockets.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::EventfdFlags;
use trigram_core::Result;

use crate::host::doorbell_words::Words;
use crate::sys::fork::GuardedFd;
use crate::sys::limits::refused;
use crate::sys::memory::Segment;

/// A rank's doorbell, as its owner and as its peers see it.
#[derive(Clone, Debug)]
pub struct Doorbell {
    control: Arc<Segment>,
    offset: usize,
    event: Arc<Event>,
}

#[derive(Debug)]
struct Event {
    _guard: GuardedFd,
    fd: OwnedFd,
}

impl Doorbell {
    /// The doorbell whose words lie at `offset` of a control segment, with its owner's eventfd.
    pub fn new(control: Arc<Segment>, offset: usize, event: OwnedFd) -> Self {
        let event = Event { _guard: GuardedFd::new(&event), fd: event };
        Self { control, offset, event: Arc::new(event) }
    }

    /// That of a rank which is alone on its host.
    pub fn alone() -> Result<Self> {
        Ok(Self::new(Arc::new(Segment::private(size_of::<Words>())?), 0, Self::event()?))
    }

    /// A new eventfd for a doorbell.
    pub fn event() -> Result<OwnedFd> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| refused("creating an eventfd", e))
    }

    fn words(&self) -> &Words {
        let len = size_of::<Words>();
        let at = self.control.at(self.offset, len).map_or(std::ptr::dangling(), |p| p.as_ptr().cast());
        // SAFETY: the control segment is mapped as long as `self` lives and is larger than the offset
        // (checked when it was mapped, see `ControlSegment::map`); the words are atomics.
        unsafe { &*at }
    }

    /// The eventfd, for the owner's epoll and for passing to peers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.fd.as_fd()
    }

    /// Wakes the owner if it sleeps. When it wakes, it sees everything written before.
    pub fn ring(&self) {
        self.words().ring(|| {
            // The eventfd is full or the write was interrupted: the owner is being woken anyway.
            let _ = rustix::io::write(&self.event.fd, &1u64.to_ne_bytes());
        });
    }

    /// Announces that the owner is about to sleep. It must check once more for work before it does.
    pub fn arm(&self, on_event: bool) -> u32 {
        self.words().arm(on_event)
    }

    /// The owner has found work after all, or has woken.
    pub fn disarm(&self) {
        self.words().disarm();
    }

    /// Sleeps until rung, for at most `limit`. `seen` is from [`Doorbell::arm`].
    pub fn sleep(&self, seen: u32, limit: Duration) {
        self.words().sleep(seen, limit);
    }

    /// Clears the rings that came through the eventfd.
    pub fn drain(&self) {
        let _ = rustix::io::read(&self.event.fd, &mut [0u8; 8]);
    }
}
