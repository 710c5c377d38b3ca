//! What the kernel knows of a connection: bytes that wait in its queues, and whether it has ended.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;

/// Bytes in a socket's queue: `FIONREAD`, those to be read; `TIOCOUTQ`, those that the peer's host has not acknowledged. 0
/// if the kernel does not say.
pub(crate) fn waiting(socket: BorrowedFd<'_>, what: libc::c_ulong) -> u64 {
    let mut bytes: libc::c_int = 0;
    // SAFETY: both requests write one int.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), what as _, &mut bytes) };
    if done == 0 { u64::try_from(bytes).unwrap_or(0) } else { 0 }
}

/// Whether a socket carries nothing any more in either direction.
pub(crate) fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let answered = rustix::event::poll(&mut fds, Some(&now)).is_ok();
    answered && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}
