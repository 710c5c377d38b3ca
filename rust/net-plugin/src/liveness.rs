//! Whether a peer that takes nothing more is slow or dead.
//!
//! A receiver may leave data unread for as long as it likes: its kernel answers all the while, and that is life.
//! A peer is dead whose kernel has not acknowledged anything for the timeout though ours keeps asking.

use std::mem::size_of;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use socket2::Socket;

/// Asking the kernel is a system call per stream: seldom.
const EVERY: Duration = Duration::from_millis(250);

/// Watches the streams of one connection.
#[derive(Debug)]
pub(crate) struct SilenceDetector {
    timeout: Duration,
    checked: Instant,
    unanswered: Vec<Option<Instant>>,
}

/// What the kernel knows about a stream.
struct Signs {
    /// Retransmissions or probes of a closed window since the last acknowledgement.
    asking: bool,
    /// How long ago that was.
    silence: Duration,
}

impl SilenceDetector {
    /// Over so many streams.
    pub(crate) fn new(streams: usize, timeout: Duration) -> Self {
        Self { timeout, checked: Instant::now(), unanswered: vec![None; streams] }
    }

    /// Something has moved.
    pub(crate) fn moved(&mut self) {
        self.unanswered.fill(None);
    }

    /// Nothing has moved: how long the longest silence has been, if that is too long.
    pub(crate) fn silence<'a>(&mut self, sockets: impl Iterator<Item = &'a Socket>) -> Option<Duration> {
        let now = Instant::now();
        if now - self.checked < EVERY {
            return None;
        }
        self.checked = now;
        let mut longest = None;
        for (socket, since) in sockets.zip(&mut self.unanswered) {
            *since = signs(socket).and_then(|signs| next_since(*since, &signs, now));
            longest = longest.max(since.map(|since| now - since));
        }
        longest.filter(|&silence| silence >= self.timeout)
    }
}

/// Since when questions are unanswered: from the first that is seen, until an answer is.
fn next_since(before: Option<Instant>, signs: &Signs, now: Instant) -> Option<Instant> {
    if !signs.asking {
        return None;
    }
    match before {
        Some(since) if signs.silence >= now - since => Some(since),
        _ => Some(now),
    }
}

fn signs(socket: &Socket) -> Option<Signs> {
    // SAFETY: all zeros is a value of this structure of numbers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    let at = (&raw mut info).cast();
    // SAFETY: the kernel writes at most `len` bytes to `info`, whose size that is.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, at, &mut len) };
    (rc == 0).then(|| Signs {
        asking: info.tcpi_retransmits > 0 || info.tcpi_probes > 0,
        silence: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unanswered_questions_count() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let signs = |asking, s| Signs { asking, silence: Duration::from_secs(s) };
        assert_eq!(next_since(None, &signs(false, 100), at(0)), None, "nobody asked");
        assert_eq!(next_since(None, &signs(true, 100), at(0)), Some(at(0)), "asked just now");
        assert_eq!(next_since(Some(at(0)), &signs(true, 105), at(5)), Some(at(0)), "no answer yet");
        assert_eq!(next_since(Some(at(0)), &signs(true, 4), at(5)), Some(at(5)), "answered in between");
        assert_eq!(next_since(Some(at(0)), &signs(false, 4), at(5)), None, "answered");
    }
}
