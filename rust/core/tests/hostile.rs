//! Decoders of this crate, given what no correct peer sends: nothing panics, nothing is allocated that the input
//! does not account for, and what is accepted is in order.
//!
//! A few thousand inputs in a test run; `TRIGRAM_FUZZ=10000000 cargo test --release -p trigram-core --test hostile`
//! gives each target so many.
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Instant;

use common::{Account, Rng, inputs, report};
use half::{bf16, f16};
use trigram_core::codec::{self, Target};
use trigram_core::lossless::{self, Then};
use trigram_core::signature::{Collective, Signature, Via};
use trigram_core::wire::{CallId, Frame, HEADER, Kind, MAGIC, MAX_PAYLOAD, Sum};
use trigram_core::{DType, Error, ReduceOp};

#[global_allocator]
static ACCOUNT: Account = Account::new();

/// One test at a time: they share the account.
static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[test]
fn headers() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (count, began) = (inputs(200_000), Instant::now());
    let mut rng = Rng::new(1);
    let (mut good, mut signed) = (0, 0);
    let before = ACCOUNT.begin();
    for i in 0..count {
        let mut bytes = [0u8; HEADER];
        if i % 2 == 0 {
            rng.fill(&mut bytes);
            if !rng.one_in(4) {
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
                bytes[4] = rng.below(9) as u8;
                (bytes[5], bytes[6], bytes[7]) = (rng.below(2) as u8, 0, 0);
                if bytes[5] == 0 {
                    bytes[HEADER - 8..].fill(0);
                } else {
                    let sum = Sum::of(&bytes[..HEADER - 4]);
                    bytes[HEADER - 4..].copy_from_slice(&sum.to_le_bytes());
                }
            }
        } else {
            let what = [Collective::AllReduce, Collective::Broadcast, Collective::AllToAll][rng.below(3)];
            let (dtype, op) =
                (DType::ALL[rng.below(DType::ALL.len())], ReduceOp::ALL[rng.below(ReduceOp::ALL.len())]);
            let frame = Frame {
                kind: [
                    Kind::Data,
                    Kind::Ready,
                    Kind::Fail,
                    Kind::Leave,
                    Kind::Rate,
                    Kind::Lost,
                    Kind::Heartbeat,
                    Kind::Offer,
                    Kind::Abort,
                    Kind::Stuck,
                ][rng.below(10)],
                group: rng.next(),
                call: CallId(rng.number()),
                tag: rng.number() as u32,
                len: rng.below(MAX_PAYLOAD as usize + 1) as u32,
                signature: Signature::new(what, dtype, op, Via::ALL[rng.below(6)], 3, rng.number()),
            };
            let sum = rng.one_in(2).then(|| rng.number() as u32);
            bytes = frame.encode(sum);
            assert_eq!(Frame::decode(&bytes), Ok((frame, sum)));
            bytes[rng.below(HEADER)] ^= 1 << rng.below(8);
            assert!(sum.is_none() || Frame::decode(&bytes).is_err(), "a flipped bit went unseen");
        }
        if let Ok((frame, sum)) = Frame::decode(&bytes) {
            good += 1;
            assert!(frame.len <= MAX_PAYLOAD);
            let again = Frame::decode(&frame.encode(sum));
            assert_eq!(again, Ok((frame, sum)), "what is accepted is carried on unchanged");
            if i % 16 < 2 {
                signed += usize::from(frame.signature.how().is_some());
                assert!(frame.signature.to_string().len() < 200);
                let _ = frame.call.as_message();
            }
        }
    }
    assert!(good > count / 10 && good < count, "{good} of {count}: the inputs say little");
    // The test harness takes a little meanwhile.
    assert!(ACCOUNT.peak() - before < 64 << 10, "a header takes no memory");
    report("headers", count, began, &format!("{good} accepted, {signed} with a signature that is known"));
}

