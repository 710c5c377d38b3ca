//! A rank of the same host that writes what it likes into everybody's control segments, and lends what it does not have.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use trigram_core::Error;
use trigram_engine::call::calls::Calls;
use trigram_engine::call::request::Submission;
use trigram_engine::drive::progress::Progress;
use trigram_engine::group::members::Members;
use trigram_engine::group::world::{Neighbour, Patience, World};
use trigram_engine::host::control_segment::{ControlSegment, MAX_LOCAL, OP_SLOTS};
use trigram_engine::host::doorbell::Doorbell;
use trigram_engine::host::pipe::PIPE;
use trigram_engine::lanes::pool::Wanted;
use trigram_engine::link::frames::{AHEAD, Rx, Tx};
use trigram_engine::sys::memory::{Segment, SegmentOffset};
use trigram_engine::sys::unix;
use trigram_engine::transport::shm;
use trigram_engine::transport::stream::Read;
use zerocopy::IntoBytes;

use crate::common::{Rng, inputs, report};
use crate::streams::{Fenced, round, some_frame, some_request};
use crate::{ACCOUNT, turn};

fn copy(fd: impl AsFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().unwrap()
}

/// Two ends of a connection that carries descriptors, as ranks of a host have it.
fn socket() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// Writes a number anywhere into the first bytes of a control segment: its mark, its bell, its pipes' counters, its directory.
fn scribble(rng: &mut Rng, control: &ControlSegment) {
    let at = rng.below(24 << 10) / 4 * 4;
    let at = control.segment().at(at, 8).unwrap().as_ptr();
    // SAFETY: it lies inside of the mapping, which is shared memory that others write to at any time.
    unsafe { at.cast::<[u32; 2]>().write_volatile([rng.number() as u32, rng.number() as u32]) };
}

/// Writes to an operation slot: all of what it shows, or one number of it.
fn show(rng: &mut Rng, control: &ControlSegment, place: usize, calls: &Calls) {
    let Some(active) = (!calls.active.is_empty()).then(|| &calls.active[rng.below(calls.active.len())])
    else {
        return;
    };
    let call = active.body.call_id.0 & 0xffff;
    let op_slot = control.op_slot(place, call);
    if rng.one_in(3) {
        let at = std::ptr::from_ref(op_slot) as usize - control.segment().at(0, 8).unwrap().as_ptr() as usize;
        let at = control.segment().at(at + 8 * rng.below(10), 8).unwrap().as_ptr();
        // SAFETY: as above.
        return unsafe { at.cast::<u64>().write_volatile(rng.number()) };
    }
    let mut signature = active.body.signature;
    if rng.one_in(8) {
        let at = rng.below(24);
        signature.as_mut_bytes()[at] = rng.next() as u8;
    }
    let lent = |rng: &mut Rng| {
        let (segment, offset) = ([0, 0, 0, 1, rng.number() >> 1][rng.below(5)], 4 * rng.below(1 << 16));
        let offset = if rng.one_in(6) { rng.number() as usize } else { offset };
        (!rng.one_in(4)).then_some(SegmentOffset { segment, offset })
    };
    op_slot.describe(&signature, lent(rng), lent(rng));
    op_slot.arrive(call, rng.below(6) as u32);
    match rng.below(12) {
        0 => op_slot.fail(call),
        1 => op_slot.leave(call + rng.below(20) as u64),
        _ => {}
    }
}

/// One hostile rank and its control segment, from its own side.
struct Hostile {
    control: ControlSegment,
    socket: OwnedFd,
    /// Into the pipe of rank 0, as any writer: frames that are in order, whatever they say.
    tx: Box<dyn trigram_engine::transport::stream::Sender>,
}

