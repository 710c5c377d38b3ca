"""What torch makes by default is on a GPU after `torch.set_default_device("cuda")`; the messages of trigram
stay on the CPU. Here the default is a device whose tensors hold nothing, so that none could be sent."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import trigram
from tests.support.cases import Cases
from tests.support.checks import same_on_all_ranks
from tests.support.harness import ROOT, run
from tests.support.twin_training import mlp, x

CASES = Cases()

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {"sample_weight": 2.0, "check_finite": True, "check_replicas": 2},
    "bytegrad": {},
    "lossless": {},
    "decentralized": {},
    "low_precision_decentralized": {},
    "async": {"staleness": 1},
    "async_low_precision": {"staleness": 1},
    "async_decentralized": {"staleness": 1},
    "async_low_precision_decentralized": {"staleness": 1},
    "powersgd": {"warmup_steps": 2},
    "topk": {},
    "signsgd": {},
    "local_sgd": {"every": 2},
    "diloco": {"every": 2},
    "push_sum": {},
    "sparta": {},
    "sparseloco": {"every": 2},
    "gossip:random/full/sync": {},
}

BY_PAIRS = ("async_decentralized", "async_low_precision_decentralized")


def trained(rank: int, algorithm: str, options: dict[str, Any], default: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    inputs = [x(rank, step, 8, 6) for step in range(8)]
    torch.set_default_device(default)
    try:
        model = trigram.with_bagua(module, algorithm, optimizer=optimizer, **options)
        for batch in inputs:
            optimizer.zero_grad()
            (model(batch) - batch[:, :3].sin()).square().mean().backward()
            optimizer.step()
        trigram.consensus(model)
    finally:
        torch.set_default_device(None)
    return [p.detach().clone() for p in model.parameters()]


@CASES.over(*ALGORITHMS)
def trains(rank: int, world: int, algorithm: str) -> None:
    options = ALGORITHMS[algorithm]
    want, got = (trained(rank, algorithm, options, default) for default in ("cpu", "meta"))
    for a, b in zip(want, got, strict=True):
        if algorithm in BY_PAIRS:  # which pairs meet depends on the time
            assert bool(b.isfinite().all())
        else:
            assert torch.equal(a, b)
    same_on_all_ranks(rank, world, f"device-{algorithm.replace('/', ' ')}", got)


@pytest.mark.parametrize("case", list(CASES))
def test_trains(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 3)


def _loses_a_rank(rank: int, world: int) -> tuple[list[int], list[torch.Tensor]]:
    module = mlp()
    torch.set_default_device("meta")
    trigram.init(elastic=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model = trigram.with_bagua(module, optimizer=optimizer, elastic=True)
    for step in range(8):
        if rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        batch = torch.ones(4, 6, device="cpu") * (rank + step)
        (model(batch) - batch[:, :3].sin()).square().mean().backward()
        optimizer.step()
    return list(trigram.stats(model)["ranks"]), [p.detach().clone() for p in module.parameters()]


def test_an_elastic_job_goes_on() -> None:
    results = run(3, _loses_a_rank, dies=[1], timeout=60)
    for ranks, weights in (results[0], results[2]):
        assert ranks == [0, 2]
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][1], strict=True))


MAKERS = (
    "empty zeros ones full tensor as_tensor arange linspace eye scalar_tensor randn rand randint randperm"
)
MAKERS += " normal sparse_coo_tensor"


def test_every_tensor_of_the_library_is_made_on_a_device_that_is_named() -> None:
    """The command line tools are processes of their own, and a kernel's tensors are the kernel's."""
    makers, unnamed = {f"torch.{name}" for name in MAKERS.split()}, []
    for file in sorted((ROOT / "python/trigram").rglob("*.py")):
        if {"cli", "triton"} & set(file.parts):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            is_one = isinstance(node, ast.Call) and ast.unparse(node.func) in makers
            # A keyword without a name is **options, which may hold the device.
            if is_one and not {k.arg for k in node.keywords} & {"device", "out", None}:
                unnamed.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not unnamed, f"device= is missing: {unnamed}"
