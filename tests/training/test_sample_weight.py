"""Ranks that count unequally in averages, and gradients that are looked at before they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from tests.reference.torch_gloo import gloo
from tests.support.algorithm_run import loss, net
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, same_on_all_ranks, says
from tests.support.twin_training import mlp, sgd, x

CASES = Cases()


def samples(rank: int) -> int:
    """2, 4, 6, ...: all together they divide by the number of ranks."""
    return 2 + 2 * rank


def inputs(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return x(rank, step, samples(rank), 6).to(dtype)


def per_sample(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean over the batch, as trainings have it."""
    return (model(batch) - batch[:, :3].sin()).square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@CASES.over("a callable", "a number", "float64")
def as_ddp_on_the_union(rank: int, world: int, label: str) -> None:
    """Unequal batches weighed by their samples are DistributedDataParallel's equal parts of all samples."""
    dtype = torch.float64 if label == "float64" else torch.float32

    def train(model: Any, batch: Callable[[int], Tensor]) -> list[Tensor]:
        optimizer, seen = sgd(model), []
        for step in range(4):
            optimizer.zero_grad()
            per_sample(model, batch(step)).backward()
            seen += gradients(model)
            optimizer.step()
        return seen

    def part(step: int) -> Tensor:
        return torch.cat([inputs(r, step, dtype) for r in range(world)]).chunk(world)[rank]

    torch.manual_seed(3)
    with gloo(rank, world):
        expected = train(DistributedDataParallel(mlp().to(dtype)), part)
    asked: list[int] = []

    def weight() -> int:
        asked.append(1)
        return samples(rank)

    torch.manual_seed(3)
    given = samples(rank) / 4 if label == "a number" else weight
    model = trigram.with_bagua(mlp().to(dtype), sample_weight=given, bucket_mb=0.001)
    actual = train(model, lambda step: inputs(rank, step, dtype))
    assert len(asked) == (0 if label == "a number" else 4), asked
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        close(a, e, 1e-5 * float(e.abs().max()) + 1e-8, f"{label}: gradient {i}")
    same_on_all_ranks(rank, world, f"union-{label}", actual)


@CASES.over(
    *("gradient_allreduce", "bytegrad", "signsgd", "topk", "powersgd", "local_sgd", "diloco", "sparseloco"),
    "int8 every:2",
)
def equal_weights_change_nothing(rank: int, world: int, label: str) -> None:
    """Where all weigh 4, every step of the arithmetic is scaled by a power of two, and back."""
    name = f"central/{label.replace(' ', '/')}" if " " in label else label
    options: dict[str, Any] = {"warmup_steps": 0} if name == "powersgd" else {}
    options |= {"every": 2} if name in ("local_sgd", "diloco", "sparseloco") else {}

    def train(**more: Any) -> list[Tensor]:
        torch.manual_seed(3)
        model = trigram.with_bagua(net(), name, **options, **more)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(train(sample_weight=4), train(), strict=True):
        if world & (world - 1) == 0:
            equal(a, b, label)
        else:  # n / (4 n) is exact, a mean over three or five of four times as much is rounded as before
            close(a, b, 1e-6 * float(b.abs().max()), label)


@CASES.over("int8", "bf16", "powersgd:8")
def coded(rank: int, world: int, what: str) -> None:
    """A weighted mean through codecs: as near as codecs are."""
    torch.manual_seed(3)
    module = net()
    alone = net()
    alone.load_state_dict(module.state_dict())
    model = trigram.with_bagua(module, f"central/{what}/sync", sample_weight=lambda: samples(rank))
    alone.load_state_dict(model.state_dict())
    per_sample(model, inputs(rank, 0)).backward()
    per_sample(alone, torch.cat([inputs(r, 0) for r in range(world)])).backward()
    same_on_all_ranks(rank, world, f"coded-{what}", gradients(model))
    far = torch.cat([(a - e).flatten() for a, e in zip(gradients(model), gradients(alone), strict=True)])
    size = torch.cat([e.flatten() for e in gradients(alone)]).norm()
    # PowerSGD keeps 8 of up to 29 columns.
    most = {"int8": 0.04, "bf16": 0.01}.get(what, 0.6)
    assert float(far.norm() / size) < most, float(far.norm() / size)
    # Weights of one's own on the losses, through the same codec, come to the same.
    torch.manual_seed(3)
    by_hand = trigram.with_bagua(net(), f"central/{what}/sync")
    by_hand.load_state_dict(alone.state_dict())
    share = samples(rank) * world / sum(map(samples, range(world)))
    (share * per_sample(by_hand, inputs(rank, 0))).backward()
    near = 0.08 if what == "int8" else 0.01
    apart = torch.cat([(a - e).flatten() for a, e in zip(gradients(model), gradients(by_hand), strict=True)])
    assert float(apart.norm() / size) < near, float(apart.norm() / size)


