//! What no correct peer sends or shows: nothing panics, nothing is written where it should not be, and no memory is
//! taken that the input does not account for.
//!
//! A few thousand inputs in a test run; `TRIGRAM_FUZZ=10000000 cargo test --release -p trigram-engine --test hostile`
//! gives each target so many, and those whose inputs each cost system calls a hundredth.
#![allow(clippy::unwrap_used)]

mod bundles;
#[path = "../../../core/tests/common/mod.rs"]
mod common;
mod control_segments;
mod strangers;
mod streams;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use common::{Account, Rng, inputs, report};
use trigram_core::Error;
use trigram_engine::bootstrap::rendezvous::{Rendezvous, Transport};

#[global_allocator]
static ACCOUNT: Account = Account::new();

/// One test at a time: they share the account.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn errors() {
    let _turn = turn();
    let (count, began, mut rng) = (inputs(100_000), Instant::now(), Rng::new(11));
    let (mut read, mut bytes) = (0, Vec::with_capacity(1 << 12));
    let text = |rng: &mut Rng| "rank 3 ü ".repeat(rng.below(6));
    let before = ACCOUNT.begin();
    for _ in 0..count {
        let error = match rng.below(6) {
            0 => Error::PeerLost { rank: rng.number() as u32, what: text(&mut rng), why: text(&mut rng) },
            1 => Error::Timeout { what: text(&mut rng), millis: rng.number(), waiting_for: text(&mut rng) },
            2 => Error::Mismatch { group: text(&mut rng), call: rng.number(), sides: text(&mut rng) },
            3 => Error::Corrupt { rank: rng.number() as u32, what: text(&mut rng) },
            4 => Error::Io { what: text(&mut rng), why: text(&mut rng) },
            _ => Error::Aborted(text(&mut rng)),
        };
        bytes.clear();
        bytes.extend(postcard::to_stdvec(&error).unwrap());
        if rng.one_in(8) {
            bytes.resize(rng.below(64), 0);
            rng.fill(&mut bytes);
        } else {
            rng.spoil(&mut bytes);
        }
        if let Ok(error) = postcard::from_bytes::<Error>(&bytes) {
            read += 1;
            assert!(error.to_string().len() < bytes.len() + 400);
        }
    }
    assert!(read > count / 20 && read < count, "{read} of {count}: the inputs say little");
    assert!(ACCOUNT.peak() - before < 64 << 10, "{} bytes for an error", ACCOUNT.peak() - before);
    report("errors", count, began, &format!("{read} read"));
}

#[test]
fn records() {
    let _turn = turn();
    let (count, began, mut rng) = (inputs(50_000), Instant::now(), Rng::new(12));
    let mut alone = Rendezvous::open(0, 1, Some("lo"), None, Transport::Auto).unwrap();
    let (record, mut good) = (alone.record().unwrap(), 0);
    let before = ACCOUNT.begin();
    for _ in 0..count {
        let mut bytes = record.clone();
        if !rng.one_in(8) {
            rng.spoil(&mut bytes); // what is left whole is taken; any other is not what this rank wrote
        }
        if rng.one_in(8) {
            rng.fill(&mut bytes);
        }
        match alone.handshake(&[bytes], std::time::Duration::from_secs(10), &mut || Ok(())) {
            Ok(met) => good += usize::from(met),
            Err(Error::Corrupt { rank: 0, .. } | Error::Config(_) | Error::Auth(_)) => {}
            Err(other) => panic!("{other}"),
        }
    }
    assert!(good > count / 20 && good < count, "{good} of {count}: the inputs say little");
    assert!(ACCOUNT.peak() - before < 64 << 10, "{} bytes for a record", ACCOUNT.peak() - before);
    report("records", count, began, &format!("{good} taken"));
}
