//! Messages inside a host: for each sender, a pipe in the receiver's control segment.

use trigram_core::Result;

use crate::host::control_segment::ControlSegment;
use crate::transport::stream::{Read, Receiver, Sender};

/// Both directions between this rank, at index `me` of its host, and the rank at index `peer`.
pub fn pair(
    mine: &ControlSegment,
    me: usize,
    theirs: &ControlSegment,
    peer: usize,
) -> (Box<dyn Sender>, Box<dyn Receiver>) {
    let sender = ShmSender { to: theirs.clone(), index: me, wrote: false };
    (Box::new(sender), Box::new(ShmReceiver { on: mine.clone(), index: peer, from: theirs.clone() }))
}

struct ShmSender {
    to: ControlSegment,
    index: usize,
    wrote: bool,
}

impl Sender for ShmSender {
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
        let (pipe, ring) = self.to.pipe(self.index);
        // SAFETY: the ring is this pipe's, and this sender is its only writer in the world.
        let mut n = unsafe { pipe.write(ring, head) };
        if n == head.len() {
            // SAFETY: as above.
            n += unsafe { pipe.write(ring, body) };
        }
        self.wrote |= n > 0;
        Ok(n)
    }

    fn flush(&mut self) {
        if std::mem::take(&mut self.wrote) {
            self.to.bell().ring();
        }
    }
}

struct ShmReceiver {
    on: ControlSegment,
    index: usize,
    from: ControlSegment,
}

impl Receiver for ShmReceiver {
    fn read(&mut self, into: &mut [u8]) -> Result<Read> {
        let (pipe, ring) = self.on.pipe(self.index);
        // SAFETY: the ring is this pipe's, and this receiver is its only reader in the world.
        let (n, writer_waits) = unsafe { pipe.read(ring, into) };
        if writer_waits {
            self.from.bell().ring();
        }
        Ok(if n == 0 { Read::Nothing } else { Read::Some(n) })
    }

    fn has_input(&self) -> bool {
        self.on.pipe(self.index).0.has_input()
    }
}