@CASES.over("gradient_allreduce", "bytegrad", "topk momentum", "local_sgd", "sparseloco", "int8 every:1")
def a_rank_that_weighs_nothing(rank: int, world: int, label: str) -> None:
    """Its gradients and weights are NaN for two steps, and the others train as without it."""
    name, _, when = label.partition(" ")
    options: dict[str, Any] = {}
    if label == "topk momentum":
        options = {"momentum": 0.5, "fraction": 0.3}
    if name in ("local_sgd", "sparseloco"):
        options = {"every": 1}
    if name == "int8":
        name = f"central/int8/{when}"
    step = 0

    def ill() -> bool:
        return rank == 0 and 2 <= step < 4

    torch.manual_seed(3)
    module = net()
    own = {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1)} if "momentum" in label else {}
    model = trigram.with_bagua(module, name, sample_weight=lambda: float(not ill()), **own, **options)
    optimizer = own.get("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(6):
        optimizer.zero_grad()
        found = loss(model, rank, step)
        (found * float("nan") if ill() else found).backward()
        if trigram.stats(model)["buckets"]:
            assert all(g.isfinite().all() for g in gradients(model)), f"step {step}"
        optimizer.step()
        if not ill():
            assert all(p.isfinite().all() for p in model.parameters()), f"step {step}"
    loss(model, rank, 6)  # a boundary
    assert all(p.isfinite().all() for p in model.parameters())
    if name in ("gradient_allreduce", "local_sgd", "sparseloco"):
        same_on_all_ranks(rank, world, f"nothing-{label}", model.parameters())


@CASES.over("in full", "optimizer too", "outer", "saved")
def local_sgd(rank: int, world: int, label: str) -> None:
    """A round weighs what its steps weigh together, which is not the same in each."""
    h, steps = 3, 6

    def weight(r: int, step: int) -> float:
        return float((r + 2 * step) % 4)

    outer = (0.7, 0.5) if label == "outer" else None
    momentum = 0.5 if label == "optimizer too" else 0.0

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        module = net()
        return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum)

    at = [0]
    more: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.5} if outer else {}

    def ours() -> tuple[Any, torch.optim.Optimizer]:
        module, optimizer = make()
        given = {"optimizer": optimizer} if momentum else {}
        wrapped = trigram.with_bagua(
            module, f"central/full/every:{h}", sample_weight=lambda: weight(rank, at[0]), **given, **more
        )
        return wrapped, optimizer

    model, optimizer = ours()
    replicas = [make() for _ in range(world)]
    agreed = [p.detach().double().clone() for p in replicas[0][0].parameters()]
    velocity = [torch.zeros_like(p) for p in agreed]
    for step in range(steps + 1):
        if step == 4 and label == "saved":  # in the middle of a round
            kept, weights = trigram.algorithm_state(model), model.state_dict()
            again, optimizer = ours()
            again.load_state_dict(weights)
            trigram.load_algorithm_state(again, kept)
            model = again
        at[0] = step
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        for r, (m, o) in enumerate(replicas):
            o.zero_grad()
            loss(m, r, step).backward()
            o.step()
        if (step + 1) % h == 0:
            w = [sum(weight(r, s) for s in range(step + 1 - h, step + 1)) for r in range(world)]

            def mean(parts: list[Tensor], w: list[float] = w) -> Tensor:
                return sum(a * p.detach().double() for a, p in zip(w, parts, strict=True)) / sum(w)  # type: ignore[return-value]

            for k, those in enumerate(zip(*(m.parameters() for m, _ in replicas), strict=True)):
                new = mean(list(those))
                if outer:
                    d = agreed[k] - new
                    velocity[k] = 0.5 * velocity[k] + d
                    new = agreed[k] = agreed[k] - 0.7 * (d + 0.5 * velocity[k])
                for p in those:
                    p.data.copy_(new)
                if momentum:
                    moved = mean(
                        [o.state[p]["momentum_buffer"] for p, (_, o) in zip(those, replicas, strict=True)]
                    )
                    for p, (_, o) in zip(those, replicas, strict=True):
                        o.state[p]["momentum_buffer"].copy_(moved)
        for a, e in zip(model.parameters(), replicas[rank][0].parameters(), strict=True):
            close(a.detach(), e.detach(), 3e-5 * float(e.abs().max()), f"{label}, step {step}")


