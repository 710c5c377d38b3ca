//! Communicators, ranks as threads, over the stand-in in `standin/`: whether calls are made rightly,
//! errors told, and nothing hangs. What a GPU does with them is for a machine that has one.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nccl_rs::{
    Buffer, Communicator, Config, Cuda, Data, DataMut, DataType, Error, Event, Nccl, Op, Search, Stream,
    UniqueId, Version,
};

const LIMIT: Duration = Duration::from_secs(20);

/// Compiles the stand-in, once.
fn library() -> &'static PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/standin");
        let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("libstandin.so");
        let built = Command::new("cc")
            .args(["-O2", "-shared", "-fPIC", "-pthread", "-o"])
            .args([file.clone(), source.join("cuda.c"), source.join("nccl.c")])
            .arg("-lrt")
            .status();
        assert!(built.unwrap().success());
        file
    })
}

/// The stand-in as versions before 2.19 are: without what came later.
fn old_library() -> PathBuf {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/standin");
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("libold.so");
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-DSTANDIN_OLD", "-shared", "-fPIC", "-pthread", "-o"]).arg(&file);
    assert!(cc.args([source.join("cuda.c"), source.join("nccl.c")]).arg("-lrt").status().unwrap().success());
    file
}

fn nccl() -> Nccl {
    Nccl::load(&Search::new().file(library())).unwrap()
}

fn stream(device: u32) -> Stream {
    Stream::new(&Cuda::load_file(library()).unwrap().device(device as i32).unwrap(), 0).unwrap()
}

fn join(id: UniqueId, rank: u32, size: u32) -> Communicator {
    let pending = Communicator::init(&nccl(), &stream(rank), id, rank, size, Config::new(), LIMIT).unwrap();
    pending.wait(LIMIT).unwrap()
}

/// Runs a body as each of `size` ranks, in threads of their own.
fn ranks(size: u32, body: impl Fn(Communicator) + Send + Sync) {
    let id = nccl().unique_id().unwrap();
    std::thread::scope(|threads| {
        for rank in 0..size {
            let body = &body;
            threads.spawn(move || body(join(id, rank, size)));
        }
    });
}

fn values(rank: u32, n: usize) -> Vec<f32> {
    (0..n).map(|i| (rank as usize * 1000 + i % 97) as f32).collect()
}

#[test]
fn collectives_give_what_they_say() {
    for size in [1, 2, 3, 5] {
        ranks(size, |comm| {
            let (n, p, me) = (40_000, size as usize, comm.rank());
            let all: Vec<Vec<f32>> = (0..size).map(|r| values(r, n)).collect();
            let sum = |i: usize| all.iter().map(|x| x[i]).sum::<f32>();
            let mine = Buffer::from_slice(comm.stream(), &all[me as usize]).unwrap();

            let mut out = Buffer::from_slice(comm.stream(), &vec![0f32; n]).unwrap();
            comm.all_reduce(Some(mine.data()), out.data_mut(), Op::SUM).unwrap();
            assert!(out.read().unwrap().iter().enumerate().all(|(i, &v)| v == sum(i)));
            comm.all_reduce(None, out.data_mut(), Op::MAX).unwrap();
            comm.all_reduce(None, out.data_mut(), Op::AVG).unwrap();
            assert!(out.read().unwrap().iter().enumerate().all(|(i, &v)| v == sum(i)));

            out.write(&vec![-1.0; n]).unwrap();
            comm.reduce(Some(mine.data()), out.data_mut(), Op::MIN, size - 1).unwrap();
            let want = |i: usize| if me == size - 1 { all[0][i] } else { -1.0 };
            assert!(out.read().unwrap().iter().enumerate().all(|(i, &v)| v == want(i)));

            out.write(&all[me as usize]).unwrap();
            comm.broadcast(out.data_mut(), size - 1).unwrap();
            assert_eq!(out.read().unwrap(), all[p - 1]);

            let mut wide = Buffer::from_slice(comm.stream(), &vec![0f32; n * p]).unwrap();
            comm.all_gather(mine.data(), wide.data_mut()).unwrap();
            assert_eq!(wide.read().unwrap(), all.concat());

            let mut part = Buffer::from_slice(comm.stream(), &vec![0f32; n]).unwrap();
            comm.reduce_scatter(wide.data(), part.data_mut(), Op::SUM).unwrap();
            let want: Vec<f32> = all[me as usize].iter().map(|v| v * size as f32).collect();
            assert_eq!(part.read().unwrap(), want);

            let sent: Vec<i64> = (0..p * 10).map(|i| (me as usize * 1000 + i) as i64).collect();
            let inp = Buffer::from_slice(comm.stream(), &sent).unwrap();
            let mut got = Buffer::from_slice(comm.stream(), &vec![0i64; p * 10]).unwrap();
            comm.all_to_all(inp.data(), got.data_mut()).unwrap();
            let want: Vec<i64> =
                (0..p * 10).map(|i| (i / 10 * 1000 + me as usize * 10 + i % 10) as i64).collect();
            assert_eq!(got.read().unwrap(), want);
        });
    }
}

