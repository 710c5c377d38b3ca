"""Parts of different lengths of GPU tensors, which are gathered and reduced in place, over a stand-in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.collectives.test_calls import right_sum
from tests.support import gpu_standin
from tests.support.cases import Cases
from tests.support.checks import equal
from tests.support.data import numbers
from trigram.collectives.dispatch import dispatch_uneven_on_device
from trigram.runtime import engine_codes
from trigram.runtime.world import resolve

CASES = Cases()
FLOAT, SUM = engine_codes.DTYPES[torch.float32], engine_codes.OPS["sum"]


@CASES.over(1, 50_000)
def uneven(rank: int, world: int, scale: int) -> None:
    group = resolve(None)
    for lengths in ([(3 * r + 1) % 4 * scale for r in range(world)], [0] * (world - 1) + [5 * scale]):
        t, out = numbers(rank, lengths[rank]), torch.empty(sum(lengths))
        asked = (engine_codes.ALL_GATHER, FLOAT, 0, 0, 0, 0)
        dispatch_uneven_on_device(group, asked, t, out, False, "all_gather", lengths, None)
        equal(out, torch.cat([numbers(r, n) for r, n in enumerate(lengths)]), f"{lengths}")
        inputs = [numbers(r, sum(lengths)) for r in range(world)]
        whole, part = inputs[rank].clone(), torch.empty(lengths[rank])
        asked = (engine_codes.REDUCE_SCATTER, FLOAT, 0, SUM, 0, 0)
        dispatch_uneven_on_device(group, asked, whole, part, False, "reduce_scatter", lengths, None)
        equal(whole, inputs[rank], "the input")
        start = sum(lengths[:rank])
        mine = slice(start, start + lengths[rank])
        right_sum(part, "sum", [p[mine] for p in inputs], f"{lengths}")


@CASES
def of_parameters(rank: int, world: int) -> None:
    """Nothing is differentiated through, and a result may be a leaf, as on the CPU."""
    lengths = [2 + r for r in range(world)]
    given = torch.nn.Parameter(numbers(rank, lengths[rank]))
    out, leaf = torch.zeros(sum(lengths)), torch.nn.Parameter(torch.zeros(sum(lengths)))
    asked = (engine_codes.ALL_GATHER, FLOAT, 0, 0, 0, 0)
    want = torch.cat([numbers(r, n) for r, n in enumerate(lengths)])
    for target in (out, leaf):
        version = target._version
        dispatch_uneven_on_device(resolve(None), asked, given, target, False, "all_gather", lengths, None)
        equal(target.detach(), want)
        assert target.grad_fn is None and target.requires_grad == (target is leaf)
        assert target._version > version or not target.requires_grad
    part = torch.nn.Parameter(torch.zeros(lengths[rank]))
    asked = (engine_codes.REDUCE_SCATTER, FLOAT, 0, SUM, 0, 0)
    dispatch_uneven_on_device(resolve(None), asked, leaf, part, False, "reduce_scatter", lengths, None)
    start = sum(lengths[:rank])
    equal(part.detach(), world * want[start : start + lengths[rank]])


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("way", ["nccl", "host"])
def test_uneven(in_launch: Callable[..., None], way: str, case: str) -> None:
    in_launch("CASES", case, 3, env=gpu_standin.env(way))
