//! What NCCL holds: connections and requests, as pointers.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, Weak};

use crate::error::{Error, Result};
use crate::recv::Receiver;
use crate::region::Region;
use crate::ring::SLOTS;
use crate::send::Sender;

/// An end of a connection.
#[derive(Debug)]
pub(crate) enum End {
    /// The one that connected.
    Send(Sender),
    /// The one that accepted.
    Recv(Receiver),
}

/// A connection, as NCCL holds it.
#[derive(Debug)]
pub(crate) struct Connection {
    end: Mutex<End>,
    requests: [Request; SLOTS],
}

/// A request, as NCCL holds it: one for each slot of its connection, which it lives in.
#[derive(Debug)]
pub(crate) struct Request {
    connection: Weak<Connection>,
    slot: usize,
}

impl Connection {
    /// The pointer for NCCL, until `close`.
    pub(crate) fn give(end: End) -> *mut c_void {
        let connection = Arc::new_cyclic(|me| Self {
            end: Mutex::new(end),
            requests: std::array::from_fn(|slot| Request { connection: me.clone(), slot }),
        });
        Arc::into_raw(connection).cast_mut().cast()
    }

    /// Ends what `give` gave: sockets are closed, buffers are no longer used.
    ///
    /// # Safety
    ///
    /// The pointer is from `give`, and neither it nor its requests are used again.
    pub(crate) unsafe fn close(pointer: *mut c_void) {
        // SAFETY: as this function demands.
        drop(unsafe { Arc::from_raw(pointer.cast_const().cast::<Self>()) });
    }

    /// The connection behind a pointer.
    ///
    /// # Safety
    ///
    /// The pointer is from `give` and not closed while the reference is used.
    pub(crate) unsafe fn at<'a>(pointer: *mut c_void) -> Result<&'a Self> {
        // SAFETY: as this function demands.
        unsafe { pointer.cast_const().cast::<Self>().as_ref() }
            .ok_or_else(|| Error::argument("NCCL passed no connection"))
    }

    /// Begins to send or to receive, whichever this end does; `None`: not now.
    pub(crate) fn post(&self, region: Region, sending: bool) -> Result<Option<*mut c_void>> {
        let slot = match &mut *self.lock()? {
            End::Send(end) if sending => end.post(region)?,
            End::Recv(end) if !sending => end.post(region)?,
            _ => {
                return Err(Error::usage(
                    "NCCL sent on a receiving connection, or received on a sending one",
                ));
            }
        };
        let request = slot.and_then(|slot| self.requests.get(slot));
        Ok(request.map(|request| std::ptr::from_ref(request).cast_mut().cast()))
    }

    fn lock(&self) -> Result<std::sync::MutexGuard<'_, End>> {
        self.end.lock().map_err(|_| Error::internal("an earlier call panicked: this is a bug in the plugin"))
    }
}

impl Request {
    /// The request behind a pointer.
    ///
    /// # Safety
    ///
    /// The pointer is from `post`, and its connection is not closed while the reference is used.
    pub(crate) unsafe fn at<'a>(pointer: *mut c_void) -> Result<&'a Self> {
        // SAFETY: as this function demands.
        unsafe { pointer.cast_const().cast::<Self>().as_ref() }
            .ok_or_else(|| Error::argument("NCCL passed no request"))
    }

    /// The message's size, once it is done; the request is free then.
    pub(crate) fn test(&self) -> Result<Option<usize>> {
        let connection = self.connection.upgrade();
        let connection =
            connection.ok_or_else(|| Error::argument("NCCL tested a request of a closed connection"))?;
        let mut end = connection.lock()?;
        match &mut *end {
            End::Send(end) => end.test(self.slot),
            End::Recv(end) => end.test(self.slot),
        }
    }
}
