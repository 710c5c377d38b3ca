//! What a stream says first: the listener's token, and which stream of which connection it is.
//!
//! `magic 8 | version 2 | stream 1 | streams 1 | 0 0 0 0 | connection 16 | token 32`.

use crate::handle::{VERSION, part};
use crate::settings::MAX_STREAMS;
use crate::token::{Token, same};

/// Bytes of a hello.
pub(crate) const SIZE: usize = 64;
/// How it begins: who begins otherwise can be dropped at once.
pub(crate) const MAGIC: [u8; 8] = *b"TrigramS";

/// Names a connection, so that the streams of two cannot mix.
pub(crate) type ConnectionId = [u8; 16];

/// A stream's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Which connection.
    pub(crate) connection: ConnectionId,
    /// Which of its streams, from 0.
    pub(crate) stream: usize,
    /// How many there are.
    pub(crate) streams: usize,
}

impl Hello {
    /// As bytes.
    pub(crate) fn write(&self, token: &Token) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = u8::try_from(self.stream).unwrap_or(u8::MAX);
        bytes[11] = u8::try_from(self.streams).unwrap_or(u8::MAX);
        bytes[16..32].copy_from_slice(&self.connection);
        bytes[32..].copy_from_slice(token);
        bytes
    }

    /// From bytes; `None` from a stranger.
    pub(crate) fn read(bytes: &[u8; SIZE], token: &Token) -> Option<Self> {
        let (stream, streams) = (usize::from(bytes[10]), usize::from(bytes[11]));
        let known = same(&part(bytes, 32), token);
        let sound = bytes[..8] == MAGIC
            && u16::from_le_bytes(part(bytes, 8)) == VERSION
            && (1..=MAX_STREAMS).contains(&streams)
            && stream < streams;
        (known && sound).then(|| Self { connection: part(bytes, 16), stream, streams })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_and_refuses_strangers() {
        let hello = Hello { connection: [9; 16], stream: 3, streams: 4 };
        let good = hello.write(&[5; 32]);
        assert_eq!(Hello::read(&good, &[5; 32]), Some(hello));
        assert_eq!(Hello::read(&good, &[6; 32]), None);
        for (at, value) in [(0, 0), (8, 9), (10, 4), (11, 0), (11, 17), (63, 6)] {
            let mut bytes = good;
            bytes[at] = value;
            assert_eq!(Hello::read(&bytes, &[5; 32]), None, "byte {at}");
        }
    }
}
