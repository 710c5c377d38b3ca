//! The header of every message.
//!
//! A connection carries frames: [`HEADER`] bytes, then `len` bytes of payload. Headers are
//! little-endian, fixed in size and validated before anything is allocated or written, so a
//! corrupt or hostile peer can at worst be disconnected.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::signature::Signature;

/// First bytes of every frame; the last byte is the version of the protocol.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TGM\x01");

/// Bytes of a header.
pub const HEADER: usize = size_of::<Header>();

/// The largest payload of one frame. A schedule's pieces are smaller.
pub const MAX_PAYLOAD: u32 = 64 << 20;

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The payload of one `Send` step.
    Data = 1,
    /// "I am in this call": lets a sender send much, and tells a stalled rank what others called.
    Ready = 2,
    /// The call failed; the payload is the error.
    Fail = 3,
    /// The sender leaves in good order.
    Bye = 4,
    /// What the sender's link carries: bytes per second as an f64, 0 if it does not know.
    Rate = 5,
}

impl Kind {
    fn from_code(code: u8) -> Option<Self> {
        [Kind::Data, Kind::Ready, Kind::Fail, Kind::Bye, Kind::Rate].into_iter().find(|k| *k as u8 == code)
    }
}

/// One frame's header, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// What it is for.
    pub kind: Kind,
    /// The group's identity, the same on all its members.
    pub group: u64,
    /// Which call of the group: see [`CallId`].
    pub call: CallId,
    /// Which message of the call, between these two ranks.
    pub tag: u32,
    /// Bytes that follow.
    pub len: u32,
    /// What the sender called.
    pub signature: Signature,
}

/// Identifies a call within a group: the n-th collective, or the n-th message with a user's tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(pub u64);

impl CallId {
    const P2P: u64 = 1 << 63;

    /// The n-th collective of the group.
    pub fn collective(n: u64) -> Self {
        Self(n & !Self::P2P)
    }

    /// The n-th message with this user's tag between two ranks.
    pub fn message(tag: u32, n: u64) -> Self {
        Self(Self::P2P | (u64::from(tag) & 0x7fff_ffff) << 32 | n & 0xffff_ffff)
    }

    /// The user's tag and the ordinal of a message.
    pub fn as_message(self) -> Option<(u32, u64)> {
        self.is_message().then_some(((self.0 >> 32) as u32 & 0x7fff_ffff, self.0 & 0xffff_ffff))
    }

    /// Whether this is a message and not a collective.
    pub fn is_message(self) -> bool {
        self.0 & Self::P2P != 0
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: U32,
    kind: u8,
    reserved: [u8; 3],
    group: U64,
    call: U64,
    tag: U32,
    len: U32,
    count: U64,
    extra: U64,
    root: U32,
    what: [u8; 4],
}

/// Why a header was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    /// Not our protocol, or a stream out of step.
    #[error("not a trigram frame (magic {0:#010x})")]
    Magic(u32),
    /// A kind this version does not know.
    #[error("unknown kind of frame {0}")]
    Kind(u8),
    /// A payload above [`MAX_PAYLOAD`].
    #[error("a frame of {0} bytes is above the limit")]
    Len(u32),
}

impl Frame {
    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut what = [0; 4];
        let signature = self.signature.as_bytes();
        what.copy_from_slice(&signature[20..24]);
        let header = Header {
            magic: U32::new(MAGIC),
            kind: self.kind as u8,
            reserved: [0; 3],
            group: U64::new(self.group),
            call: U64::new(self.call.0),
            tag: U32::new(self.tag),
            len: U32::new(self.len),
            count: U64::new(self.signature.count),
            extra: U64::new(self.signature.extra),
            root: U32::new(self.signature.root),
            what,
        };
        zerocopy::transmute!(header)
    }

    /// Decodes a header, trusting nothing.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, Bad> {
        let header: Header = zerocopy::transmute!(*bytes);
        if header.magic.get() != MAGIC {
            return Err(Bad::Magic(header.magic.get()));
        }
        let kind = Kind::from_code(header.kind).ok_or(Bad::Kind(header.kind))?;
        if header.len.get() > MAX_PAYLOAD {
            return Err(Bad::Len(header.len.get()));
        }
        let mut signature = Signature::default();
        signature.count = header.count.get();
        signature.extra = header.extra.get();
        signature.root = header.root.get();
        signature.as_mut_bytes()[20..24].copy_from_slice(&header.what);
        Ok(Self {
            kind,
            group: header.group.get(),
            call: CallId(header.call.get()),
            tag: header.tag.get(),
            len: header.len.get(),
            signature,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::{DType, ReduceOp};
    use crate::signature::{Collective, Via};

    #[test]
    fn round_trips() {
        let frame = Frame {
            kind: Kind::Data,
            group: 7,
            call: CallId::message(3, 9),
            tag: 11,
            len: 4096,
            signature: Signature::new(Collective::Scatter, DType::BF16, ReduceOp::Max, Via::Tree, 3, 1 << 40),
        };
        assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        assert!(frame.call.is_message());
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::array::uniform32(any::<u8>()), ok in any::<bool>()) {
            let mut header = [0u8; HEADER];
            header[..32].copy_from_slice(&bytes);
            header[HEADER - 20..].copy_from_slice(&bytes[..20]);
            if ok { header[..4].copy_from_slice(&MAGIC.to_le_bytes()); }
            if let Ok(frame) = Frame::decode(&header) {
                prop_assert!(frame.len <= MAX_PAYLOAD);
                let _ = frame.signature.to_string();
            }
        }
    }
}
