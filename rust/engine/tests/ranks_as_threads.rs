//! The whole engine with ranks as threads: over `mem`, and over shared memory and TCP through the
//! real rendezvous.
#![allow(clippy::unwrap_used)] // a test harness: a failure is a failed test

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use trigram_core::planner::Call;
use trigram_core::signature::{Collective, Via};
use trigram_core::{DType, Error, ReduceOp, Result};
use trigram_engine::bootstrap::rendezvous::{Rendezvous, Transport};
use trigram_engine::call::request::{Message, Request};
use trigram_engine::runtime::engine::Engine;
use trigram_engine::runtime::group::{Group, call, in_place};

/// Engines of `n` ranks whose only connections are queues.
fn over_mem(n: usize) -> Vec<Arc<Engine>> {
    common::engines(n, Duration::from_secs(15), |ends, _, _| ends)
}

/// Engines of `n` ranks that met as processes do.
fn met(n: usize, transport: Transport) -> Vec<Arc<Engine>> {
    let mut ranks: Vec<Rendezvous> =
        (0..n).map(|r| Rendezvous::open(r as u32, n, Some("lo"), None, transport).unwrap()).collect();
    let records: Vec<Vec<u8>> = ranks.iter().map(|r| r.record().unwrap()).collect();
    let limit = Duration::from_secs(20);
    let verdicts: Vec<bool> = std::thread::scope(|s| {
        let handshake = |r: &mut Rendezvous| r.handshake(&records, limit, &mut || Ok(())).unwrap();
        let all: Vec<_> = ranks.iter_mut().map(|r| s.spawn(move || handshake(r))).collect();
        all.into_iter().map(|t| t.join().unwrap()).collect()
    });
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
    run(group, Call { via, ..call(Collective::AllReduce, DType::F32, data.len()) }, data)
}

/// A call in place.
fn run(group: &Group, call: Call, data: &mut [f32]) -> Result<()> {
    let tensors = in_place(data.as_mut_ptr().cast(), size_of_val(data));
    let request = Request {
        call,
        op: ReduceOp::Sum,
        tensors,
        lists: None,
        message: None,
        declared: None,
        pass: 0,
        update: None,
    };
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

/// Small calls of one host: some that all make at once, some that begin early and go on as ordinary calls, some that
/// differ, and slots that are used again and again.
#[test]
fn small_calls_are_right_whoever_comes_first() {
    for n in [2, 3, 5] {
        on_all(met(n, Transport::Shm), |rank, group| {
            for i in 0..3000usize {
                if i % 97 == rank * 11 {
                    std::thread::sleep(Duration::from_micros(300));
                }
                let len = [1, 4, 5, 1000, 3][i % 5]; // up to 16 bytes, and more
                if i % 501 == 500 {
                    let error = all_reduce(&group, &mut vec![0.0; len + usize::from(rank == 1)], Via::Auto);
                    assert!(
                        matches!(error, Err(Error::Mismatch { .. })),
                        "call {i} of rank {rank}: {error:?}"
                    );
                    continue;
                }
                let mut data: Vec<f32> = (0..len).map(|k| (k + i % 7 + rank) as f32).collect();
                all_reduce(&group, &mut data, Via::Auto).unwrap();
                let want = |k: usize| ((k + i % 7) * n + n * (n - 1) / 2) as f32;
                assert!(
                    data.iter().enumerate().all(|(k, x)| *x == want(k)),
                    "call {i} of rank {rank}: {data:?}"
                );
            }
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
                engine.shutdown(&mut || Ok(())).unwrap();
                caller.join().unwrap();
            });
        });
    }
}