#[test]
fn a_weighted_average_is_a_sum_with_scalars() {
    ranks(3, |comm| {
        let weight = comm.pre_mul_sum(comm.rank() as f32 + 1.0).unwrap();
        let mut x = Buffer::from_slice(comm.stream(), &[10.0f32, 1.0]).unwrap();
        let memory = comm.register(x.data()).unwrap();
        comm.all_reduce(None, x.data_mut(), weight.op()).unwrap();
        assert_eq!(x.read().unwrap(), [60.0, 6.0]);
        drop((memory, weight));
    });
}

#[test]
fn neighbours_exchange_in_a_group() {
    ranks(3, |comm| {
        let (n, me, p) = (100_000, comm.rank(), comm.size());
        let mine = Buffer::from_slice(comm.stream(), &values(me, n)).unwrap();
        let mut left = Buffer::from_slice(comm.stream(), &vec![0f32; n]).unwrap();
        nccl()
            .group(|| {
                comm.send(mine.data(), (me + 1) % p)?;
                comm.recv(left.data_mut(), (me + p - 1) % p)
            })
            .unwrap();
        assert_eq!(left.read().unwrap(), values((me + p - 1) % p, n));
    });
}

#[test]
fn ranks_divide() {
    ranks(5, |comm| {
        let me = comm.rank();
        // Two groups, in the reverse order of their ranks, and one rank in neither.
        let color = (me < 4).then_some(me % 2);
        let part = comm.split(color, 10 - me, Config::new()).unwrap();
        let Some(part) = part else { return assert_eq!(me, 4) };
        assert_eq!((part.size(), part.rank()), (2, 1 - me / 2));
        let mut x = Buffer::from_slice(part.stream(), &[me]).unwrap();
        drop(comm); // it lives until what was split from it has ended
        part.all_reduce(None, x.data_mut(), Op::SUM).unwrap();
        assert_eq!(x.read().unwrap(), [me % 2 * 2 + 2]);
    });
}

#[test]
fn streams_order_work_by_events() {
    ranks(2, |comm| {
        let mut x = Buffer::from_slice(comm.stream(), &vec![1f32; 1 << 20]).unwrap();
        comm.all_reduce(None, x.data_mut(), Op::SUM).unwrap();
        let over = Event::record(comm.stream()).unwrap();
        let other = stream(comm.rank());
        other.wait_for(&over).unwrap();
        other.synchronize().unwrap();
        assert!(over.is_reached().unwrap() && other.is_idle().unwrap());
        over.synchronize().unwrap();
    });
}

#[test]
fn what_does_not_fit_is_refused_before_nccl_sees_it() {
    ranks(2, |comm| {
        let mut three = Buffer::from_slice(comm.stream(), &[0f32; 3]).unwrap();
        let four = Buffer::from_slice(comm.stream(), &[0f32; 4]).unwrap();
        let ints = Buffer::from_slice(comm.stream(), &[0i32; 3]).unwrap();
        let foreign = Buffer::from_slice(&stream(0), &[0f32; 3]).unwrap();
        let refused = |made: Result<(), Error>, what: &str| match made {
            Err(Error::Misuse(text)) => assert!(text.contains(what), "{text}"),
            other => panic!("{other:?}"),
        };
        refused(
            comm.all_reduce(Some(four.data()), three.data_mut(), Op::SUM),
            "4 values of Float32 does not fit an output of 3",
        );
        refused(comm.all_reduce(Some(ints.data()), three.data_mut(), Op::SUM), "Int32");
        refused(comm.all_reduce(Some(foreign.data()), three.data_mut(), Op::SUM), "another stream");
        refused(comm.broadcast(three.data_mut(), 2), "no rank 2 among 2");
        refused(comm.all_to_all(ints.data(), DataMut::from_raw_test()), "does not fit an output of 0");
        comm.all_reduce(None, three.data_mut(), Op::SUM).unwrap(); // nothing was disturbed
    });
}

