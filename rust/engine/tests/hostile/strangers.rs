//! Who connects to a rank that is being met, and says the wrong thing: the right ones meet none the less.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::Deserialize;
use trigram_engine::memory::Segment;
use trigram_engine::rendezvous::{Rendezvous, Transport};
use trigram_engine::unix;

use crate::common::{Rng, inputs, report};
use crate::turn;

/// What a card says, see `rendezvous.rs`.
#[derive(Deserialize)]
struct Card {
    _version: u32,
    _rank: u32,
    address: SocketAddr,
    _host: String,
    socket: String,
    token: [u8; 16],
}

/// Ranks 0 and 1, met while strangers talk to rank 0.
fn meet_among(transport: Transport, strangers: impl FnOnce(&Card)) {
    let open = |rank| Rendezvous::open(rank, 2, Some("lo"), None, transport).unwrap();
    let (mut zero, mut one) = (open(0), open(1));
    let cards = [zero.card().unwrap(), one.card().unwrap()];
    let card: Card = postcard::from_bytes(&cards[0]).unwrap();
    let limit = Duration::from_secs(30);
    std::thread::scope(|s| {
        let cards = &cards;
        let finish = |mut rank: Rendezvous| {
            move || {
                let met = rank.meet(cards, &mut || Ok(())).unwrap();
                assert!(met);
                rank.connect(&[true, true], limit, &mut || Ok(())).unwrap()
            }
        };
        if transport == Transport::Shm {
            let first = s.spawn(finish(zero));
            strangers(&card);
            let second = s.spawn(finish(one));
            drop((first.join().unwrap(), second.join().unwrap()));
            return;
        }
        assert!(zero.meet(cards, &mut || Ok(())).unwrap() && one.meet(cards, &mut || Ok(())).unwrap());
        let first = s.spawn(move || zero.connect(&[true, true], limit, &mut || Ok(())).unwrap());
        strangers(&card);
        let second = s.spawn(move || one.connect(&[true, true], limit, &mut || Ok(())).unwrap());
        drop((first.join().unwrap(), second.join().unwrap()));
    });
}

#[test]
fn introductions() {
    let _turn = turn();
    let (count, began, mut rng) = ((inputs(20_000) / 100).min(20_000), Instant::now(), Rng::new(41));
    let memory = Segment::create(4096).unwrap();
    meet_among(Transport::Shm, |card| {
        let mut open = Vec::new();
        for _ in 0..count {
            let unix::Connected::To(stream) = unix::connect(&card.socket).unwrap() else {
                std::thread::sleep(Duration::from_millis(1)); // more than its backlog wait
                continue;
            };
            let mut bytes: Vec<u8> = card.token.iter().copied().chain(1u32.to_le_bytes()).collect();
            let right = bytes.clone();
            while bytes == right {
                rng.spoil(&mut bytes);
            }
            let fds = vec![memory.fd(); rng.below(4)];
            unix::send(&stream, &bytes, &fds).unwrap();
            if rng.one_in(4) {
                open.push(stream);
            }
            if open.len() > 100 {
                open.clear();
            }
        }
    });
    report("introductions", count, began, "both ranks met");
}

#[test]
fn greetings() {
    let _turn = turn();
    let (count, began, mut rng) = ((inputs(20_000) / 100).min(5_000), Instant::now(), Rng::new(42));
    meet_among(Transport::Tcp, |card| {
        let mut open = Vec::new();
        for _ in 0..count {
            let Ok(mut stream) = TcpStream::connect(card.address) else { continue };
            let mut bytes = b"TRIGRAM\x01".to_vec();
            bytes.extend(card.token);
            bytes.extend([0; 8]);
            let right = [&bytes[..24], &[1, 0, 0, 0, 0, 0, 0, 0]].concat();
            rng.spoil(&mut bytes);
            if bytes.starts_with(&right) {
                continue; // who knows the token is no stranger
            }
            let _ = stream.write_all(&bytes);
            open.push(stream);
            if open.len() > 50 {
                open.clear();
            }
        }
    });
    report("greetings", count, began, "both ranks met");
}
