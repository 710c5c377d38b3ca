//! What strangers and broken peers may send: handles, hellos, chunks' headers. Nothing panics, and nothing goes
//! outside of the buffer. `TRIGRAM_FUZZ` says how many inputs, see the tests of that name in the other crates.

use std::time::Instant;

#[path = "../../core/tests/common/mod.rs"]
mod common;

use self::common::{Rng, inputs, report};
use crate::chunk::{self, Chunk, Incoming};
use crate::handle::{self, Handle};
use crate::hello::{self, Hello};
use crate::region::Region;
use crate::settings::MAX_STREAMS;

#[test]
fn headers() {
    let (count, began, mut rng) = (inputs(100_000), Instant::now(), Rng::new(51));
    let token = [7u8; 32];
    let hello = Hello { connection: [9; 16], stream: 1, streams: 4 }.write(&token);
    let handle = Handle { address: "10.1.2.3:4567".parse().unwrap(), token }.write();
    let mut good = [0usize; 3];
    let mut memory = vec![0u8; 300];
    for _ in 0..count {
        let mut bytes = hello.to_vec();
        rng.spoil(&mut bytes);
        bytes.resize(hello::SIZE, 0);
        if let Some(read) = Hello::read(&bytes.try_into().unwrap(), &token) {
            assert!(read.stream < read.streams && read.streams <= MAX_STREAMS);
            good[0] += 1;
        }
        let mut bytes = handle.to_vec();
        rng.spoil(&mut bytes);
        bytes.resize(handle::SIZE, 0);
        good[1] += usize::from(Handle::read(&bytes.try_into().unwrap()).is_ok());
        // SAFETY: `memory` outlives it.
        let mut incoming = Incoming::new(unsafe { Region::new(memory.as_mut_ptr().add(100), 100) });
        let total = rng.below(120);
        for _ in 0..4 {
            let offset = rng.below(total + 1);
            let sent = Chunk { number: rng.next(), offset, len: rng.below(total - offset + 1), total };
            let mut bytes = sent.header().to_vec();
            if rng.one_in(2) {
                rng.spoil(&mut bytes);
                bytes.resize(chunk::HEADER, 0);
            }
            let Ok(chunk) = Chunk::read(&bytes.try_into().unwrap()) else { continue };
            if incoming.claim(chunk).is_ok() {
                assert!(chunk.offset + chunk.len <= 100);
                incoming.region.room(chunk.offset, chunk.len).fill(1);
                incoming.receive(chunk.len);
                good[2] += 1;
            }
            assert!(incoming.size().is_none_or(|size| size <= 100));
        }
    }
    assert!(memory[..100].iter().chain(&memory[200..]).all(|b| *b == 0), "nothing outside of the buffer");
    assert!(good.iter().all(|good| *good > count / 100), "{good:?} of {count}: the inputs say little");
    report("plugin headers", count, began, &format!("{good:?} hellos, handles and chunks taken"));
}
