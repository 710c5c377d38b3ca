"""The adapter for torchcomms, with a stand-in for its module: torchcomms has no wheel on the index of Python.

The stand-in keeps its contract for backends in Python: a class without arguments, `init(device, name,
options)`, and calls that are given tensors, operator and `async_op` by position, and return None or a handle
with `wait`.
"""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import torch

from tests.support.checks import equal
from tests.support.harness import run


class ReduceOp(enum.Enum):
    SUM = 0
    PRODUCT = 1
    MAX = 2


def _calls(rank: int, world: int) -> None:
    module: Any = types.ModuleType("torchcomms")
    registered: dict[str, type] = {}
    module.TorchCommBackend = type("TorchCommBackend", (), {})
    module.register_backend = registered.__setitem__
    sys.modules["torchcomms"] = module
    from trigram.backend import torchcomms

    torchcomms.register()
    comm: Any = registered["trigram"]()
    comm.init(torch.device("cpu"), "comm", None)
    assert (comm.get_rank(), comm.get_size()) == (rank, world)
    for background in (False, True):

        def call(name: str, *args: Any, background: bool = background) -> None:
            work = getattr(comm, name)(*args, background)
            assert (work is not None) == background, name
            if work is not None:
                work.wait()

        t = torch.full((4,), rank + 1.0)
        call("all_reduce", t, ReduceOp.SUM)
        equal(t, torch.full((4,), world * (world + 1) / 2))
        call("broadcast", t.fill_(rank), 1)
        equal(t, torch.full((4,), 1.0))
        call("reduce", t.fill_(rank + 1.0), 0, ReduceOp.MAX)
        equal(t, torch.full((4,), float(world if rank == 0 else rank + 1)))
        out = torch.empty(world * 2)
        call("all_gather_single", out, torch.full((2,), float(rank)))
        equal(out, torch.arange(world).repeat_interleave(2).float())
        outs = [torch.empty(r + 1) for r in range(world)]
        call("all_gather_v", outs, torch.full((rank + 1,), float(rank)))
        equal(torch.cat(outs), torch.cat([torch.full((r + 1,), float(r)) for r in range(world)]))
        part = torch.empty(2)
        call("reduce_scatter_single", part, torch.ones(2 * world), ReduceOp.SUM)
        equal(part, torch.full((2,), float(world)))
        own = torch.empty(rank + 1)
        call("reduce_scatter_v", own, [torch.ones(r + 1) for r in range(world)], ReduceOp.SUM)
        equal(own, torch.full((rank + 1,), float(world)))
        call("all_to_all_single", out, torch.full((2 * world,), float(rank)))
        equal(out, torch.arange(world).repeat_interleave(2).float())
        call("all_to_all_v_single", out, torch.full((2 * world,), float(rank)), [2] * world, [2] * world)
        outs = [torch.empty(1) for _ in range(world)]
        call("all_to_all", outs, [torch.full((1,), float(rank)) for _ in range(world)])
        equal(torch.cat(outs), torch.arange(world).float())
        call("gather", outs if rank == 0 else [], torch.full((1,), float(rank)), 0)
        call("scatter", own[:1], outs if rank == 0 else [], 0)
        equal(own[:1], torch.full((1,), float(rank)))
        call("barrier")
        if rank == 0:
            call("send", torch.full((1,), 5.0), 1)
        elif rank == 1:
            call("recv", own[:1], 0)
            assert own[0] == 5
    part_of = comm.split([0, 1], "part", None)
    assert (part_of is None) == (rank > 1)
    if part_of is not None:
        t = torch.ones(1)
        part_of.all_reduce(t, ReduceOp.SUM, False)
        assert t.item() == 2
    comm.finalize()


def test_calls() -> None:
    run(3, _calls)
