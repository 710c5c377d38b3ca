//! Memory that several processes map: memfd segments, and an arena that hands out parts of them. A rank that is alone on its
//! host has private memory in their place where it may have no shared memory.
//!
//! One rank creates a segment and passes it to the others on its host over a unix socket, so it needs no name and no
//! `/dev/shm` (64 MB in a container). The kernel frees it with its last user, even when every process is killed. It
//! is sealed against shrinking, so that no peer can make an access fault.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use trigram_core::{Error, Result};

use crate::sys::fork::{self, GuardedFd};
use crate::sys::limits::refused;

/// Shared memory mapped into this process.
#[derive(Debug)]
pub struct Segment {
    base: NonNull<u8>,
    len: usize,
    /// The descriptor of a segment that this rank made to share it. That of a peer's is closed once it is mapped: many ranks
    /// with many segments would hold more descriptors than a process may have.
    own: Option<(GuardedFd, OwnedFd)>,
}

// SAFETY: a segment is a plain range of memory; the schedules decide who accesses which part of it when.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// New zeroed shared memory.
    pub fn create(len: usize) -> Result<Self> {
        let io = |e: rustix::io::Errno| refused(format!("creating {len} bytes of shared memory"), e);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        // Where vm.memfd_noexec is 2, only memory that can never be executed may be made; older kernels do not know
        // the flag.
        let fd = rustix::fs::memfd_create("trigram", flags | MemfdFlags::NOEXEC_SEAL)
            .or_else(|e| match e {
                rustix::io::Errno::INVAL => rustix::fs::memfd_create("trigram", flags),
                e => Err(e),
            })
            .map_err(io)?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(io)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).map_err(io)?;
        let mut segment = Self::map(&fd)?;
        segment.own = Some((GuardedFd::new(&fd), fd));
        Ok(segment)
    }

    /// New zeroed memory that no other process can map.
    pub fn private(len: usize) -> Result<Self> {
        let io = |e: rustix::io::Errno| refused(format!("allocating {len} bytes of memory"), e);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, MapFlags::PRIVATE).map_err(io)?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| Error::io("allocating memory", "null"))?;
        Ok(Self { base, len, own: None })
    }

    /// Maps a segment that a peer made, after checking that it cannot shrink.
    pub fn map(fd: &impl AsFd) -> Result<Self> {
        let io = |e: rustix::io::Errno| refused("mapping shared memory", e);
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(io)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::Auth("a peer shared memory that it could still shrink, which no rank of trigram does; the connection is refused".into()));
        }
        let len = rustix::fs::fstat(fd).map_err(io)?.st_size as usize;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0).map_err(io)?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| Error::io("mapping shared memory", "null"))?;
        Ok(Self { base, len, own: None })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of `offset`, if `len` bytes from there lie inside.
    pub fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(len)?;
        // SAFETY: the offset is inside the mapping.
        (end <= self.len).then(|| unsafe { self.base.add(offset) })
    }

    /// The descriptor of a segment that this rank made to share it, to pass it on.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.own.as_ref().map(|(_, fd)| fd.as_fd())
    }

    /// Replaces the pages from `from` to `to` of a segment that this rank made by copies that no other process has.
    /// Threads of this process may go on using them meanwhile.
    fn make_private(&self, from: usize, to: usize) -> Result<()> {
        let io = |e: rustix::io::Errno| refused("taking shared memory back from a rank", e);
        let (Some((_, fd)), true) = (&self.own, to <= self.len) else {
            return Err(Error::misuse(
                "internal error: memory of another rank is taken back; please report it",
            ));
        };
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: the pages lie inside this segment's mapping, and show the same bytes afterwards.
        unsafe {
            let at = self.base.as_ptr().add(from).cast();
            rustix::mm::mmap(at, to - from, prot, flags, fd, from as u64).map_err(io)?;
        }
        for page in (from..to).step_by(ALIGN) {
            // SAFETY: inside the mapping, and an atomic needs no alignment of more than a byte.
            let byte = unsafe { AtomicU8::from_ptr(self.base.as_ptr().add(page)) };
            // The first write copies the page. It must not undo a write of another thread.
            let _ = byte.fetch_update(Ordering::Relaxed, Ordering::Relaxed, Some);
        }
        Ok(())
    }

    /// Gives the pages from `from` to `to`, whose contents nobody needs, back to the kernel. They are zeros afterwards.
    fn empty(&self, from: usize, to: usize) {
        let len = to - from;
        // Where it is refused, the memory stays taken, as it was.
        let _ = match &self.own {
            Some((_, fd)) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(fd, flags, from as u64, len as u64)
            }
            // SAFETY: the pages lie inside this mapping, and nobody needs what is in them.
            None => unsafe {
                let at = self.base.as_ptr().add(from).cast();
                rustix::mm::madvise(at, len, rustix::mm::Advice::LinuxDontNeed)
            },
        };
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: we made this mapping; whoever holds an address in it holds the segment too. A
        // failure could only mean that it is unmapped already.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The position of registered memory, as a peer can resolve it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentOffset {
    /// The number that the owner gave the segment.
    pub segment: u64,
    /// Bytes into it.
    pub offset: usize,
}

