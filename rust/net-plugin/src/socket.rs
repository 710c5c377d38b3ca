//! Sockets as this plugin wants them. All are closed in programs that a process starts.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

/// Connections that the kernel keeps until `accept` comes by.
const BACKLOG: i32 = 1024;

/// A socket that listens at a free port of this address.
pub(crate) fn listening(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// A socket on its way to this address.
pub(crate) fn connecting(address: SocketAddr, timeout: Duration) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    prepare(&socket, timeout)?;
    match socket.connect(&address.into()) {
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) || e.kind() == io::ErrorKind::Interrupted => {}
        other => other?,
    }
    Ok(socket)
}

/// The next that the kernel has accepted.
pub(crate) fn accepted(from: &Socket, timeout: Duration) -> io::Result<Socket> {
    let (socket, _) = from.accept()?;
    prepare(&socket, timeout)?;
    // This end never sends: the limit is that of unanswered keepalives alone.
    socket.set_tcp_user_timeout(Some(timeout))?;
    Ok(socket)
}

/// No waiting, no delays, and a sign of life now and then.
///
/// `TCP_USER_TIMEOUT` is not for the end that sends: the kernel also counts the time in which a living receiver
/// does not read, which may be as long as it likes. `liveness` is for that end.
fn prepare(socket: &Socket, timeout: Duration) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    let part = (timeout / 4).max(Duration::from_secs(1));
    let keepalive = TcpKeepalive::new().with_time(part).with_interval(part).with_retries(3);
    socket.set_tcp_keepalive(&keepalive)
}

/// Whether a socket on its way has arrived.
pub(crate) fn has_arrived(socket: &Socket) -> io::Result<bool> {
    if let Some(e) = SockRef::from(socket).take_error()? {
        return Err(e);
    }
    match socket.peer_addr() {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => Ok(false),
        Err(e) => Err(e),
    }
}
