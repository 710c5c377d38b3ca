"""Measures GPU codecs, compared with a copy on the GPU: the fraction of its bandwidth that each reaches.

    python benches/gpu_codecs.py [--codecs int8,sign] [--sizes 1,4,25,100,400] [--out FILE]

Rates in GB/s (10^9) count what must be read and written once: the values, the encoded bytes and, with
feedback, the residuals. They are relative to a copy of 256 MiB in the same run. First the script checks that
the encoded bytes equal the CPU's. Times are from CUDA events around a graph of 20 calls, the median of 7:
what a launch from Python costs the host is a row of its own. Up to some tens of MiB the data stay in the
GPU's cache, and a codec may be faster than the copy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import gpu_ranks
import torch
from figures import Figures

from trigram import codecs
from trigram.codecs.registry import find_kernel

CODECS = "bf16,f16,int8,int4,fp8,sign,topk:0.01,randomk:0.01"
CALLS, REPEATS = 20, 7
# What must be reached of a copy's bandwidth, with 100 MiB and more: more than caches hold.
BARS = {"bf16": 0.85, "int8": 0.85, "fp8": 0.85, "int4": 0.7, "sign": 0.7}
LARGE = 100
DEVICE = gpu_ranks.device()


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call on the GPU: the calls are replayed as a graph, so that the host's part of a launch
    does not count."""
    replay = captured(call)
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / CALLS)
    return statistics.median(times)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A function that makes the call `CALLS` times, as a graph; in a rehearsal, once."""
    if gpu_ranks.REHEARSES:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    return graph.replay


def copy_rate() -> float:
    """Bytes that a large copy reads and writes per second."""
    a = torch.randn(1 << (20 if gpu_ranks.REHEARSES else 26), device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.nbytes / seconds(lambda: b.copy_(a))


def rows(name: str, n: int, copy: float) -> list[tuple[str, str, float, float]]:
    """Each operation on ``n`` float32 values: codec, operation, GB/s, fraction of the copy's rate."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    kernel, codec = find_kernel(name), codecs.find(name)
    here, residual = x.to(DEVICE), torch.zeros(n, device=DEVICE)
    code = torch.empty(codec.size(n), dtype=torch.uint8, device=DEVICE)
    out = torch.zeros(n, device=DEVICE)
    kernel.encode(here, code, seed=1)
    assert torch.equal(code.cpu(), codec.encode(x, seed=1)), f"{name}: bytes differ from the CPU's"
    operations: list[tuple[str, Callable[[], object], int]] = [
        ("encode", lambda: kernel.encode(here, code), x.nbytes + code.nbytes),
        ("encode with feedback", lambda: kernel.encode(here, code, residual), 3 * x.nbytes + code.nbytes),
        ("decode", lambda: kernel.decode(code, out), x.nbytes + code.nbytes),
        ("decode and add", lambda: kernel.decode(code, out, 1.0), 2 * x.nbytes + code.nbytes),
    ]
    if n <= 1 << 18:
        Figures().add(
            f"{name}, encode: the host's part of a call",
            1e6 * gpu_ranks.seconds(lambda: kernel.encode(here, code), CALLS),
            "us",
        )
    timed = [(what, moved / seconds(call)) for what, call, moved in operations]
    return [(name, what, rate / 1e9, rate / copy) for what, rate in timed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--sizes", default="1,4,25,100,400", help="MiB of float32, with commas")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    gpu_ranks.needs_gpu()
    copy, figures = copy_rate(), Figures()
    figures.add("a copy", copy / 1e9, "GB/s")
    lines = [f"{torch.cuda.get_device_name()}: a copy moves {copy / 1e9:.0f} GB/s", ""]
    lines += ["| codec | operation | MiB | GB/s | of the copy |", "|---|---|---|---|---|"]
    for name in options.codecs.split(","):
        for size in options.sizes.split(","):
            for codec, what, rate, fraction in rows(name, int(float(size) * (1 << 18)), copy):
                lines.append(f"| {codec} | {what} | {size} | {rate:.0f} | {fraction:.2f} |")
                bar = BARS.get(codec) if float(size) >= LARGE else None
                figures.add(f"{codec}, {what}, {size} MiB", fraction, "of the copy", bar)
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
