"""What goes over the wire in a step: the formulas of docs/algorithms.md, counted by the transport."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.reference.codec_roundtrip import encoded_size
from tests.reference.graphs import DIRECTED, targets
from tests.support.algorithm_rows import always
from tests.support.algorithm_run import OPTIMIZERS, loss
from tests.support.cases import Cases
from tests.support.marks import long
from trigram.algorithms import graphs
from trigram.runtime import logs

CASES = Cases()
PARAMETERS = 6
LAYERS = (6, 150, 130, 3)


def large() -> nn.Module:
    """Large enough that a few control messages do not blur the counts."""
    a, b, c, d = LAYERS
    return nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c), nn.Tanh(), nn.Linear(c, d))


def length() -> int:
    """L: every parameter is padded to 64 bytes."""
    return sum(math.ceil(p.numel() / 16) * 16 for p in large().parameters())


def padded_shard(n: int) -> int:
    return 64 * math.ceil(math.ceil(length() / n) / 64)


def by_owners(first: str, second: str, block: int | None = None) -> Callable[[int, int, int], float]:
    """Bytes of one round: every shard goes out once, and the mean of one's own comes back to all."""

    def formula(n: int, rank: int, round: int) -> float:
        s = padded_shard(n)
        return (n - 1) * (encoded_size(first, s, block) + encoded_size(second, s, block))

    return formula


def by_graph(kind: str, codec: str = "full", block: int | None = None) -> Callable[[int, int, int], float]:
    def formula(n: int, rank: int, round: int) -> float:
        if kind in ("random", "push:random"):
            w = torch.as_tensor(graphs.find(kind, n).matrix(round))
            degree = int((w[:, rank] > 0).sum()) - 1
        else:
            sends = targets(kind, n, round)
            mine = set(sends[rank])
            if kind in DIRECTED and codec != "full":
                mine |= {j for j in range(n) if rank in sends[j]}
            degree = len(mine)
        return degree * encoded_size(codec, length(), block)

    return formula


@dataclass(frozen=True)
class Count:
    algorithm: str
    formula: Callable[[int, int, int], float]  # (world, rank, round) -> bytes
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    flags: bool = False  # one byte per parameter goes along
    slack: int = 64  # bytes a round and peer for what is not payload
    every: int = 1


def gathered(codec: str) -> Callable[[int, int, int], float]:
    """Bytes of one round: one's own code reaches all others."""
    return lambda n, rank, round: (n - 1) * encoded_size(codec, n * padded_shard(n))


COUNTS = {
    "bytegrad": Count("bytegrad", by_owners("int8", "int8"), flags=True),
    "bytegrad block": Count("bytegrad", by_owners("int8", "int8", 64), {"block": 64}, flags=True),
    "signsgd": Count("signsgd", by_owners("sign", "int8"), flags=True),
    "topk": Count("topk", by_owners("topk:0.01", "topk:0.01"), flags=True),
    "central int4": Count("central/int4/sync", by_owners("int4", "int4"), flags=True),
    "central fp8": Count("central/fp8/sync", by_owners("fp8", "fp8"), flags=True),
    "central bf16": Count("central/bf16/sync", by_owners("bf16", "bf16"), flags=True),
    "central randomk": Count(
        "central/randomk:0.05/sync", by_owners("randomk:0.05", "randomk:0.05"), flags=True
    ),
    "qadam 8": Count("qadam", by_owners("int8", "int8"), {"warmup_steps": 1}, "qadam", flags=True),
    "qadam 1": Count("qadam", by_owners("sign", "sign"), {"warmup_steps": 1, "bits": 1}, "qadam", flags=True),
    "central int8 every": Count("central/int8/every:2", by_owners("int8", "int8"), every=2),
    "sparseloco": Count("sparseloco", gathered("chunktopk:0.02"), {"every": 2}, every=2),
    "async_low_precision": Count("async_low_precision", by_owners("int8", "int8"), {"script": always}),
    "decentralized": Count("decentralized", by_graph("one_peer")),
    "decentralized ring": Count("decentralized", by_graph("ring"), {"topology": "ring"}),
    "decentralized exponential": Count("decentralized", by_graph("exponential"), {"topology": "exponential"}),
    "decentralized pairs": Count("decentralized", by_graph("pairs"), {"topology": "pairs"}),
    "decentralized random": Count("decentralized", by_graph("random"), {"topology": "random"}),
    "gossip every": Count("gossip:ring/full/every:2", by_graph("ring"), every=2),
    "noloco": Count("noloco", by_graph("random"), {"every": 2}, every=2),
    "low_precision_decentralized": Count("low_precision_decentralized", by_graph("ring", "int8")),
    "low_precision_decentralized exponential": Count(
        "low_precision_decentralized", by_graph("exponential", "int8"), {"topology": "exponential"}
    ),
    "gossip ring topk": Count("gossip:ring/topk:0.01/sync", by_graph("ring", "topk:0.01")),
    "gossip ring sign": Count("gossip:ring/sign/sync", by_graph("ring", "sign")),
    "gossip random int8": Count("gossip:random/int8/sync", by_graph("random", "int8")),
    "push_sum": Count("push_sum", by_graph("push:random")),
    "push_sum exponential": Count("push_sum", by_graph("exponential"), {"topology": "exponential"}),
    "async_decentralized": Count("async_decentralized", by_graph("random"), {"script": always}),
    "async_low_precision_decentralized": Count(
        "async_low_precision_decentralized",
        by_graph("pairs", "int8"),
        {"topology": "pairs", "script": always},
    ),
}