fn meet(mine: &ControlSegment) -> (Hostile, Neighbour, Tx, Rx) {
    let control = ControlSegment::create().unwrap();
    let (ours, theirs) = socket();
    let seen = ControlSegment::map(copy(control.segment().fd().unwrap()), copy(control.bell().fd())).unwrap();
    let own = Segment::create(1 << 20).unwrap();
    unix::send(&theirs, &0u64.to_le_bytes(), &[own.fd().unwrap()]).unwrap();
    let (out, inn) = shm::pair(mine, 0, &seen, 1);
    let (tx, _) = shm::pair(&control, 1, mine, 0);
    (Hostile { control, socket: theirs, tx }, Neighbour::new(seen, Some(ours)), Tx::new(out), Rx::new(1, inn))
}

#[test]
fn control_segments() {
    let _turn = turn();
    let (count, began, mut rng) = (inputs(10_000), Instant::now(), Rng::new(31));
    let (mut done, mut ended, mut failed, mut group) = (0, 0u64, 0usize, 1000u64);
    while done < count {
        let mine = ControlSegment::create().unwrap();
        let (mut hostile, neighbour, tx, rx) = meet(&mine);
        let world = Arc::new(World {
            tuning: Vec::new(),
            rank: 0,
            host_of: vec![0, 0],
            far: Vec::new(),
            through: Vec::new(),
            passing: None,
            bell: mine.bell().clone(),
            control: Some(mine.clone()),
            neighbours: [(1, neighbour)].into(),
            arena: Arc::default(),
            retired: Arc::default(),
            patience: Patience { limit: Duration::from_millis(1200), ..Patience::default() },
            lanes: Wanted::Exactly { lanes: 1, least: 1, sums: 2 },
        });
        let before = ACCOUNT.begin();
        let mut memory: Vec<(Fenced, usize)> = (0..40)
            .map(|_| [1, 100, 5000][rng.below(3)] * 2)
            .map(|len| (Fenced::new(len * 4), len))
            .collect();
        let held: usize = memory.iter().map(|m| m.1 * 16).sum();
        let mut progress = Progress::new(world.clone(), vec![None, Some(tx)], vec![None, Some(rx)]);
        group += 1;
        let Ok(members) = Members::new(group, "here".into(), vec![0, 1], 0, &world) else { continue };
        let members = Arc::new(members);
        let place = hostile.control.enter_group(group).unwrap();
        let (mut completions, mut bytes, mut fed, mut jobs) = (Vec::new(), Vec::new(), 0, 0);
        for _ in 0..400 {
            if jobs < memory.len() && progress.calls.active.len() < OP_SLOTS && rng.one_in(3) {
                let (memory, len) = &mut memory[jobs];
                let request = some_request(&mut rng, memory.at(), *len, 2);
                let completion = Arc::default();
                completions.push(Arc::clone(&completion));
                progress.admit(Submission::new(members.clone(), request, completion, None));
                jobs += 1;
            }
            match rng.below(40) {
                0 => scribble(&mut rng, &hostile.control),
                1 => scribble(&mut rng, &mine),
                2..8 => {
                    bytes.clear();
                    some_frame(&mut rng, &progress.calls, 1, &mut bytes);
                    fed += hostile.tx.write(&bytes, &[]).unwrap();
                }
                8 => show(&mut rng, &mine, place, &progress.calls), // not its own, but it can
                9 => drop(unix::send(
                    &hostile.socket,
                    &bytes[..bytes.len().min(9)],
                    &[hostile.control.bell().fd()],
                )),
                _ => show(&mut rng, &hostile.control, place, &progress.calls),
            }
            done += 1;
            round(&mut progress);
            members.ring();
        }
        let took = ACCOUNT.peak() - before;
        // A pipe whose counters lie gives what its ring holds, again and again: at most a turn in each round.
        let most = (4 << 20) + held + 6 * fed + 2 * AHEAD + 400 * PIPE;
        assert!(took < most, "{took} bytes for {fed} that came, at most {most}");
        ended += progress.counters.calls.load(std::sync::atomic::Ordering::Relaxed);
        failed += completions.iter().filter(|t| matches!(t.outcome(), Some(Err(_)))).count();
        progress.fail_all(&Error::Aborted("the end".into()), false);
        drop(progress);
        memory.iter().for_each(|m| m.0.check());
    }
    assert!(ended > 0 && failed > 0);
    report("control segments", done, began, &format!("{ended} calls ended well, {failed} failed"));
}

