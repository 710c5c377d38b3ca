"""Averages that broken ranks cannot steer: against numpy, with ranks that send noise, NaN or no code."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.reference.robust import RobustGradients, RobustWeights, Statistic
from tests.support.algorithm_rows import Row, always
from tests.support.algorithm_run import Reversed, Run, loss, net
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, same_on_all_ranks, says
from tests.support.marks import long
from trigram.algorithms.robust import RobustAggregation
from trigram.averaging.average import padded
from trigram.averaging.groups import ModelGroups
from trigram.averaging.robust import robust_average
from trigram.codecs.registry import find

CASES = Cases()
RULES = ("median", "trimmed", "clip:1", "clip:2.5")


def rule(label: str, world: int) -> str:
    """As many are trimmed as can be."""
    return f"trimmed:{(world - 1) // 2}" if label == "trimmed" else label


def row(label: str, world: int) -> Row:
    """`RULE WHAT WHEN [outer]`, and its reference."""
    name, what, when, *outer = label.split()
    name = rule(name, world)
    codec = None if what == "full" else what
    options: dict[str, Any] = {"iterations": 2} if name == "clip:2.5" else {}
    statistic = Statistic(name, options.get("iterations", 3))
    algorithm = f"central:{name}/{what}/{when}"
    coded = codec is not None
    if when == "sync":
        return Row(algorithm, lambda _: RobustGradients(statistic, codec), options, same=True, coded=coded)
    more: dict[str, Any] = {}
    if outer:
        options |= {"outer_lr": 0.7, "outer_momentum": 0.5}
        more["outer"] = (0.7, 0.5)
    if when == "async":
        options["script"] = more["script"] = always
    else:
        more["every"] = int(when.partition(":")[2])
    agree = more.get("every", 0) if codec is None else 0
    return Row(
        algorithm, lambda _: RobustWeights(statistic, codec, **more), options, coded=coded, agree=agree
    )


LABELS = [f"{r} {w} {t}" for r in RULES for w in ("full", "int8") for t in ("sync", "every:2", "async")]
LABELS += [
    "median sign sync",
    "clip:1 sign sync",
    "median fp8 sync",
    "trimmed bf16 sync",
    "median int4 every:3",
]
LABELS += ["median full every:2 outer", "clip:1 full every:2 outer", "trimmed int8 every:2 outer"]


@CASES.over(*LABELS)
def trains(rank: int, world: int, label: str) -> None:
    run = Run(rank, world, row(label, world), once=True)
    run.train(8)
    run.end(world, f"trains-{label.replace('/', '-')}")
    stats = trigram.stats(run.model)
    assert stats["steps"] == 8 and stats["suspects"] == {}, stats
    assert stats["bytes"] > 0


@CASES.over("clip:1 full sync", "clip:1 sign sync", "median int8 sync")
def in_another_order(rank: int, world: int, label: str) -> None:
    """From the second step on buckets are dealt anew; where clipping starts moves with the parameters."""
    run = Run(rank, world, row(label, world), Reversed, once=True)
    run.train(5)
    run.end(world, f"order-{label}")


@CASES.over("median full sync", "trimmed int8 sync", "clip:1 full sync", "clip:1 int8 sync")
def without_a_number(rank: int, world: int, label: str) -> None:
    """One rank's gradients are NaN in two steps: the others' statistic, and it is named, on all ranks."""
    said = io.StringIO()

    class Ill(Run):
        def losses(self, model: nn.Module, rank: int) -> list[Tensor]:
            found = super().losses(model, rank)
            return [f * float("nan") for f in found] if self._ill(rank) else found

        def _ill(self, rank: int) -> bool:
            return rank == world - 1 and self.done in (1, 4)

        def backward(self) -> None:
            self.sim.boundary()
            self.sim.backward(self.losses)
            self.optimizer.zero_grad()
            found = loss(self.model, self.rank, self.done, 0, self.salt)
            (found * float("nan") if self._ill(self.rank) else found).backward()

    with contextlib.redirect_stderr(said):
        run = Ill(rank, world, row(label, world))
        run.train(7)
    run.end(world, f"nan-{label}")
    assert trigram.stats(run.model)["suspects"] == {world - 1: 2}, trigram.stats(run.model)["suspects"]
    assert said.getvalue().count("trigram: rank") == 1, said.getvalue()
    says(said.getvalue(), f"rank {world - 1}", "NaN", "leaves")


@CASES.over("full every:2", "int8 every:2", "full async:1", "int8 async:1")
def weights_recover(rank: int, world: int, label: str) -> None:
    """A rank whose weights are NaN gets good ones back, and spoils nobody's."""
    what, when = label.split()
    torch.manual_seed(5)
    module = net()
    model = trigram.with_bagua(module, f"central:median/{what}/{when}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(8):
        optimizer.zero_grad()
        found = loss(model, rank, step)
        (found * float("nan") if rank == 0 and step == 2 else found).backward()
        optimizer.step()
        if rank:
            assert all(p.isfinite().all() for p in model.parameters()), f"step {step}"
    trigram.algorithm_state(model)  # what is in flight lands
    with trigram.consensus(model):
        same_on_all_ranks(rank, world, f"recover-{label}", model.parameters())
    assert all(p.isfinite().all() for p in model.parameters())
    suspects = trigram.stats(model)["suspects"]
    assert list(suspects) == [0] and suspects[0] >= 1, suspects


@CASES
def nobody_has_a_number(rank: int, world: int) -> None:
    """As a mean would be: a GradScaler must see it."""
    model = trigram.with_bagua(net(), "central:median/full/sync")
    (loss(model, rank, 0) * float("inf")).backward()
    assert not any(p.grad.isfinite().any() for p in model.parameters())
    assert sorted(trigram.stats(model)["suspects"]) == list(range(world))


def average(
    rank: int, world: int, name: str, values: Callable[[int], Tensor], codec: str | None = None
) -> tuple[Tensor, ModelGroups]:
    """One average of every rank's values."""
    groups = ModelGroups(trigram.new_group(range(world)))
    mine = values(rank)
    memory = trigram.empty(padded(len(mine), world), dtype=mine.dtype)
    memory.zero_()
    memory[: len(mine)] = mine
    found = RobustAggregation.parse(name)
    assert found is not None
    codecs = (find(codec), find(codec)) if codec else None
    made = robust_average(memory, groups, found, codecs)
    made.start(0)
    made.wait()
    return memory[: len(mine)].clone(), groups


def noise(rank: int, n: int = 1000) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))