def sent() -> int:
    return sum(trigram.stats()["sent_bytes"])


@CASES.over(*COUNTS)
def bytes_of(rank: int, world: int, label: str) -> None:
    """Several rounds: each costs what the formula says, and a few bytes that are no payload.

    Counted between forwards, where nothing but the round itself is under way.
    """
    count = COUNTS[label]
    torch.manual_seed(8)
    module = large()
    optimizer = OPTIMIZERS[count.optimizer](module)
    given = {"optimizer": optimizer} if count.optimizer == "qadam" else {}
    model = trigram.with_bagua(module, count.algorithm, **given, **count.options)
    seen, told = [], []

    def step(k: int) -> None:
        optimizer.zero_grad()
        loss(model, rank, k).backward()
        optimizer.step()

    gradients = count.flags
    scripted = "script" in count.options  # each step begins a round, which algorithm_state ends
    for k in range(0 if scripted else 1 if not gradients else 3):  # the first steps may tell each other more
        step(k)
    rounds, first = 4, 0 if not gradients else 3
    for r in range(rounds):
        if scripted:
            trigram.barrier()
        before, said = sent(), trigram.stats(model)["bytes"]
        for k in range(count.every):
            step(first + 1 + r * count.every + k)
        if scripted:
            trigram.algorithm_state(model)
        seen.append(sent() - before)
        told.append(trigram.stats(model)["bytes"] - said)
    flags = 2 * world * PARAMETERS if gradients else 0
    barriers = 2 * 64 * world if scripted else 0
    for r, (actual, said) in enumerate(zip(seen, told, strict=True)):
        expected = count.formula(world, rank, r)
        slack = count.slack * 2 * world + flags + barriers
        assert expected <= actual <= expected + slack, (
            f"round {r}: {actual} bytes, expected {expected} to {expected + slack}: "
            f"{actual - expected} over; all rounds: {seen}"
        )
        assert expected <= said <= expected + flags + 4 * world, (
            f"round {r}: stats say {said} bytes, not {expected}"
        )


@CASES
def fewer_than_full(rank: int, world: int) -> None:
    """PowerSGD has no formula there: r (rows + columns) numbers for a matrix, twice around."""
    torch.manual_seed(8)
    module = large()
    optimizer = OPTIMIZERS["sgd"](module)
    model = trigram.with_bagua(module, "powersgd", warmup_steps=2)
    costs = []
    for k in range(6):
        before = sent()
        optimizer.zero_grad()
        loss(model, rank, k).backward()
        optimizer.step()
        costs.append(sent() - before)
    matrices = [2 * (sum(p.shape)) for p in module.parameters() if p.dim() > 1]
    whole = [p.numel() for p in module.parameters() if p.dim() > 1 and 2 * sum(p.shape) < p.numel()]
    assert costs[4] == costs[5] < costs[1] * (sum(matrices) / sum(whole) + 0.3), costs


@CASES.over("bytegrad", "topk", "powersgd", "lossless")
def float64_is_sent_in_full_and_said(rank: int, world: int, algorithm: str) -> None:
    """Nobody counts on bytes that are not saved."""
    before = logs.warning
    lines: list[str] = []
    logs.warning = lambda text, *_: lines.append(text)  # type: ignore[assignment]
    try:
        model = large().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trigram.with_bagua(model, algorithm, **({"warmup_steps": 0} if algorithm == "powersgd" else {}))
        model(torch.randn(8, 6).double()).square().mean().backward()
        optimizer.step()
    finally:
        logs.warning = before
    told = [line for line in lines if "float64 are sent in full" in line]
    assert len(told) == (rank == 0), lines


@CASES
def nothing_between_rounds(rank: int, world: int) -> None:
    """local_sgd says nothing but every H-th step."""
    torch.manual_seed(8)
    module = large()
    optimizer = OPTIMIZERS["sgd"](module)
    model = trigram.with_bagua(module, "local_sgd", every=4)
    costs = []
    for k in range(9):
        before = sent()
        optimizer.zero_grad()
        loss(model, rank, k).backward()
        optimizer.step()
        costs.append(sent() - before)
    assert all((cost > 0) == (k in (3, 7)) for k, cost in enumerate(costs)), costs
    stats = trigram.stats(model)
    assert stats["rounds"] == 2 and stats["algorithm"] == "local_sgd" and stats["steps"] == 9, stats


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, long(3), 5])
def test_bytes(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="tcp")
