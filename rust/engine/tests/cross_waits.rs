//! Ranks as threads that wait for each other in calls of different groups, and ranks that only seem to.
#![allow(clippy::unwrap_used)] // a test harness: a failure is a failed test

use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use trigram_core::{Error, Result};
use trigram_engine::bootstrap::rendezvous::{Rendezvous, Transport};
use trigram_engine::call::request::Request;
use trigram_engine::runtime::engine::Engine;
use trigram_engine::runtime::group::Group;

/// Longer than a rank waits before it tells the others.
const LONG: Duration = Duration::from_millis(2500);

/// Runs `f` on `n` ranks that met as processes do, each in the thread that created its engine; `census`: whether these
/// threads may be taken for all that make calls.
fn on_all<T: Send>(
    n: usize,
    transport: Transport,
    census: bool,
    f: impl Fn(usize, &Arc<Engine>) -> T + Sync,
) -> Vec<T> {
    let (records, met) = (Mutex::new(vec![Vec::new(); n]), Barrier::new(n));
    let limit = Duration::from_secs(60);
    let run = |rank: usize| {
        let mut rendezvous = Rendezvous::open(rank as u32, n, Some("lo"), None, transport).unwrap();
        records.lock().unwrap()[rank] = rendezvous.record().unwrap();
        met.wait();
        let all = records.lock().unwrap().clone();
        let verdict = rendezvous.handshake(&all, limit, &mut || Ok(())).unwrap();
        let engine = Arc::new(rendezvous.connect(&vec![verdict; n], limit, &mut || Ok(())).unwrap());
        engine.callers().set_census(Box::new(move |_| census));
        let result = f(rank, &engine);
        met.wait(); // nobody leaves while others are in a call
        result
    };
    std::thread::scope(|s| {
        let run = &run;
        let all: Vec<_> = (0..n).map(|rank| s.spawn(move || run(rank))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn group(engine: &Arc<Engine>, name: &str, ranks: &[u32], ordinal: u64) -> Group {
    Group::new(engine, name.into(), ranks.to_vec(), ordinal, 0).unwrap()
}

fn barrier(group: &Group) -> Result<()> {
    // SAFETY: it has no memory.
    unsafe { group.run(Request::nothing(), Some(Duration::from_secs(60)), &mut || Ok(())) }
}

#[test]
fn ranks_that_wait_for_each_other_in_two_groups_all_fail() {
    for (n, transport) in [(2, Transport::Shm), (2, Transport::Tcp), (3, Transport::Shm), (3, Transport::Tcp)]
    {
        let errors = on_all(n, transport, true, |rank, engine| {
            let all: Vec<u32> = (0..n as u32).collect();
            let (main, control) = (group(engine, "main", &all, 1), group(engine, "control", &all, 2));
            barrier(&control).unwrap();
            let (first, second) = if rank == 1 { (&control, &main) } else { (&main, &control) };
            let began = Instant::now();
            let error = barrier(first).unwrap_err();
            assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
            // The other call has failed too, and no more than that.
            assert!(matches!(barrier(second), Err(Error::Mismatch { .. })), "rank {rank}");
            barrier(&main).unwrap();
            barrier(&control).unwrap();
            error
        });
        for error in &errors {
            let text = error.to_string();
            assert!(matches!(error, Error::Mismatch { .. }), "{text}");
            for part in ["call 0 of group main", "call 1 of group control", "rank 1"] {
                assert!(text.contains(part), "{text}");
            }
        }
        assert!(n > 2 || errors[0] == errors[1], "{errors:?}");
    }
}

/// Rank 1 waits in one group and then in another, where rank 0 waits all the time; another thread of rank 0 makes the
/// first call later. `knows`: that thread has made calls before.
fn with_a_second_thread(knows: bool) {
    on_all(2, Transport::Auto, knows, |rank, engine| {
        let (main, control) = (group(engine, "main", &[0, 1], 1), group(engine, "control", &[0, 1], 2));
        if rank == 1 {
            if knows {
                barrier(&control).unwrap();
            }
            barrier(&control).unwrap();
            return barrier(&main).unwrap();
        }
        std::thread::scope(|s| {
            s.spawn(|| {
                if knows {
                    barrier(&control).unwrap();
                }
                std::thread::sleep(LONG);
                barrier(&control).unwrap();
            });
            barrier(&main).unwrap();
        });
    });
}

#[test]
fn a_thread_that_computes_may_still_make_the_call() {
    with_a_second_thread(true);
}

#[test]
fn a_thread_that_has_made_no_call_may_make_its_first() {
    with_a_second_thread(false);
}

/// A signal handler may make the call that the peer waits for.
#[test]
fn a_rank_that_handles_a_signal_does_not_wait() {
    on_all(2, Transport::Auto, true, |rank, engine| {
        let (main, control) = (group(engine, "main", &[0, 1], 1), group(engine, "control", &[0, 1], 2));
        if rank == 1 {
            barrier(&control).unwrap();
            return barrier(&main).unwrap();
        }
        let (began, mut handled) = (Instant::now(), false);
        let mut handle = || {
            if !handled && began.elapsed() > Duration::from_millis(800) {
                handled = true;
                std::thread::sleep(LONG);
                barrier(&control).unwrap();
            }
            Ok(())
        };
        // SAFETY: it has no memory.
        unsafe { main.run(Request::nothing(), None, &mut handle) }.unwrap();
        assert!(handled);
    });
}

/// Who waits with a limit, again and again, may do something else in between.
#[test]
fn a_rank_that_looks_up_now_and_then_does_not_wait() {
    on_all(2, Transport::Auto, true, |rank, engine| {
        let (main, control) = (group(engine, "main", &[0, 1], 1), group(engine, "control", &[0, 1], 2));
        if rank == 1 {
            barrier(&control).unwrap();
            return barrier(&main).unwrap();
        }
        // SAFETY: it has no memory.
        let call = unsafe { main.start(Request::nothing(), None) }.unwrap();
        let until = Instant::now() + LONG;
        assert_eq!(engine.wait(&call, Some(until), &mut || Ok(())), Ok(None));
        barrier(&control).unwrap();
        assert_eq!(engine.wait(&call, None, &mut || Ok(())), Ok(Some(Ok(()))));
    });
}

/// Two ranks wait for a third in groups of their own with it, and one has started a call that the other waits for.
#[test]
fn ranks_that_wait_for_a_slow_one_are_left_alone() {
    on_all(3, Transport::Auto, true, |rank, engine| {
        let all = group(engine, "all", &[0, 1, 2], 1);
        let pair = |a, b| group(engine, "pair", &[a, b], 2);
        match rank {
            0 => {
                // SAFETY: it has no memory.
                let started = unsafe { all.start(Request::nothing(), None) }.unwrap();
                barrier(&pair(0, 2)).unwrap();
                assert_eq!(engine.wait(&started, None, &mut || Ok(())), Ok(Some(Ok(()))));
            }
            1 => {
                barrier(&all).unwrap();
                barrier(&pair(1, 2)).unwrap();
            }
            _ => {
                std::thread::sleep(LONG);
                barrier(&pair(0, 2)).unwrap();
                barrier(&all).unwrap();
                barrier(&pair(1, 2)).unwrap();
            }
        }
    });
}