@CASES.over("float64", "float16", "bfloat16")
def dtypes(rank: int, world: int, label: str) -> None:
    """16-bit values are combined in float32 and rounded once."""
    dtype = getattr(torch, label)
    for name in (rule(r, world) for r in RULES):
        out, _ = average(rank, world, name, lambda r: noise(r).to(dtype))
        expected = Statistic(name)([noise(r).to(dtype) for r in range(world)])
        eps = max(torch.finfo(dtype).eps, 2e-7)
        close(out.double(), expected.double(), eps * (expected.double().abs() + 1), f"{name} {label}")
        same_on_all_ranks(rank, world, f"dtype-{name}-{label}", [out])


@CASES.over("huge", "one infinity", "opposite")
def attacks(rank: int, world: int, label: str) -> None:
    """Fewer than half of the ranks send what they like: the result stays where the others are."""
    bad = (world - 1) // 2

    def values(r: int) -> Tensor:
        v = noise(r)
        if r < bad:
            if label == "huge":
                v = v * 1e30
            elif label == "one infinity":
                v[700] = float("inf")
            else:
                v = v - 50.0
        return v

    honest = torch.stack([values(r) for r in range(bad, world)])
    for name in ("median", f"trimmed:{bad}"):
        out, _ = average(rank, world, name, values)
        low, high = honest.min(0)[0], honest.max(0)[0]
        if label == "one infinity":  # and the rest of what these ranks sent counts
            every = torch.stack([values(r) for r in range(world)])
            low, high = every.min(0)[0], torch.where(every.max(0)[0].isinf(), high, every.max(0)[0])
        assert ((out >= low) & (out <= high)).all(), name
    out, groups = average(rank, world, "clip:1", values)
    # Three iterations, in each of which a bad rank moves the result by the median distance over n at most.
    reach = 3 * bad / world * float(honest.norm(dim=1).max()) + float(honest.norm(dim=1).max())
    assert float(out.norm()) <= reach, (float(out.norm()), reach)
    blamed = list(range(bad)) if label == "one infinity" else []
    assert sorted(groups.non_finite_senders.counts) == blamed, groups.non_finite_senders.counts


@CASES
def no_code(rank: int, world: int) -> None:
    """Bytes that are no code are left out as values that are no numbers, and their sender is named."""
    codec = find("topk:0.5")

    class Liar(type(codec)):  # type: ignore[misc]
        def encode(self, src: Tensor, out: Tensor, *rest: Any) -> Tensor:
            super().encode(src, out, *rest)
            return out.fill_(255) if rank == 1 else out

    groups = ModelGroups(trigram.new_group(range(world)))
    memory = trigram.empty(padded(500, world))
    memory.copy_(torch.arange(len(memory)) + 1.0)
    found = RobustAggregation.parse("median")
    assert found is not None
    made = robust_average(memory, groups, found, (Liar("topk:0.5"), find("f16")))
    made.start(0)
    made.wait()
    assert groups.non_finite_senders.counts == {1: 1}, groups.non_finite_senders.counts
    assert memory.isfinite().all() and memory.max() > 1
    same_on_all_ranks(rank, world, "no-code", [memory])


