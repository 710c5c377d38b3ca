"""reduce_scatter and all_gather among hosts of several ranks: the order of sums to the bit, every kind of
memory, and what crosses between hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import pytest
import torch

import trigram
from tests.collectives.test_calls import registered
from tests.collectives.test_hosts import sent_by
from tests.support.cases import Cases
from tests.support.checks import equal
from tests.support.data import numbers
from tests.support.harness import run
from tests.support.marks import long

CASES = Cases()
LAYOUTS = {
    "2+2": [0, 0, 1, 1],
    "mixed": [0, 1, 0, 1],
    "2+1": [0, 1, 0],
    "3+1": [0, 1, 1, 1],
    "2+2+1": [0, 1, 2, 0, 1],
}
MIB = 2**20


def _in_order(parts: list[torch.Tensor], hosts: list[int]) -> torch.Tensor:
    """The sum as documented: of a host's ranks in order, rounded to the dtype, then of the hosts in order."""
    by_host = {
        h: [p for p, host in zip(parts, hosts, strict=True) if host == h] for h in dict.fromkeys(hosts)
    }

    def added(ts: list[torch.Tensor]) -> torch.Tensor:
        wide = torch.float32 if ts[0].dtype in (torch.float16, torch.bfloat16) else ts[0].dtype
        return reduce(torch.add, [t.to(wide) for t in ts]).to(ts[0].dtype)

    return added([added(each) for each in by_host.values()])


def _layout(world: int) -> list[int]:
    """The hosts of this launch, by rank, as the ranks know them."""
    group = trigram.runtime.world.resolve(None)
    return [next(i for i, h in enumerate(group.hosts()) if r in h) for r in range(world)]


def _lengths(world: int, scale: int) -> list[list[int]]:
    """Equal blocks; blocks of which some are empty; one rank has all."""
    uneven = [(3 * r + 1) % 4 * scale for r in range(world)]
    return [[scale] * world, uneven, [0] * (world - 1) + [2 * scale]]


