//! What two ranks prove to each other when one connects to the other: MACs over everything both have sent.
//!
//! Both sides contribute a fresh nonce, so a recorded proof is useless later. The MAC covers which side proves, so
//! that nobody can reflect a side's own message to it; it also covers the ranks, the job and the channel. Over TLS
//! the channel is identified by keys that only its two ends have: a man in the middle terminates two channels, and a
//! proof for one is invalid on the other.

use trigram_core::Result;

use crate::security::secret::{Keys, PROOF, random};

const MAGIC: &[u8; 8] = b"TRIGRAM\x02";
/// Bytes of the first message.
pub const HELLO: usize = 8 + 16 + 4 + 4 + NONCE;
/// Bytes of a nonce.
pub const NONCE: usize = 32;

/// The channel that a proof is valid for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// A unix socket inside a host.
    Host,
    /// TCP without encryption: a man in the middle can forward proofs.
    Plain,
    /// TLS, named by a secret that only its two ends can derive.
    Tls([u8; 32]),
}

/// Which side proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The rank that connects, usually the higher one.
    Connecting,
    /// The rank that listens.
    Accepting,
}

/// One handshake of two ranks, as either side sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handshake {
    /// The rank that connects.
    pub from: u32,
    /// The rank that it connects to.
    pub to: u32,
    /// The connecting side's nonce.
    pub connecting_nonce: [u8; NONCE],
    /// The accepting side's nonce.
    pub accepting_nonce: [u8; NONCE],
    /// The channel in use.
    pub binding: Binding,
}

impl Handshake {
    /// The connecting side's state before it has received anything.
    pub fn begin(from: u32, to: u32, binding: Binding) -> Result<Self> {
        Ok(Self { from, to, connecting_nonce: random()?, accepting_nonce: [0; NONCE], binding })
    }

    /// The accepting side's state after a first message; `None` if the message is not of this job, or not for `me`.
    pub fn accept(hello: &[u8], me: u32, keys: &Keys, binding: Binding) -> Option<Self> {
        let hello: &[u8; HELLO] = hello.try_into().ok()?;
        let number = |at: usize| Some(u32::from_le_bytes(hello[at..at + 4].try_into().ok()?));
        let (from, to) = (number(24)?, number(28)?);
        let connecting_nonce = hello[32..].try_into().ok()?;
        let is_ours = hello[..8] == *MAGIC && hello[8..24] == keys.id && to == me && from != me;
        // Without fresh random bytes a side cannot tell a replayed message from a new one, so it accepts none.
        is_ours.then_some(Self { from, to, connecting_nonce, accepting_nonce: random().ok()?, binding })
    }

    /// The first message.
    pub fn hello(&self, keys: &Keys) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..24].copy_from_slice(&keys.id);
        bytes[24..28].copy_from_slice(&self.from.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.to.to_le_bytes());
        bytes[32..].copy_from_slice(&self.connecting_nonce);
        bytes
    }

    /// The proof of one side.
    pub fn prove(&self, side: Side, keys: &Keys) -> [u8; PROOF] {
        self.with_parts(side, keys, |parts| keys.prove(parts))
    }

    /// Whether it is the proof of that side.
    pub fn is_proof(&self, side: Side, keys: &Keys, proof: &[u8]) -> bool {
        self.with_parts(side, keys, |parts| keys.is_proof(parts, proof))
    }

    /// All parts but the last have a fixed length, so no two handshakes give the same MAC input.
    fn with_parts<T>(&self, side: Side, keys: &Keys, f: impl FnOnce(&[&[u8]]) -> T) -> T {
        let side: &[u8] = match side {
            Side::Connecting => b"trigram connects",
            Side::Accepting => b"trigram  accepts",
        };
        let (channel, name): (&[u8], &[u8]) = match &self.binding {
            Binding::Host => (b"h", &[]),
            Binding::Plain => (b"p", &[]),
            Binding::Tls(name) => (b"t", name),
        };
        let (from, to) = (self.from.to_le_bytes(), self.to.to_le_bytes());
        f(&[side, MAGIC, &keys.id, &from, &to, &self.connecting_nonce, &self.accepting_nonce, channel, name])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::security::secret::{Secret, Security};

    fn keys(secret: &str) -> Keys {
        Security { secret: Some(Secret::new(secret.as_bytes()).unwrap()), tls: false }.keys(&[7; 16])
    }

    fn handshake() -> Handshake {
        let begun = Handshake::begin(3, 1, Binding::Tls([9; 32])).unwrap();
        let keys = keys("s");
        Handshake::accept(&begun.hello(&keys), 1, &keys, Binding::Tls([9; 32])).unwrap()
    }

    #[test]
    fn both_sides_can_prove_what_they_are() {
        let (ours, keys) = (handshake(), keys("s"));
        for side in [Side::Connecting, Side::Accepting] {
            assert!(ours.is_proof(side, &keys, &ours.prove(side, &keys)));
        }
    }

    #[test]
    fn another_key_or_side_proves_nothing() {
        let ours = handshake();
        let proof = ours.prove(Side::Connecting, &keys("t"));
        assert!(!ours.is_proof(Side::Connecting, &keys("s"), &proof));
        let reflected = ours.prove(Side::Accepting, &keys("s"));
        assert!(!ours.is_proof(Side::Connecting, &keys("s"), &reflected));
        assert!(!ours.is_proof(Side::Accepting, &keys("s"), &reflected[..31]));
    }

    #[test]
    fn whatever_is_altered_undoes_the_proof() {
        let (ours, keys) = (handshake(), keys("s"));
        let proof = ours.prove(Side::Connecting, &keys);
        let altered = [
            Handshake { from: 2, ..ours },
            Handshake { to: 0, ..ours },
            Handshake { from: ours.to, to: ours.from, ..ours },
            Handshake { connecting_nonce: [0; NONCE], ..ours },
            Handshake { accepting_nonce: [0; NONCE], ..ours },
            Handshake {
                connecting_nonce: ours.accepting_nonce,
                accepting_nonce: ours.connecting_nonce,
                ..ours
            },
            Handshake { binding: Binding::Tls([8; 32]), ..ours },
            Handshake { binding: Binding::Plain, ..ours },
            Handshake { binding: Binding::Host, ..ours },
        ];
        for other in altered {
            assert!(!other.is_proof(Side::Connecting, &keys, &proof), "{other:?}");
        }
    }

    #[test]
    fn nonces_are_fresh_each_time() {
        let (one, two) = (handshake(), handshake());
        assert!(one.connecting_nonce != two.connecting_nonce && one.accepting_nonce != two.accepting_nonce);
    }

    #[test]
    fn a_first_message_of_another_job_or_for_another_rank_is_not_heard() {
        let keys = keys("s");
        let hello = Handshake::begin(3, 1, Binding::Plain).unwrap().hello(&keys);
        let heard = |bytes: &[u8], me| Handshake::accept(bytes, me, &keys, Binding::Plain);
        assert_eq!(heard(&hello, 1).map(|c| c.from), Some(3));
        assert_eq!(heard(&hello, 2), None);
        assert_eq!(heard(&hello[1..], 1), None);
        for at in [0, 8, 28] {
            let mut bytes = hello;
            bytes[at] ^= 1;
            assert_eq!(heard(&bytes, 1), None, "byte {at}");
        }
    }
}