#[test]
fn codes() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (count, began) = (inputs(100_000), Instant::now());
    let names = [
        "bf16",
        "f16",
        "int8",
        "int4",
        "fp8",
        "sign",
        "topk:0.01",
        "topk:0.3",
        "topk:1",
        "randomk:0.2",
        "chunktopk:0.02",
        "chunktopk:0.5",
    ];
    let codecs: Vec<_> = names.iter().map(|name| (*name, codec::find(name, None).unwrap())).collect();
    let mut rng = Rng::new(2);
    let (mut refused, mut buf, mut code) = (0, Vec::new(), Vec::new());
    code.reserve(1 << 16);
    let (mut wide, mut half, mut brain) = (vec![0f32; 700], vec![f16::ZERO; 700], vec![bf16::ZERO; 700]);
    let before = ACCOUNT.begin();
    for _ in 0..count {
        let (name, codec) = &codecs[rng.below(codecs.len())];
        let n = match rng.below(16) {
            0 => rng.below(3),
            1 => 100 + rng.below(600),
            _ => 1 + rng.below(70),
        };
        // From nothing but noise hardly any top-k code is one: half begin with a code of something.
        code.clear();
        code.resize(codec.size(n), 0);
        if rng.one_in(2) {
            rng.fill(&mut code);
        } else {
            buf.clear();
            buf.extend((0..n).map(|_| f32::from_bits(rng.next() as u32 & 0xbfff_ffff)));
            codec::encode(&**codec, codec::Values::F32(&buf), codec::Keep::Nothing, rng.next(), &mut code)
                .unwrap();
            let size = code.len();
            rng.spoil(&mut code);
            if !rng.one_in(8) {
                code.resize(size, 0); // of the right length again
            }
        }
        let weight = f32::from_bits(rng.next() as u32);
        let target = match rng.below(4) {
            0 => Target::F32(&mut wide[..n]),
            1 => Target::F16(&mut half[..n]),
            2 => Target::BF16(&mut brain[..n]),
            _ => Target::Add(&mut wide[..n], weight),
        };
        match codec::decode(&**codec, &code, target, 7) {
            Ok(()) => assert_eq!(code.len(), codec.size(n), "{name}"),
            Err(Error::Corrupt { rank: 7, .. }) => refused += 1,
            Err(other) => panic!("{name}: {other}"),
        }
    }
    assert!(refused > count / 100 && refused < count / 2, "{refused} of {count}: the inputs say little");
    assert!(
        ACCOUNT.peak() - before < 256 << 10,
        "{} bytes to decode codes of 700 values",
        ACCOUNT.peak() - before
    );
    report("codes", count, began, &format!("{refused} refused"));
}

/// Lossless codes, whose length is known only from what is in them.
#[test]
fn lossless_codes() {
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let (count, began) = (inputs(100_000), Instant::now());
    let mut rng = Rng::new(7);
    let (mut refused, mut values, mut code) = (0, Vec::new(), Vec::new());
    let (mut out, mut whole) = (vec![0f32; 700], vec![0u8; lossless::worst(700)]);
    for _ in 0..count {
        let n = rng.below(700);
        let (keeps, spread) = (rng.below(33) as u32, rng.next() as u32);
        values.clear();
        values.extend(
            (0..n).map(|_| f32::from_bits((rng.next() as u32 & spread) >> keeps.min(31) << keeps.min(31))),
        );
        let size = lossless::encode(&values, &mut whole).unwrap();
        code.clear();
        code.extend_from_slice(&whole[..size]);
        let is_whole = rng.one_in(4);
        match () {
            () if is_whole => {}
            () if rng.one_in(4) => rng.fill(&mut code),
            () => rng.spoil(&mut code),
        }
        let then = if rng.one_in(2) { Then::Add } else { Then::Write };
        match lossless::decode(&code, &mut out[..n], then, 7) {
            Ok(()) if is_whole && then == Then::Write => {
                assert!(out.iter().zip(&values).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
            Ok(()) => {}
            Err(Error::Corrupt { rank: 7, .. }) if !is_whole => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > count / 10, "{refused} of {count}: the inputs say little");
    report("lossless codes", count, began, &format!("{refused} refused"));
}