def _memory(rank: int, hosts: list[int]) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Ordinary memory, registered memory, registered on the first host only, on all ranks but the first."""
    plain = torch.Tensor.clone
    return [
        plain,
        registered,
        registered if hosts[rank] == hosts[0] else plain,
        plain if rank == 0 else registered,
    ]


@CASES.over(1, 1003, 30_000, 250_000)
def sums(rank: int, world: int, scale: int) -> None:
    hosts = _layout(world)
    for lengths in _lengths(world, scale):
        mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8):
            inputs = [numbers(r, sum(lengths), dtype) for r in range(world)]
            right = _in_order([p[mine] for p in inputs], hosts)
            for k, make in enumerate(_memory(rank, hosts)):
                t, what = make(inputs[rank]), f"{lengths} {dtype} memory {k}"
                out = torch.full((lengths[rank],), 7, dtype=dtype)
                trigram.reduce_scatter(out, t, splits=lengths)
                equal(out, right, what)
                equal(t, inputs[rank], f"{what}: the input")
                trigram.reduce_scatter(t[mine], t, splits=lengths)
                equal(t[mine], right, f"{what} in place")


@CASES.over(1, 1003, 30_000, 250_000)
def blocks(rank: int, world: int, scale: int) -> None:
    hosts = _layout(world)
    for lengths in _lengths(world, scale):
        mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        for dtype in (torch.float32, torch.int8):
            parts = [numbers(r, n, dtype) for r, n in enumerate(lengths)]
            whole = torch.cat(parts)
            for k, make in enumerate(_memory(rank, hosts)):
                out, what = make(torch.full_like(whole, 7)), f"{lengths} {dtype} memory {k}"
                trigram.all_gather(out, parts[rank], splits=lengths)
                equal(out, whole, what)
                out.fill_(7)
                out[mine] = parts[rank]
                trigram.all_gather(out, out[mine], splits=lengths)
                equal(out, whole, f"{what} in place")


@CASES
def at_the_same_time(rank: int, world: int) -> None:
    """Several asynchronous calls, more than there are operation slots, with all_reduces between them."""
    hosts = _layout(world)
    for make in _memory(rank, hosts):
        calls = []
        for k in range(12):
            n = (5, 1003, 70_000)[k % 3]
            inputs = [numbers(r, n * world, salt=k) for r in range(world)]
            scattered, gathered = torch.empty(n), make(torch.empty(n * world))
            added = torch.full((3,), float(rank))
            right = _in_order([p[n * rank : n * (rank + 1)] for p in inputs], hosts)
            given = make(inputs[rank])
            works = [
                trigram.reduce_scatter(scattered, given, async_op=True),
                trigram.all_reduce(added, async_op=True),
                trigram.all_gather(gathered, given[:n], async_op=True),
            ]
            calls.append(
                (works, scattered, right, gathered, torch.cat([p[:n] for p in inputs]), added, given)
            )
        for works, scattered, right, gathered, whole, added, _ in calls:
            for work in works:
                assert work is not None
                work.wait()
            equal(scattered, right)
            equal(gathered, whole)
            equal(added, torch.full((3,), float(sum(range(world)))))


@CASES
def lists(rank: int, world: int) -> None:
    """Blocks that lie in several tensors, which nobody else can access."""
    n = 20_000
    outs = [registered(torch.empty(n)) for _ in range(world)]
    trigram.all_gather(outs, numbers(rank, n))
    for r, out in enumerate(outs):
        equal(out, numbers(r, n))
    inputs = [[numbers(r, n, salt=k) for k in range(world)] for r in range(world)]
    out = torch.empty(n)
    trigram.reduce_scatter(out, [registered(t) for t in inputs[rank]])
    equal(out, _in_order([p[rank] for p in inputs], _layout(world)))


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("layout", [long("2+2"), long("mixed"), "2+1", long("3+1"), "2+2+1"])
def test_blocks(in_launch: Callable[..., None], several_hosts: None, layout: str, case: str) -> None:
    hosts = LAYOUTS[layout]
    in_launch("CASES", case, len(hosts), transport="auto", hosts=hosts)


def _crossing(rank: int, world: int, rounds: int, size: int) -> dict[str, tuple[int, int]]:
    """What left this host over the wire, and over its own loopback, during some calls."""
    found = {}
    for kind, make in (("ordinary", torch.empty), ("registered", trigram.empty)):
        whole, part = make(size // 4), make(size // 4 // world)
        whole.zero_()
        part.zero_()
        for name, call in (
            ("reduce_scatter", lambda a=part, b=whole: trigram.reduce_scatter(a, b)),
            ("all_gather", lambda a=whole, b=part: trigram.all_gather(a, b)),
        ):
            call()
            trigram.barrier()
            before = sent_by("eth0"), sent_by("lo")
            trigram.barrier()
            for _ in range(rounds):
                call()
            trigram.barrier()
            found[f"{name} {kind}"] = sent_by("eth0") - before[0], sent_by("lo") - before[1]
    return found


@pytest.mark.parametrize("layout", ["2+2", "2+1", long("3+1"), long("2+2+1")])
def test_what_crosses_is_the_formula(several_hosts: None, layout: str) -> None:
    """Of S bytes a host sends what other hosts' ranks get of a reduce_scatter, S (H-1)/H if all have as many
    ranks, and its own part to each other host in an all_gather. The rest passes through shared memory.
    Counted by the kernel, so headers add a few percent."""
    hosts, rounds = LAYOUTS[layout], 5
    world, size = len(hosts), 4 * len(hosts) * MIB
    for rank, found in enumerate(run(world, _crossing, rounds, size, transport="auto", hosts=hosts)):
        own = size * hosts.count(hosts[rank]) // world
        right = {"reduce_scatter": size - own, "all_gather": (len(set(hosts)) - 1) * own}
        for what, (wire, loopback) in found.items():
            least = rounds * right[what.split()[0]]
            assert 0.99 * least < wire < 1.12 * least, f"{what} of host {hosts[rank]}: {wire / least:.3f}"
            assert loopback < 0.02 * least, f"{what}: {loopback} bytes went over loopback"