trait FromRawTest {
    fn from_raw_test() -> DataMut<'static>;
}

impl FromRawTest for DataMut<'static> {
    fn from_raw_test() -> DataMut<'static> {
        // SAFETY: nothing is there, and nothing is taken.
        unsafe { DataMut::from_raw(0, 0, DataType::Float16) }
    }
}

#[test]
fn a_rank_that_never_comes_ends_the_wait() {
    let id = nccl().unique_id().unwrap();
    let stream = stream(0);
    let start = || Communicator::init(&nccl(), &stream, id, 0, 2, Config::new(), LIMIT).unwrap();
    let since = Instant::now();
    let error = start().wait(Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }) && since.elapsed() < LIMIT, "{error}");
    let pending = start();
    let aborter = pending.aborter();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            aborter.abort();
        });
        assert!(matches!(pending.wait(LIMIT), Err(Error::Aborted(_))));
    });
}

#[test]
fn a_stuck_collective_is_aborted_from_another_thread() {
    ranks(2, |comm| {
        let mut x = Buffer::from_slice(comm.stream(), &[1f32; 10]).unwrap();
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(100)); // it never calls
            return comm.abort();
        }
        comm.all_reduce(None, x.data_mut(), Op::SUM).unwrap(); // given, not done
        let aborter = comm.aborter();
        assert!(!comm.stream().is_idle().unwrap());
        std::thread::spawn(move || aborter.abort()).join().unwrap();
        comm.stream().synchronize().unwrap();
        let error = comm.all_reduce(None, x.data_mut(), Op::SUM).unwrap_err();
        assert!(matches!(error, Error::Aborted("ncclAllReduce")), "{error}");
    });
}

/// A stream whose first call is stuck has room for a thousand more; then the thread that gives it another one waits.
fn is_aborted_while_the_stream_is_full(give: impl Fn(&Communicator) -> Result<(), Error> + Send + Sync) {
    while_the_stream_is_full(give, |comm| {
        let _ = comm.check(); // nor does it wait
        comm.abort();
    });
}

/// `end` ends the call of the thread that waits for room.
fn while_the_stream_is_full(
    give: impl Fn(&Communicator) -> Result<(), Error> + Send + Sync,
    end: impl Fn(Communicator) + Copy + Send + Sync + 'static,
) {
    ranks(2, |comm| {
        if comm.rank() == 1 {
            return; // it never calls
        }
        let given = AtomicUsize::new(0);
        std::thread::scope(|threads| {
            let (comm, given, give) = (&comm, &given, &give);
            let full = threads.spawn(move || {
                loop {
                    if let Err(error) = give(comm) {
                        return error;
                    }
                    given.fetch_add(1, Ordering::Relaxed);
                }
            });
            let (mut before, since) = (usize::MAX, Instant::now());
            while given.load(Ordering::Relaxed) != before {
                before = given.load(Ordering::Relaxed);
                assert!(since.elapsed() < LIMIT);
                std::thread::sleep(Duration::from_millis(300));
            }
            assert!(before > 100);
            let (said, heard) = std::sync::mpsc::channel();
            let other = comm.clone();
            std::thread::spawn(move || {
                end(other);
                said.send(()).unwrap();
            });
            let ended = heard.recv_timeout(LIMIT);
            if ended.is_err() {
                std::process::abort(); // the other thread would never end
            }
            let error = full.join().unwrap();
            assert!(matches!(error, Error::Aborted(_)), "{error}");
        });
        comm.stream().synchronize().unwrap();
    });
}

#[test]
fn a_call_that_waits_for_room_does_not_hold_up_an_abort() {
    is_aborted_while_the_stream_is_full(gives_nothing);
}

fn gives_nothing(comm: &Communicator) -> Result<(), Error> {
    // SAFETY: nothing is there, and nothing is taken.
    let none = unsafe { DataMut::from_raw(0, 0, DataType::Float32) };
    comm.all_reduce(None, none, Op::SUM)
}