#[derive(Debug)]
struct Region {
    segment: Arc<Segment>,
    number: u64,
    /// Free stretches by offset.
    free: BTreeMap<usize, usize>,
    /// Free bytes that may still take memory.
    idle: usize,
    /// Ranges that are registered no more, see [`Arena::revoke`].
    revoked: Vec<(usize, usize)>,
}

/// Hands out registered memory.
#[derive(Debug, Default)]
pub struct Arena {
    regions: Mutex<Vec<Region>>,
}

/// Free memory that a region keeps for the next allocation; what is more goes back to the kernel.
const MOST_IDLE: usize = 64 << 20;

/// Allocations start on a page, so that no two share one.
const ALIGN: usize = 4096;

/// The least size of a segment. Pages cost nothing before they are touched.
const SEGMENT: usize = 256 << 20;

/// An odd number of extra pages. The segments of a host's ranks are mapped side by side, and a reduction reads all of
/// them at the same offset. With addresses that differ in high bits only, AMD's first-level cache mispredicts the way
/// of each access, and the reduction takes five times as long.
const SKEW: usize = 37 * ALIGN;

impl Arena {
    /// Allocates `len` bytes, zeroed only if they are fresh. Calls `announce` with each new segment before handing
    /// out any of it, so that peers have the segment before they can be asked to access it. `is_alone`: there are no peers,
    /// so that private memory will do where this process may have no shared memory.
    pub fn allocate(
        self: &Arc<Self>,
        len: usize,
        is_alone: bool,
        announce: impl FnOnce(u64, &Segment) -> Result<()>,
    ) -> Result<RegisteredBuffer> {
        let len = len.max(1).next_multiple_of(ALIGN);
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        for region in regions.iter_mut() {
            let fit = region.free.iter().find(|&(_, &free)| free >= len).map(|(&at, &free)| (at, free));
            if let Some((at, free)) = fit {
                region.free.remove(&at);
                region.idle = region.idle.saturating_sub(len);
                if free > len {
                    region.free.insert(at + len, free - len);
                }
                return Ok(RegisteredBuffer {
                    arena: self.clone(),
                    segment: region.segment.clone(),
                    at,
                    len,
                });
            }
        }
        let size = len.max(SEGMENT) + SKEW;
        let segment = match Segment::create(size) {
            // Only what is needed: a limit of this process may be the reason.
            Err(refused) if is_alone => Segment::private(len).map_err(|_| refused)?,
            made => made?,
        };
        let size = segment.len();
        let segment = Arc::new(segment);
        let number = regions.len() as u64;
        let announced = announce(number, &segment);
        let free = (size > len && announced.is_ok()).then_some((len, size - len)).into_iter().collect();
        // Some peers may have it even if others could not be told, so its number is never used again.
        regions.push(Region { segment: segment.clone(), number, free, idle: 0, revoked: Vec::new() });
        announced?;
        Ok(RegisteredBuffer { arena: self.clone(), segment, at: 0, len })
    }

