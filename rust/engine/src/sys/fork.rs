//! Forked children: trigram raises a clear error there, and they hold none of its sockets (invariant PY-4).
//!
//! A process that forks (for the workers of a DataLoader) duplicates every descriptor. A worker that outlives a dead
//! rank would keep the rank's connections open, and its peers would wait. So the engine registers every descriptor
//! here, and in a child each is replaced by `/dev/null`: replaced, not closed, so that the child's copies of our
//! objects never close a descriptor that meanwhile belongs to something else.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use trigram_core::{Error, Result};

const ROOM: usize = 16 << 10;
static FDS: [AtomicI32; ROOM] = [const { AtomicI32::new(-1) }; ROOM];
/// How many engines of this process have not shut down.
static ENGINES: AtomicUsize = AtomicUsize::new(0);
static FORKED: AtomicBool = AtomicBool::new(false);
static DEPTH: AtomicUsize = AtomicUsize::new(0);
static WATCH: Once = Once::new();

/// Registers the fork handler: from now on forked children of this process are recognized.
pub fn watch() {
    WATCH.call_once(|| {
        // SAFETY: the handler makes only async-signal-safe calls. If it cannot be registered for lack of memory,
        // children keep the descriptors, as with any other library.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// A descriptor that no forked child keeps. Held beside the descriptor, and dropped before it.
#[derive(Debug)]
pub struct GuardedFd(RawFd);

impl GuardedFd {
    /// Registers a descriptor. Beyond 16,384 of them, a child keeps the rest.
    pub fn new(fd: &impl AsRawFd) -> Self {
        watch();
        let fd = fd.as_raw_fd();
        for cell in &FDS {
            if cell.compare_exchange(-1, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                break;
            }
        }
        Self(fd)
    }
}

impl Drop for GuardedFd {
    fn drop(&mut self) {
        for cell in &FDS {
            if cell.compare_exchange(self.0, -1, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                break;
            }
        }
    }
}

/// Counts an engine that begins: children that are forked before [`engine_ended`] may not use trigram.
pub fn engine_began() {
    watch();
    ENGINES.fetch_add(1, Ordering::Relaxed);
}

/// Counts an engine that has shut down. A child has no part in its connections, and may make an engine of its own.
pub fn engine_ended() {
    ENGINES.fetch_sub(1, Ordering::Relaxed);
}

/// Returns an error in a forked child of a process that had an engine.
pub fn check() -> Result<()> {
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(Error::misuse(
        "trigram cannot be used in a forked child: its connections belong to the parent. \
         Start workers that communicate with the spawn method, and call trigram.init there",
    ))
}

/// Whether this process is a forked child of one that had an engine.
pub fn is_child() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// How many forks lie between this process and the one in which [`watch`] was called first. What a thread of the
/// parent may have locked, or counted itself in, is kept once for each depth.
pub fn depth() -> usize {
    DEPTH.load(Ordering::Relaxed)
}

extern "C" fn in_child() {
    DEPTH.fetch_add(1, Ordering::Relaxed);
    // A child of a process that had no engine may make one of its own.
    if ENGINES.swap(0, Ordering::Relaxed) > 0 {
        FORKED.store(true, Ordering::Relaxed);
    }
    // SAFETY: open, dup2 and close may be called between fork and exec.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        for cell in &FDS {
            let fd = cell.load(Ordering::Relaxed);
            if fd >= 0 && null >= 0 {
                libc::dup3(null, fd, libc::O_CLOEXEC);
            }
        }
        libc::close(null);
    }
}
