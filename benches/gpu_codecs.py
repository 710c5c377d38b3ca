"""Measures GPU codecs, compared with a copy on the GPU: the fraction of its bandwidth that each reaches.

    python benches/gpu_codecs.py [--codecs int8,sign] [--sizes 1,4,25,100] [--out FILE]

Rates in GB/s (10^9) count what must be read and written once: the values, the encoded bytes and, with
feedback, the residuals. They are relative to a copy of 256 MiB in the same run. First the script checks that
the encoded bytes equal the CPU's. Times are from CUDA events around 20 calls, the median of 7.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from trigram import codecs
from trigram.codecs.registry import find_kernel

CODECS = "bf16,f16,int8,int4,fp8,sign,topk:0.01,randomk:0.01"
CALLS, REPEATS = 20, 7


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / CALLS)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes that a large copy reads and writes per second."""
    a = torch.randn(1 << 26, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / seconds(lambda: b.copy_(a))


def rows(name: str, n: int, copy: float) -> list[tuple[str, str, float, float]]:
    """Each operation on ``n`` float32 values: codec, operation, GB/s, fraction of the copy's rate."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    kernel, codec = find_kernel(name), codecs.find(name)
    here, residual = x.cuda(), torch.zeros(n, device="cuda")
    code = torch.empty(codec.size(n), dtype=torch.uint8, device="cuda")
    out = torch.zeros(n, device="cuda")
    kernel.encode(here, code, seed=1)
    assert torch.equal(code.cpu(), codec.encode(x, seed=1)), f"{name}: bytes differ from the CPU's"
    operations: list[tuple[str, Callable[[], object], int]] = [
        ("encode", lambda: kernel.encode(here, code), x.nbytes + code.nbytes),
        ("encode with feedback", lambda: kernel.encode(here, code, residual), 3 * x.nbytes + code.nbytes),
        ("decode", lambda: kernel.decode(code, out), x.nbytes + code.nbytes),
        ("decode and add", lambda: kernel.decode(code, out, 1.0), 2 * x.nbytes + code.nbytes),
    ]
    timed = [(what, moved / seconds(call)) for what, call, moved in operations]
    return [(name, what, rate / 1e9, rate / copy) for what, rate in timed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--codecs", default=CODECS)
    parser.add_argument("--sizes", default="1,4,25,100", help="MiB of float32, with commas")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("gpu_codecs: torch finds no GPU here")
    copy = copy_rate()
    lines = [f"{torch.cuda.get_device_name()}: a copy moves {copy / 1e9:.0f} GB/s", ""]
    lines += ["| codec | operation | MiB | GB/s | of the copy |", "|---|---|---|---|---|"]
    for name in options.codecs.split(","):
        for size in options.sizes.split(","):
            for codec, what, rate, fraction in rows(name, int(float(size) * (1 << 18)), copy):
                lines.append(f"| {codec} | {what} | {size} | {rate:.0f} | {fraction:.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