    /// The position of an address, if `len` bytes from it are registered memory.
    pub fn locate(&self, ptr: *const u8, len: usize) -> Option<SegmentOffset> {
        let regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        regions.iter().filter(|r| r.segment.fd().is_some()).find_map(|r| {
            let offset = (ptr as usize).checked_sub(r.segment.base.as_ptr() as usize)?;
            let end = offset.checked_add(len)?;
            let registered = end <= r.segment.len && !r.revoked.iter().any(|&(a, b)| offset < b && a < end);
            registered.then_some(SegmentOffset { segment: r.number, offset })
        })
    }

    /// Takes the pages of registered memory back from all other processes: this rank keeps a copy, under the same
    /// addresses, and what others write from now on changes nothing here. The memory is ordinary memory afterwards.
    /// Returns the first and the last address; `None` if it is not registered.
    pub(crate) fn revoke(&self, ptr: *const u8, len: usize) -> Result<Option<(usize, usize)>> {
        let Some(place) = self.locate(ptr, len.max(1)) else { return Ok(None) };
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(region) = regions.iter_mut().find(|r| r.number == place.segment) else { return Ok(None) };
        let from = place.offset / ALIGN * ALIGN;
        let to = (place.offset + len.max(1)).next_multiple_of(ALIGN);
        region.segment.make_private(from, to)?;
        region.revoked.push((from, to));
        let base = region.segment.base.as_ptr() as usize;
        Ok(Some((base + from, base + to)))
    }

    /// All segments that can be shared, for a peer that joins.
    pub fn segments(&self) -> Vec<(u64, Arc<Segment>)> {
        let regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = regions.iter().filter(|r| r.segment.fd().is_some());
        shared.map(|r| (r.number, r.segment.clone())).collect()
    }

    fn give_back(&self, segment: &Arc<Segment>, at: usize, len: usize) {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(region) = regions.iter_mut().find(|r| Arc::ptr_eq(&r.segment, segment)) else { return };
        if region.revoked.iter().any(|&(a, b)| at < b && a < at + len) {
            return; // a rank that was evicted still has the shared pages: nobody gets them again
        }
        region.idle += len;
        if region.idle > MOST_IDLE {
            region.idle -= len;
            region.segment.empty(at, at + len);
        }
        let (mut at, mut len) = (at, len);
        if let Some(next) = region.free.remove(&(at + len)) {
            len += next;
        }
        if let Some((&before, &free)) = region.free.range(..at).next_back()
            && before + free == at
        {
            region.free.remove(&before);
            (at, len) = (before, len + free);
        }
        region.free.insert(at, len);
    }
}

/// Registered memory; the arena gets it back when this is dropped.
#[derive(Debug)]
pub struct RegisteredBuffer {
    arena: Arc<Arena>,
    segment: Arc<Segment>,
    at: usize,
    len: usize,
}

impl RegisteredBuffer {
    /// Its first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        // SAFETY: `at` is inside the segment.
        unsafe { self.segment.base.as_ptr().add(self.at) }
    }

    /// Its size in bytes, a multiple of the page.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for RegisteredBuffer {
    fn drop(&mut self) {
        if fork::is_child() {
            return; // a thread of the parent's may have held the lock
        }
        self.arena.give_back(&self.segment, self.at, self.len);
    }
}

/// Private memory for partial results, reused from call to call and never zeroed.
#[derive(Debug, Default)]
pub struct Scratch {
    words: Vec<std::mem::MaybeUninit<Line>>,
}

/// A cache line: the alignment of scratch memory.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u8; 64]);