#[test]
fn pipes() {
    let _turn = turn();
    let (count, began, mut rng) = (inputs(20_000), Instant::now(), Rng::new(32));
    let (mine, theirs) = (ControlSegment::create().unwrap(), ControlSegment::create().unwrap());
    let (mut tx, _) = shm::pair(&mine, 3, &theirs, 5);
    let (_, mut rx) = shm::pair(&mine, 3, &theirs, 5);
    let (mut into, out) = (vec![0u8; 600], vec![7u8; 600]);
    let counters =
        [(&theirs, 3usize), (&mine, 5)].map(|(control, index)| std::ptr::from_ref(control.pipe(index).0));
    let (mut read, mut written) = (0u64, 0u64);
    for _ in 0..count {
        for at in counters {
            let offset = [0, 8, 64][rng.below(3)];
            let word = if rng.one_in(2) { rng.number() } else { rng.below(2 * PIPE) as u64 };
            // SAFETY: inside of a pipe's 128 bytes, which others write to at any time.
            unsafe { at.cast_mut().byte_add(offset).cast::<u64>().write_volatile(word) };
        }
        let len = rng.below(into.len() + 1);
        let _ = rx.has_input();
        if let Read::Some(n) = rx.read(&mut into[..len]).unwrap() {
            assert!(n > 0 && n <= len);
            read += n as u64;
        }
        let n = tx.write(&out[..len / 2], &out[..len]).unwrap();
        assert!(n <= len + len / 2);
        written += n as u64;
        tx.flush();
    }
    for index in (0..MAX_LOCAL).filter(|i| *i != 3) {
        let (_, ring) = theirs.pipe(index);
        // SAFETY: a ring of its own, of `PIPE` bytes.
        let ring = unsafe { std::slice::from_raw_parts(ring, PIPE) };
        assert!(ring.iter().all(|b| *b == 0), "what goes into one ring stays in it");
    }
    assert!(read > 0 && written > 0);
    report("pipes", count, began, &format!("{read} bytes read, {written} written"));
}

#[test]
fn segments() {
    let _turn = turn();
    let (count, began, mut rng) = (inputs(100_000) / 100, Instant::now(), Rng::new(33));
    let (ours, theirs) = socket();
    let neighbour = Neighbour::new(ControlSegment::create().unwrap(), Some(ours));
    let (small, event) = (Segment::create(8192).unwrap(), Doorbell::event().unwrap());
    let file: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
    let unsealed = rustix::fs::memfd_create("trigram-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let (mut bytes, mut lent, mut refused) = (vec![0u8; 300], 0, 0);
    for _ in 0..count {
        let number = rng.below(4) as u64;
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        let len = if rng.one_in(4) { rng.below(300) } else { 8 };
        let fds = [small.fd().unwrap(), small.fd().unwrap(), event.as_fd(), file.as_fd(), unsealed.as_fd()];
        let from = rng.below(fds.len());
        let fds = &fds[from..(from + rng.below(3)).min(fds.len())];
        unix::send(&theirs, &bytes[..len], fds).unwrap();
        refused += usize::from(neighbour.collect().is_err());
        let place = SegmentOffset { segment: rng.below(5) as u64, offset: rng.number() as usize };
        let len = rng.number() as usize;
        if let Ok(at) = neighbour.lent(place, len) {
            assert!(place.offset + len <= 8192);
            lent += 1;
            if len > 0 {
                // SAFETY: that is what `lent` promises: `len` bytes that can be read.
                let ends = unsafe { [at.read_volatile(), at.add(len - 1).read_volatile()] };
                assert_eq!(ends, [0, 0]);
            }
        }
    }
    assert!(lent > 0 && refused > 0);
    report("segments", count, began, &format!("{refused} refused, {lent} stretches lent"));
}
