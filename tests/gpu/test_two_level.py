"""Compressed averages in two levels, against a loop over all hosts in one process (over the stand-in)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import trigram
from tests.gpu.test_routes import LAYOUTS
from tests.support import gpu_standin
from tests.support.harness import run
from trigram import codecs
from trigram.averaging.coded import CodedAverage
from trigram.averaging.groups import ModelGroups
from trigram.averaging.hierarchical import HierarchicalAverage, HostLevels

COUNT, ROUNDS = 5003, 3
CODECS = {"int8": False, "int4": True, "bf16": False, "sign": True}  # with feedback or without


def inputs(rank: int, round: int, length: int) -> Tensor:
    x = torch.zeros(length)
    generator = torch.Generator().manual_seed(1000 * rank + round)
    x[:COUNT] = torch.randn(COUNT, generator=generator) * (1 + rank)
    return x


def expected(hosts: list[list[int]], length: int, name: str, feedback: bool) -> list[Tensor]:
    """The means of all rounds: sums inside hosts, shards of shares coded for owners, means coded again."""
    codec, n = codecs.find(name), sum(map(len, hosts))
    rails, h = min(map(len, hosts)), len(hosts)
    kept = torch.zeros(h, length)
    owned = torch.zeros(length)
    means = []
    shard = length // rails // h
    for round in range(ROUNDS):
        sums = []
        for host in hosts:
            total = inputs(host[0], round, length)
            for rank in host[1:]:
                total = total + inputs(rank, round, length)
            sums.append(total * (h / n))
        mean = torch.zeros(length)
        for at in range(0, length, shard):
            span, parts = slice(at, at + shard), []
            for k in range(h):
                code = codec.encode(sums[k][span], residual=kept[k, span] if feedback else None)
                parts.append(torch.empty(shard))
                codec.decode(code, parts[-1])
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            total /= h
            code = codec.encode(total, residual=owned[span] if feedback else None)
            codec.decode(code, mean[span])
        means.append(mean)
    return means


def _all_averages(rank: int, world: int) -> dict[str, list[Tensor]]:
    return {name: _averages(name, feedback, rank) for name, feedback in CODECS.items()}


@functools.cache
def averages(layout: str) -> list[dict[str, list[Tensor]]]:
    """Those of all codecs, from one launch."""
    hosts, env = LAYOUTS[layout], gpu_standin.env("hierarchical")
    return run(len(hosts), _all_averages, transport="auto", hosts=hosts, env=env, timeout=60)


def _averages(name: str, feedback: bool, rank: int) -> list[Tensor]:
    group = trigram.init()
    groups = ModelGroups(group)
    levels = HostLevels.of(groups, torch.empty(0))
    assert levels is not None
    memory = trigram.empty(levels.length(COUNT))
    codec = codecs.find(name)
    average = HierarchicalAverage(
        memory, levels, lambda m, c: CodedAverage(m, c, codec, codec, (feedback, feedback))
    )
    means = []
    for round in range(ROUNDS):
        memory.copy_(inputs(rank, round, memory.numel()))
        average.start(round)
        average.wait()
        means.append(memory.clone())
    trigram.barrier()  # nobody leaves while another's part of the last call is under way
    return means


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_averages(several_hosts: None, layout: str, name: str) -> None:
    hosts, feedback = LAYOUTS[layout], CODECS[name]
    results = [each[name] for each in averages(layout)]
    by_host = [[r for r, host in enumerate(hosts) if host == h] for h in sorted(set(hosts))]
    right = expected(by_host, results[0][0].numel(), name, feedback)
    for rank, means in enumerate(results):
        for round, (mean, want) in enumerate(zip(means, right, strict=True)):
            assert torch.equal(mean, results[0][round]), f"rank {rank} has another mean in round {round}"
            assert torch.equal(mean, want), f"round {round}: {float((mean - want).abs().max())}"


def _keeps(rank: int, world: int) -> int:
    """Half of the tensor in turn: what the shards keep of the other half; the number of values compared."""
    groups = ModelGroups(trigram.init())
    levels = HostLevels.of(groups, torch.empty(0))
    assert levels is not None
    memory = trigram.empty(levels.length(COUNT))
    codec, compared = codecs.find("sign"), 0
    average = HierarchicalAverage(memory, levels, lambda m, c: CodedAverage(m, c, codec, codec, (True, True)))
    inner = average.average
    assert isinstance(inner, CodedAverage)
    halves = memory[: COUNT // 2], memory[COUNT // 2 : COUNT]
    for round in range(6):
        memory.copy_(inputs(rank, round, memory.numel()))
        unused = halves[round % 2]
        unused.zero_()
        mine = torch.zeros(memory.numel(), dtype=torch.bool)
        mine[: COUNT // 2 if round % 2 == 0 else COUNT] = True
        mine[: COUNT // 2 if round % 2 else 0] = False
        at = average.mine.storage_offset() - memory.storage_offset()
        first = mine[at : at + average.mine.numel()]
        second = first.view(inner.groups.size, -1)[inner.groups.rank]
        before = inner.state()
        average.hold([unused])
        average.start(round)
        average.wait()
        average.settle([True])
        after = inner.state()
        for name, chosen in (("residual", first), ("owned", second)):
            assert torch.equal(after[name][chosen], before[name][chosen]), f"round {round}: {name}"
            assert not torch.equal(after[name][~chosen], before[name][~chosen]) or bool(chosen.all())
            compared += int(before[name][chosen].count_nonzero())
    trigram.barrier()
    return compared


def test_shards_keep_the_residual_of_what_no_rank_uses(several_hosts: None) -> None:
    env = gpu_standin.env("hierarchical")
    compared = run(4, _keeps, transport="auto", hosts=LAYOUTS["2+2"], env=env, timeout=60)
    assert all(compared), compared


def _trains(rank: int, world: int, steps: int) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = trigram.with_bagua(torch.nn.Linear(200, 50), "bytegrad")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(16, 200, generator=generator)
        (model(x) - x[:, :50]).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights.tolist(), trigram.stats(model)["bytes_per_step"]


def test_training_sends_a_share_of_the_codes(several_hosts: None) -> None:
    options = {"transport": "auto", "hosts": LAYOUTS["2+2"], "timeout": 90}
    flat = run(4, _trains, 30, env=gpu_standin.env("host"), **options)  # type: ignore[arg-type]
    levels = run(4, _trains, 30, env=gpu_standin.env("hierarchical"), **options)  # type: ignore[arg-type]
    assert all(weights == levels[0][0] for weights, _ in levels), "ranks have parted"
    assert torch.allclose(torch.tensor(flat[0][0]), torch.tensor(levels[0][0]), atol=5e-3)
    assert levels[0][1] < 0.4 * flat[0][1]  # a half of the data, among two in place of four


class Breaks(torch.nn.Module):
    """Fails in the middle of a backward pass when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(60, 60), torch.nn.Linear(60, 3)
        self.now = False

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        if self.now:
            h.register_hook(_raise)
        y: Tensor = self.b(h)
        return y


