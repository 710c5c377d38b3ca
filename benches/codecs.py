"""Measures the speed of the codecs, compared with torch's `copy_` of the same tensor, and checks their error
bounds.

    python benches/codecs.py --out codecs-out [--codecs int8,sign] [--sizes 1,25] [--threads 1]

GB/s (10^9) count the bytes of the float32 input, whatever the encoded size. The operations take turns with
the copy (`paired.py`); figures are medians, and results.json has quartiles too. Writes results.json and
table.md. The exit code is 1 if an error exceeds its bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import coding
import torch
from coding import OPERATIONS
from paired import ratio

from trigram import codecs

CODECS = ("bf16", "f16", "int8", "int4", "fp8", "sign", "topk:0.01", "randomk:0.01", "chunktopk:0.02")


def measure(name: str, n: int, rounds: int) -> dict[str, Any]:
    """Median rates, and how fast each operation is, where 1 is as fast as the copy."""
    taken = coding.seconds(name, n, rounds)
    rates = {each: 4 * n / statistics.median(times) / 1e9 for each, times in taken.items()}
    row: dict[str, Any] = {"codec": name, "bytes": 4 * n, "encoded_bytes": codecs.find(name).size(n)}
    of_copy = {each: ratio(taken[each], taken["copy"])._asdict() for each in OPERATIONS}
    return row | {"GBps": rates, "of_copy": of_copy}


def markdown(rows: list[dict[str, Any]]) -> str:
    """A row per codec and size: GB/s, and in brackets the fraction of the copy's rate."""
    lines = [f"| codec | MiB | smaller | copy | {' | '.join(OPERATIONS)} | error |"]
    lines.append("|---|---:|---:|---:|" + "---:|" * len(OPERATIONS) + "---|")
    for row in rows:
        cells = " | ".join(
            f"{row['GBps'][each]:.2f} ({row['of_copy'][each]['median']:.2f})" for each in OPERATIONS
        )
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
            rows.append(measure(name, n, args.rounds) | {"wrong": coding.wrong(name, coding.values(n))})
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(
        json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n"
    )
    (args.out / "table.md").write_text(markdown(rows))
    print(markdown(rows))
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
