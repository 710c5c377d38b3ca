//! A sum over all GPUs of this machine, a thread each.
#![allow(clippy::print_stdout)] // an example shows what it does

use std::time::Duration;

use nccl_rs::{Buffer, Communicator, Config, Cuda, Nccl, Op, Result, Search, Stream, UniqueId};

const LIMIT: Duration = Duration::from_secs(60);

fn rank(nccl: &Nccl, cuda: &Cuda, id: UniqueId, rank: u32, size: u32) -> Result<f32> {
    let stream = Stream::new(&cuda.device(rank as i32)?, 0)?;
    let comm = Communicator::init(nccl, &stream, id, rank, size, Config::new(), LIMIT)?.wait(LIMIT)?;
    let mut x = Buffer::from_slice(&stream, &vec![rank as f32 + 1.0; 1 << 20])?;
    comm.all_reduce(None, x.data_mut(), Op::SUM)?;
    Ok(x.read()?[0])
}

fn main() -> Result<()> {
    let nccl = Nccl::load(&Search::new())?;
    println!("NCCL {} from {}", nccl.version(), nccl.path());
    let cuda = Cuda::load()?;
    let (size, id) = (cuda.devices()?.unsigned_abs(), nccl.unique_id()?);
    std::thread::scope(|threads| {
        let (nccl, cuda) = (&nccl, &cuda);
        let all: Vec<_> = (0..size).map(|r| threads.spawn(move || rank(nccl, cuda, id, r, size))).collect();
        for (r, thread) in all.into_iter().enumerate() {
            match thread.join() {
                Ok(Ok(sum)) => println!("rank {r}: {sum}, expected {}", size * (size + 1) / 2),
                Ok(Err(e)) => println!("rank {r}: {e}"),
                Err(_) => println!("rank {r} panicked"),
            }
        }
    });
    Ok(())
}
