"""`trigram test`: whether an installation works, in half a minute: two ranks over shared memory and over TCP.

``run`` starts the ranks; this module, run as a rank's program, makes the checks. Each compares with what this
process computes itself, or with DistributedDataParallel over gloo.
"""

from __future__ import annotations

import gc
import itertools
import platform
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from trigram.runtime import launch

_SECONDS = 120.0
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_SIZES = (1, 1000, 300_001)
_CORNERS = [
    f"{who}/{what}/{when}"
    for who, what, when in itertools.product(("central", "gossip:ring"), ("full", "int8"), ("sync", "async"))
]


def run() -> int:
    """Runs the checks on two ranks of this machine over each transport, and prints what was found.

    Returns:
        The exit code: 1 if something is wrong.
    """
    begun = time.monotonic()
    where = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    print(f"trigram {trigram.__version__} with {where}", flush=True)
    code = 0
    for transport in ("shm", "tcp"):
        print(f"two ranks over {'shared memory' if transport == 'shm' else 'TCP'}", flush=True)
        outcome = launch.launch(
            2,
            [sys.executable, "-m", "trigram.cli.self_test"],
            environment={"TRIGRAM_TRANSPORT": transport},
            timeout=_SECONDS,
        )
        if outcome.interrupted:
            return outcome.code
        if outcome.timed_out:
            print(f"  FAILED: not over after {_SECONDS:.0f} s", flush=True)
        code = code or outcome.code
    seconds = time.monotonic() - begun
    if code:
        print(f"something is wrong ({seconds:.0f} s): see above, and run trigram doctor", flush=True)
    else:
        print(f"all is well ({seconds:.0f} s)", flush=True)
    return int(code != 0)


class _WrongError(Exception):
    """A result is not what it must be."""


def _main() -> int:
    """A rank: makes all checks; rank 0 says what it finds, and a rank that finds something wrong ends."""
    torch.set_num_threads(1)
    trigram.init()
    for name, check in (("collectives", _collectives), ("training", _training), ("algorithms", _corners)):
        begun = time.monotonic()
        try:
            found = check()
        except _WrongError as error:
            print(f"  FAILED {name}: rank {trigram.rank()}: {error}", file=sys.stderr, flush=True)
            return 1
        if trigram.rank() == 0:
            print(f"  {name:12s}{found} ({time.monotonic() - begun:.1f} s)", flush=True)
    launch.leave_job()
    return 0