/// A thread waits for a call whose operation slot an earlier call has, which has no partner.
#[test]
fn a_shutdown_ends_a_call_that_waits_for_its_slot() {
    for _ in 0..5 {
        let engines = met(2, Transport::Shm);
        let group = Group::new(&engines[0], "alone".into(), vec![0, 1], 1, 0).unwrap();
        // SAFETY: they have no memory.
        let begun: Vec<_> =
            (0..8).map(|_| unsafe { group.start(Request::nothing(), None) }.unwrap()).collect();
        let made = group.clone();
        // SAFETY: as above.
        let caller =
            std::thread::spawn(move || unsafe { group.run(Request::nothing(), None, &mut || Ok(())) });
        while made.next() < 9 {
            std::thread::yield_now(); // on a busy machine the thread begins late
        }
        std::thread::sleep(Duration::from_millis(5));
        let (ended, end) = channel();
        let engine = engines[0].clone();
        std::thread::spawn(move || {
            engine.shutdown(&mut || Ok(())).unwrap();
            ended.send(())
        });
        assert!(end.recv_timeout(Duration::from_secs(10)).is_ok(), "the shutdown does not end");
        assert!(matches!(caller.join().unwrap(), Err(Error::Aborted(_))));
        assert!(begun.iter().all(|done| matches!(done.outcome(), Some(Err(Error::Aborted(_))))));
    }
}

/// Small calls are begun by the thread that starts them; here nobody comes to wait for them, and nobody asks for them.
#[test]
fn a_small_call_that_nobody_waits_for_ends() {
    for engines in [met(3, Transport::Auto), met(3, Transport::Tcp), over_mem(2)] {
        on_all(engines, |rank, group| {
            let mut data = vec![[rank as f32; 40]; 30];
            let calls: Vec<_> = data
                .iter_mut()
                .enumerate()
                .map(|(i, data)| {
                    // Ranks come at different times.
                    std::thread::sleep(Duration::from_micros(((rank * 7 + i) % 5 * 300) as u64));
                    let call = call(Collective::AllReduce, DType::F32, data.len());
                    let tensors = in_place(data.as_mut_ptr().cast(), size_of_val(data));
                    let request = Request {
                        call,
                        op: ReduceOp::Sum,
                        tensors,
                        lists: None,
                        message: None,
                        declared: None,
                        pass: 0,
                        update: None,
                    };
                    // SAFETY: the loop below waits until all have ended.
                    unsafe { group.start(request, None).unwrap() }
                })
                .collect();
            let end = Instant::now() + Duration::from_secs(60);
            while !calls.iter().all(|call| call.is_done()) {
                assert!(Instant::now() < end, "rank {rank}");
                std::thread::sleep(Duration::from_millis(1));
            }
            let sum = (0..group.members().ranks.len()).sum::<usize>() as f32;
            assert!(data.iter().flatten().all(|&x| x == sum));
        });
    }
}

