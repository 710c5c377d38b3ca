//! The 128 bytes that NCCL carries from who listens to who connects.
//!
//! `magic 8 | version 2 | family 1 | 0 | port 2 | 0 0 | address 16 | token 32 | attempt id 8 | zeros`, numbers
//! little-endian. The attempt id is zero until the connecting side sets it: it identifies the attempt under way.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::error::{Error, Result};
use crate::token::Token;

/// Bytes of NCCL's handles.
pub(crate) const SIZE: usize = 128;
/// Of handles and hellos; both sides must have the same.
pub(crate) const VERSION: u16 = 1;
const MAGIC: [u8; 8] = *b"TrigramH";
const ATTEMPT_ID: std::ops::Range<usize> = 64..72;

/// Where to connect, and what to present there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Handle {
    /// Of who listens.
    pub(crate) address: SocketAddr,
    /// What it wants to see.
    pub(crate) token: Token,
}

impl Handle {
    /// As bytes.
    pub(crate) fn write(&self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.address.port().to_le_bytes());
        match self.address.ip() {
            IpAddr::V4(ip) => {
                bytes[10] = 4;
                bytes[16..20].copy_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                bytes[10] = 6;
                bytes[16..32].copy_from_slice(&ip.octets());
            }
        }
        bytes[32..64].copy_from_slice(&self.token);
        bytes
    }

    /// From bytes.
    pub(crate) fn read(bytes: &[u8; SIZE]) -> Result<Self> {
        if bytes[..8] != MAGIC {
            return Err(Error::argument(
                "the peer's handle is not from this plugin; set NCCL_NET alike on all ranks",
            ));
        }
        let version = u16::from_le_bytes(part(bytes, 8));
        if version != VERSION {
            return Err(Error::usage(format!(
                "the peer's plugin has version {version}, this one has {VERSION}; install the same on all hosts"
            )));
        }
        let ip = match bytes[10] {
            4 => IpAddr::V4(Ipv4Addr::from(part::<4>(bytes, 16))),
            6 => IpAddr::V6(Ipv6Addr::from(part::<16>(bytes, 16))),
            family => {
                return Err(Error::argument(format!(
                    "the peer's handle has an address of unknown family {family}"
                )));
            }
        };
        let port = u16::from_le_bytes(part(bytes, 12));
        Ok(Self { address: SocketAddr::new(ip, port), token: part(bytes, 32) })
    }
}

/// The attempt that a handle's buffer names; zero: none yet.
pub(crate) fn attempt_id(bytes: &[u8; SIZE]) -> u64 {
    u64::from_le_bytes(part(bytes, ATTEMPT_ID.start))
}

/// Notes the attempt in the buffer.
pub(crate) fn set_attempt_id(bytes: &mut [u8; SIZE], attempt_id: u64) {
    bytes[ATTEMPT_ID].copy_from_slice(&attempt_id.to_le_bytes());
}

/// `N` of the bytes; zeros behind the end.
pub(crate) fn part<const N: usize>(bytes: &[u8], from: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes.get(from + i).copied().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips() {
        for address in ["10.1.2.3:4567", "[fd00::17]:65535"] {
            let handle =
                Handle { address: address.parse().unwrap(), token: std::array::from_fn(|i| i as u8) };
            let mut bytes = handle.write();
            assert_eq!(attempt_id(&bytes), 0);
            set_attempt_id(&mut bytes, u64::MAX - 1);
            assert_eq!(attempt_id(&bytes), u64::MAX - 1);
            assert_eq!(Handle::read(&bytes).unwrap(), handle);
        }
    }

    #[test]
    fn other_handles_are_refused() {
        let good = Handle { address: "10.1.2.3:4567".parse().unwrap(), token: [7; 32] }.write();
        for (at, code) in [(0, 4), (8, 5), (10, 4)] {
            let mut bytes = good;
            bytes[at] ^= 0x41;
            assert_eq!(Handle::read(&bytes).unwrap_err().code, code);
        }
        assert!(Handle::read(&[0; SIZE]).is_err());
    }
}
