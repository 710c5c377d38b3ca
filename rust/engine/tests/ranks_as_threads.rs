//! The whole engine with ranks as threads: over `mem`, and over shared memory and TCP through the
//! real rendezvous.
#![allow(clippy::unwrap_used)] // a test harness: a failure is a failed test

mod common;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use trigram_core::planner::Call;
use trigram_core::signature::{Collective, Via};
use trigram_core::{DType, Error, ReduceOp, Result};
use trigram_engine::bootstrap::rendezvous::{Rendezvous, Transport};
use trigram_engine::call::request::{Message, Request};
use trigram_engine::runtime::engine::Engine;
use trigram_engine::runtime::group::{Group, call, in_place};

/// Engines of `n` ranks whose only connections are queues.
fn over_mem(n: usize) -> Vec<Arc<Engine>> {
    common::engines(n, |ends, _, _| ends)
}

/// Engines of `n` ranks that met as processes do.
fn met(n: usize, transport: Transport) -> Vec<Arc<Engine>> {
    let mut ranks: Vec<Rendezvous> =
        (0..n).map(|r| Rendezvous::open(r as u32, n, Some("lo"), None, transport).unwrap()).collect();
    let records: Vec<Vec<u8>> = ranks.iter().map(|r| r.record().unwrap()).collect();
    let verdicts: Vec<bool> = std::thread::scope(|s| {
        let all: Vec<_> =
            ranks.iter_mut().map(|r| s.spawn(|| r.handshake(&records, &mut || Ok(())).unwrap())).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let limit = Duration::from_secs(20);
    std::thread::scope(|s| {
        let verdicts = &verdicts;
        let connect = |r: Rendezvous| Arc::new(r.connect(verdicts, limit, &mut || Ok(())).unwrap());
        let all: Vec<_> = ranks.into_iter().map(|r| s.spawn(move || connect(r))).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Runs `f` on every rank, each in a thread, and returns what they return.
fn on_all<T: Send>(engines: Vec<Arc<Engine>>, f: impl Fn(usize, Group) -> T + Sync) -> Vec<T> {
    let n = engines.len();
    std::thread::scope(|s| {
        let f = &f;
        let run = |(rank, engine): (usize, Arc<Engine>)| {
            let group = Group::new(&engine, "world".into(), (0..n as u32).collect(), 0, 0);
            f(rank, group.unwrap())
        };
        let all: Vec<_> = engines.into_iter().enumerate().map(|e| s.spawn(move || run(e))).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn all_reduce(group: &Group, data: &mut [f32], via: Via) -> Result<()> {
    let call = Call { via, ..call(Collective::AllReduce, DType::F32, data.len()) };
    let tensors = in_place(data.as_mut_ptr().cast(), size_of_val(data));
    let request = Request { call, op: ReduceOp::Sum, tensors, message: None, declared: None, pass: 0 };
    // SAFETY: `data` outlives the call.
    unsafe { group.run(request, Some(Duration::from_secs(20)), &mut || Ok(())) }
}

fn check_all_reduce(engines: Vec<Arc<Engine>>) {
    let n = engines.len();
    let results = on_all(engines, |rank, group| {
        let mut seen = Vec::new();
        for via in [Via::Auto, Via::Ring, Via::Tree, Via::RecursiveDoubling, Via::ScatterGather] {
            for len in [0, 1, 5, 1000, 200_003] {
                let mut data: Vec<f32> = (0..len).map(|i| (i % 17) as f32 + rank as f32).collect();
                all_reduce(&group, &mut data, via).unwrap();
                let extra = (n * (n - 1) / 2) as f32;
                let want = |i: usize| (i % 17) as f32 * n as f32 + extra;
                assert!(data.iter().enumerate().all(|(i, x)| *x == want(i)), "{via:?} {len} rank {rank}");
                seen.push(data);
            }
        }
        seen
    });
    assert!(results.iter().all(|r| *r == results[0]), "ranks hold different bits");
}

/// Reductions of more than one turn, and of more operands than fit on the stack.
#[test]
fn large_reductions_take_turns() {
    for engines in [over_mem(2), met(3, Transport::Shm), met(2, Transport::Tcp)] {
        let n = engines.len();
        on_all(engines, |rank, group| {
            let mut data: Vec<f32> = (0..6_000_001).map(|i| (i % 17) as f32 + rank as f32).collect();
            all_reduce(&group, &mut data, Via::Auto).unwrap();
            let want = |i: usize| ((i % 17) * n + n * (n - 1) / 2) as f32;
            assert!(data.iter().enumerate().all(|(i, x)| *x == want(i)));
        });
    }
}

/// A call is refused, or it ends: whenever the engine is shut down.
#[test]
fn no_call_is_left_behind_by_a_shutdown() {
    for seed in 0..40 {
        on_all(over_mem(2), |rank, group| {
            let engine = group.engine().clone();
            std::thread::scope(|s| {
                let caller = s.spawn(|| {
                    let mut begun = Vec::new();
                    for _ in 0..100 {
                        // SAFETY: it has no memory.
                        match unsafe { group.start(Request::nothing(), None) } {
                            Ok(done) => begun.push(done),
                            Err(_) => break,
                        }
                    }
                    for done in begun {
                        let end = std::time::Instant::now() + Duration::from_secs(60);
                        assert!(done.wait(Some(end), &mut || Ok(())).unwrap().is_some(), "rank {rank}");
                    }
                });
                std::thread::sleep(Duration::from_micros(seed * 20));
                engine.shutdown();
                caller.join().unwrap();
            });
        });
    }
}

#[test]
fn a_rank_helps_one_group_at_a_time() {
    let engines = over_mem(3);
    let groups = |engine: &Arc<Engine>, ordinal| {
        Group::new(engine, "aided".into(), vec![0, 1, 2], ordinal, 1).unwrap()
    };
    let (first, second) = (groups(&engines[2], 1), groups(&engines[2], 2));
    first.help().unwrap();
    first.help().unwrap();
    let error = second.help().unwrap_err();
    assert!(error.to_string().contains("helps another group"), "{error}");
    assert!(first.is_helping());
}

/// More groups than peers may mention before this rank knows them: those that are deleted do not count.
#[test]
fn deleted_groups_do_not_count() {
    on_all(over_mem(3), |_, group| {
        let engine = group.engine();
        let barrier = |group: &Group| {
            // SAFETY: it has no memory.
            unsafe { group.run(Request::nothing(), Some(Duration::from_secs(60)), &mut || Ok(())) }.unwrap();
        };
        for ordinal in 1..4300 {
            barrier(&Group::new(engine, "short".into(), vec![0, 1, 2], ordinal, 0).unwrap());
        }
        let last = Group::new(engine, "last".into(), vec![0, 1, 2], 5000, 0).unwrap();
        for _ in 0..20 {
            let mut data = vec![1f32; 300_000];
            all_reduce(&last, &mut data, Via::Auto).unwrap();
            assert!(data.iter().all(|x| *x == 3.0));
        }
    });
}

#[test]
fn parts_of_different_lengths_are_refused() {
    for engines in [over_mem(2), met(2, Transport::Shm)] {
        on_all(engines, |_, group| {
            let mut data = vec![1f32; 30];
            for what in [Collective::AllReduce, Collective::Broadcast, Collective::Gather] {
                let splits = Some((vec![10, 20], vec![10, 20]));
                let call = Call { splits, ..call(what, DType::F32, 15) };
                let tensors = in_place(data.as_mut_ptr().cast(), 120);
                let request =
                    Request { call, op: ReduceOp::Sum, tensors, message: None, declared: None, pass: 0 };
                // SAFETY: `data` outlives the call.
                let error = unsafe { group.run(request, None, &mut || Ok(())) }.unwrap_err();
                assert!(matches!(&error, Error::Unsupported(text) if text.contains(what.name())), "{error}");
            }
        });
    }
}

#[test]
fn all_reduce_over_mem() {
    for n in 1..=5 {
        check_all_reduce(over_mem(n));
    }
}

#[test]
fn all_reduce_over_shared_memory() {
    for n in [2, 3, 5] {
        check_all_reduce(met(n, Transport::Shm));
    }
}

#[test]
fn all_reduce_over_tcp() {
    for n in [2, 3, 5] {
        check_all_reduce(met(n, Transport::Tcp));
    }
}

#[test]
fn a_mismatch_reaches_every_rank_and_the_group_goes_on() {
    for engines in [over_mem(3), met(3, Transport::Shm), met(3, Transport::Tcp)] {
        let errors = on_all(engines, |rank, group| {
            let mut data = vec![1f32; if rank == 2 { 70_000 } else { 60_000 }];
            let error = all_reduce(&group, &mut data, Via::Auto).unwrap_err();
            all_reduce(&group, &mut data[..100], Via::Auto).unwrap();
            assert_eq!(data[0], 3.0);
            error
        });
        for error in errors {
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("60000") && text.contains("70000"), "{text}");
        }
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    for engines in [over_mem(3), met(3, Transport::Shm), met(3, Transport::Tcp)] {
        let (left, gone) = channel();
        let gone = std::sync::Mutex::new(gone);
        let errors = on_all(engines, |rank, group| {
            let mut data = vec![1f32; 10];
            all_reduce(&group, &mut data, Via::Auto).unwrap();
            if rank == 1 {
                group.engine().shutdown();
                left.send(()).unwrap();
                left.send(()).unwrap();
                return None;
            }
            gone.lock().unwrap().recv().unwrap();
            Some(all_reduce(&group, &mut data, Via::Auto).unwrap_err())
        });
        for error in errors.into_iter().flatten() {
            assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
        }
    }
}

#[test]
fn messages_larger_than_any_buffer_arrive() {
    for engines in [over_mem(2), met(2, Transport::Shm), met(2, Transport::Tcp)] {
        on_all(engines, |rank, group| {
            let len = 1_500_001;
            let mut data: Vec<f32> = (0..len).map(|i| if rank == 0 { i as f32 } else { 0.0 }).collect();
            let message = Message { peer: 1 - rank as u32, tag: 7, sends: rank == 0 };
            let request = Request {
                call: call(Collective::SendRecv, DType::F32, len),
                op: ReduceOp::Sum,
                tensors: in_place(data.as_mut_ptr().cast(), len * 4),
                message: Some(message),
                declared: None,
                pass: 0,
            };
            // SAFETY: `data` outlives the call.
            unsafe { group.run(request, Some(Duration::from_secs(20)), &mut || Ok(())) }.unwrap();
            assert!(data.iter().enumerate().all(|(i, x)| *x == i as f32));
        });
    }
}
