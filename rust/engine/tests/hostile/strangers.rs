//! Who connects to a rank that is being met, and says the wrong thing: the right ones meet none the less.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::Deserialize;
use trigram_engine::bootstrap::rendezvous::{Rendezvous, Transport};
use trigram_engine::security::proofs::{Binding, HELLO, Handshake, NONCE};
use trigram_engine::security::secret::{Keys, PROOF, Security};
use trigram_engine::sys::memory::Segment;
use trigram_engine::sys::unix;

use crate::common::{Rng, inputs, report};
use crate::turn;

/// What a endpoint record says, see `rendezvous.rs`.
#[derive(Deserialize)]
struct EndpointRecord {
    _version: u32,
    _release: String,
    _rank: u32,
    address: SocketAddr,
    _more: Vec<SocketAddr>,
    _announced: Option<SocketAddr>,
    _outward: bool,
    _host: String,
    _boot: String,
    socket: String,
    token: [u8; 16],
}

/// Ranks 0 and 1, met while strangers talk to rank 0.
fn meet_among(transport: Transport, strangers: impl FnOnce(&EndpointRecord)) {
    let open = |rank| Rendezvous::open(rank, 2, Some("lo"), None, transport).unwrap();
    let (mut zero, mut one) = (open(0), open(1));
    let records = [zero.record().unwrap(), one.record().unwrap()];
    let record: EndpointRecord = postcard::from_bytes(&records[0]).unwrap();
    let limit = Duration::from_secs(30);
    std::thread::scope(|s| {
        let records = &records;
        let finish = |mut rank: Rendezvous| {
            move || {
                let met = rank.handshake(records, limit, &mut || Ok(())).unwrap();
                assert!(met);
                rank.connect(&[true, true], limit, &mut || Ok(())).unwrap()
            }
        };
        if transport == Transport::Shm {
            let first = s.spawn(finish(zero));
            strangers(&record);
            let second = s.spawn(finish(one));
            drop((first.join().unwrap(), second.join().unwrap()));
            return;
        }
        assert!(
            zero.handshake(records, limit, &mut || Ok(())).unwrap()
                && one.handshake(records, limit, &mut || Ok(())).unwrap()
        );
        let first = s.spawn(move || zero.connect(&[true, true], limit, &mut || Ok(())).unwrap());
        strangers(&record);
        let second = s.spawn(move || one.connect(&[true, true], limit, &mut || Ok(())).unwrap());
        drop((first.join().unwrap(), second.join().unwrap()));
    });
}

/// The keys that all who have read the endpoint record come to: no secret is set here.
fn keys(record: &EndpointRecord) -> Keys {
    Security::from_env().unwrap().keys(&record.token)
}

/// A first message as rank 1 sends it; whole in half of all cases, so that the proof that follows is what is wrong.
fn hello(rng: &mut Rng, keys: &Keys, binding: Binding) -> Vec<u8> {
    let mut bytes = Handshake::begin(1, 0, binding).unwrap().hello(keys).to_vec();
    if rng.one_in(2) {
        rng.spoil(&mut bytes);
    }
    bytes
}

#[test]
fn introductions() {
    let _turn = turn();
    let (count, began, mut rng) = ((inputs(20_000) / 100).min(20_000), Instant::now(), Rng::new(41));
    let memory = Segment::create(4096).unwrap();
    let mut heard = 0;
    let mut answered = 0;
    // Ranks of one host wait ten seconds for each other; a busy machine is given a thousand strangers in that time.
    let mut meeting = |most: usize| {
        meet_among(Transport::Shm, |record| {
            let keys = keys(record);
            let mut open = Vec::new();
            while heard < most {
                let stream = match unix::connect(&record.socket).unwrap() {
                    unix::Connected::To(stream) => stream,
                    unix::Connected::Busy => {
                        std::thread::sleep(Duration::from_millis(1)); // more than its backlog wait
                        continue;
                    }
                    unix::Connected::Nobody => panic!("it has given up after {heard} of {most} strangers"),
                };
                heard += 1;
                let fds = vec![memory.fd().unwrap(); rng.below(4)];
                unix::send(&stream, &hello(&mut rng, &keys, Binding::Host), &fds).unwrap();
                if rng.one_in(4) {
                    for _ in 0..20 {
                        std::thread::sleep(Duration::from_micros(200));
                        if let Ok(unix::Received::Message(..)) = unix::receive(&stream) {
                            answered += 1;
                            let mut proof = vec![0; rng.below(2 * PROOF)];
                            rng.fill(&mut proof);
                            let _ = unix::send(&stream, &proof, &vec![memory.fd().unwrap(); rng.below(4)]);
                            break;
                        }
                    }
                    open.push(stream);
                }
                if open.len() > 100 {
                    open.clear();
                }
            }
        })
    };
    (1000..count).step_by(1000).chain([count]).for_each(&mut meeting);
    assert!(answered > count / 40, "only {answered} of {count} came as far as a proof");
    report("introductions", count, began, &format!("{answered} were asked for a proof; both ranks met"));
}

#[test]
fn greetings() {
    let _turn = turn();
    let (count, began, mut rng) = ((inputs(20_000) / 100).min(5_000), Instant::now(), Rng::new(42));
    let mut heard = 0;
    let mut answered = 0;
    meet_among(Transport::Tcp, |record| {
        let keys = keys(record);
        let mut open = Vec::new();
        while heard < count {
            let Ok(mut stream) = TcpStream::connect(record.address) else { continue };
            heard += 1;
            let mut bytes = hello(&mut rng, &keys, Binding::Plain);
            bytes.resize(HELLO, 0); // else it waits for the rest
            let _ = stream.write_all(&bytes);
            if rng.one_in(4) {
                stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
                if stream.read_exact(&mut [0; NONCE]).is_ok() {
                    answered += 1;
                    let mut proof = vec![0; PROOF];
                    rng.fill(&mut proof);
                    let _ = stream.write_all(&proof);
                }
                open.push(stream);
            }
            if open.len() > 50 {
                open.clear();
            }
        }
    });
    assert!(answered > count / 40, "only {answered} of {count} came as far as a proof");
    report("greetings", count, began, &format!("{answered} were asked for a proof; both ranks met"));
}
