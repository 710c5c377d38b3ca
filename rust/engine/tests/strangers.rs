//! Connections between ranks with somebody in between, as real sockets see it.
#![allow(clippy::unwrap_used)] // a test harness: a failure is a failed test

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use trigram_core::{Error, Result};
use trigram_engine::bootstrap::handshake::{Connected, Identity, connect};
use trigram_engine::bootstrap::routes::Peer;

use trigram_engine::security::secret::{Secret, Security};
use trigram_engine::security::tls_keys::Tls;
use trigram_engine::transport::stream::Read as Came;

type Ends = Result<HashMap<u32, Connected>>;

fn identity(rank: u32, secret: &str, tls: bool, streams: Option<u8>) -> Identity {
    let security = Security { secret: Some(Secret::new(secret.as_bytes()).unwrap()), tls };
    let tls = tls.then(|| Tls::new().unwrap());
    Identity { rank, keys: security.keys(&[7; 16]), tls, streams }
}

/// Ranks 0 and 1, where rank 1 finds rank 0 at the address that `between` makes of the true one.
fn meet(
    secrets: [&str; 2],
    tls: bool,
    limit: Duration,
    between: impl FnOnce(SocketAddr) -> SocketAddr,
) -> (Ends, Ends) {
    meet_by(None, secrets, tls, limit, between)
}

/// The same, by several connections.
fn meet_by(
    streams: Option<u8>,
    secrets: [&str; 2],
    tls: bool,
    limit: Duration,
    between: impl FnOnce(SocketAddr) -> SocketAddr,
) -> (Ends, Ends) {
    let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let addresses = [0, 1].map(|r: usize| listeners[r].local_addr().unwrap());
    let detour = between(addresses[0]);
    let [zero, one] = listeners;
    thread::scope(|s| {
        let low = s.spawn(|| {
            let me = identity(0, secrets[0], tls, streams);
            connect(&me, &[Peer::direct(0, 1, addresses[1])], &[], &[zero], 2, limit, &mut || Ok(()))
                .map(|met| met.connected)
        });
        let me = identity(1, secrets[1], tls, streams);
        let high = connect(&me, &[Peer::direct(1, 0, detour)], &[], &[one], 2, limit, &mut || Ok(()))
            .map(|met| met.connected);
        (low.join().unwrap(), high)
    })
}

/// Passes every connection on, and keeps what travels from who calls to who is called.
fn forwarder(to: SocketAddr, seen: Arc<Mutex<Vec<u8>>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for near in listener.incoming() {
            let (near, far) = (near.unwrap(), TcpStream::connect(to).unwrap());
            let pass = |mut a: TcpStream, mut b: TcpStream, seen: Option<Arc<Mutex<Vec<u8>>>>| {
                let mut bytes = [0; 4096];
                while let Ok(n @ 1..) = a.read(&mut bytes) {
                    if let Some(seen) = &seen {
                        seen.lock().unwrap().extend(&bytes[..n]);
                    }
                    if b.write_all(&bytes[..n]).is_err() {
                        break;
                    }
                }
                let _ = b.shutdown(Shutdown::Write);
            };
            let (near2, far2, seen) = (near.try_clone().unwrap(), far.try_clone().unwrap(), seen.clone());
            thread::spawn(move || pass(near, far, Some(seen)));
            thread::spawn(move || pass(far2, near2, None));
        }
    });
    address
}

/// Ends TLS on both sides and passes on what is inside: the four messages of the handshake.
fn man_in_the_middle(to: SocketAddr, passed: Arc<Mutex<Vec<usize>>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let tls = Tls::new().unwrap();
        for near in listener.incoming() {
            let (mut near, mut far) = (near.unwrap(), TcpStream::connect(to).unwrap());
            let rustls::Connection::Server(mut inner) = tls.accepting().unwrap() else { return };
            let rustls::Connection::Client(mut outer) = tls.connecting().unwrap() else { return };
            let mut near = rustls::Stream::new(&mut inner, &mut near);
            let mut far = rustls::Stream::new(&mut outer, &mut far);
            for (message, len) in [64, 32, 32, 33].into_iter().enumerate() {
                let mut bytes = vec![0; len];
                let (from, to): (&mut dyn Read, &mut dyn Write) =
                    if message % 2 == 0 { (&mut near, &mut far) } else { (&mut far, &mut near) };
                if from.read_exact(&mut bytes).and_then(|()| to.write_all(&bytes)).is_err() {
                    break;
                }
                passed.lock().unwrap().push(len);
            }
        }
    });
    address
}

