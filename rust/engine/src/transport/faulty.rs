//! A connection that `trigram chaos` damages on purpose, through a shared file.
//!
//! If `TRIGRAM_CHAOS` names a file of four bytes when a rank starts, the rank's TCP connections read its first word:
//! 1 flips one bit of what the rank sends next; 2 cuts the rank off: nothing it sends leaves, nothing arrives, and no
//! connection closes, as if its cable had been pulled for good; 3 interrupts its connections: what they carry waits until
//! the word is 0 again, as if the cable were back.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use trigram_core::{Error, Result};

use crate::transport::stream::{Read, Receiver, Sender};
use crate::transport::tcp;

const FLIP: u32 = 1;
const CUT: u32 = 2;
const OUTAGE: u32 = 3;

/// The word that commands this rank's connections, if `TRIGRAM_CHAOS` is set.
fn word() -> Result<Option<&'static AtomicU32>> {
    static WORD: OnceLock<Result<Option<Mapped>>> = OnceLock::new();
    let mapped = WORD.get_or_init(|| {
        let Some(path) = std::env::var_os("TRIGRAM_CHAOS") else { return Ok(None) };
        let io = |e: rustix::io::Errno| Error::io("opening the file that TRIGRAM_CHAOS names", e);
        let fd = rustix::fs::open(&path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(io)?;
        if rustix::fs::fstat(&fd).map_err(io)?.st_size < 4 {
            return Err(Error::Config("TRIGRAM_CHAOS names a file of less than 4 bytes; `trigram chaos` makes one that is large enough".into()));
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing; it is never unmapped.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4, prot, MapFlags::SHARED, &fd, 0) };
        Ok(NonNull::new(at.map_err(io)?.cast()).map(Mapped))
    });
    match mapped {
        // SAFETY: mapped for as long as the process lives, aligned to a page, and an atomic.
        Ok(Some(word)) => Ok(Some(unsafe { word.0.as_ref() })),
        Ok(None) => Ok(None),
        Err(e) => Err(e.clone()),
    }
}

struct Mapped(NonNull<AtomicU32>);

// SAFETY: the address of an atomic that stays where it is.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

/// Both directions of a connection, which can be damaged if `TRIGRAM_CHAOS` is set.
pub fn wrap(halves: (Box<dyn Sender>, Box<dyn Receiver>)) -> Result<(Box<dyn Sender>, Box<dyn Receiver>)> {
    let Some(word) = word()? else { return Ok(halves) };
    // What is damaged here must be found, as if it had passed a wire.
    let summed = tcp::Checksums::from_env().apply(true);
    let sender = FaultySender { inner: halves.0, summed, word };
    Ok((Box::new(sender), Box::new(FaultyReceiver { inner: halves.1, word })))
}

struct FaultySender {
    inner: Box<dyn Sender>,
    summed: bool,
    word: &'static AtomicU32,
}

impl Sender for FaultySender {
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
        match self.word.load(Ordering::Relaxed) {
            CUT => Ok(head.len() + body.len()),
            OUTAGE => Ok(0),
            FLIP if !body.is_empty() => {
                let mut bytes = [head, body].concat();
                let at = head.len() + body.len() / 2;
                bytes[at] ^= 0x10;
                let n = self.inner.write(&bytes, &[])?;
                if n > at {
                    self.word.store(0, Ordering::Relaxed);
                }
                Ok(n)
            }
            _ => self.inner.write(head, body),
        }
    }

    fn has_room(&self) -> bool {
        self.inner.has_room()
    }

    fn wake(&mut self) {
        self.inner.wake();
    }

    fn may_hold(&self) -> bool {
        self.inner.may_hold()
    }

    fn is_drained(&self) -> bool {
        self.word.load(Ordering::Relaxed) == CUT || self.inner.is_drained()
    }

    fn drain(&mut self) -> Result<bool> {
        match self.word.load(Ordering::Relaxed) {
            CUT | OUTAGE => Ok(false),
            _ => self.inner.drain(),
        }
    }

    fn tick(&mut self, soon: bool) -> Result<()> {
        match self.word.load(Ordering::Relaxed) {
            CUT | OUTAGE => Ok(()),
            _ => self.inner.tick(soon),
        }
    }

    fn unacknowledged(&self) -> Option<u64> {
        self.inner.unacknowledged()
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn is_summed(&self) -> bool {
        self.summed
    }

    fn close(&mut self) {
        if self.word.load(Ordering::Relaxed) != CUT {
            self.inner.close();
        }
    }
}

struct FaultyReceiver {
    inner: Box<dyn Receiver>,
    word: &'static AtomicU32,
}

impl Receiver for FaultyReceiver {
    fn read(&mut self, into: &mut [u8]) -> Result<Read> {
        if self.word.load(Ordering::Relaxed) == OUTAGE {
            return Ok(Read::Nothing);
        }
        let read = self.inner.read(into)?;
        Ok(if self.word.load(Ordering::Relaxed) == CUT { Read::Nothing } else { read })
    }

    fn has_input(&self) -> bool {
        self.inner.has_input() && self.word.load(Ordering::Relaxed) != CUT
    }

    fn each_socket(&self, look: &mut dyn FnMut(BorrowedFd<'_>)) {
        self.inner.each_socket(look);
    }

    fn wake(&mut self) {
        self.inner.wake();
    }

    fn signs(&self) -> u64 {
        self.inner.signs()
    }

    fn expect(&mut self, bytes: usize) {
        self.inner.expect(bytes);
    }

    fn read_ahead(&self) -> usize {
        self.inner.read_ahead()
    }
}