/// Who waits for an asynchronous call drives it, and comes back when its time is over; the call goes on.
#[test]
fn a_wait_ends_at_its_deadline_and_the_call_goes_on() {
    let rank_0_gave_up = std::sync::Barrier::new(2);
    on_all(met(2, Transport::Auto), |rank, group| {
        let engine = group.engine().clone();
        let started = || {
            // SAFETY: it has no memory.
            unsafe { group.start(Request::nothing(), None).unwrap() }
        };
        let told = Arc::new(AtomicUsize::new(0));
        if rank == 1 {
            rank_0_gave_up.wait();
        }
        let call = started();
        let tell = told.clone();
        call.when_done(move || assert_eq!(tell.fetch_add(1, Ordering::SeqCst), 0));
        if rank == 0 {
            let (before, limit) = (Instant::now(), Duration::from_millis(60));
            assert_eq!(engine.wait(&call, Some(before + limit), &mut || Ok(())), Ok(None));
            assert!(before.elapsed() >= limit && before.elapsed() < Duration::from_secs(20));
            let stop = Error::Aborted("stopped".into());
            let mut stopping = || Err(stop.clone());
            assert_eq!(engine.wait(&call, None, &mut stopping), Err(stop.clone()));
            assert!(!call.is_done() && told.load(Ordering::SeqCst) == 0);
            rank_0_gave_up.wait();
        }
        assert_eq!(engine.wait(&call, None, &mut || Ok(())), Ok(Some(Ok(()))));
        assert_eq!(told.load(Ordering::SeqCst), 1);
        let tell = told.clone();
        call.when_done(move || assert_eq!(tell.fetch_add(1, Ordering::SeqCst), 1));
        assert_eq!(told.load(Ordering::SeqCst), 2, "at once, since it has ended");
        // With a listener, it ends though nobody waits.
        let (call, tell) = (started(), told.clone());
        call.when_done(move || assert_eq!(tell.fetch_add(1, Ordering::SeqCst), 2));
        engine.hurry();
        let end = Instant::now() + Duration::from_secs(60);
        while told.load(Ordering::SeqCst) < 3 {
            assert!(Instant::now() < end, "rank {rank}");
            std::thread::sleep(Duration::from_millis(1));
        }
        all_reduce(&group, &mut [1.0], Via::Auto).unwrap();
    });
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
                let request = Request {
                    call,
                    op: ReduceOp::Sum,
                    tensors,
                    lists: None,
                    message: None,
                    declared: None,
                    pass: 0,
                    update: None,
                };
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
                group.engine().shutdown(&mut || Ok(())).unwrap();
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

/// Rank 2 is alive and waits; rank 0 is told to send it away. Rank 1 hears of that from rank 0 only, and hears rank 2.
#[test]
fn all_believe_at_once_who_was_sent_away() {
    for transport in [Transport::Shm, Transport::Tcp] {
        let engines = met(3, transport);
        let boss = engines[0].clone();
        let began = Instant::now();
        let errors = on_all(engines, |rank, group| {
            if rank == 0 {
                std::thread::sleep(Duration::from_millis(100));
                boss.send_away(2, "the operator says so".into()).unwrap();
                boss.send_away(7, "there is no such rank".into()).unwrap();
            }
            // Rank 2 does not make this call: it hangs.
            if rank < 2 {
                return all_reduce(&group, &mut [0.0; 4], Via::Auto).unwrap_err().to_string();
            }
            while !group.engine().counters().failures().am_sent_away() {
                std::thread::sleep(Duration::from_millis(1));
            }
            all_reduce(&group, &mut [0.0; 4], Via::Auto).unwrap_err().to_string()
        });
        assert!(began.elapsed() < Duration::from_secs(10), "it was not believed at once");
        for error in &errors[..2] {
            assert!(error.contains("rank 2 is gone (the operator says so)"), "{transport:?}: {errors:?}");
        }
        assert!(errors[2].contains("it evicted this rank"), "{transport:?}: {errors:?}");
    }
}

#[test]
fn messages_larger_than_any_buffer_arrive() {
    for engines in [over_mem(2), met(2, Transport::Shm), met(2, Transport::Tcp)] {
        on_all(engines, |rank, group| {
            let len = 1_500_001;
            let mut data: Vec<f32> = (0..len).map(|i| if rank == 0 { i as f32 } else { 0.0 }).collect();
            let message = Message { peer: 1 - rank as u32, tag: 7, sends: rank == 0, shorter: false };
            let request = Request {
                call: call(Collective::SendRecv, DType::F32, len),
                op: ReduceOp::Sum,
                tensors: in_place(data.as_mut_ptr().cast(), len * 4),
                lists: None,
                message: Some(message),
                declared: None,
                pass: 0,
                update: None,
            };
            // SAFETY: `data` outlives the call.
            unsafe { group.run(request, Some(Duration::from_secs(20)), &mut || Ok(())) }.unwrap();
            assert!(data.iter().enumerate().all(|(i, x)| *x == i as f32));
        });
    }
}

fn message(data: &mut [f32], message: Message) -> Request {
    Request {
        call: call(Collective::SendRecv, DType::F32, data.len()),
        tensors: in_place(data.as_mut_ptr().cast(), size_of_val(data)),
        message: Some(message),
        ..Request::nothing()
    }
}

/// Small messages, and large ones that are announced first.
#[test]
fn a_receive_from_any_source_takes_what_comes() {
    for engines in [over_mem(3), met(3, Transport::Shm), met(3, Transport::Tcp)] {
        on_all(engines, |rank, group| {
            let limit = Some(Duration::from_secs(20));
            for (tag, len) in (3..).zip([0, 10, 600_000]) {
                let mut data = vec![rank as f32; len];
                if rank > 0 {
                    let sent = message(&mut data, Message { peer: 0, tag, sends: true, shorter: false });
                    // SAFETY: `data` outlives the call.
                    unsafe { group.run(sent, limit, &mut || Ok(())) }.unwrap();
                    continue;
                }
                let mut senders = [1, 2].map(|_| {
                    let taken =
                        message(&mut data, Message { peer: Message::ANY, tag, sends: false, shorter: false });
                    // SAFETY: as above.
                    let sender = unsafe { group.receive(taken, limit, &mut || Ok(())) }.unwrap();
                    assert!(data.iter().all(|x| *x == sender as f32));
                    sender
                });
                senders.sort_unstable();
                assert_eq!(senders, [1, 2]);
            }
        });
    }
}

/// From a known sender and from any, of lengths that are sent at once and that are announced first, before and after the
/// receive is made; the rest of the memory stays as it is.
#[test]
fn a_receive_takes_a_shorter_message_if_it_may() {
    for engines in [over_mem(2), met(2, Transport::Shm), met(2, Transport::Tcp)] {
        on_all(engines, |rank, group| {
            let limit = Some(Duration::from_secs(20));
            let lengths = [(0, 3), (3, 3), (3, 700_000), (600_000, 600_001), (600_000, 600_000)];
            let sources = [0, Message::ANY];
            let cases = lengths.into_iter().flat_map(|l| sources.map(|from| (l, from)));
            for (tag, ((sent, room), from)) in (3..).zip(cases) {
                let late = if (tag / 2) % 2 == rank as u32 { 20 } else { 0 };
                std::thread::sleep(Duration::from_millis(late));
                if rank == 0 {
                    let mut data = vec![5f32; sent];
                    let message = message(&mut data, Message { peer: 1, tag, sends: true, shorter: false });
                    // SAFETY: `data` outlives the call.
                    unsafe { group.run(message, limit, &mut || Ok(())) }.unwrap();
                } else {
                    let mut data = vec![1f32; room];
                    let mut message =
                        message(&mut data, Message { peer: from, tag, sends: false, shorter: true });
                    if room == 600_001 {
                        message.call.dtype = DType::I8; // the bytes are what counts
                        message.call.len = 4 * room;
                    }
                    // SAFETY: as above.
                    assert_eq!(unsafe { group.receive(message, limit, &mut || Ok(())) }.unwrap(), 0);
                    assert!(data[..sent].iter().all(|x| *x == 5.0) && data[sent..].iter().all(|x| *x == 1.0));
                }
            }
        });
    }
}

/// What is longer than the receive has room for is told on both sides, and what is shorter where it must be equal.
#[test]
fn a_message_that_does_not_fit_is_told() {
    for (sent, room, shorter) in [(4, 3, true), (600_001, 600_000, true), (3, 4, false)] {
        for engines in [over_mem(2), met(2, Transport::Tcp)] {
            let errors = on_all(engines, |rank, group| {
                let mut data = vec![1f32; if rank == 0 { sent } else { room }];
                let sends = rank == 0;
                let peer = 1 - rank as u32;
                let message = message(&mut data, Message { peer, tag: 3, sends, shorter: shorter && !sends });
                // SAFETY: `data` outlives the call.
                unsafe { group.run(message, Some(Duration::from_secs(20)), &mut || Ok(())) }.err()
            });
            assert!(matches!(errors[1], Some(Error::Mismatch { .. })), "{errors:?}");
            let told = matches!(errors[0], Some(Error::Mismatch { .. }));
            assert!(told || sent < 600_000 && errors[0].is_none(), "{errors:?}");
        }
    }
}

#[test]
fn an_aborted_group_ends_for_all() {
    for engines in [over_mem(3), met(3, Transport::Shm), met(3, Transport::Tcp)] {
        on_all(engines, |rank, group| {
            let other = Group::new(group.engine(), "other".into(), vec![0, 1, 2], 9, 0).unwrap();
            let mut data = vec![1f32; 100_000];
            all_reduce(&other, &mut data, Via::Auto).unwrap();
            if rank == 2 {
                other.abort_all("enough").unwrap();
            }
            let error = all_reduce(&other, &mut data, Via::Auto).unwrap_err();
            assert!(
                matches!(&error, Error::Aborted(text) if text.contains("rank 2") && text.contains("enough"))
            );
            let error = all_reduce(&other, &mut data, Via::Auto).unwrap_err();
            assert!(matches!(&error, Error::Aborted(_)), "{error}");
            data.fill(1.0);
            all_reduce(&group, &mut data, Via::Auto).unwrap();
            assert!(data.iter().all(|x| *x == 3.0));
        });
    }
}

/// What has ended on the rank that aborts ends on all, even where it has yet to begin.
#[test]
fn an_abort_ends_no_call_before_it() {
    for engines in [over_mem(3), met(3, Transport::Shm), met(3, Transport::Tcp)] {
        on_all(engines, |rank, group| {
            for (k, len) in (0..24).zip([10, 1000, 50_000].into_iter().cycle()) {
                let other = Group::new(group.engine(), format!("{k}"), vec![0, 1, 2], 9 + k, 0).unwrap();
                if rank == k as usize % 2 {
                    std::thread::sleep(Duration::from_millis(k));
                }
                let mut data = vec![rank as f32; len];
                let broadcast = Call { root: 2, ..call(Collective::Broadcast, DType::F32, len) };
                run(&other, broadcast, &mut data).unwrap();
                assert!(data.iter().all(|x| *x == 2.0));
                if rank == 2 {
                    other.abort_all("enough").unwrap();
                }
                all_reduce(&other, &mut data, Via::Auto).unwrap_err();
            }
        });
    }
}

/// Lists of tensors that ranks cut differently, by every way.
#[test]
fn lists_are_reduced_where_they_are() {
    for engines in [over_mem(3), met(3, Transport::Shm), met(2, Transport::Tcp)] {
        let n = engines.len();
        on_all(engines, |rank, group| {
            for via in [Via::Auto, Via::Ring, Via::Tree, Via::RecursiveDoubling, Via::ScatterGather] {
                for total in [7, 5000, 700_001] {
                    let cuts = [0, total / 7, total / (2 + rank), total / (2 + rank), total];
                    let mut parts: Vec<Vec<f32>> = cuts
                        .windows(2)
                        .map(|w| (w[0]..w[1]).map(|i| (i % 23) as f32 + rank as f32).collect())
                        .collect();
                    let places: Vec<(usize, usize)> =
                        parts.iter_mut().map(|p| (p.as_mut_ptr().addr(), size_of_val(&p[..]))).collect();
                    let request = Request {
                        call: Call { via, ..call(Collective::AllReduce, DType::F32, total) },
                        ..Request::nothing()
                    };
                    let request = request.in_lists(Some((places.clone(), places)));
                    // SAFETY: `parts` outlive the call.
                    unsafe { group.run(request, Some(Duration::from_secs(20)), &mut || Ok(())) }.unwrap();
                    let extra = (n * (n - 1) / 2) as f32;
                    let all = parts.iter().flatten().enumerate();
                    all.for_each(|(i, x)| {
                        assert_eq!(*x, (i % 23) as f32 * n as f32 + extra, "{via:?} {total} {i}")
                    });
                }
            }
        });
    }
}
