"""The ratios to look at before and after a change, in two minutes on two cores: `make bench-quick`.

    python benches/quick.py --out quick-out [--parts inside,codecs,between]

AllReduce of two ranks next to gloo, a training step next to DistributedDataParallel, the codecs next to a
copy, and, for root, AllReduce over TCP between two network namespaces. All of it runs in turns (`paired.py`),
and the times of a call are the slowest rank's. The data are random; every result is checked, and a wrong one
ends the script with an error. Writes table.md and results.json. How near registered memory is to the floor
needs longer runs: `registered.py`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import coding
import hosts
import torch
import torch.distributed as dist
from paired import Ratio, in_turns, ratio, table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from trigram.runtime.launch import free_port

SIZES = {
    "4 B": (4, 20, 240),
    "64 KiB": (64 << 10, 5, 160),
    "1 MiB": (1 << 20, 1, 120),
    "25 MiB": (25 << 20, 1, 16),
}
"""Of a call: bytes, calls in a row that are timed together, and turns."""
CODECS = ("bf16", "int8", "int4", "topk:0.01")
CODEC_MIB, STEPS, LAYERS, WIDTH = 64, 20, 6, 512

Times = dict[str, list[float]]


def draw(rank: int, n: int) -> Tensor:
    """The values of a rank; every rank can draw all ranks' values, to check a sum."""
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * rank + n % 997))


def all_reduces(label: str) -> Times:
    """In a rank: seconds of one call by library."""
    size, row, turns = SIZES[label]
    n = max(1, size // 4)
    mine, total = draw(trigram.rank(), n), draw(0, n) + draw(1, n)
    tensors = {"trigram": mine.clone(), "gloo": mine.clone()}

    def prepare() -> None:
        for t in tensors.values():
            t.copy_(mine)
        trigram.barrier()

    def call(name: str) -> None:
        one = dist.all_reduce if name == "gloo" else trigram.all_reduce
        for _ in range(row):
            one(tensors[name])

    def check(name: str) -> None:
        # Summed again and again, the same values on both ranks double: that is exact.
        if not torch.equal(tensors[name], total * 2.0 ** (row - 1)):
            raise SystemExit(f"rank {trigram.rank()}: the sum of {label} by {name} is wrong")

    calls = {name: functools.partial(call, name) for name in tensors}
    taken = in_turns(calls, turns, prepare, check)
    return {name: [t / row for t in times] for name, times in taken.items()}


def steps() -> Times:
    """In a rank: seconds of a training step, by trigram and by DistributedDataParallel."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    plain: nn.Module = nn.Sequential(*layers)
    other = copy.deepcopy(plain)
    models = {"trigram": trigram.with_bagua(plain), "ddp": DistributedDataParallel(other)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    turn = iter(range(1 << 30))
    batch = [torch.empty(0)]

    def prepare() -> None:
        # The same batch for both models: they are asked one after the other.
        batch[0] = draw(trigram.rank() + 2 * (next(turn) // 2), 64 * WIDTH).view(64, WIDTH)
        trigram.barrier()

    def step(name: str) -> Callable[[], None]:
        def run() -> None:
            optimizers[name].zero_grad()
            models[name](batch[0]).square().mean().backward()
            optimizers[name].step()

        return run

    times = in_turns({name: step(name) for name in models}, STEPS, prepare, warmup=3)
    for ours, theirs in zip(plain.parameters(), other.parameters(), strict=True):
        if not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
            raise SystemExit(f"rank {trigram.rank()}: the weights differ from DistributedDataParallel's")
    return times


def rank_main(args: argparse.Namespace) -> None:
    """In a rank: measures, and writes its times."""
    trigram.init()
    master = f"tcp://{os.environ['MASTER_ADDR']}:{args.port}"
    dist.init_process_group("gloo", init_method=master, rank=trigram.rank(), world_size=trigram.world_size())
    found = {label: all_reduces(label) for label in SIZES}
    if args.steps:
        found["step"] = steps()
    (args.out / f"rank{trigram.rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    trigram.shutdown()


def slowest(out: Path, steps: bool, network: hosts.Hosts | None = None) -> dict[str, Times]:
    """Starts two ranks; their times, of each call those of the slower one."""
    argv = [__file__, "--rank", "--out", str(out), "--port", str(free_port())]
    argv += ["--steps"] if steps else []
    if code := hosts.start(argv, 2, network, {"TORCH_CPP_LOG_LEVEL": "ERROR"}, quiet=True):
        raise SystemExit(code)
    zero, one = (json.loads((out / f"rank{r}.json").read_text()) for r in (0, 1))
    return {
        label: {
            name: [max(pair) for pair in zip(taken, one[label].get(name, taken), strict=True)]
            for name, taken in times.items()
        }
        for label, times in zero.items()
    }


def inside(out: Path) -> Iterator[tuple[str, Ratio]]:
    """Two ranks of one host."""
    found = slowest(out, True)
    step = found.pop("step")
    for label, times in found.items():
        yield f"all_reduce {label} : gloo", ratio(times["trigram"], times["gloo"])
    yield "training step : DDP", ratio(step["trigram"], step["ddp"])


def beside_a_copy() -> Iterator[tuple[str, Ratio]]:
    """The codecs, with buffers larger than the caches."""
    for name in CODECS:
        n = CODEC_MIB << 18
        if what := coding.wrong(name, coding.values(n)):
            raise SystemExit(f"codec {name}: {what}")
        seconds = coding.seconds(name, n, 5)
        for operation in coding.OPERATIONS:
            yield f"{name} {operation} : copy", ratio(seconds[operation], seconds["copy"])


def between(out: Path) -> Iterator[tuple[str, Ratio]]:
    """Two hosts, an unshaped cable."""
    if os.geteuid() != 0:
        print("between hosts: left out, network namespaces need root", file=sys.stderr)
        return
    with hosts.Hosts(2) as network:
        found = slowest(out, False, network)
    for label, times in found.items():
        yield f"all_reduce {label} over TCP : gloo", ratio(times["trigram"], times["gloo"])


def main() -> None:
    """Measures and prints the table; in a rank, measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("quick-out"))
    parser.add_argument("--parts", default="inside,codecs,between", help="what to measure")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rank:
        return rank_main(args)
    made: dict[str, Callable[[], Iterator[tuple[str, Ratio]]]] = {
        "inside": lambda: inside(args.out),
        "codecs": beside_a_copy,
        "between": lambda: between(args.out),
    }
    rows = [row for part in args.parts.split(",") for row in made[part]()]
    text = table(rows)
    (args.out / "table.md").write_text(text)
    (args.out / "results.json").write_text(
        json.dumps([{"name": name, **r._asdict()} for name, r in rows], indent=1) + "\n"
    )
    print(text)


if __name__ == "__main__":
    main()
