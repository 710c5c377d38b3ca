//! Random faults, with a seed: no hang, no wrong number, and every survivor names the rank that died or was cut off.
//!
//! Ranks are threads whose connections are queues that can be damaged. In each episode the ranks of a small
//! world make random calls and check every number; in the middle one rank dies, is cut off, or one bit
//! of what it sends is flipped. Survivors then go on in a group of their own. `TRIGRAM_FAULTS` says
//! how many episodes; each follows from its number alone.
#![allow(clippy::unwrap_used, clippy::panic)] // a test harness: a failure is a failed test

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use trigram_core::planner::Call;
use trigram_core::signature::{Collective, Via};
use trigram_core::{DType, Error, ReduceOp, Result};
use trigram_engine::call::request::{Message, Request};
use trigram_engine::runtime::engine::Engine;
use trigram_engine::runtime::group::{Group, call, in_place};
use trigram_engine::transport::stream::{Read, Receiver, Sender};

const FLIP: u32 = 1;
const CUT: u32 = 2;
/// Nobody waits longer than this for anything.
const LIMIT: Duration = Duration::from_secs(20);

/// SplitMix64.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// What happens to a rank's connections.
type Fate = Arc<AtomicU32>;

struct Damaged<T>(T, Fate);

impl Sender for Damaged<Box<dyn Sender>> {
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
        match self.1.load(Ordering::Relaxed) {
            CUT => Ok(head.len() + body.len()),
            FLIP if !body.is_empty() => {
                let mut bytes = [head, body].concat();
                let at = head.len() + body.len() / 2;
                bytes[at] ^= 4;
                let n = self.0.write(&bytes, &[])?;
                if n > at {
                    self.1.store(0, Ordering::Relaxed);
                }
                Ok(n)
            }
            _ => self.0.write(head, body),
        }
    }

    fn flush(&mut self) {
        self.0.flush();
    }

    fn is_summed(&self) -> bool {
        self.0.is_summed()
    }

    fn close(&mut self) {
        if self.1.load(Ordering::Relaxed) != CUT {
            self.0.close();
        }
    }
}

impl Receiver for Damaged<Box<dyn Receiver>> {
    fn read(&mut self, into: &mut [u8]) -> Result<Read> {
        let read = self.0.read(into)?;
        Ok(if self.1.load(Ordering::Relaxed) == CUT { Read::Nothing } else { read })
    }

    fn has_input(&self) -> bool {
        self.0.has_input() && self.1.load(Ordering::Relaxed) != CUT
    }
}

fn engines(fates: &[Fate]) -> Vec<Arc<Engine>> {
    common::engines(fates.len(), common::patient(Duration::from_millis(1200)), |(out, inn), from, to| {
        (Box::new(Damaged(out, fates[from].clone())), Box::new(Damaged(inn, fates[to].clone())))
    })
}

/// One random call, the same on all ranks, with numbers that tell whether it is right.
fn some_call(group: &Group, rng: &mut Rng, me: usize) -> Result<()> {
    let n = group.members().ranks.len();
    let via = [Via::Auto, Via::Ring, Via::Tree, Via::RecursiveDoubling, Via::ScatterGather][rng.below(5)];
    let (kind, len) = (rng.below(6), [1, 7, 1000, 70_000][rng.below(4)]);
    let root = rng.below(n);
    let value = |rank: usize, i: usize| (rank + 1) as f32 + (i % 13) as f32;
    let sum = |i: usize| (0..n).map(|r| value(r, i)).sum::<f32>();
    let right = |got: &[f32], want: &dyn Fn(usize) -> f32| {
        if let Some(i) = (0..got.len()).find(|&i| got[i] != want(i)) {
            panic!("rank {me}: kind {kind}, {via:?}, {len}: element {i} is {} and not {}", got[i], want(i));
        }
    };
    let mut mine: Vec<f32> = (0..len).map(|i| value(me, i)).collect();
    let mut out = vec![0f32; len * n];
    let (at, all) = (mine.as_mut_ptr().cast::<u8>(), out.as_mut_ptr().cast::<u8>());
    let mut request = Request { ..Request::nothing() };
    request.op = ReduceOp::Sum;
    request.tensors = in_place(at, len * 4);
    let base = call(Collective::AllReduce, DType::F32, len);
    match kind {
        0 | 1 => request.call = Call { via, ..base },
        2 => request.call = Call { what: Collective::Broadcast, root: root as u32, ..base },
        3 => {
            request.call = Call { what: Collective::AllGather, ..base };
            (request.tensors.output, request.tensors.output_len) = (all, len * n * 4);
        }
        4 => request.call = Call { what: Collective::Barrier, len: 0, dtype: DType::U8, ..base },
        // Neighbours in a ring pass what they have to the right.
        _ => {
            let right_hand = (me + 1) % n;
            let left_hand = (me + n - 1) % n;
            let message =
                |sends, peer: usize| Some(Message { peer: peer as u32, tag: 3, sends, shorter: false });
            let base = call(Collective::SendRecv, DType::F32, len);
            let send = Request { call: base.clone(), message: message(true, right_hand), ..request };
            let take = Request {
                call: base,
                message: message(false, left_hand),
                tensors: in_place(all, len * 4),
                lists: None,
                op: ReduceOp::Sum,
                declared: None,
                pass: 0,
                update: None,
            };
            // SAFETY: both tensors live until both completion handles are resolved.
            let sent = unsafe { group.start(send, None)? };
            // SAFETY: as above.
            let taken = unsafe { group.start(take, None)? };
            let began = Instant::now();
            let mut failed = Ok(());
            for completion in [taken, sent] {
                // Messages concern two ranks only: who hears of a loss elsewhere stops waiting by itself.
                loop {
                    let soon = Some(Instant::now() + Duration::from_millis(50));
                    if let Some(end) = completion.wait(soon, &mut || Ok(()))? {
                        failed = failed.and(end);
                        break;
                    }
                    let lost = group.engine().counters().failures().losses();
                    let gone = lost.iter().find(|(rank, _)| group.members().ranks.contains(rank));
                    if let Some(&(rank, _)) = gone.filter(|_| began.elapsed() > Duration::from_millis(500)) {
                        std::mem::forget((mine, out)); // the calls may still be under way
                        return Err(Error::PeerLost { rank, what: "a message".into(), why: String::new() });
                    }
                    assert!(began.elapsed() < LIMIT, "rank {me} hangs in a message of {len}");
                }
            }
            failed?;
            right(&out[..len], &|i| value(left_hand, i));
            return Ok(());
        }
    }
    // SAFETY: the vectors outlive the call, and nobody else has them.
    let done = unsafe { group.run(request, Some(LIMIT), &mut || Ok(())) };
    if matches!(done, Err(Error::Timeout { .. })) {
        panic!("rank {me} hangs in kind {kind}, {via:?}, {len}");
    }
    done?;
    match kind {
        0 | 1 => right(&mine, &sum),
        2 => right(&mine, &|i| value(root, i)),
        3 => right(&out, &|i| value(i / len, i % len)),
        _ => {}
    }
    Ok(())
}