/// Sends `bytes` from rank 1 to rank 0 through the transport; what arrived.
fn carry(low: Ends, high: Ends, bytes: &[u8]) -> Vec<u8> {
    let high = high.unwrap().remove(&0).unwrap();
    assert!(high.prepare());
    let (mut tx, mut told) = high.split((1, 0), true).unwrap();
    let (mut tells, mut rx) = low.unwrap().remove(&1).unwrap().split((0, 1), true).unwrap();
    let (mut sent, mut got) = (0, Vec::new());
    let mut into = vec![0; 100_000];
    let mut waits = 0;
    let began = Instant::now();
    while got.len() < bytes.len() {
        assert!(began.elapsed() < Duration::from_secs(30), "{sent} sent, {} came", got.len());
        // All that the sender takes; then all that there is to receive.
        while sent < bytes.len() {
            let (head, body) = bytes[sent..].split_at(56.min(bytes.len() - sent));
            let n = tx.write(head, body).unwrap();
            sent += n;
            if n == 0 {
                waits += 1;
                break;
            }
        }
        tx.wake();
        tx.drain().unwrap();
        rx.wake();
        while let Came::Some(n) = rx.read(&mut into).unwrap() {
            got.extend(&into[..n]);
        }
        // What has arrived is told the other way.
        tells.drain().unwrap();
        told.wake();
        assert_eq!(told.read(&mut into).unwrap(), Came::Nothing);
    }
    assert_eq!(sent, bytes.len());
    assert!(waits > 0, "so much cannot have fitted the socket: the sender buffers without bound");
    tx.close();
    while rx.read(&mut into).unwrap() != Came::Closed {
        rx.wake();
        assert!(began.elapsed() < Duration::from_secs(30), "the end is not heard");
    }
    got
}

fn contains(hay: &[u8], needle: &[u8]) -> bool {
    hay.windows(needle.len()).any(|w| w == needle)
}

#[test]
fn what_travels_under_tls_arrives_and_is_not_to_be_seen() {
    let text = b"nobody should read this: ";
    let bytes: Vec<u8> = (0..48_000_000).map(|i| text[i % text.len()] ^ (i >> 20) as u8).collect();
    for (tls, streams) in [(false, None), (true, None), (false, Some(3)), (true, Some(3))] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let detour = |to| forwarder(to, seen.clone());
        let (low, high) = meet_by(streams, ["s", "s"], tls, Duration::from_secs(20), detour);
        let numbers = [&low, &high].map(|end| end.as_ref().unwrap().values().next().unwrap().streams.len());
        assert_eq!(numbers, [usize::from(streams.unwrap_or(1)); 2]);
        assert!(carry(low, high, &bytes) == bytes, "tls {tls}: other bytes arrived than were sent");
        assert_eq!(contains(&seen.lock().unwrap(), text), !tls, "tls {tls}");
    }
}

#[test]
fn a_frame_counts_as_sent_only_when_it_has_left() {
    let (low, high) = meet(["s", "s"], true, Duration::from_secs(20), |to| to);
    let (mut tx, _rx) = high.unwrap().remove(&0).unwrap().split((0, 1), true).unwrap();
    let (_tx, mut rx) = low.unwrap().remove(&1).unwrap().split((0, 1), true).unwrap();
    let frame = vec![7; 100_000];
    let (mut frames, mut part) = (0, 0);
    // Nobody reads, until a frame does not fit any more.
    loop {
        let n = tx.write(&[], &frame[part..]).unwrap();
        part += n;
        if n == 0 {
            break;
        }
        if part == frame.len() {
            (frames, part) = (frames + 1, 0);
        }
    }
    assert!(frames > 0 && part > 0, "a frame of which a part is inside is begun: {frames}, {part}");
    // The sender is left alone, as the link leaves one alone that has nothing to send.
    let (mut got, mut into) = (0, vec![0; 100_000]);
    let began = Instant::now();
    while got < frames * frame.len() {
        assert!(began.elapsed() < Duration::from_secs(10), "{frames} frames were sent, {got} bytes came");
        rx.wake();
        if let Came::Some(n) = rx.read(&mut into).unwrap() {
            got += n;
        }
    }
}

