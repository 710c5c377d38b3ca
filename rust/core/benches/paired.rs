//! Sums and codecs next to a copy, in turns: `cargo bench -p trigram-core --bench paired [-- FILTER]`.
//!
//! Each round times the work and then a copy that moves as many bytes as the sum reads and writes, or the
//! float32 values of the codec. A row has the ratio of the copy's time to the work's: the best of both, the median of
//! the rounds' ratios and its quartiles. Buffers are larger than the last-level cache unless `TRIGRAM_BENCH_MIB`
//! says otherwise.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::hint::black_box;
use std::time::Instant;

use trigram_core::codec::{self, Keep, Target, Values};
use trigram_core::{DType, ReduceOp, reduce};

const ROUNDS: usize = 25;

fn seconds(work: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// A row: how fast `work` is, where 1 is as fast as `copy`.
fn row(name: &str, work: &mut dyn FnMut(), copy: &mut dyn FnMut()) {
    if std::env::args().skip(1).filter(|a| !a.starts_with("--")).any(|wanted| !name.contains(&wanted)) {
        return;
    }
    work();
    copy();
    let (mut ratios, mut best) = (Vec::new(), [f64::INFINITY; 2]);
    for _ in 0..ROUNDS {
        let (ours, theirs) = (seconds(work), seconds(copy));
        best = [best[0].min(ours), best[1].min(theirs)];
        ratios.push(theirs / ours);
    }
    ratios.sort_by(f64::total_cmp);
    let at = |part: f64| ratios[(part * (ROUNDS - 1) as f64).round() as usize];
    println!(
        "{name:<34} best {:.2}  median {:.2}  quartiles {:.2} to {:.2}  n {ROUNDS}",
        best[1] / best[0],
        at(0.5),
        at(0.25),
        at(0.75),
    );
}

/// Values like gradients: of many magnitudes, either sign.
fn values(n: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 24) as f32 - 0.5) * 2.0
    };
    (0..n).map(|_| draw() * (4.0 * draw()).exp() * 1e-3).collect()
}

fn fill<'a, T: bytemuck::Pod>(words: &mut [u64], x: impl Iterator<Item = &'a f32>, of: fn(f32) -> T) {
    let out: &mut [T] = bytemuck::cast_slice_mut(words);
    out.iter_mut().zip(x).for_each(|(o, v)| *o = of(*v));
}

fn main() {
    let mib: usize = std::env::var("TRIGRAM_BENCH_MIB").ok().and_then(|m| m.parse().ok()).unwrap_or(96);
    let bytes = mib << 20;
    let x = values(bytes / 4);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for ways in [2usize, 3, 4, 8] {
            // Each source and the result have a share of the bytes, so that all rows move as many.
            let len = bytes / 4 / ways * 4;
            let sources: Vec<Vec<u64>> = (0..ways)
                .map(|k| {
                    let mut words = vec![0u64; len / 8];
                    let part = x[k * 1001..].iter().chain(&x);
                    match dtype {
                        DType::F32 => fill(&mut words, part, |v| v),
                        DType::F16 => fill(&mut words, part, half::f16::from_f32),
                        _ => fill(&mut words, part, half::bf16::from_f32),
                    }
                    words
                })
                .collect();
            let mut out = vec![0u64; len / 8];
            let half = (ways + 1) * len / 16;
            let (from, mut to) = (vec![1u64; half], vec![0u64; half]);
            for op in [ReduceOp::Sum, ReduceOp::Avg] {
                row(
                    &format!("{} {} of {ways}", dtype.name(), op.name()),
                    &mut || {
                        let ends: Vec<&[u8]> = sources.iter().map(|s| bytemuck::cast_slice(s)).collect();
                        let out = bytemuck::cast_slice_mut(&mut out);
                        reduce::fold(dtype, op, Some(ways as u32), &ends, out).unwrap();
                    },
                    &mut || to.copy_from_slice(black_box(&from)),
                );
            }
            let mut ends = sources;
            let (from, mut to) = (vec![1u64; ways * len / 8], vec![0u64; ways * len / 8]);
            for op in [ReduceOp::Sum, ReduceOp::Avg] {
                row(
                    &format!("{} {} of {ways} into all", dtype.name(), op.name()),
                    &mut || {
                        let mut ends: Vec<&mut [u8]> =
                            ends.iter_mut().map(|s| bytemuck::cast_slice_mut(s)).collect();
                        reduce::fold_into_all(dtype, op, Some(ways as u32), &mut ends).unwrap();
                    },
                    &mut || to.copy_from_slice(black_box(&from)),
                );
            }
        }
    }
    let names = ["f16", "bf16", "int8", "int4", "fp8", "sign", "topk:0.01", "topk:0.001", "chunktopk:0.02"];
    for name in names {
        let codec = codec::find(name, None).unwrap();
        let n = x.len();
        let (mut code, mut back, mut residual) = (vec![0; codec.size(n)], vec![0f32; n], vec![0f32; n]);
        let mut to = vec![0f32; n];
        let mut copy = || to.copy_from_slice(black_box(&x));
        codec::encode(&*codec, Values::F32(&x), Keep::Nothing, 0, &mut code).unwrap();
        let read = code.clone();
        let mut encode = || codec::encode(&*codec, Values::F32(&x), Keep::Nothing, 0, &mut code).unwrap();
        row(&format!("{name} encode"), &mut encode, &mut copy);
        let mut feedback =
            || codec::encode(&*codec, Values::F32(&x), Keep::Feedback(&mut residual), 0, &mut code).unwrap();
        row(&format!("{name} encode with feedback"), &mut feedback, &mut copy);
        let mut decode = || codec::decode(&*codec, &read, Target::F32(&mut back), 0).unwrap();
        row(&format!("{name} decode"), &mut decode, &mut copy);
        let mut add = || codec::decode(&*codec, &read, Target::Add(&mut back, 0.25), 0).unwrap();
        row(&format!("{name} decode-add"), &mut add, &mut copy);
    }
}
