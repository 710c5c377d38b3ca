"""Measures the speed of the codecs, compared with torch's `copy_` of the same tensor, and checks their error
bounds.

    python benches/codecs.py --out codecs-out [--codecs int8,sign] [--sizes 1,25] [--threads 1]

GB/s (10^9) count the bytes of the float32 input, whatever the encoded size. The operations take turns with
the copy, so that changes of the machine's speed affect all alike; figures are medians. Writes results.json
and table.md. The exit code is 1 if an error exceeds its bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trigram import codecs

CODECS = ("bf16", "f16", "int8", "int4", "fp8", "sign", "topk:0.01", "randomk:0.01")
OPERATIONS = ("encode", "encode with feedback", "decode", "decode-add")
BLOCKS = {"int8": 512, "int4": 32, "fp8": 128, "sign": 256}
ULP = 2.0**-23


def values(n: int) -> Tensor:
    """Values distributed like gradients: of many magnitudes, a few of them large."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=generator) * torch.randn(n, generator=generator).exp() * 1e-3


def bound(name: str, x: Tensor) -> Tensor:
    """The error bound of each value of `x` (whole blocks), for codecs that send all values."""
    if name in ("bf16", "f16"):
        relative, least = (2.0**-8, 0.0) if name == "bf16" else (2.0**-11, 2.0**-25)
        return (x.abs() * relative).clamp(min=least)
    blocks = x.view(-1, BLOCKS[name])
    if name == "fp8":
        scale = blocks.abs().amax(1, keepdim=True) / 448
        # Three mantissa bits; below 2^-6 of the scale the step is 2^-9.
        limit = torch.maximum(blocks.abs() / 16, scale * 2.0**-10) * (1 + 4 * ULP)
    else:
        codes, spare = (255, 2.0**-15) if name == "int8" else (15, 2.0**-19)
        low, high = blocks.amin(1, keepdim=True).clamp(max=0), blocks.amax(1, keepdim=True).clamp(min=0)
        limit = ((high - low) / codes * (1 + spare) + blocks.abs() * ULP).expand_as(blocks)
    return limit.reshape(-1)


def wrong(name: str, x: Tensor) -> str:
    """What is wrong after encoding and decoding `x`; an empty string if nothing is."""
    codec, back, residual = codecs.find(name), torch.empty_like(x), torch.zeros_like(x)
    encoded = codec.encode(x, residual=residual, seed=1)
    codec.decode(encoded, back)
    if encoded.numel() != codec.size(len(x)):
        return f"{encoded.numel()} bytes, not {codec.size(len(x))}"
    if not torch.equal(residual, x - back):
        return "the residual is not the encoding error"
    added = x.clone()
    codec.decode(encoded, added, weight=0.5)
    if not torch.allclose(added, x + 0.5 * back, rtol=1e-6, atol=0):
        return "decode-add does not add the decoded values"
    if name == "sign":
        mean = (
            x.view(-1, BLOCKS[name]).double().abs().mean(1, keepdim=True).expand(-1, BLOCKS[name]).reshape(-1)
        )
        good = torch.allclose(back.double(), torch.where(x < 0, -mean, mean), rtol=1e-6)
        return "" if good else "a decoded value is not the mean with the value's sign"
    if name.partition(":")[0] in ("topk", "randomk"):
        kept = back != 0
        count = max(1, -int(-float(name.partition(":")[2]) * len(x) // 1))
        if not torch.equal(back[kept], x[kept]) or abs(int(kept.sum()) - count) > 0:
            return f"not {count} unchanged values"
        smaller = name.startswith("randomk") or x[kept].abs().min() >= x[~kept].abs().max()
        return "" if smaller else "the values sent are not the largest"
    excess = float(((back - x).abs() / bound(name, x).clamp(min=1e-45)).max())
    return "" if excess <= 1 else f"an error {excess:.4f} times its bound"


def measure(name: str, n: int, rounds: int) -> dict[str, Any]:
    """Median rates of each operation and of the copy, measured in turns."""
    codec, x = codecs.find(name), values(n)
    out, residual, added = torch.empty_like(x), torch.zeros_like(x), torch.zeros_like(x)
    encoded = codec.encode(x)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(x),
        "encode": lambda: codec.encode(x, encoded),
        "encode with feedback": lambda: codec.encode(x, encoded, residual),
        "decode": lambda: codec.decode(encoded, out),
        "decode-add": lambda: codec.decode(encoded, added, 0.25),
    }
    seconds: dict[str, list[float]] = {each: [] for each in calls}
    for repeat in range(rounds + 1):
        for each, call in calls.items():
            started = time.perf_counter()
            call()
            if repeat:
                seconds[each].append(time.perf_counter() - started)
    rates = {each: 4 * n / statistics.median(taken) / 1e9 for each, taken in seconds.items()}
    row: dict[str, Any] = {"codec": name, "bytes": 4 * n, "encoded_bytes": codec.size(n), "GBps": rates}
    return row | {"of_copy": {each: rates[each] / rates["copy"] for each in OPERATIONS}}


def markdown(rows: list[dict[str, Any]]) -> str:
    """A row per codec and size: GB/s, and in brackets the fraction of the copy's rate."""
    lines = [f"| codec | MiB | smaller | copy | {' | '.join(OPERATIONS)} | error |"]
    lines.append("|---|---:|---:|---:|" + "---:|" * len(OPERATIONS) + "---|")
    for row in rows:
        cells = " | ".join(f"{row['GBps'][each]:.2f} ({row['of_copy'][each]:.2f})" for each in OPERATIONS)
        smaller, copy = row["bytes"] / row["encoded_bytes"], row["GBps"]["copy"]
        lines.append(
            f"| {row['codec']} | {row['bytes'] / 2**20:g} | {smaller:.1f}x | {copy:.2f} | {cells} "
            f"| {row['wrong'] or 'in its bound'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures and checks; returns 1 if an error exceeds its bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", type=lambda text: text.split(","), default=list(CODECS))
    parser.add_argument(
        "--sizes", type=lambda text: [float(size) for size in text.split(",")], default=[1, 25]
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of torch's copy")
    parser.add_argument("--out", type=Path, default=Path("codecs-out"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for size in args.sizes:
        n = max(1, int(size * 2**20) // 4096) * 1024  # whole blocks
        for name in args.codecs:
            rows.append(measure(name, n, args.rounds) | {"wrong": wrong(name, values(n))})
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(
        json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n"
    )
    (args.out / "table.md").write_text(markdown(rows))
    print(markdown(rows))
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