#[test]
fn who_finds_nobody_says_where_and_what_the_system_answered() {
    let limit = Duration::from_secs(2);
    let text = |end: Ends| match end.err().unwrap() {
        error @ Error::Timeout { .. } => error.to_string(),
        other => panic!("{other}"),
    };
    // Nobody listens there; somebody does, and says nothing.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mute = silent.local_addr().unwrap();
    for (detour, answer) in [(free, "refused"), (mute, "no answer")] {
        let (low, high) = meet(["s", "s"], false, limit, |_| detour);
        let (low, high) = (text(low), text(high));
        let tried = format!("rank 0 announced {detour}, and rank 1 tried to connect to it: {answer}");
        assert!(high.contains(&tried) && high.contains("also an address of the host of rank 1"), "{high}");
        assert!(high.contains("TRIGRAM_IFACE") && high.contains("waiting for rank 0"), "{high}");
        assert!(low.contains("no connection of rank 1 has come there"), "{low}");
    }
}

#[test]
fn a_man_in_the_middle_of_tls_is_refused() {
    let passed = Arc::new(Mutex::new(Vec::new()));
    let detour = |to| man_in_the_middle(to, passed.clone());
    let (low, high) = meet(["s", "s"], true, Duration::from_secs(3), detour);
    // He did pass on all that both said.
    assert!(passed.lock().unwrap().starts_with(&[64, 32, 32, 33]), "{:?}", passed.lock().unwrap());
    let (low, high) = (low.err().unwrap(), high.err().unwrap());
    assert!(matches!(&high, Error::Auth(e) if e.contains("rank 0 at") && e.contains("intercepts")), "{high}");
    assert!(matches!(&low, Error::Auth(e) if e.contains("rank 1")), "{low}");
}

#[test]
fn another_secret_is_refused_at_once_where_it_calls() {
    let began = Instant::now();
    let (low, high) = meet(["s", "t"], false, Duration::from_secs(4), |to| to);
    assert!(matches!(high.err().unwrap(), Error::Auth(e) if e.contains("TRIGRAM_SECRET")));
    assert!(matches!(low.err().unwrap(), Error::Auth(e) if e.contains("rank 1")));
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn what_is_altered_under_tls_is_not_passed_on() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // Passes on all that comes in order, but for one bit far behind the handshake.
    let detour = |to| {
        thread::spawn(move || {
            let (near, far) = (listener.accept().unwrap().0, TcpStream::connect(to).unwrap());
            let (mut from, mut back) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut from, &mut back));
            let (mut near, mut far) = (near, far);
            let (mut bytes, mut passed) = ([0; 4096], 0);
            while let Ok(n @ 1..) = near.read(&mut bytes) {
                if (passed..passed + n).contains(&50_000) {
                    bytes[50_000 - passed] ^= 1;
                }
                passed += n;
                if far.write_all(&bytes[..n]).is_err() {
                    break;
                }
            }
        });
        address
    };
    let (low, high) = meet(["s", "s"], true, Duration::from_secs(20), detour);
    let (mut tx, _rx) = high.unwrap().remove(&0).unwrap().split((0, 1), true).unwrap();
    let (_tx, mut rx) = low.unwrap().remove(&1).unwrap().split((0, 1), true).unwrap();
    let sent = [5; 100_000];
    assert!(tx.write(&sent[..56], &sent[56..]).unwrap() > 60_000);
    let (mut got, mut into) = (0, vec![0; 100_000]);
    let began = Instant::now();
    let error = loop {
        assert!(began.elapsed() < Duration::from_secs(20) && got < 50_000, "{got} bytes passed");
        match rx.read(&mut into) {
            Ok(Came::Some(n)) => {
                assert!(into[..n].iter().all(|b| *b == 5));
                got += n;
            }
            Ok(_) => thread::sleep(Duration::from_millis(1)),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Io { .. }), "{error}");
}