#[test]
fn nor_does_it_hold_up_a_revoke_or_a_shrink_that_interrupts() {
    type How = fn(&Communicator) -> Result<(), Error>;
    let hows: [How; 2] = [|comm| comm.revoke(LIMIT), |comm| comm.shrink(&[1], true, Config::new()).map(drop)];
    for how in hows {
        while_the_stream_is_full(gives_nothing, move |comm| {
            let error = how(&comm).unwrap_err();
            assert!(matches!(error, Error::Timeout { .. }), "{error}");
            comm.abort(); // what it asks for
        });
    }
}

#[test]
fn nor_does_a_group() {
    is_aborted_while_the_stream_is_full(|comm| {
        nccl().group(|| {
            // SAFETY: nothing is there, and nothing is taken.
            let (from, to) = unsafe {
                (Data::from_raw(0, 0, DataType::Float32), DataMut::from_raw(0, 0, DataType::Float32))
            };
            comm.broadcast(to, 1)?;
            comm.send(from, 1)
        })
    });
}

#[test]
fn an_error_inside_a_group_aborts_and_leaves_no_group_behind() {
    ranks(2, |comm| {
        let mut x = Buffer::from_slice(comm.stream(), &[1f32; 10]).unwrap();
        let failed = nccl().group(|| {
            comm.all_reduce(None, x.data_mut(), Op::SUM)?;
            comm.broadcast(x.data_mut(), 7)
        });
        assert!(matches!(failed, Err(Error::Misuse(_))));
        assert!(matches!(comm.all_reduce(None, x.data_mut(), Op::SUM), Err(Error::Aborted(_))));
    });
    ranks(1, |comm| {
        let broke = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = nccl().group(|| -> Result<(), Error> { panic!("on purpose") });
        }));
        assert!(broke.is_err());
        let mut x = Buffer::from_slice(comm.stream(), &[1f32; 10]).unwrap();
        comm.all_reduce(None, x.data_mut(), Op::SUM).unwrap(); // would never begin in an open group
        comm.stream().synchronize().unwrap();
    });
}

#[test]
fn a_failed_start_says_why_and_leaves_no_group_behind() {
    let wrong = UniqueId::from_bytes([7; UniqueId::BYTES]);
    let stream = stream(0);
    let error = Communicator::init(&nccl(), &stream, wrong, 0, 1, Config::new(), LIMIT).unwrap_err();
    let Error::Nccl { code: 4, detail, .. } = &error else { panic!("{error}") };
    assert!(detail.contains("a wrong id"), "{error}");
    let error = Communicator::init(&nccl(), &stream, wrong, 3, 3, Config::new(), LIMIT).unwrap_err();
    assert!(matches!(error, Error::Misuse(_)));
    // This thread is in no group.
    let id = nccl().unique_id().unwrap();
    let comm = join(id, 0, 1);
    let mut x = Buffer::from_slice(comm.stream(), &[1f32; 10]).unwrap();
    comm.all_reduce(None, x.data_mut(), Op::SUM).unwrap();
    comm.stream().synchronize().unwrap();
}

#[test]
fn what_is_missing_is_said() {
    let Err(Error::NotFound { library: "libnccl.so.2", tried, .. }) =
        Nccl::load(&Search::new().file("/no/such"))
    else {
        panic!()
    };
    assert_eq!(tried[0].place, "/no/such");
    // A library that is none of NCCL's.
    let libc = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/usr/lib/libc.so.6"];
    let libc = libc.iter().find(|f| std::path::Path::new(f).exists());
    if let Some(file) = libc {
        let error = Nccl::load(&Search::new().file(file)).unwrap_err();
        assert!(matches!(error, Error::MissingSymbol { symbol: "ncclGetVersion", .. }), "{error}");
        let error = Cuda::load_file(file.as_ref()).unwrap_err();
        assert!(matches!(error, Error::MissingSymbol { symbol: "cuInit", .. }), "{error}");
    }
    let cuda = Cuda::load_file(library()).unwrap();
    let error = cuda.device(8).unwrap_err();
    assert_eq!(error.to_string(), "no CUDA device 8: there are 8");
    assert_eq!(nccl().version(), Version::new(2, 29, 7));
    assert!(nccl().path().ends_with("libstandin.so"));
}

