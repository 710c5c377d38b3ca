//! The secret that the ranks of one job share, and what they prove with it.
//!
//! `TRIGRAM_SECRET`, if set, is the secret of the job. Otherwise the token in the lowest rank's endpoint record
//! stands in for it. That prevents accidents but keeps no attacker out: whoever can read the store can read the
//! token.
//!
//! Endpoint records travel through a store that others may write to. With a secret, each record carries a seal (an
//! HMAC over the whole record), so a record that no rank of the job wrote is rejected by name, and so is a rank with
//! another secret.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use trigram_core::error::name_ranks;
use trigram_core::{Error, Result};

/// Bytes of a seal and of a proof.
pub const PROOF: usize = 32;

/// The secret of a job, from `TRIGRAM_SECRET`. It is never printed.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// From the bytes that all ranks were given; an empty secret is an error.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        if bytes.is_empty() {
            return Err(Error::Config(
                "TRIGRAM_SECRET is set but empty, which anybody could guess. Give all ranks the same long random \
                 value (openssl rand -hex 32), or unset it on all"
                    .into(),
            ));
        }
        Ok(Self(bytes.to_vec()))
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The security settings of a rank.
#[derive(Clone, Debug, Default)]
pub struct Security {
    /// The secret of the job, if one was given.
    pub secret: Option<Secret>,
    /// Whether connections between hosts are encrypted.
    pub tls: bool,
}

/// What a rank's endpoint record says about its security.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// The rank that the record belongs to.
    pub rank: u32,
    /// Whether the rank has a secret.
    pub secret: bool,
    /// Whether the rank encrypts.
    pub tls: bool,
    /// Whether the record is sealed with this rank's own secret.
    pub sealed: bool,
}

impl Security {
    /// From `TRIGRAM_SECRET` and `TRIGRAM_TLS`.
    pub fn from_env() -> Result<Self> {
        use std::os::unix::ffi::OsStrExt;
        let secret = std::env::var_os("TRIGRAM_SECRET").map(|s| Secret::new(s.as_bytes())).transpose()?;
        let tls = match std::env::var_os("TRIGRAM_TLS").unwrap_or_default().as_bytes() {
            b"" | b"0" => false,
            b"1" => true,
            other => {
                let other = String::from_utf8_lossy(other);
                return Err(Error::Config(format!("TRIGRAM_TLS={other:?} is not valid; set it to 1 or 0")));
            }
        };
        Ok(Self { secret, tls })
    }

    /// The seal of an endpoint record; zeros if there is no secret to seal it with.
    pub fn seal(&self, record: &[u8]) -> [u8; PROOF] {
        self.secret.as_ref().map_or([0; PROOF], |s| mac(&s.0, &[b"trigram record", record]).into())
    }

    /// Whether an endpoint record is sealed with this rank's secret.
    pub fn is_sealed(&self, record: &[u8], seal: &[u8]) -> bool {
        self.secret.as_ref().is_some_and(|s| is_mac(&s.0, &[b"trigram record", record], seal))
    }

    /// The keys of the job whose lowest rank's endpoint record has this token.
    pub fn keys(&self, token: &[u8; 16]) -> Keys {
        let secret = self.secret.as_ref().map_or(&token[..], |s| &s.0);
        let id = Sha256::new().chain_update(b"trigram job").chain_update(token).finalize();
        let mut short = [0; 16];
        short.copy_from_slice(&id[..16]);
        Keys { id: short, key: mac(secret, &[b"trigram key", token]).into() }
    }

    /// Checks this rank's security settings against the endpoint records of all ranks.
    pub fn check(&self, me: u32, claims: &[Claim]) -> Result<()> {
        let that = |f: &dyn Fn(&Claim) -> bool| -> Vec<u32> {
            claims.iter().filter(|c| c.rank != me && f(c)).map(|c| c.rank).collect()
        };
        let mut wrong = Vec::new();
        if self.secret.is_none() {
            let with = that(&|c| c.secret);
            if !with.is_empty() {
                wrong.push(format!("TRIGRAM_SECRET is set on {} but not on rank {me}", name_ranks(&with)));
            }
        } else {
            let without = that(&|c| !c.secret);
            if !without.is_empty() {
                wrong.push(format!("TRIGRAM_SECRET is set on rank {me} but not on {}", name_ranks(&without)));
            }
            let unsealed = that(&|c| c.secret && !c.sealed);
            if !unsealed.is_empty() {
                wrong.push(format!(
                    "the endpoint record of {} in the store is not signed with rank {me}'s TRIGRAM_SECRET: the \
                     secrets differ, or the record was forged",
                    name_ranks(&unsealed)
                ));
            }
        }
        if !wrong.is_empty() {
            return Err(Error::Auth(format!(
                "init: {}; give all ranks the same TRIGRAM_SECRET, or unset it on all",
                wrong.join("; ")
            )));
        }
        let differ = that(&|c| c.tls != self.tls);
        if !differ.is_empty() {
            let others = name_ranks(&differ);
            let mine = format!("rank {me}");
            let (with, without) = if self.tls { (mine, others) } else { (others, mine) };
            return Err(Error::Config(format!(
                "init: TRIGRAM_TLS=1 is set on {with} but not on {without}; set it on all ranks or on none",
            )));
        }
        Ok(())
    }
}

