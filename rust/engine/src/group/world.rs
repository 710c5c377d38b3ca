//! The job as this rank sees it: the ranks, their hosts, and the memory that the ranks of this host share.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::time::Timespec;
use trigram_core::tuning::Tuned;
use trigram_core::{Error, Result};

use crate::group::retired::Retired;
use crate::host::control_segment::ControlSegment;
use crate::host::doorbell::Doorbell;
use crate::lanes::pool::Wanted;
use crate::sys::fork::{self, GuardedFd};
use crate::sys::limits::refused;
use crate::sys::memory::{Arena, RegisteredBuffer, Segment, SegmentOffset};
use crate::sys::passing::Passing;
use crate::sys::{process_state, unix};

/// A rank on this host.
#[derive(Debug)]
pub struct Neighbour {
    /// Its control segment.
    pub control: ControlSegment,
    /// A socket that carries descriptors; it closes when the peer's process ends. `None` for this rank and for ranks
    /// that are threads.
    socket: Option<OwnedFd>,
    /// Its process and that process's number, if visible from this one's namespace.
    process: Option<(OwnedFd, i32)>,
    _guard: Option<GuardedFd>,
    /// Its registered memory, by segment number, or why this rank could not map it.
    segments: Mutex<HashMap<u64, Result<Arc<Segment>>>>,
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
        let Some((process, _)) = &self.process else { return false };
        let _ = rustix::process::pidfd_send_signal(process, rustix::process::Signal::KILL);
        self.ends_within(Duration::from_millis(400)) == Some(true)
    }

    /// Whether its process ends within `limit`; `None` if the process is not visible from this one's namespace.
    pub(crate) fn ends_within(&self, limit: Duration) -> Option<bool> {
        let (process, _) = self.process.as_ref()?;
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
        Some(matches!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1)))
    }

    /// Why its process does not run, as far as this host's kernel tells; otherwise empty.
    pub(crate) fn why_silent(&self) -> &'static str {
        self.process.as_ref().map_or("", |(_, pid)| process_state::why_silent(*pid))
    }

    /// Whether its process has crashed and is writing a core dump: it never runs again, but has not ended yet.
    pub(crate) fn is_dumping_core(&self) -> bool {
        self.process.as_ref().is_some_and(|(_, pid)| process_state::is_dumping_core(*pid))
    }

    /// Closes the connection, so that the rank notices when it wakes that it was evicted.
    pub fn dismiss(&self) {
        if let Some(socket) = &self.socket {
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
    }

    /// Whether the peer's end of the connection is closed, as it is when its process ends.
    pub(crate) fn has_hung_up(&self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let answered = rustix::event::poll(&mut fds, Some(&now)).is_ok();
        answered && fds[0].revents().intersects(PollFlags::HUP | PollFlags::RDHUP)
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
        let Some(fd) = segment.fd() else {
            return Err(Error::misuse(
                "internal error: memory of another rank is passed on; please report it",
            ));
        };
        unix::send(socket, &number.to_le_bytes(), &[fd])
            .map_err(|e| Error::io(format!("sharing memory with rank {rank}"), e))
    }

    /// Maps the segments that the peer has sent; false if the peer has gone. If this rank cannot map one, the calls that
    /// need it fail, and the peer is not to blame.
    ///
    /// # Errors
    ///
    /// The peer has sent what no correct rank sends.
    pub fn collect(&self) -> Result<bool> {
        let Some(socket) = &self.socket else { return Ok(true) };
        let mut segments = self.segments.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match unix::receive(socket)? {
                unix::Received::Message(bytes, mut fds) => {
                    if let (Some(number), Some(fd)) = (number(&bytes), fds.pop()) {
                        match Segment::map(&fd) {
                            Err(e @ Error::Auth(_)) => return Err(e),
                            segment => drop(segments.insert(number, segment.map(Arc::new))),
                        }
                    }
                }
                unix::Received::WithoutFds(bytes) => {
                    if let Some(number) = number(&bytes) {
                        segments.insert(number, Err(refused("receiving shared memory", Errno::MFILE)));
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
            match segments.get(&place.segment) {
                Some(Ok(segment)) => Ok(segment.at(place.offset, len).map(|p| p.as_ptr())),
                Some(Err(error)) => Err(error.clone()),
                None => Ok(None),
            }
        };
        if let Some(at) = find()? {
            return Ok(at);
        }
        // The peer sent the segment before it could refer to it, so it has arrived by now.
        self.collect()?;
        find()?.ok_or_else(|| {
            Error::io(
                "reading a peer's registered memory",
                format!("the peer named segment {}, which it has not shared; do all ranks run the same version of trigram?", place.segment),
            )
        })
    }
}

/// The number of the segment that a message brings.
fn number(bytes: &[u8]) -> Option<u64> {
    bytes.get(..8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes)
}

/// How long ranks may send no heartbeat, and what happens then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Patience {
    /// After this long without a heartbeat a rank is lost; all ranks have agreed on it.
    pub limit: Duration,
    /// Whether this rank ends the process of a rank of its host that is lost in this way (`TRIGRAM_KILL=on`).
    pub kills: bool,
}

impl Default for Patience {
    fn default() -> Self {
        Self { limit: Duration::from_secs(15), kills: false }
    }
}

impl Patience {
    /// What this rank asks for: `TRIGRAM_SILENCE` in seconds, and `TRIGRAM_KILL`.
    pub fn from_env() -> Self {
        let usual = Self::default();
        let asked = std::env::var("TRIGRAM_SILENCE").ok().and_then(|s| s.parse().ok());
        let asked = asked.and_then(|s: f64| Duration::try_from_secs_f64(s).ok());
        let limit = asked.map_or(usual.limit, |s| s.clamp(LEAST_LIMIT, MOST_LIMIT));
        Self { limit, kills: std::env::var("TRIGRAM_KILL").is_ok_and(|s| s == "on") }
    }
}

/// The least and the most that may be asked for.
const LEAST_LIMIT: Duration = Duration::from_millis(500);
pub(crate) const MOST_LIMIT: Duration = Duration::from_secs(86_400);

/// The job as this rank sees it.
#[derive(Debug)]
pub struct World {
    /// This rank.
    pub rank: u32,
    /// The number of each rank's host.
    pub host_of: Vec<usize>,
    /// Whether an answer of each rank takes long, as this rank and that one know alike.
    pub far: Vec<bool>,
    /// This rank's doorbell.
    pub bell: Doorbell,
    /// This rank's control segment, which other ranks of this host see; `None` without any.
    pub control: Option<ControlSegment>,
    /// The other ranks on this host, by world rank.
    pub neighbours: HashMap<u32, Neighbour>,
    /// This rank's registered memory.
    pub arena: Arc<Arena>,
    /// Bounce buffers of deleted groups.
    pub retired: Arc<Retired>,
    /// How long ranks may be silent.
    pub patience: Patience,
    /// How many threads may move bytes for the one that drives.
    pub lanes: Wanted,
    /// What was measured of the network; the same on all ranks.
    pub tuning: Vec<Tuned>,
    /// By rank, the rank that passes on what it and this one send each other.
    pub through: Vec<Option<u32>>,
    /// What this rank passes on for others.
    pub passing: Option<Arc<Passing>>,
}

impl World {
    /// The rank through which this one reaches another, if there is one.
    pub(crate) fn relay_of(&self, rank: u32) -> Option<u32> {
        self.through.get(rank as usize).copied().flatten()
    }

    /// Ranks in the job.
    pub fn size(&self) -> usize {
        self.host_of.len()
    }

    /// The index of a rank among those of its host.
    pub fn index_on_host(&self, rank: u32) -> usize {
        let host = self.host_of.get(rank as usize);
        self.host_of.iter().take(rank as usize).filter(|&h| Some(h) == host).count()
    }

    /// The control segment of a rank on this host.
    pub fn control(&self, rank: u32) -> Option<&ControlSegment> {
        match rank == self.rank {
            true => self.control.as_ref(),
            false => self.neighbours.get(&rank).map(|n| &n.control),
        }
    }

    /// Allocates `len` bytes of registered memory: collectives on it copy nothing inside a host.
    pub fn allocate(&self, len: usize) -> Result<RegisteredBuffer> {
        fork::check()?; // what is free in a child's copy of the arena is the parent's to give
        self.retired.sweep();
        self.arena.allocate(len, self.neighbours.is_empty(), |number, segment| {
            self.neighbours.iter().try_for_each(|(&rank, n)| n.share(rank, number, segment))
        })
    }
}
