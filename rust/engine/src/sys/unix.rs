//! Unix sockets inside a host: they carry descriptors, and tell which user and process the peer is.
//!
//! Names are abstract, so they belong to the network namespace: ranks in different namespaces do not find each other
//! and count as different hosts. Sockets are `SOCK_SEQPACKET`: a message arrives whole, with its descriptors.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use trigram_core::{Error, Result};

use crate::sys::limits::refused;

/// The most descriptors in one message.
const MOST_FDS: usize = 4;

/// The outcome of an attempt to receive.
#[derive(Debug)]
pub enum Received {
    /// A message and its descriptors.
    Message(Vec<u8>, Vec<OwnedFd>),
    /// A message whose descriptors are lost, because this process may not have more.
    WithoutFds(Vec<u8>),
    /// No message yet.
    Nothing,
    /// The peer has closed the connection.
    Closed,
}

fn socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| refused("opening a unix socket", e))
}

fn address(name: &str) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|e| Error::io("naming a unix socket", e))
}

/// Listens under an abstract name.
pub fn listen(name: &str) -> Result<OwnedFd> {
    let io = |e: rustix::io::Errno| Error::io("listening on a unix socket", e);
    let listener = socket()?;
    rustix::net::bind(&listener, &address(name)?).map_err(io)?;
    rustix::net::listen(&listener, 128).map_err(io)?;
    Ok(listener)
}

/// The outcome of an attempt to connect.
#[derive(Debug)]
pub enum Connected {
    /// A connection.
    To(OwnedFd),
    /// The listener's queue is full: try again.
    Busy,
    /// No process listens there in this network namespace.
    Nobody,
}

/// Connects to an abstract name.
pub fn connect(name: &str) -> Result<Connected> {
    let stream = socket()?;
    Ok(match rustix::net::connect(&stream, &address(name)?) {
        Ok(()) => Connected::To(stream),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Connected::Busy,
        Err(_) => Connected::Nobody,
    })
}

/// The next connection, if one waits. Connections from other users are closed at once.
pub fn accept(listener: &OwnedFd) -> Result<Option<OwnedFd>> {
    use rustix::io::Errno;
    loop {
        match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(stream) if is_same_user(&stream) => return Ok(Some(stream)),
            Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
            // Out of descriptors or memory: the connection waits until there are some again.
            Err(Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                return Ok(None);
            }
            Err(e) => return Err(Error::io("accepting on a unix socket", e)),
        }
    }
}

/// The user and the process at the other end. A process that is not visible from this one's namespace has the number 0,
/// which `rustix` does not foresee.
fn peer(stream: &OwnedFd) -> Option<libc::ucred> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, of three integers.
    let done = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    (done == 0 && len as usize == size_of::<libc::ucred>()).then_some(found)
}

/// Whether the process at the other end runs as the same user.
pub fn is_same_user(stream: &OwnedFd) -> bool {
    peer(stream).is_some_and(|peer| peer.uid == rustix::process::geteuid().as_raw())
}

/// The process at the other end and its number, if it is another one and visible from this process's namespace.
pub fn peer_process(stream: &OwnedFd) -> Option<(OwnedFd, i32)> {
    let pid = rustix::process::Pid::from_raw(peer(stream)?.pid)?;
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok()?;
    (pid != rustix::process::getpid()).then_some((process, pid.as_raw_nonzero().get()))
}

/// Sends a message with descriptors. A peer that has gone is no error here: the failure detector notices it.
pub fn send(stream: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    use rustix::io::Errno;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let parts = [IoSlice::new(bytes)];
    match rustix::net::sendmsg(stream.as_fd(), &parts, &mut control, SendFlags::NOSIGNAL) {
        Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
        Err(e) => Err(Error::io("sending on a unix socket", e)),
    }
}

/// Receives a message of at most 256 bytes, with its descriptors.
pub fn receive(stream: &OwnedFd) -> Result<Received> {
    use rustix::io::Errno;
    let mut bytes = vec![0; 256];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [IoSliceMut::new(&mut bytes)];
    let got = match rustix::net::recvmsg(stream.as_fd(), into, &mut control, RecvFlags::CMSG_CLOEXEC) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR | Errno::NOMEM | Errno::NOBUFS) => return Ok(Received::Nothing),
        Err(Errno::CONNRESET) => return Ok(Received::Closed),
        Err(e) => return Err(Error::io("receiving on a unix socket", e)),
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    // More than there is room for: whoever sends that is no rank.
    let lost = got.flags.contains(ReturnFlags::CTRUNC) && fds.len() < MOST_FDS;
    if got.bytes == 0 && fds.is_empty() && !lost {
        return Ok(Received::Closed);
    }
    bytes.truncate(got.bytes);
    Ok(if lost { Received::WithoutFds(bytes) } else { Received::Message(bytes, fds) })
}
