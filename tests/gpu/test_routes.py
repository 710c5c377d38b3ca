"""What GPU tensors go through, on a machine without a GPU: the references of the CPU path, over a stand-in
for NCCL and the driver (see tests/support/gpu_standin.py), by each way that a group may take."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch

import trigram
from tests.algorithms import test_consensus, test_state, test_switch, test_weights
from tests.collectives import test_calls, test_uneven, test_work_and_groups
from tests.faults import test_errors
from tests.support import gpu_standin
from tests.support.algorithm_rows import NAMES_ONCE
from tests.support.cases import Cases
from tests.support.checks import equal, raises, says
from tests.support.harness import run
from tests.support.marks import long, long_unless, pairs_with
from tests.training import test_failures, test_loops
from trigram.collectives import batch_send_recv

# NCCL has no bitwise operators, chooses its own schedules, and knows no order of messages by tags.
COLLECTIVES = Cases(test_calls.CASES | {"premultiplied_sums": test_uneven.CASES["premultiplied_sums"]})
NCCLS = [c for c in COLLECTIVES if not c.startswith("nan_and")]  # its min and max drop a NaN
# Callbacks of the engine's own calls, which carry no GPU tensors.
GROUPS = Cases({name: case for name, case in test_work_and_groups.CASES.items() if "callback" not in name})
ALGORITHMS = Cases(test_weights.CASES)
# Ranks that wait for each other in different groups are found in calls of the engine, not of a GPU (ADR 42).
CROSSED = ("one_rank_stops_early", "models_in_another_order")
FAULTS = Cases(
    {c: f for c, f in (test_failures.CASES | test_errors.CASES).items() if not c.startswith(CROSSED)}
)
UNKNOWN_TO_NCCL = Cases()
STATES = Cases(test_state.CASES | test_switch.CASES | test_consensus.CASES | test_loops.CASES)


@pytest.mark.parametrize("case", NCCLS)
@pytest.mark.parametrize("world", [long(2), 3])
def test_collective_by_nccl(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("COLLECTIVES", case, world, env=gpu_standin.env("nccl"))


@pytest.mark.parametrize("case", list(COLLECTIVES))
@pytest.mark.parametrize("world", [3])
def test_collective_by_host(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("COLLECTIVES", case, world, env=gpu_standin.env("host"))


@pytest.mark.parametrize("case", list(GROUPS))
@pytest.mark.parametrize("way", ["nccl", "host"])
def test_groups(in_launch: Callable[..., None], way: str, case: str) -> None:
    if way == "host" and case == "overlapping_memory":
        pytest.skip("input and output pass through buffers of their own, so nothing overlaps")
    in_launch("GROUPS", case, 3, env=gpu_standin.env(way))


@UNKNOWN_TO_NCCL.over(torch.int16, torch.complex64, torch.complex128)
def dtype(rank: int, world: int, dtype: torch.dtype) -> None:
    """NCCL has no such numbers: they are moved as bytes, and complex ones summed as pairs."""
    parts = [(100 * r + torch.arange(5)).to(dtype) * (1j if dtype.is_complex else 1) for r in range(world)]
    whole = torch.cat(parts)
    for root in range(world):
        t = parts[rank].clone()
        trigram.broadcast(t, root)
        equal(t, parts[root])
        out = torch.zeros_like(whole) if rank == root else None
        trigram.gather(out, parts[rank], root)
        if out is not None:
            equal(out, whole)
        trigram.scatter(t, whole if rank == root else None, root)
        equal(t, parts[rank])
    out = torch.zeros_like(whole)
    trigram.all_gather(out, parts[rank])
    equal(out, whole)
    trigram.all_to_all(out, torch.cat([(parts[rank] + r).to(dtype) for r in range(world)]))
    equal(out, torch.cat([(part + rank).to(dtype) for part in parts]))
    messages = [(True, (rank + 1) % world, parts[rank]), (False, (rank - 1) % world, t)]
    batch_send_recv(messages, trigram.init()).wait()
    equal(t, parts[(rank - 1) % world])
    if dtype.is_complex:
        for op, divisor in (("sum", 1), ("avg", world)):
            t = parts[rank].clone()
            trigram.all_reduce(t, op)
            assert torch.allclose(t, torch.stack(parts).sum(0) / divisor)
            trigram.reduce_scatter(t, torch.cat([parts[rank]] * world), op)
            assert torch.allclose(t, torch.stack(parts).sum(0) / divisor)
    elif os.environ["TRIGRAM_GPU_TRANSPORT"] == "nccl":
        says(raises(trigram.UnsupportedError, trigram.all_reduce, t), "int16")


@UNKNOWN_TO_NCCL
def buffers(rank: int, world: int) -> None:
    net = torch.nn.Linear(3, 2)
    net.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0) + rank))
    net.register_buffer("places", torch.arange(7, dtype=torch.int16) + rank)
    model = trigram.with_bagua(net, "local_sgd", every=2)
    equal(net.turns, torch.polar(torch.ones(4), torch.arange(4.0)))  # type: ignore[arg-type]
    equal(net.places, torch.arange(7, dtype=torch.int16))  # type: ignore[arg-type]
    model(torch.ones(1, 3)).sum().backward()
    trigram.consensus(model)


@pytest.mark.parametrize("case", list(UNKNOWN_TO_NCCL))
@pytest.mark.parametrize("way", ["nccl", "host"])
def test_dtypes_that_nccl_does_not_know(in_launch: Callable[..., None], way: str, case: str) -> None:
    in_launch("UNKNOWN_TO_NCCL", case, 3, env=gpu_standin.env(way))


ONCE = [f"trains-{k}" for k in NAMES_ONCE]  # each by NCCL or through the host, and some of the rest
BY_TURNS = {way: [*ONCE[i::2], *list(ALGORITHMS)[i::8]] for i, way in enumerate(("nccl", "host"))}


@pytest.mark.parametrize(
    ("way", "case"),
    [p for way, some in BY_TURNS.items() for p in pairs_with(way, long_unless(some, list(ALGORITHMS)))],
)
def test_algorithm(in_launch: Callable[..., None], way: str, case: str) -> None:
    in_launch("ALGORITHMS", case, 3, env=gpu_standin.env(way))


@pytest.mark.parametrize("case", list(FAULTS))
def test_fault_by_host(in_launch: Callable[..., None], case: str) -> None:
    in_launch("FAULTS", case, 3, env=gpu_standin.env("host"))


# NCCL does not compare splits. After a pass that failed on one rank when it had sent all gradients, the ranks
# agree on communicators anew at different times: each error is told to all, but no checkpoint ends them.
NOT_BY_NCCL = ("splits", "fault_after_the_last_gradient")


@pytest.mark.parametrize("case", [c for c in FAULTS if not c.startswith(NOT_BY_NCCL)])
def test_fault_by_nccl(in_launch: Callable[..., None], case: str) -> None:
    in_launch("FAULTS", case, 3, env=gpu_standin.env("nccl"))


@pytest.mark.parametrize("case", ["fault_before_the_first_gradient"])
def test_fault_while_the_pass_before_it_ends(in_launch: Callable[..., None], case: str) -> None:
    """A rank may fail in its next pass while NCCL still ends the pass before it on another one: that pass
    succeeds there too, so that all ranks have the error in the same pass."""
    in_launch("FAULTS", case, 3, env=gpu_standin.env("nccl") | {"STANDIN_LATE": "0:200"})


@pytest.mark.parametrize("case", long_unless(list(STATES)[::3], list(STATES)))
@pytest.mark.parametrize("way", ["nccl"])
def test_state(in_launch: Callable[..., None], way: str, case: str) -> None:
    in_launch("STATES", case, 3, env=gpu_standin.env(way))


LAYOUTS = {"2+2": [0, 0, 1, 1], "3+1": [0, 0, 0, 1], "2+2+1": [0, 0, 1, 1, 2]}
SUMS = [c for c in COLLECTIVES if c.startswith(("all_reduce", "broadcast"))]
SOME = ["trains-gradient_allreduce sgd", "trains-local_sgd", "trains-decentralized"]


@pytest.mark.parametrize("case", SUMS)
@pytest.mark.parametrize("layout", [long("2+2"), long("3+1"), "2+2+1"])
def test_hierarchical(in_launch: Callable[..., None], several_hosts: None, layout: str, case: str) -> None:
    hosts = LAYOUTS[layout]
    env = gpu_standin.env("hierarchical")
    in_launch("COLLECTIVES", case, len(hosts), transport="auto", hosts=hosts, env=env)


@pytest.mark.parametrize("case", SOME)
def test_training_hierarchical(in_launch: Callable[..., None], several_hosts: None, case: str) -> None:
    env = gpu_standin.env("hierarchical")
    in_launch("ALGORITHMS", case, 4, transport="auto", hosts=LAYOUTS["2+2"], env=env)


def _first_call_differs(rank: int, world: int) -> str:
    """No route has been agreed on, and the last rank makes a call that needs none."""
    trigram.init(op_timeout=30)
    text = ""
    for _ in range(2):
        t = torch.ones(10)
        call = trigram.barrier if rank == world - 1 else partial(trigram.all_reduce, t)
        text = raises(trigram.MismatchError, call)
    return text


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_first_call_differs(way: str) -> None:
    """The ranks that agree on a route do not wait for one that makes another call instead."""
    for text in run(3, _first_call_differs, env=gpu_standin.env(way), timeout=20):
        says(text, "rank 0 called all_reduce", "rank 2 called barrier")
