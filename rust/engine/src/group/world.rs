//! The job as this rank sees it: the ranks, their hosts, and the memory that the ranks of this host share.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;
use trigram_core::{Error, Result};

use crate::group::retired::Retired;
use crate::host::control_segment::ControlSegment;
use crate::sys::fork::GuardedFd;
use crate::sys::memory::{Arena, RegisteredBuffer, Segment, SegmentOffset};
use crate::sys::unix;

/// A rank on this host.
#[derive(Debug)]
pub struct Neighbour {
    /// Its control segment.
    pub control: ControlSegment,
    /// A socket that carries descriptors; it closes when the peer's process ends. `None` for this rank and for ranks
    /// that are threads.
    socket: Option<OwnedFd>,
    /// Its process, if visible from this one's namespace.
    process: Option<OwnedFd>,
    _guard: Option<GuardedFd>,
    /// Its registered memory, by segment number.
    segments: Mutex<HashMap<u64, Arc<Segment>>>,
}

impl Neighbour {
    /// A rank whose control segment is mapped and whose socket is open.
    pub fn new(control: ControlSegment, socket: Option<OwnedFd>) -> Self {
        let watched = socket.as_ref().map(GuardedFd::new);
        let process = socket.as_ref().and_then(unix::peer_process);
        Self { control, socket, process, _guard: watched, segments: Mutex::default() }
    }

    /// Kills its process, and waits briefly for its end; false if that takes longer, or if the process is not visible
    /// from this one's namespace. The wait is short because this rank sends no heartbeats meanwhile.
    pub fn end(&self) -> bool {
        let Some(process) = &self.process else { return false };
        let _ = rustix::process::pidfd_send_signal(process, rustix::process::Signal::KILL);
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        let limit = Timespec { tv_sec: 0, tv_nsec: 400_000_000 };
        matches!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1))
    }

    /// Closes the connection, so that the rank notices when it wakes that it was evicted.
    pub fn dismiss(&self) {
        if let Some(socket) = &self.socket {
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
    }

    /// Becomes readable when the peer sends a segment or its process ends.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// Passes a segment of this rank to the peer, `rank`.
    pub fn share(&self, rank: u32, number: u64, segment: &Segment) -> Result<()> {
        let Some(socket) = &self.socket else {
            return Err(Error::Unsupported(
                "ranks that are threads of one process cannot share registered memory".into(),
            ));
        };
        unix::send(socket, &number.to_le_bytes(), &[segment.fd()])
            .map_err(|e| Error::io(format!("sharing memory with rank {rank}"), e))
    }

    /// Maps the segments that the peer has sent; false if the peer has gone.
    pub fn collect(&self) -> Result<bool> {
        let Some(socket) = &self.socket else { return Ok(true) };
        let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match unix::receive(socket)? {
                unix::Received::Message(bytes, mut fds) => {
                    let number = bytes.get(..8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
                    if let (Some(number), Some(fd)) = (number, fds.pop()) {
                        segments.insert(number, Arc::new(Segment::map(fd)?));
                    }
                }
                unix::Received::Nothing => return Ok(true),
                unix::Received::Closed => return Ok(false),
            }
        }
    }

    /// The address of `len` bytes of the peer's registered memory.
    pub fn lent(&self, place: SegmentOffset, len: usize) -> Result<*mut u8> {
        let find = || {
            let segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
            segments.get(&place.segment).and_then(|s| s.at(place.offset, len)).map(|p| p.as_ptr())
        };
        if let Some(at) = find() {
            return Ok(at);
        }
        // The peer sent the segment before it could refer to it, so it has arrived by now.
        self.collect()?;
        find().ok_or_else(|| {
            Error::io(
                "reading a peer's registered memory",
                format!("the peer named segment {}, which it has not shared; do all ranks run the same version of trigram?", place.segment),
            )
        })
    }
}

/// The job as this rank sees it.
#[derive(Debug)]
pub struct World {
    /// This rank.
    pub rank: u32,
    /// The number of each rank's host.
    pub host_of: Vec<usize>,
    /// This rank's control segment.
    pub control: ControlSegment,
    /// The other ranks on this host, by world rank.
    pub neighbours: HashMap<u32, Neighbour>,
    /// This rank's registered memory.
    pub arena: Arc<Arena>,
    /// Bounce buffers of deleted groups.
    pub retired: Arc<Retired>,
}

impl World {
    /// Ranks in the job.
    pub fn size(&self) -> usize {
        self.host_of.len()
    }

    /// The control segment of a rank on this host.
    pub fn control(&self, rank: u32) -> Option<&ControlSegment> {
        if rank == self.rank { Some(&self.control) } else { self.neighbours.get(&rank).map(|n| &n.control) }
    }

    /// Allocates `len` bytes of registered memory: collectives on it copy nothing inside a host.
    pub fn allocate(&self, len: usize) -> Result<RegisteredBuffer> {
        self.retired.sweep();
        self.arena.allocate(len, |number, segment| {
            self.neighbours.iter().try_for_each(|(&rank, n)| n.share(rank, number, segment))
        })
    }
}