@CASES.over(
    "clip:1 full sync", "clip:1 sign sync", "clip:1 full every:2", "trimmed int8 every:2", "median full sync"
)
def resumes(rank: int, world: int, label: str) -> None:
    """Bit for bit where it was left, though clipping starts from the last result."""
    asked = row(label, world)

    def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = net()
        return trigram.with_bagua(module, asked.algorithm), torch.optim.SGD(module.parameters(), lr=0.1)

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()

    model, optimizer = make(3)
    train(model, optimizer, range(5))
    kept = trigram.algorithm_state(model)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    train(model, optimizer, range(5, 9))
    again, other = make(4)
    again.load_state_dict(weights)
    trigram.load_algorithm_state(again, kept)
    train(again, other, range(5, 9))
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        equal(a, b, label)


@CASES
def means_elsewhere_are_robust_too(rank: int, world: int) -> None:
    """The warm-up, consensus, switch and the optimizer's state follow the rule as well."""
    bad = rank == 0
    torch.manual_seed(5)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    model = trigram.with_bagua(module, "central:median/full/every:2", optimizer=optimizer, warmup_steps=2)
    for step in range(5):
        optimizer.zero_grad()
        (loss(model, rank, step) * (float("nan") if bad and step in (1, 4) else 1.0)).backward()
        optimizer.step()
    if not bad:
        assert all(p.isfinite().all() for p in model.parameters())
    with trigram.consensus(model):
        assert all(p.isfinite().all() for p in model.parameters())
    trigram.switch(model, "gradient_allreduce")
    assert all(p.isfinite().all() for p in model.parameters())
    same_on_all_ranks(rank, world, "elsewhere", model.parameters())


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "no rule": ("central:mode/full/sync", {}, ("central:mode", "central:median", "central:clip:R")),
    "no rule at all": ("central:/full/sync", {}, ("central:", "central:median")),
    "nothing to trim": ("central:trimmed/full/sync", {}, ("trimmed",)),
    "half a rank": ("central:trimmed:0.5/full/sync", {}, ("trimmed:0.5", "integer")),
    "too many": ("central:trimmed:4/full/sync", {}, ("trimmed:4", "9 ranks")),
    "radius": ("central:clip:0/full/sync", {}, ("clip:0", "positive")),
    "infinite radius": ("central:clip:inf/full/sync", {}, ("clip:inf", "positive")),
    "iterations": ("central:clip:1/full/sync", {"iterations": 0}, ("iterations", "0")),
    "iterations of the median": ("central:median/full/sync", {"iterations": 2}, ("iterations",)),
    "powersgd": ("central:median/powersgd:2/sync", {}, ("powersgd", "summation")),
    "topk": ("central:median/topk:0.1/sync", {}, ("topk", "few ranks")),
    "randomk": ("central:clip:1/randomk:0.1/every:2", {}, ("randomk", "few ranks")),
    "gossip": ("gossip:median/full/sync", {}, ("median",)),
}


@CASES.over(*REFUSED)
def refused(rank: int, world: int, label: str) -> None:
    algorithm, options, words = REFUSED[label]
    module = net()
    says(raises(trigram.UnsupportedError, trigram.with_bagua, module, algorithm, **options), *words)
    trigram.with_bagua(module, "central:median/full/sync")  # it was not hooked


@CASES
def refused_later(rank: int, world: int) -> None:
    """A switch to what cannot be leaves the model as it was; momenta are not combined."""
    model = trigram.with_bagua(net(), "bytegrad")
    says(raises(trigram.UnsupportedError, trigram.switch, model, "central:trimmed:9/full/sync"), "19 ranks")
    loss(model, rank, 0).backward()
    momenta = trigram.Trigram("central:median", "int8", "sync", "momentum")
    says(raises(trigram.UnsupportedError, trigram.with_bagua, net(), momenta), "momentum")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [3, long(4)])
def test_robust(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm", patience=60.0)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.startswith("trains-") and c.endswith(("sync", "every:2"))]
)
@pytest.mark.parametrize("world", [long(2), 5])
def test_robust_worlds(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm", patience=60.0)


@pytest.mark.parametrize("case", ["trains-clip:1 int8 sync", "trains-median full every:2"])
def test_robust_over_tcp(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 3, transport="tcp")