def _values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank contributes: small whole numbers, whose sums are exact in every dtype."""
    return ((torch.arange(size) * 7 + 3 * rank) % 11 - 5).to(dtype)


def _same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if not torch.equal(got, expected):
        raise _WrongError(f"{what}: {int((got != expected).sum())} of {got.numel()} elements are wrong")


def _collectives() -> str:
    """Every collective, with dtypes and sizes that take different ways."""
    calls = 0
    for dtype, size in itertools.product(_DTYPES, _SIZES):
        for name, got, expected in _calls(dtype, size):
            _same(got, expected, f"{name} of {size} {dtype}")
            calls += 1
    dtypes = f"{len(_DTYPES)} dtypes, up to {max(_SIZES):,} elements"
    return f"{calls} results of 10 operations with {dtypes}: all right"


def _calls(dtype: torch.dtype, size: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Makes calls; yields their names, results and what these must be."""
    rank, world = trigram.rank(), trigram.world_size()
    all_values = [_values(r, size, dtype) for r in range(world)]
    stacked, mine = torch.stack(all_values), all_values[rank]
    for op, expected in (("sum", stacked.sum(0)), ("max", stacked.amax(0)), ("min", stacked.amin(0))):
        t = mine.clone()
        trigram.all_reduce(t, op)
        yield f"all_reduce {op}", t, expected.to(dtype)
    t = mine.clone()
    trigram.reduce(t, 1, "sum")
    if rank == 1:
        yield "reduce", t, stacked.sum(0).to(dtype)
    t = mine.clone()
    trigram.broadcast(t, 1)
    yield "broadcast", t, all_values[1]
    t = torch.empty(world * size, dtype=dtype)
    trigram.all_gather(t, mine)
    yield "all_gather", t, torch.cat(all_values)
    t = torch.empty(size, dtype=dtype)
    parts = [_values(r, world * size, dtype) for r in range(world)]
    trigram.reduce_scatter(t, parts[rank], "sum")
    yield "reduce_scatter", t, torch.stack(parts).sum(0).to(dtype)[rank * size : (rank + 1) * size]
    t = torch.empty(world * size, dtype=dtype)
    trigram.all_to_all(t, parts[rank])
    yield "all_to_all", t, torch.cat([p[rank * size : (rank + 1) * size] for p in parts])
    gathered = torch.empty(world * size, dtype=dtype) if rank == 0 else None
    trigram.gather(gathered, mine, 0)
    if gathered is not None:
        yield "gather", gathered, torch.cat(all_values)
    t = torch.empty(size, dtype=dtype)
    trigram.scatter(t, parts[0] if rank == 0 else None, 0)
    yield "scatter", t, parts[0][rank * size : (rank + 1) * size]
    t = mine.clone() if rank == 0 else torch.empty(size, dtype=dtype)
    if rank == 0:
        trigram.send(t, 1)
    else:
        trigram.recv(t, 0)
    yield "send and recv", t, all_values[0]
    trigram.barrier()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Trains; returns the last loss."""
    loss = torch.zeros(())
    for step in range(steps):
        draw = torch.Generator().manual_seed(100 * step + trigram.rank())
        x = torch.randn(16, 32, generator=draw)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def _training() -> str:
    """Some steps give the bits that DistributedDataParallel gives over gloo."""
    steps = 5
    dist.init_process_group("gloo", world_size=trigram.world_size(), rank=trigram.rank())
    model = _model()
    ours = trigram.with_bagua(model, "gradient_allreduce")  # whatever TRIGRAM_ALGORITHM says
    _train(ours, torch.optim.AdamW(ours.parameters(), 1e-2), steps)
    theirs = _with_ddp(steps)
    # The last reference to gloo's group must not be one of DDP's, which is dropped under the lock of the
    # interpreter: the group waits for its threads, and one of them may wait for that lock.
    gc.collect()
    dist.destroy_process_group()
    for (name, p), q in zip(model.named_parameters(), theirs.parameters(), strict=True):
        _same(p.detach(), q.detach(), f"{name} after {steps} steps")
    trigram.unwrap(model)
    return f"{steps} steps, bit for bit those of DistributedDataParallel over gloo"


def _with_ddp(steps: int) -> nn.Module:
    """The model after some steps of DistributedDataParallel, which is dropped."""
    model = _model()
    ddp = DistributedDataParallel(model)
    _train(ddp, torch.optim.AdamW(model.parameters(), 1e-2), steps)
    return model


def _corners() -> str:
    """Each corner of the cube trains, and its consensus is the same on all ranks."""
    steps = 20
    for name in _CORNERS:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        wrapped = trigram.with_bagua(model, name, optimizer=optimizer)
        last = _train(wrapped, optimizer, steps)
        trigram.consensus(wrapped)
        for key, p in model.named_parameters():
            everyone = torch.empty(trigram.world_size() * p.numel())
            trigram.all_gather(everyone, p.detach().flatten())
            _same(everyone.view(-1, p.numel())[0], everyone.view(-1, p.numel())[1], f"{name}: {key}")
        if not last < 3.0:
            raise _WrongError(f"{name}: the loss is {last:.2f} after {steps} steps")
        trigram.unwrap(wrapped)
    return f"{steps} steps with each of the {len(_CORNERS)} corners, {_CORNERS[0]} to {_CORNERS[-1]}"


if __name__ == "__main__":
    sys.exit(_main())