@CASES.over("awaited", "overlapping", "saved")
def fragments(rank: int, world: int, label: str) -> None:
    """A fragment weighs what the steps since its own last average weigh together."""
    every, overlaps = 4, label == "overlapping"

    def weight(r: int, step: int) -> float:
        return float((r + 3 * step) % 5)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        # Each of the two parameters is a fragment.
        layers = nn.Linear(6, 3, bias=False), nn.Tanh(), nn.Linear(3, 6, bias=False), nn.AvgPool1d(2)
        module = nn.Sequential(*layers)
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    def ours() -> tuple[Any, torch.optim.Optimizer]:
        module, optimizer = make()
        given = {"sample_weight": lambda: weight(rank, at[0]), "fragments": 2, "overlap": overlaps}
        return trigram.with_bagua(module, f"central/full/every:{every}", **given), optimizer

    at = [0]
    model, optimizer = ours()
    replicas = [make() for _ in range(world)]
    since = [0, 0]  # by fragment, the first step that its next average counts
    means: list[tuple[int, Tensor]] = []
    for step in range(11):
        if step == 5 and label == "saved":
            kept, weights = trigram.algorithm_state(model), model.state_dict()
            model, optimizer = ours()
            model.load_state_dict(weights)
            trigram.load_algorithm_state(model, kept)
        at[0] = step
        optimizer.zero_grad()
        per_sample(model, inputs(rank, step)).backward()
        for r, (m, o) in enumerate(replicas):
            o.zero_grad()
            per_sample(m, inputs(r, step)).backward()
        for part, mean in means:  # of before this step; its gradients are of other weights
            for m, _ in replicas:
                list(m.parameters())[part].data.copy_(mean)
        means = []
        optimizer.step()
        for _, o in replicas:
            o.step()
        if (step + 1) % (every // 2) == 0:
            part = (step + 1) // (every // 2) % 2
            w = [sum(weight(r, s) for s in range(since[part], step + 1)) for r in range(world)]
            since[part] = step + 1
            those = [list(m.parameters())[part].detach() for m, _ in replicas]
            mean = torch.stack([a * p for a, p in zip(w, those, strict=True)]).sum(0) / sum(w)
            if overlaps:
                means.append((part, mean))
            else:
                for p in those:
                    p.copy_(mean)
        for a, e in zip(model.parameters(), replicas[rank][0].parameters(), strict=True):
            close(a.detach(), e.detach(), 3e-6, f"{label}, step {step}")


class Partly(nn.Module):
    """Rank 0 alone uses `rare`, nobody uses `never`; rows of `table` have sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)
        self.always, self.rare, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, batch: Tensor, rare: bool) -> Tensor:
        rows = self.table((batch[:, 0] * 3).long().abs() % 10)
        out = self.always(batch + rows)
        return out + self.rare(batch) if rare else out


@CASES
def unused_and_sparse(rank: int, world: int) -> None:
    """Which parameters nobody used is known whatever ranks weigh, and sparse rows are weighed too."""
    torch.manual_seed(3)
    module = Partly()
    alone = Partly()
    alone.load_state_dict(module.state_dict())
    weights = [0.001 + r for r in range(world)]
    model = trigram.with_bagua(module, sample_weight=weights[rank])
    alone.load_state_dict(model.state_dict())
    model(inputs(rank, 0), rank == 0).square().mean().backward()
    for r, w in enumerate(weights):
        (alone(inputs(r, 0), r == 0).square().mean() * w / sum(weights)).backward()
    for (name, a), e in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (a.grad is None) == (e.grad is None), name
        if a.grad is not None and e.grad is not None:
            there = e.grad.to_dense()
            close(a.grad.to_dense(), there, 1e-5 * float(there.abs().max()), name)


@CASES
def join(rank: int, world: int) -> None:
    """A rank that has no inputs left weighs nothing: the mean is over those that have."""
    torch.manual_seed(3)
    model = trigram.with_bagua(mlp(), sample_weight=lambda: 2.0)
    seen: list[Tensor] = []
    with trigram.join(model):
        for step in range(1 + rank):
            model.zero_grad()
            model(x(rank, step)).square().mean().backward()
            seen = gradients(model)
    if rank == world - 1 and world > 1:  # its last step was its own alone
        model.zero_grad()
        with trigram.no_sync(model):
            model(x(rank, rank)).square().mean().backward()
        for a, e in zip(seen, gradients(model), strict=True):
            close(a, e, 1e-6 * float(e.abs().max()), "the last rank's own")


@CASES.over("-1", "nan", "inf")
def no_weight(rank: int, world: int, label: str) -> None:
    """All ranks are told whose weight is none, and go on when it is one again."""
    now = [1.0]
    model = trigram.with_bagua(net(), sample_weight=lambda: now[0])
    loss(model, rank, 0).backward()
    now[0] = float(label) if rank == 1 else 1.0
    says(raises(trigram.MisuseError, loss(model, rank, 1).backward), "sample_weight", "rank 1", label)
    now[0] = 1.0
    model.zero_grad()
    loss(model, rank, 2).backward()
    same_on_all_ranks(rank, world, f"no-weight-{label}", gradients(model))


@CASES.over("bytegrad", "local_sgd")
def nobody_weighs(rank: int, world: int, name: str) -> None:
    options = {"every": 1} if name == "local_sgd" else {}
    model = trigram.with_bagua(net(), name, sample_weight=0, **options)

    def step() -> None:
        loss(model, rank, 0).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    says(raises(trigram.MisuseError, step), "sample_weight", "0", "nothing to average")


@CASES
def a_weight_that_raises(rank: int, world: int) -> None:
    """The pass is given up on all ranks, and the next one is well."""
    broken = [False]

    def weight() -> float:
        if broken[0]:
            raise KeyError("no such batch")
        return 1.0 + rank

    model = trigram.with_bagua(net(), sample_weight=weight)
    loss(model, rank, 0).backward()
    broken[0] = rank == world - 1
    raises(KeyError if broken[0] else trigram.AbortedError, loss(model, rank, 1).backward)
    broken[0] = False
    model.zero_grad()
    loss(model, rank, 2).backward()
    same_on_all_ranks(rank, world, "raises", gradients(model))


REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "gossip": ("decentralized", ("neighbours",)),
    "push": ("push_sum", ("neighbours",)),
    "async": ("async", ("different steps",)),
    "robust": ("central:median/full/sync", ("counts ranks",)),
}


@CASES.over(*REFUSED)
def refused(rank: int, world: int, label: str) -> None:
    algorithm, words = REFUSED[label]
    module = net()
    text = raises(trigram.UnsupportedError, trigram.with_bagua, module, algorithm, sample_weight=1)
    says(text, "sample_weight", *words)
    trigram.with_bagua(module, "bytegrad", sample_weight=1)  # it was not hooked
    says(raises(trigram.UnsupportedError, trigram.switch, module, algorithm), "sample_weight", *words)
    loss(module, rank, 0).backward()


@CASES
def ranks_disagree(rank: int, world: int) -> None:
    given = 1.0 if rank == 0 else None
    text = raises(trigram.MismatchError, trigram.with_bagua, net(), sample_weight=given)
    says(text, "a different algorithm or different options")
    raises(trigram.MisuseError, trigram.with_bagua, net(), sample_weight="many")


# Gradients that are looked at.


@CASES.over("gradient_allreduce", "bytegrad", "powersgd")
def check_finite(rank: int, world: int, name: str) -> None:
    """All ranks raise an error that names the one, and train on when it is well again."""
    options = {"warmup_steps": 0} if name == "powersgd" else {}
    model = trigram.with_bagua(net(), name, check_finite=True, bucket_mb=0.001, **options)
    for step in range(4):
        model.zero_grad()
        found = loss(model, rank, step)
        if step == 2:
            with_nan = found * float("nan") if rank == 1 else found
            try:
                with_nan.backward()
            except trigram.CorruptError as e:
                assert e.rank == 1, e.rank
                says(str(e), "rank(s) 1", "NaN or infinity")
            else:
                raise AssertionError("nobody was told")
        else:
            found.backward()
            assert all(g.isfinite().all() for g in gradients(model)), f"step {step}"
    same_on_all_ranks(rank, world, f"finite-{name}", gradients(model))


@CASES
def nobody_looks(rank: int, world: int) -> None:
    """Without it a mean is NaN on all ranks, and weights that travel are not looked at."""
    model = trigram.with_bagua(net())
    (loss(model, rank, 0) * (float("nan") if rank == 0 else 1.0)).backward()
    assert not any(g.isfinite().any() for g in gradients(model))
    text = raises(trigram.UnsupportedError, trigram.with_bagua, net(), "local_sgd", check_finite=True)
    says(text, "check_finite", "weights")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_sample_weight(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm", patience=60.0)


@pytest.mark.parametrize(
    "case", ["as_ddp_on_the_union-a callable", "local_sgd-in full", "a_weight_that_raises"]
)
def test_sample_weight_over_tcp(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 4, transport="tcp")
