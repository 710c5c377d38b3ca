//! Ranks as threads of one process, connected by queues: for tests of everything above the transports.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use trigram_core::Result;

use crate::host::doorbell::Doorbell;
use crate::transport::stream::{Read, Receiver, Sender};

/// Bytes that a queue holds before its sender must wait, like a socket's send buffer.
const ROOM: usize = 64 << 10;

#[derive(Default)]
struct Queue {
    bytes: VecDeque<u8>,
    closed: bool,
}

/// One direction from one rank to another; the doorbells are the receiver's and the sender's.
pub fn one_way(to: Doorbell, from: Doorbell) -> (Box<dyn Sender>, Box<dyn Receiver>) {
    let queue = Arc::new(Mutex::new(Queue::default()));
    (Box::new(MemSender { queue: queue.clone(), to }), Box::new(MemReceiver { queue, from }))
}

struct MemSender {
    queue: Arc<Mutex<Queue>>,
    to: Doorbell,
}

impl Sender for MemSender {
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let room = ROOM - queue.bytes.len();
        let head = &head[..head.len().min(room)];
        let body = &body[..body.len().min(room - head.len())];
        queue.bytes.extend(head);
        queue.bytes.extend(body);
        Ok(head.len() + body.len())
    }

    fn flush(&mut self) {
        self.to.ring();
    }

    fn is_summed(&self) -> bool {
        true
    }

    fn close(&mut self) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.to.ring();
    }
}

impl Drop for MemSender {
    fn drop(&mut self) {
        self.close();
    }
}

struct MemReceiver {
    queue: Arc<Mutex<Queue>>,
    from: Doorbell,
}

impl Receiver for MemReceiver {
    fn read(&mut self, into: &mut [u8]) -> Result<Read> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let n = into.len().min(queue.bytes.len());
        let was_full = queue.bytes.len() == ROOM;
        for (to, byte) in into.iter_mut().zip(queue.bytes.drain(..n)) {
            *to = byte;
        }
        let closed = queue.closed;
        drop(queue);
        if was_full && n > 0 {
            self.from.ring();
        }
        Ok(match n {
            0 if closed => Read::Closed,
            0 => Read::Nothing,
            n => Read::Some(n),
        })
    }

    fn has_input(&self) -> bool {
        let queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.closed || !queue.bytes.is_empty()
    }
}