#[test]
fn empty_data_is_data() {
    ranks(2, |comm| {
        let mut none = Buffer::<f32>::from_slice(comm.stream(), &[]).unwrap();
        comm.all_reduce(None, none.data_mut(), Op::SUM).unwrap();
        assert!(none.read().unwrap().is_empty() && none.is_empty());
        // SAFETY: nothing is there, and nothing is taken.
        let raw = unsafe { Data::from_raw(0, 0, DataType::Float32) };
        comm.send(raw, comm.rank()).unwrap();
    });
}

fn sum_is_right(comm: &Communicator) {
    let mut x = Buffer::from_slice(comm.stream(), &[comm.rank() + 1, 1]).unwrap();
    comm.all_reduce(None, x.data_mut(), Op::SUM).unwrap();
    let p = comm.size();
    assert_eq!(x.read().unwrap(), [p * (p + 1) / 2, p]);
}

/// The others wait for rank 1, which does not come.
fn is_stuck(comm: &Communicator) -> Option<Buffer<f32>> {
    if comm.rank() == 1 {
        return None;
    }
    let mut x = Buffer::from_slice(comm.stream(), &[1f32; 10]).unwrap();
    comm.all_reduce(None, x.data_mut(), Op::SUM).unwrap();
    assert!(!comm.stream().is_idle().unwrap());
    Some(x)
}

#[test]
fn after_a_revoke_the_ranks_that_are_left_shrink() {
    ranks(4, |comm| {
        let Some(mut x) = is_stuck(&comm) else { return };
        let other = comm.clone(); // as the thread that watches
        std::thread::spawn(move || other.revoke(LIMIT).unwrap()).join().unwrap();
        comm.revoke(LIMIT).unwrap(); // once is enough, twice does no harm
        comm.stream().synchronize().unwrap();
        let error = comm.all_reduce(None, x.data_mut(), Op::SUM).unwrap_err();
        assert!(error.to_string().contains("was revoked"), "{error}");
        let left = comm.shrink(&[1], false, Config::new()).unwrap();
        assert_eq!((left.size(), left.rank()), (3, comm.rank().saturating_sub(1)));
        drop(comm);
        sum_is_right(&left);
        // One more leaves, which knows of it.
        if left.rank() < 2 {
            sum_is_right(&left.shrink(&[2], false, Config::new()).unwrap());
        }
    });
}

#[test]
fn without_a_revoke_a_shrink_can_interrupt() {
    ranks(3, |comm| {
        let Some(_x) = is_stuck(&comm) else { return };
        let left = comm.shrink(&[1], true, Config::new()).unwrap();
        comm.stream().synchronize().unwrap();
        sum_is_right(&left);
        let error = comm.shrink(&[1], false, Config::new());
        assert!(error.is_ok() || matches!(error, Err(Error::Nccl { .. } | Error::Timeout { .. })));
    });
}

#[test]
fn a_wait_for_a_rank_that_never_shrinks_ends() {
    let id = nccl().unique_id().unwrap();
    std::thread::scope(|threads| {
        for rank in 0..3 {
            threads.spawn(move || {
                let limit = Duration::from_millis(300);
                let pending =
                    Communicator::init(&nccl(), &stream(rank), id, rank, 3, Config::new(), limit).unwrap();
                let comm = pending.wait(LIMIT).unwrap();
                if rank == 0 {
                    let error = comm.shrink(&[1], false, Config::new()).unwrap_err();
                    assert!(matches!(error, Error::Timeout { call: "ncclCommShrink", .. }), "{error}");
                }
            });
        }
    });
}

#[test]
fn what_cannot_shrink_is_refused() {
    ranks(2, |comm| {
        for lost in [&[][..], &[comm.rank()], &[2]] {
            let error = comm.shrink(lost, false, Config::new()).unwrap_err();
            assert!(matches!(error, Error::Misuse(_)), "{error}");
        }
        sum_is_right(&comm); // nothing was disturbed
        comm.abort();
        assert!(matches!(comm.revoke(LIMIT), Err(Error::Aborted("ncclCommRevoke"))));
        let other = (comm.rank() + 1) % 2;
        assert!(matches!(comm.shrink(&[other], true, Config::new()), Err(Error::Aborted("ncclCommShrink"))));
    });
}

