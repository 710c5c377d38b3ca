//! What a link needs over which an answer takes long: another congestion control, and several streams.
//!
//! Cubic halves what it has under way at each loss and needs minutes to get it back; BBR sends at the rate that it measures.
//! On near links BBR is slower, so only far ones get it. Several streams lose a part of it at a time, begin with several
//! windows, and together hold more than one socket's buffers may.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::net::sockopt;

use crate::transport::stream::Carried;

/// From this round-trip time on, in seconds, an answer takes too long to wait for with little under way.
const FAR: f64 = 2e-3;

/// Streams to a rank that is far: with BBR, and with a congestion control that each lost packet costs half of its rate.
const STREAMS: (u8, u8) = (4, 8);
/// The most that a setting may ask for.
pub const MOST_STREAMS: u8 = 16;
/// Sockets of a rank that is far from all others, at most about as many.
const MOST_SOCKETS: usize = 512;

/// What far links use where the kernel has it.
const BBR: &str = "bbr";

/// Bytes that wait unsent in a socket of several, at most: what waits in one cannot leave by another.
const MOST_UNSENT: libc::c_int = 256 << 10;

/// Whether an answer takes so long that the link would be idle if the sender waited for it.
pub fn is_far(socket: BorrowedFd<'_>) -> bool {
    min_rtt(socket).is_some_and(|rtt| rtt >= FAR)
}

/// How many connections to a rank `TRIGRAM_STREAMS` asks for.
pub fn asked_streams() -> Option<u8> {
    let asked: u8 = std::env::var("TRIGRAM_STREAMS").ok()?.parse().ok()?;
    Some(asked.clamp(1, MOST_STREAMS))
}

/// How many connections to open to a rank, of which this is the first: several if it is far. `world`: the number of ranks.
pub fn streams(first: BorrowedFd<'_>, far: bool, world: usize) -> u8 {
    if !far {
        return 1;
    }
    let has_bbr = set_congestion(first, far) && sockopt::tcp_congestion(first).is_ok_and(|name| name == BBR);
    let most = if has_bbr { STREAMS.0 } else { STREAMS.1 };
    (MOST_SOCKETS / world.max(1)).clamp(1, usize::from(most)) as u8
}

/// Prepares a socket to a rank that is far or not. `several`: it is one of several to that rank. False if the link is far,
/// and the system does not let it have what it should.
pub fn prepare(socket: BorrowedFd<'_>, far: bool, several: bool) -> bool {
    if several {
        // Without it, more waits in slow streams: slower, and as right.
        let _ = set(socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, MOST_UNSENT);
    }
    set_congestion(socket, far)
}

/// Sets the congestion control that `TRIGRAM_CONGESTION` names, else BBR if the link is far. False if the system refuses.
fn set_congestion(socket: BorrowedFd<'_>, far: bool) -> bool {
    let asked = std::env::var("TRIGRAM_CONGESTION").unwrap_or_default();
    let name = match asked.as_str() {
        "system" => return true,
        "" | "auto" if far => BBR,
        "" | "auto" => return true,
        name => name,
    };
    sockopt::set_tcp_congestion(socket, name).is_ok()
}

fn set(socket: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> bool {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads one int.
    unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), len) == 0 }
}

/// The least round-trip time of a connection so far, in seconds.
pub fn min_rtt(socket: BorrowedFd<'_>) -> Option<f64> {
    /// Where `struct tcp_info` of linux/tcp.h has `tcpi_min_rtt`, in microseconds; since Linux 4.6.
    const MIN_RTT: usize = 148;
    let info = info::<{ MIN_RTT + 4 }>(socket)?;
    let micros = u32::from_ne_bytes(info[MIN_RTT..].try_into().ok()?);
    (micros != u32::MAX).then(|| f64::from(micros) * 1e-6)
}

/// What the system knows of what a connection has carried.
pub fn carried(socket: BorrowedFd<'_>) -> Option<Carried> {
    /// Where it has `tcpi_bytes_acked`, `tcpi_delivery_rate` and the bit `tcpi_delivery_rate_app_limited`; since Linux 4.9.
    const ACKED: usize = 120;
    const RATE: usize = 160;
    const LIMITED: usize = 7;
    let info = info::<{ RATE + 8 }>(socket)?;
    let number = |from: usize| u64::from_ne_bytes(info[from..from + 8].try_into().unwrap_or_default());
    let rate = Some(number(RATE) as f64).filter(|rate| *rate > 0.0 && info[LIMITED] & 1 == 0);
    Some(Carried { arrived: number(ACKED), rate })
}

/// The first bytes of `struct tcp_info`; `None` if the system has fewer.
fn info<const BYTES: usize>(socket: BorrowedFd<'_>) -> Option<[u8; BYTES]> {
    let mut info = [0u8; BYTES];
    let mut len = info.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, and says how many.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    (done == 0 && len as usize == info.len()).then_some(info)
}
