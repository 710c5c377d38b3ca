//! A peer that writes what it likes into several connections that carry one stream of bytes.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use trigram_engine::transport::bundle::{Between, head, join};
use trigram_engine::transport::stream::{Read, Receiver};

use crate::common::{Rng, inputs, report};
use crate::streams::{Away, Fed, Feed};
use crate::{ACCOUNT, turn};

/// What stands at each position, so that a byte that is passed on out of its order is seen.
fn byte(at: u64) -> u8 {
    (at ^ (at >> 8)) as u8
}

#[test]
fn bundles() {
    let _turn = turn();
    let (count, began, mut rng) = (inputs(6_000), Instant::now(), Rng::new(31));
    let (mut done, mut passed, mut refused) = (0, 0u64, 0);
    let mut into = vec![0; 70_000];
    while done < count {
        let before = ACCOUNT.begin();
        let feeds: Vec<Arc<Mutex<Feed>>> = (0..2 + rng.below(3)).map(|_| Arc::default()).collect();
        let ends = feeds.iter().map(|feed| {
            let receiver: Box<dyn Receiver> = Box::new(Fed(feed.clone()));
            (Box::new(Away(rng.clone())) as _, receiver)
        });
        let (_tx, mut rx) = join(ends.collect(), Between::default());
        let (mut sent, mut got, mut fed, mut over) = (0u64, 0u64, 0, false);
        for _ in 0..64 {
            let len = if rng.one_in(60) { rng.below(1 << 18) } else { [1, 20, 3000, 65536][rng.below(4)] };
            let mut bytes = Vec::new();
            // As a correct peer does, or somewhere else.
            let at = if rng.one_in(40) {
                sent.wrapping_add(rng.below(9000) as u64).wrapping_sub(4000)
            } else {
                sent
            };
            bytes.extend(head(at, len));
            if rng.one_in(60) {
                let at = rng.below(12);
                bytes[at] ^= 1 << rng.below(8);
            }
            bytes.extend((0..len as u64).map(|i| byte(at.wrapping_add(i))));
            sent += len as u64;
            fed += bytes.len();
            let mut feed = feeds[rng.below(feeds.len())].lock().unwrap();
            feed.bytes.extend(bytes);
            feed.chunk = 1 + rng.below(80_000);
            drop(feed);
            done += 1;
            for _ in 0..200 {
                let most = 1 + rng.below(into.len());
                match rx.read(&mut into[..most]) {
                    Ok(Read::Some(n)) => {
                        assert!(into[..n].iter().enumerate().all(|(i, b)| *b == byte(got + i as u64)));
                        got += n as u64;
                    }
                    Ok(_) => break,
                    Err(_) => over = true,
                }
            }
            if over {
                break;
            }
        }
        assert!(got <= sent + 10_000);
        let took = ACCOUNT.peak() - before;
        let most = (1 << 20) + 4 * fed;
        assert!(took < most, "{took} bytes for {fed} that came, at most {most}");
        passed += got;
        refused += usize::from(over);
    }
    assert!(passed > 0 && refused > 0);
    report("bundles", done, began, &format!("{passed} bytes passed on, {refused} peers refused"));
}