def _gives_up(rank: int, world: int) -> str:
    module = Breaks()
    model = trigram.with_bagua(module, "bytegrad", bucket_mb=0.01)
    told = ""
    for step in range(5):
        module.now = step == 2 and rank == 1
        loss = model(torch.ones(2, 60)).sum()
        try:
            loss.backward()
        except (trigram.TrigramError, ArithmeticError) as e:
            assert step == 2, (step, e)
            told = type(e).__name__
    return told


def _raise(_: Tensor) -> None:
    raise ArithmeticError("on purpose")


def test_a_pass_that_fails_on_one_rank_is_given_up_on_all(several_hosts: None) -> None:
    hosts = LAYOUTS["2+2"]
    env = gpu_standin.env("hierarchical")
    told = run(4, _gives_up, transport="auto", hosts=hosts, env=env, timeout=60)
    assert told == ["AbortedError", "ArithmeticError", "AbortedError", "AbortedError"]


def _waits_in_another_order(rank: int, world: int) -> list[float]:
    given = [torch.full((4000,), float((rank + 1) * 10**k)) for k in range(4)]
    works = [trigram.all_reduce(t, async_op=True) for t in given]
    for k in (0, 3, 1, 2) if rank % 2 else (2, 1, 0, 3):
        works[k].wait()
    assert all(bool((t == t[0]).all()) for t in given)
    trigram.barrier()
    return [float(t[0]) for t in given]


@pytest.mark.parametrize("layout", ["2+2", "2+2+1"])
def test_ranks_may_wait_in_any_order(several_hosts: None, layout: str) -> None:
    """The calls are alike, so that nothing but their order tells the results of one from those of another."""
    hosts = LAYOUTS[layout]
    results = run(
        len(hosts),
        _waits_in_another_order,
        transport="auto",
        hosts=hosts,
        env=gpu_standin.env("hierarchical"),
        timeout=60,
    )
    total = sum(r + 1 for r in range(len(hosts)))
    assert results == [[float(total * 10**k) for k in range(4)]] * len(hosts)


def _trains_with(rank: int, world: int, algorithm: str, options: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(6)]
    module = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if options.pop("fused", False):
        options |= {"fused": True, "optimizer": optimizer, "bucket_mb": 0.005}
    model = trigram.with_bagua(module, algorithm, **options)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(30):
        optimizer.zero_grad()
        x = torch.randn(8, 32, generator=generator)
        (model(x) - x.flip(1)).square().mean().backward()
        optimizer.step()
    trigram.consensus(model)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


# Asynchronous algorithms are not among them: the stand-in's streams are the host's threads, and a rank would
# wait in one average for a rank that waits for it elsewhere.
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("gradient_allreduce", {"fused": True}),
        ("bytegrad", {"bucket_mb": 0.005}),
        ("local_sgd", {"every": 4, "fragments": 4, "overlap": True}),
    ],
)
def test_averages_that_end_at_other_times_on_each_rank(
    several_hosts: None, algorithm: str, options: dict[str, Any]
) -> None:
    env = gpu_standin.env("hierarchical")
    results = run(
        4, _trains_with, algorithm, options, transport="auto", hosts=LAYOUTS["2+2"], env=env, timeout=90
    )
    assert all(weights == results[0] for weights in results)
    assert all(abs(w) < 10 for w in results[0])
