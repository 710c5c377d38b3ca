//! Forked children: they get a clear error, and hold none of our sockets (invariant PY-4).
//!
//! A process that forks (a DataLoader's workers) duplicates every descriptor. A worker that
//! outlives a dead rank would keep its connections open, and its peers waiting. So every
//! descriptor of the engine is entered here, and in a child replaced by `/dev/null`: replaced, not
//! closed, so that the child's copies of our objects never close a number that is someone else's.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use trigram_core::{Error, Result};

const ROOM: usize = 16 << 10;
static FDS: [AtomicI32; ROOM] = [const { AtomicI32::new(-1) }; ROOM];
static FORKED: AtomicBool = AtomicBool::new(false);
static WATCH: Once = Once::new();

/// From now on [`is_child`] tells forked children of this process apart.
pub fn watch() {
    WATCH.call_once(|| {
        // SAFETY: the handler makes only async-signal-safe calls. That no handler could be
        // entered means no memory; then children keep descriptors, as with any library.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// A descriptor that no child keeps. Held beside the descriptor, and dropped before it.
#[derive(Debug)]
pub struct GuardedFd(RawFd);

impl GuardedFd {
    /// Enters a descriptor. Beyond 16,384 of them a child keeps the rest.
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

/// Refuses to work in a forked child.
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

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
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
