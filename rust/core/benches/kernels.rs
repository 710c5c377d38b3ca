//! How fast sums and schedules are: `cargo bench -p trigram-core`.
//!
//! Sums are beside a copy of as many bytes as they read and write, in the cache (256 KiB) and out of it
//! (64 MiB): throughput counts the bytes read and written.
#![allow(clippy::unwrap_used, missing_docs)]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use trigram_core::planner::WINDOW_PIECES;
use trigram_core::schedule::even_shares;
use trigram_core::topology::{Shape, recursive_doubling, ring, scatter_gather, tree};
use trigram_core::{DType, ReduceOp, reduce};

/// Bytes, aligned for every dtype.
fn buffer(bytes: usize) -> Vec<u64> {
    vec![0; bytes / 8]
}

fn sums(c: &mut Criterion) {
    for (name, bytes) in [("256 KiB", 256 << 10), ("64 MiB", 64 << 20)] {
        let mut group = c.benchmark_group(format!("sum of two, {name}"));
        group.throughput(Throughput::Bytes(3 * bytes as u64)).sample_size(20);
        let (a, b) = (buffer(bytes), buffer(bytes));
        let mut out = buffer(bytes);
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            group.bench_function(BenchmarkId::from_parameter(dtype.name()), |bench| {
                bench.iter(|| {
                    let sources = [bytemuck::cast_slice(&a), bytemuck::cast_slice(&b)];
                    reduce::fold(dtype, ReduceOp::Sum, None, &sources, bytemuck::cast_slice_mut(&mut out))
                });
            });
        }
        // As many bytes as a sum moves: half are read, half written.
        let (from, mut to) = (buffer(3 * bytes / 2), buffer(3 * bytes / 2));
        group.bench_function("copy", |bench| bench.iter(|| to.copy_from_slice(black_box(&from))));
        group.finish();
    }
}

fn schedules(c: &mut Criterion) {
    let mut group = c.benchmark_group("one rank's schedule, 25 MiB among 10,000 ranks");
    group.sample_size(20);
    let shape = Shape { me: 4321, world: 10_000, len: 25 << 18, piece: 32 << 10 };
    group.bench_function("ring", |b| b.iter(|| ring::all_reduce(black_box(shape))));
    group.bench_function("tree", |b| b.iter(|| tree::all_reduce(black_box(shape))));
    group.bench_function("recursive_doubling", |b| {
        b.iter(|| recursive_doubling::all_reduce(black_box(shape)));
    });
    let shares = even_shares(shape.len, shape.world as usize);
    group.bench_function("scatter_gather", |b| {
        b.iter(|| scatter_gather::all_reduce(black_box(shape), &shares, WINDOW_PIECES));
    });
    group.finish();
}

criterion_group!(benches, sums, schedules);
criterion_main!(benches);