impl Scratch {
    /// At least `len` bytes, with whatever the last call left in them. A peer may have chosen `len`, so running out
    /// of memory is an error and no panic.
    pub fn reserve(&mut self, len: usize) -> Result<*mut u8> {
        let lines = len.div_ceil(64);
        if self.words.capacity() < lines {
            self.words = Vec::new(); // give the old memory back first: its contents are dead
            let taken = self.words.try_reserve_exact(lines);
            taken.map_err(|e| Error::io(format!("allocating {len} bytes of memory for a call"), e))?;
        }
        Ok(self.words.as_mut_ptr().cast())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_back_and_merge() {
        let arena = Arc::new(Arena::default());
        let mut announced = 0;
        let mut take = |n: usize| {
            arena.allocate(n, false, |_, _| {
                announced += 1;
                Ok(())
            })
        };
        let (a, b, c) = (take(5000).unwrap(), take(1).unwrap(), take(4096).unwrap());
        assert_eq!((a.len(), b.len()), (8192, 4096));
        let place = arena.locate(b.as_ptr(), 10).unwrap();
        assert_eq!(place, SegmentOffset { segment: 0, offset: 8192 });
        let at = a.as_ptr();
        drop((a, c, b));
        let again = take(16384).unwrap();
        assert_eq!(again.as_ptr(), at, "freed neighbours are one stretch again");
        assert_eq!(announced, 1);
        assert!(arena.locate(&raw const announced as *const u8, 4).is_none());
    }

    #[test]
    fn a_segment_seen_twice_is_the_same_memory() {
        let a = Segment::create(8192).unwrap();
        let b = Segment::map(&a.fd().unwrap()).unwrap();
        assert!(b.fd().is_none(), "no descriptor stays open");
        let (p, q) = (a.at(4096, 1).unwrap(), b.at(4096, 1).unwrap());
        // SAFETY: both addresses are inside their mappings and nobody else has them.
        unsafe {
            p.as_ptr().write(7);
            assert_eq!(q.as_ptr().read(), 7);
        }
        assert!(a.at(8192, 1).is_none());
        assert!(a.at(usize::MAX, 2).is_none());
    }

    #[test]
    fn memory_that_is_taken_back_is_out_of_reach() {
        let arena = Arc::new(Arena::default());
        let mut theirs = None;
        let mine = arena
            .allocate(5 * ALIGN, false, |_, segment| {
                theirs = Some(Segment::map(&segment.fd().unwrap()).unwrap());
                Ok(())
            })
            .unwrap();
        let theirs = theirs.unwrap();
        let read = |at: usize| {
            // SAFETY: inside the allocation, which only this test uses.
            unsafe { mine.as_ptr().add(at).read_volatile() }
        };
        let write = |at: usize, value: u8| {
            // SAFETY: the same memory as the peer maps it.
            unsafe { theirs.at(at, 1).unwrap().as_ptr().write_volatile(value) }
        };
        (0..5 * ALIGN).for_each(|at| write(at, 3));
        // SAFETY: inside the allocation.
        let part = unsafe { mine.as_ptr().add(ALIGN + 100) };
        assert!(arena.revoke(part, ALIGN).unwrap().is_some());
        (0..5 * ALIGN).for_each(|at| write(at, 4));
        let private = |at: usize| (ALIGN..3 * ALIGN).contains(&at);
        assert!((0..5 * ALIGN).all(|at| read(at) == if private(at) { 3 } else { 4 }));
        assert!(arena.locate(part, 8).is_none(), "it is not registered any more");
        assert!(arena.locate(mine.as_ptr(), ALIGN).is_some(), "what lies beside it is");
        assert_eq!(arena.revoke(part, 8).unwrap(), None);
        let at = mine.as_ptr();
        drop(mine);
        assert_ne!(
            arena.allocate(ALIGN, false, |_, _| Ok(())).unwrap().as_ptr(),
            at,
            "nobody gets its pages again"
        );
    }

    #[test]
    fn free_memory_goes_back_to_the_kernel() {
        let arena = Arc::new(Arena::default());
        let taken = || {
            let regions = arena.regions.lock().unwrap();
            rustix::fs::fstat(regions[0].segment.fd().unwrap()).unwrap().st_blocks as usize * 512
        };
        let fill = |buffer: &RegisteredBuffer| {
            for at in (0..buffer.len()).step_by(ALIGN) {
                // SAFETY: inside the buffer.
                unsafe { buffer.as_ptr().add(at).write_volatile(1) };
            }
        };
        let (a, b) = (
            arena.allocate(MOST_IDLE, false, |_, _| Ok(())).unwrap(),
            arena.allocate(32 << 20, false, |_, _| Ok(())).unwrap(),
        );
        fill(&a);
        fill(&b);
        assert!(taken() >= MOST_IDLE + (32 << 20));
        drop(a);
        assert!(taken() >= MOST_IDLE + (32 << 20), "a little is kept for the next allocation");
        drop(b);
        assert!(taken() < MOST_IDLE + (1 << 20));
    }
}