#[test]
fn ranks_that_come_join_those_that_are_there() {
    let id = nccl().unique_id().unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let made = std::sync::Barrier::new(2);
    std::thread::scope(|threads| {
        for rank in 0..2 {
            let (tell, made) = (tell.clone(), &made);
            threads.spawn(move || {
                let comm = join(id, rank, 2);
                assert!(matches!(comm.grow(2, None, Config::new()), Err(Error::Misuse(_))));
                let id = (rank == 1).then(|| comm.grow_id().unwrap());
                if let Some(id) = id {
                    let error = comm.grow_id().unwrap_err();
                    assert!(error.to_string().contains("was not used"), "{error}");
                    tell.send(id).unwrap();
                }
                made.wait(); // by other means: the id is there
                let grown = comm.grow(3, id, Config::new()).unwrap().wait(LIMIT).unwrap();
                assert_eq!((grown.rank(), grown.size()), (rank, 3));
                sum_is_right(&grown);
                sum_is_right(&comm); // it stays as it is
            });
        }
        threads.spawn(move || {
            let id = told.recv().unwrap();
            let join =
                |rank| Communicator::join_grown(&nccl(), &stream(2), id, rank, 3, Config::new(), LIMIT);
            assert!(matches!(join(3), Err(Error::Misuse(_))));
            sum_is_right(&join(2).unwrap().wait(LIMIT).unwrap());
        });
    });
}

#[test]
fn windows_are_registered_by_all_ranks() {
    ranks(3, |comm| {
        let memory = nccl().allocate(comm.stream().device(), 1 << 16).unwrap();
        assert_eq!((memory.address() % 4096, memory.bytes()), (0, 1 << 16));
        // SAFETY: the memory is there, longer than the window.
        let data = |at: u64, n| unsafe { Data::from_raw(memory.address() + at, n, DataType::Float32) };
        for wrong in [data(4, 10), data(0, 0)] {
            assert!(matches!(comm.register_window(wrong), Err(Error::Misuse(_))));
        }
        let refused = |made: Result<(), Error>| match made {
            Err(Error::Misuse(text)) => assert!(text.contains("open group"), "{text}"),
            other => panic!("{other:?}"),
        };
        nccl()
            .group(|| {
                refused(comm.register_window(data(0, 10)).map(drop));
                refused(comm.split(Some(0), 0, Config::new()).map(drop));
                refused(comm.shrink(&[(comm.rank() + 1) % 3], false, Config::new()).map(drop));
                refused(comm.grow_id().map(drop));
                refused(comm.grow(4, None, Config::new()).map(drop));
                Ok(())
            })
            .unwrap();
        let window = comm.register_window(data(0, 1 << 14)).unwrap();
        assert!(window.is_some());
        // SAFETY: as above, and nobody else uses it.
        let x = unsafe { DataMut::from_raw(memory.address(), 100, DataType::Float32) };
        comm.all_reduce(None, x, Op::SUM).unwrap();
        comm.stream().synchronize().unwrap();
        drop((window, memory));
    });
}

#[test]
fn an_older_library_says_what_it_lacks() {
    let nccl = Nccl::load(&Search::new().file(old_library())).unwrap();
    let stream = Stream::new(&Cuda::load_file(&old_library()).unwrap().device(0).unwrap(), 0).unwrap();
    let id = nccl.unique_id().unwrap();
    let comm = Communicator::init(&nccl, &stream, id, 0, 1, Config::new(), LIMIT).unwrap();
    let comm = comm.wait(LIMIT).unwrap();
    // SAFETY: nothing is there, and nothing is taken.
    let none = unsafe { Data::from_raw(0, 0, DataType::Float32) };
    let missing = |made: Result<(), Error>, version: &str| match made {
        Err(Error::TooOld { least, .. }) => assert_eq!(least, version),
        other => panic!("{other:?}"),
    };
    missing(comm.revoke(LIMIT), "2.28.7");
    missing(comm.shrink(&[1], false, Config::new()).map(drop), "2.27.3");
    missing(comm.grow_id().map(drop), "2.29.2");
    missing(comm.grow(2, None, Config::new()).map(drop), "2.29.2");
    let join = Communicator::join_grown(&nccl, &stream, id, 1, 2, Config::new(), LIMIT);
    missing(join.map(drop), "2.29.2");
    missing(comm.register_window(none).map(drop), "2.27.3");
    missing(nccl.allocate(stream.device(), 1).map(drop), "2.19");
    sum_is_right(&comm);
}