/// The rank that an error blames.
fn blamed(error: &Error) -> Option<u32> {
    match error {
        Error::PeerLost { rank, .. } | Error::Corrupt { rank, .. } => Some(*rank),
        _ => None,
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Kill,
    Cut,
    Flip,
}

/// One world and its fault; what was done, and whether anybody noticed.
fn episode(seed: u64) -> (Fault, bool) {
    let mut rng = Rng(seed);
    let n = 2 + rng.below(4);
    let victim = rng.below(n);
    // A cut is noticed by silence, which takes a while.
    let fault = [Fault::Kill, Fault::Flip][rng.below(2)];
    let fault = if rng.below(40) == 0 { Fault::Cut } else { fault };
    let strike = rng.below(12);
    let calls = rng.next();
    let fates: Vec<Fate> = (0..n).map(|_| Fate::default()).collect();
    let engines = engines(&fates);
    let fates = &fates;
    let noticed = &AtomicBool::new(false);
    std::thread::scope(|s| {
        let run = |(me, engine): (usize, Arc<Engine>)| {
            move || {
                let ranks: Vec<u32> = (0..n as u32).collect();
                let group = Group::new(&engine, "all".into(), ranks, 0, 0).unwrap();
                let mut rng = Rng(calls);
                let mut failed = None;
                for i in 0..40 {
                    if me == victim && i == strike {
                        if fault == Fault::Cut {
                            std::thread::sleep(Duration::from_millis(300)); // all have heard of it once
                        }
                        let fate = if fault == Fault::Flip { FLIP } else { CUT };
                        fates[me].store(fate, Ordering::Relaxed);
                        if fault == Fault::Kill {
                            return; // the engine goes, and its farewell does not get through
                        }
                    }
                    if let Err(error) = some_call(&group, &mut rng, me) {
                        failed = Some(error);
                        break;
                    }
                }
                if me == victim {
                    return;
                }
                let Some(error) = failed else {
                    // A flipped bit may have been the last of what it sent.
                    assert!(fault == Fault::Flip, "rank {me} of {n} noticed nothing of {fault:?} {victim}");
                    return;
                };
                noticed.store(true, Ordering::Relaxed);
                let who = blamed(&error);
                let who = who.unwrap_or_else(|| panic!("rank {me} of {n}: {fault:?} of {victim}: {error}"));
                // Between two, each may be right about a damaged connection.
                let fair = who as usize == victim || fault == Fault::Flip;
                assert!(fair, "rank {me} of {n} blames {who} for {fault:?} of {victim}: {error}");
                if fault == Fault::Flip || n == 2 {
                    return;
                }
                let living = (0..n as u32).filter(|&r| r as usize != victim).collect();
                let group = Group::new(&engine, "the living".into(), living, 1, 0).unwrap();
                let place = group.members().me as usize;
                let mut rng = Rng(calls ^ 1);
                for _ in 0..3 {
                    some_call(&group, &mut rng, place)
                        .unwrap_or_else(|e| panic!("rank {me} of the living: {e}"));
                }
            }
        };
        let all: Vec<_> = engines.into_iter().enumerate().map(|e| s.spawn(run(e))).collect();
        all.into_iter().for_each(|t| t.join().unwrap_or_else(|_| panic!("episode {seed}")));
    });
    (fault, noticed.load(Ordering::Relaxed))
}

#[test]
fn random_faults_are_survived() {
    let count = std::env::var("TRIGRAM_FAULTS").ok().and_then(|n| n.parse().ok()).unwrap_or(150);
    let (mut done, mut noticed) = ([0; 3], [0; 3]);
    for seed in 0..count {
        let (fault, was_noticed) = episode(seed);
        done[fault as usize] += 1;
        noticed[fault as usize] += usize::from(was_noticed);
    }
    let [kills, cuts, flips] = done;
    println!("{count} episodes: {kills} kills, {cuts} cuts, {flips} flipped bits; noticed {noticed:?}");
    // A bit may have been that of the last call; most are not.
    assert!(
        (noticed[0], noticed[1]) == (kills, cuts) && noticed[2] * 2 >= flips,
        "{done:?}, noticed {noticed:?}"
    );
    assert!(count < 150 || done.iter().all(|&n| n > 0), "{done:?}");
}
