//! The header of every message.
//!
//! A connection carries frames: [`HEADER`] bytes, then `len` bytes of payload. Headers are
//! little-endian, fixed in size and validated before anything is allocated or written, so a
//! corrupt or hostile peer can at worst be disconnected.
//!
//! Where bytes leave the host, a frame is *summed*: its header carries the CRC-32 of itself and of its
//! payload. TCP's own sum of 16 bits lets through one damaged segment in 65,536, and hardware that
//! damages one damages many (Stone and Partridge, SIGCOMM 2000).

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::signature::Signature;

/// First bytes of every frame; the last byte is the version of the protocol.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TGM\x04");

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
    Leave = 4,
    /// What the sender's link carries: bytes per second as an f64, 0 if it does not know.
    Rate = 5,
    /// The sender has given up the rank in `tag`, perhaps the receiver; the payload is why.
    Lost = 6,
    /// The sender is alive and has nothing else to say.
    Heartbeat = 7,
    /// "I have a message for you that is too large to send unasked": a receive from any source finds it by this.
    Offer = 8,
    /// The sender has aborted the group: its calls under way and all later ones fail with the error in the payload.
    Abort = 9,
    /// "All my threads wait in this call"; the payload is the group's name, and a call of the receiver that the sender has
    /// not made.
    Stuck = 10,
}

impl Kind {
    fn from_code(code: u8) -> Option<Self> {
        use Kind::*;
        [Data, Ready, Fail, Leave, Rate, Lost, Heartbeat, Offer, Abort, Stuck]
            .into_iter()
            .find(|k| *k as u8 == code)
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

    /// Whether this message comes before the `next`-th of its tag. Numbers wrap around, so less than half of them are
    /// under way.
    pub fn is_before(self, next: u64) -> bool {
        (self.0 as u32).wrapping_sub(next as u32) > u32::MAX / 2
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
    summed: u8,
    reserved: [u8; 2],
    group: U64,
    call: U64,
    tag: U32,
    len: U32,
    count: U64,
    extra: U64,
    root: U32,
    what: [u8; 4],
    /// CRC-32 of the payload; 0 unless `summed`.
    payload_sum: U32,
    /// CRC-32 of the header up to here; 0 unless `summed`.
    header_sum: U32,
}

/// CRC-32 (ISO-HDLC) of some bytes, in as many parts as they come in.
#[derive(Clone, Debug, Default)]
pub struct Sum(crc32fast::Hasher);

impl Sum {
    /// Takes in the next bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The sum of all bytes so far.
    pub fn value(&self) -> u32 {
        self.0.clone().finalize()
    }

    /// The sum of some bytes.
    pub fn of(bytes: &[u8]) -> u32 {
        crc32fast::hash(bytes)
    }
}

/// Why a header was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    /// Not our protocol, or a stream out of step.
    #[error("these bytes are no trigram frame (magic number {0:#010x})")]
    Magic(u32),
    /// A kind this version does not know.
    #[error("unknown kind of frame {0}")]
    Kind(u8),
    /// A payload above [`MAX_PAYLOAD`].
    #[error("a frame of {0} bytes exceeds the limit")]
    Len(u32),
    /// A header whose bytes changed on the way.
    #[error("wrong checksum of a frame header: bits flipped between the two hosts")]
    Sum,
}

impl Frame {
    /// The header's bytes, and with `sum`, that of the payload, those of a summed frame.
    pub fn encode(&self, sum: Option<u32>) -> [u8; HEADER] {
        let mut what = [0; 4];
        let signature = self.signature.as_bytes();
        what.copy_from_slice(&signature[20..24]);
        let header = Header {
            magic: U32::new(MAGIC),
            kind: self.kind as u8,
            summed: u8::from(sum.is_some()),
            reserved: [0; 2],
            group: U64::new(self.group),
            call: U64::new(self.call.0),
            tag: U32::new(self.tag),
            len: U32::new(self.len),
            count: U64::new(self.signature.count),
            extra: U64::new(self.signature.extra),
            root: U32::new(self.signature.root),
            what,
            payload_sum: U32::new(sum.unwrap_or_default()),
            header_sum: U32::new(0),
        };
        let mut bytes: [u8; HEADER] = zerocopy::transmute!(header);
        if sum.is_some() {
            let (head, own) = bytes.split_at_mut(HEADER - 4);
            own.copy_from_slice(&Sum::of(head).to_le_bytes());
        }
        bytes
    }

    /// Decodes a header, trusting nothing; and the sum that its payload must have, if it is summed.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<(Self, Option<u32>), Bad> {
        let header: Header = zerocopy::transmute!(*bytes);
        if header.magic.get() != MAGIC {
            return Err(Bad::Magic(header.magic.get()));
        }
        let sums = (header.payload_sum.get(), header.header_sum.get());
        let sound = match header.summed {
            0 => sums == (0, 0) && header.reserved == [0; 2],
            1 => sums.1 == Sum::of(&bytes[..HEADER - 4]),
            _ => false,
        };
        if !sound {
            return Err(Bad::Sum);
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
        let frame = Self {
            kind,
            group: header.group.get(),
            call: CallId(header.call.get()),
            tag: header.tag.get(),
            len: header.len.get(),
            signature,
        };
        Ok((frame, (header.summed == 1).then_some(sums.0)))
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
        assert_eq!(Frame::decode(&frame.encode(None)), Ok((frame, None)));
        assert_eq!(Frame::decode(&frame.encode(Some(7))), Ok((frame, Some(7))));
        assert!(frame.call.is_message());
    }

    #[test]
    fn messages_are_in_order_where_their_numbers_wrap_around() {
        for next in [0, 7, (1 << 31) - 3, 1 << 31, (1 << 32) - 2, 1 << 32, (1 << 32) + 5, 3 << 32] {
            for ahead in [0, 1, 5, 100_000] {
                assert!(!CallId::message(3, next + ahead).is_before(next), "{next} {ahead}");
                assert!(CallId::message(3, next + ahead).is_before(next + ahead + 1), "{next} {ahead}");
            }
        }
    }

    #[test]
    fn no_flipped_bit_of_a_summed_header_goes_unseen() {
        let frame = Frame {
            kind: Kind::Data,
            group: 7,
            call: CallId::collective(2),
            tag: 0,
            len: 8,
            signature: Signature::default(),
        };
        let bytes = frame.encode(Some(Sum::of(b"12345678")));
        for bit in 0..HEADER * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Frame::decode(&flipped).is_err(), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::array::uniform32(any::<u8>()), ok in any::<bool>()) {
            let mut header = [0u8; HEADER];
            header[..32].copy_from_slice(&bytes);
            header[HEADER - 32..].copy_from_slice(&bytes);
            if ok {
                header[..4].copy_from_slice(&MAGIC.to_le_bytes());
                header[5] = 1;
                let sum = Sum::of(&header[..HEADER - 4]);
                header[HEADER - 4..].copy_from_slice(&sum.to_le_bytes());
            }
            if let Ok((frame, _)) = Frame::decode(&header) {
                prop_assert!(frame.len <= MAX_PAYLOAD);
                let _ = frame.signature.to_string();
            }
        }
    }
}
