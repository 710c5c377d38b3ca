"""Several hosts of several ranks (network namespaces); the same bits in every run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import trigram
from tests.collectives import test_calls, test_work_and_groups
from tests.support.cases import Cases
from tests.support.checks import fingerprint
from tests.support.data import numbers
from tests.support.harness import run
from tests.support.marks import long
from tests.support.models import train

CASES = Cases(test_calls.CASES | test_work_and_groups.CASES)
LAYOUTS = {"2+2": [0, 0, 1, 1], "1+3": [0, 1, 1, 1], "mixed": [0, 1, 0, 1]}
MIB = 2**20


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("layout", [long("2+2"), long("1+3"), "mixed"])
def test_collective_across_hosts(
    in_launch: Callable[..., None], several_hosts: None, layout: str, case: str
) -> None:
    in_launch("CASES", case, 4, transport="auto", hosts=LAYOUTS[layout])


def sent_by(interface: str) -> int:
    """Bytes that this namespace's interface has sent, as the kernel counts them."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise KeyError(interface)


def _bytes(rank: int, world: int, rounds: int, size: int) -> tuple[int, int]:
    """What left this host over the wire, and over its own loopback, during some all_reduces."""
    t = trigram.empty(size // 4, dtype=torch.float32)
    t.fill_(1.0)
    trigram.all_reduce(t, "max")
    trigram.barrier()
    before = sent_by("eth0"), sent_by("lo")
    trigram.barrier()
    for _ in range(rounds):
        trigram.all_reduce(t, "max")
    trigram.barrier()
    return sent_by("eth0") - before[0], sent_by("lo") - before[1]


def test_once_per_byte_between_hosts(several_hosts: None) -> None:
    """2 hosts x 2 ranks: each host sends S bytes per all_reduce of S, not a flat ring's 1.5 S.

    The rest goes through shared memory, not loopback. Counted by the kernel, so headers add a few percent.
    """
    rounds, size = 5, 8 * MIB
    for wire, loopback in run(4, _bytes, rounds, size, transport="auto", hosts=LAYOUTS["2+2"]):
        assert 0.9 * rounds * size < wire < 1.12 * rounds * size, (
            f"{wire / rounds / size:.3f} S per all_reduce"
        )
        assert loopback < 0.02 * rounds * size, f"{loopback} bytes went over loopback"


def test_shared_memory_passes_through_no_socket(several_hosts: None) -> None:
    for wire, loopback in run(2, _bytes, 5, 8 * MIB, hosts=[0, 0]):
        assert wire + loopback < MIB, f"{wire} + {loopback} bytes through sockets"


def test_training_across_hosts(several_hosts: None) -> None:
    """The weights are the same on all ranks after every step, and the losses those of one host.

    In float64: steps amplify what the order of additions leaves in the last bit.
    """
    across = run(4, _train, transport="auto", hosts=LAYOUTS["2+2"], timeout=90)
    within = run(4, _train, timeout=90)
    assert len({tuple(w) for _, w in across}) == 1
    for (a, _), (b, _) in zip(across, within, strict=True):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) <= 1e-10, (a, b)


def _train(rank: int, world: int) -> tuple[list[float], list[str]]:
    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        return trigram.with_bagua(model, bucket_mb=0.01)

    history = train("small digits", wrap, rank, world, 20, torch.float64)
    return history.losses, history.weights


def _bits(rank: int, world: int) -> dict[str, str]:
    """Hashes of float sums whose bits depend on the order of the additions."""
    shared = [] if os.environ["TRIGRAM_TRANSPORT"] == "tcp" else ["shared"]
    prints = {}
    for via in ["ring", "tree", "recursive_doubling", "scatter_gather", *shared]:
        results = []
        for n in (5, 1003, 300_007):
            for dtype in (torch.float32, torch.bfloat16):
                for _again in range(3):
                    t = trigram.empty(n, dtype=dtype)
                    t.copy_(numbers(rank, n, dtype))
                    trigram.all_reduce(t, via=via)
                    results.append(t)
        prints[via] = fingerprint(results)
        assert all(fingerprint([t]) == fingerprint([results[i - i % 3]]) for i, t in enumerate(results)), via
    return prints


@pytest.mark.parametrize("transport, world", [("shm", 5), ("tcp", 3), long("shm", 3), long("tcp", 5)])
def test_same_bits_in_every_run(world: int, transport: str) -> None:
    """NUM-4, over two launches; NUM-1, on all ranks."""
    runs = [run(world, _bits, transport=transport) for _ in range(2)]
    assert all(prints == runs[0][0] for results in runs for prints in results), runs


def _calls_by_rates(rank: int, world: int) -> tuple[int, bool]:
    """Large and small sums in flight together, until rates have changed schedules; and how long that took."""
    sizes = [600_000, 1, 900, 2_000, 700_000, 5_000, 8_000]
    group = trigram.runtime.world.resolve(None)
    for round_ in range(400):
        tensors = [torch.full((n,), float(rank + round_ + i)) for i, n in enumerate(sizes)]
        works = [trigram.all_reduce(t, async_op=True) for t in tensors]
        for i, (t, work) in enumerate(zip(tensors, works, strict=True)):
            assert work is not None
            work.wait()
            right = float(sum(r + round_ + i for r in range(world)))
            assert bool((t == right).all()), f"round {round_}, call {i}: {t.unique().tolist()}, not {right}"
        if round_ >= 40 and group.core.rates():
            return round_, len(group.core.rates()) == world
    return 400, False


@pytest.mark.parametrize("world", [3, 5])
def test_schedules_follow_measured_rates(several_hosts: None, world: int) -> None:
    """Every call is right while rates become known and change what calls take, small and large ones."""
    ends = run(world, _calls_by_rates, transport="auto", hosts=list(range(world)), timeout=90)
    assert len(set(ends)) == 1
    assert ends[0][1], "the rates were never known"