/// The keys with which a rank proves that it belongs to a job.
#[derive(Clone)]
pub struct Keys {
    /// Identifies the job. It is not secret; it tells ranks of another job on the same port apart.
    pub id: [u8; 16],
    key: [u8; PROOF],
}

impl Keys {
    /// The proof for `parts`, each of a fixed length.
    pub fn prove(&self, parts: &[&[u8]]) -> [u8; PROOF] {
        mac(&self.key, parts).into()
    }

    /// Whether this is the proof for `parts`, in constant time.
    pub fn is_proof(&self, parts: &[&[u8]], proof: &[u8]) -> bool {
        is_mac(&self.key, parts, proof)
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys").field("id", &self.id).finish_non_exhaustive()
    }
}

fn begin(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    // A key is hashed if it is longer than a block, and then padded to one: as HMAC itself does.
    let mut block = [0; 64];
    if key.len() > block.len() {
        block[..PROOF].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let mut mac = <Hmac<Sha256> as KeyInit>::new(&block.into());
    parts.iter().for_each(|part| mac.update(part));
    mac
}

fn mac(key: &[u8], parts: &[&[u8]]) -> impl Into<[u8; PROOF]> + use<> {
    begin(key, parts).finalize().into_bytes()
}

fn is_mac(key: &[u8], parts: &[&[u8]], proof: &[u8]) -> bool {
    begin(key, parts).verify_slice(proof).is_ok()
}

/// Unpredictable random bytes.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("getting random bytes", e))?;
    if got < N {
        return Err(Error::io("getting random bytes", format!("the kernel gave {got} of {N}")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(secret: &str) -> Security {
        Security { secret: Some(Secret::new(secret.as_bytes()).unwrap()), tls: false }
    }

    fn claim(rank: u32, secret: bool, sealed: bool) -> Claim {
        Claim { rank, secret, tls: false, sealed }
    }

    #[test]
    fn macs_are_those_of_rfc_4231() {
        let hex = |bytes: [u8; 32]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let short: [u8; 32] = mac(b"Jefe", &[b"what do ya want ", b"for nothing?"]).into();
        assert_eq!(hex(short), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let long: [u8; 32] =
            mac(&[0xaa; 131], &[b"Test Using Larger Than Block-Size Key - Hash Key First"]).into();
        assert_eq!(hex(long), "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    }

    #[test]
    fn a_seal_holds_for_one_card_and_one_secret() {
        let seal = with("s").seal(b"record");
        assert!(with("s").is_sealed(b"record", &seal));
        assert!(!with("t").is_sealed(b"record", &seal));
        assert!(!with("s").is_sealed(b"cart", &seal));
        assert!(!with("s").is_sealed(b"record", &seal[..16]));
        assert!(!Security::default().is_sealed(b"record", &Security::default().seal(b"record")));
    }

    #[test]
    fn ranks_that_differ_are_named() {
        let said = |s: &Security, claims: &[Claim]| s.check(0, claims).unwrap_err();
        with("s").check(0, &[claim(0, true, true), claim(1, true, true)]).unwrap();
        let error = said(&with("s"), &[claim(0, true, true), claim(1, true, false), claim(2, false, false)]);
        assert!(
            matches!(&error, Error::Auth(e) if e.contains("record of rank 1") && e.contains("not on rank 2"))
        );
        let error = said(&Security::default(), &[claim(0, false, false), claim(3, true, false)]);
        assert!(matches!(&error, Error::Auth(e) if e.contains("set on rank 3 but not on rank 0")), "{error}");
        let tls = Security { secret: None, tls: true };
        let error = said(&tls, &[Claim { tls: true, ..claim(0, false, false) }, claim(1, false, false)]);
        assert!(matches!(&error, Error::Config(e) if e.contains("rank 1")), "{error}");
    }

    #[test]
    fn nothing_secret_is_printed() {
        let security = with("hunter2");
        let keys = security.keys(&[7; 16]);
        let printed = format!("{security:?} {keys:?}");
        assert!(!printed.contains("hunter2") && printed.contains("Secret(..)"), "{printed}");
        assert_ne!(keys.id, [7; 16], "the token is not told to whoever connects");
    }
}
