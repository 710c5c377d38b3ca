"""Filters of the script: what gradients pass before they are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, says
from trigram.averaging import GradientFilter

CASES, ALONE = Cases(), Cases()


class Net(nn.Module):
    """Two layers, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two, self.rests = nn.Linear(6, 9), nn.Linear(9, 2), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(torch.tanh(self.one(inputs)))
        return out


class Times(GradientFilter):
    """Multiplies, and notes what it is told."""

    def __init__(self, factor: float) -> None:
        self.factor, self.seen, self.passes, self.ends = factor, 0, 0, 0

    def pass_begins(self) -> None:
        self.passes += 1

    def before(self, bucket: Any) -> None:
        assert len(bucket.views) == len(bucket.tensors)
        for view, param in zip(bucket.views, bucket.tensors, strict=True):
            assert view.shape == param.shape
            self.seen += int(view.abs().sum() > 0)
            view.mul_(self.factor)

    def pass_ends(self) -> None:
        self.ends += 1


def loss(model: nn.Module, rank: int, step: int, factor: float = 1.0) -> torch.Tensor:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return factor * (model(inputs) - inputs[:, :2].sin()).square().mean()


def train(model: nn.Module, optimizer: Any, rank: int, steps: int, factor: float = 1.0) -> torch.Tensor:
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, rank, step, factor).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


WAYS: dict[str, Callable[[nn.Module, Any], dict[str, Any]]] = {
    "in full": lambda model, optimizer: {},
    "8 bits": lambda model, optimizer: {"algorithm": "bytegrad"},
    "powersgd": lambda model, optimizer: {"algorithm": "powersgd"},
    "top": lambda model, optimizer: {"algorithm": "topk"},
    "median": lambda model, optimizer: {"algorithm": "central:median/full/sync"},
    "fused": lambda model, optimizer: {"fused": True, "optimizer": optimizer},
    "sharded": lambda model, optimizer: {"algorithm": "sharded", "optimizer": optimizer},
    "shards": lambda model, optimizer: {
        "algorithm": "sharded",
        "gradients": "shards",
        "optimizer": optimizer,
    },
    "weighted": lambda model, optimizer: {"sample_weight": 0.5, "check_finite": True},
}


@CASES
def as_the_loss(rank: int, world: int) -> None:
    """A factor on gradients is one on the loss: to the bit, as it is a power of two."""
    factor = 2.0 ** (rank - 1)
    for name, way in WAYS.items():
        found = []
        for filtered in (True, False):
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
            times = Times(factor)
            filters = [times] if filtered else []
            trigram.with_bagua(model, filters=filters, bucket_mb=0.0001, **way(model, optimizer))
            found.append(train(model, optimizer, rank, 6, 1.0 if filtered else factor))
            if filtered:
                assert (times.passes, times.ends, times.seen) == (6, 6, 24), f"{name}: {vars(times)}"
            trigram.unwrap(model)
        equal(found[0], found[1], name)


@CASES
def in_their_order(rank: int, world: int) -> None:
    """One after the other; the check looks at what they leave."""

    class Cleans(GradientFilter):
        def before(self, bucket: Any) -> None:
            bucket.values.nan_to_num_(0.0, 0.0, 0.0)

    class Breaks(GradientFilter):
        def before(self, bucket: Any) -> None:
            if rank == 0:
                bucket.values[:3] = float("nan")

    model = trigram.with_bagua(Net(), filters=(Breaks(), Cleans()), check_finite=True)
    loss(model, rank, 0).backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
    model = trigram.with_bagua(Net(), filters=(Cleans(), Breaks()), check_finite=True)
    says(raises(trigram.CorruptError, lambda: loss(model, rank, 0).backward()), "rank(s) 0", "NaN")


@CASES
def not_without_inputs(rank: int, world: int) -> None:
    """A rank whose inputs have ended contributes nothing, whatever a filter would add."""

    class Adds(GradientFilter):
        def before(self, bucket: Any) -> None:
            bucket.values.add_(1.0)

    model = trigram.with_bagua(Net(), filters=[Adds()])
    plain = Net()
    with trigram.join(model):
        for step in range(1 + rank):
            model.zero_grad()
            loss(model, rank, step).backward()
    plain.zero_grad()
    loss(plain, world - 1, world - 1).backward()
    if rank == world - 1:
        for mine, alone in zip(model.parameters(), plain.parameters(), strict=True):
            if alone.grad is not None:
                assert mine.grad is not None
                close(mine.grad, (alone.grad + 1) / world, 1e-6, "of one rank")


@CASES
def fails_on_one(rank: int, world: int) -> None:
    """What a filter raises on one rank ends the pass on all, and the next is right."""

    class Fails(GradientFilter):
        fails = False

        def before(self, bucket: Any) -> None:
            if self.fails and rank == world - 1:
                raise ValueError("a value of the script's")

    mine = Fails()
    model = trigram.with_bagua(Net(), filters=[mine])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, rank, 2)
    mine.fails = True
    error = raises((ValueError, trigram.TrigramError), train, model, optimizer, rank, 1)
    says(error, "a value of the script's" if rank == world - 1 else f"rank {world - 1}")
    mine.fails = False
    weights = train(model, optimizer, rank, 2)
    everybody = torch.empty(world, len(weights))
    trigram.all_gather(everybody, weights)
    assert torch.equal(everybody, everybody[:1].expand(world, -1))


@CASES
def sees_the_averages(rank: int, world: int) -> None:
    """On the way back a filter sees what the parameters get, with weights too."""

    class Notes(GradientFilter):
        def averaged(self, buckets: Any) -> None:
            self.found = [b.mean.clone() for b in buckets]

    notes = Notes()
    model = trigram.with_bagua(Net(), filters=[notes], sample_weight=1.0 + rank)
    loss(model, rank, 0).backward()
    length = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    seen = sum(float(mean.square().sum()) for mean in notes.found)
    assert abs(seen - length) < 1e-5 * length


@CASES
def begins_badly(rank: int, world: int) -> None:
    """What `pass_begins` raises on one rank leaves all calls in step, those of the weights too."""

    class Begins(GradientFilter):
        fails = False

        def pass_begins(self) -> None:
            if self.fails and rank == 0:
                raise ValueError("a value of the script's")

    mine = Begins()
    model = trigram.with_bagua(Net(), filters=[mine], sample_weight=1.0 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, rank, 2)
    mine.fails = True
    raises((ValueError, trigram.TrigramError), train, model, optimizer, rank, 1)
    mine.fails = False
    weights = train(model, optimizer, rank, 3)
    everybody = torch.empty(world, len(weights))
    trigram.all_gather(everybody, weights)
    assert torch.equal(everybody, everybody[:1].expand(world, -1))


@CASES
def sparse_and_ignored(rank: int, world: int) -> None:
    """Sparse gradients that are not averaged do not matter."""
    model = nn.ModuleDict({"table": nn.Embedding(4, 6, sparse=True), "net": Net()})
    trigram.with_bagua(model, filters=[Times(1.0)], ignore=["table.weight"])
    model["net"](model["table"](torch.tensor([0, rank]))).sum().backward()


@CASES
def no_sync_costs_no_copy(rank: int, world: int) -> None:
    """Gradients of micro-batches are views of buckets in the end, as a script holds none of them."""
    model = trigram.with_bagua(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        with trigram.no_sync(model):
            loss(model, rank, 2 * step).backward()
        loss(model, rank, 2 * step + 1).backward()
        optimizer.step()
    kept = [p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None]
    assert len(set(kept)) == 1, "each has memory of its own"


@CASES
def refused(rank: int, world: int) -> None:
    """What cannot be is named."""
    unsupported = trigram.UnsupportedError
    for name in ("async", "decentralized", "local_sgd"):
        text = raises(unsupported, trigram.with_bagua, Net(), name, filters=[Times(1.0)])
        says(text, "filters=", "averages weights")
    for wrong in (Times(1.0), [Times], [lambda bucket: None], "abc"):
        says(raises(trigram.MisuseError, trigram.with_bagua, Net(), filters=wrong), "filters=", "MyFilter()")
    says(
        raises(unsupported, trigram.with_bagua, nn.Embedding(4, 2, sparse=True), filters=[Times(1.0)]),
        "filters=",
        "sparse",
    )
    trigram.unwrap(trigram.with_bagua(Net(), filters=None))

    class NoBucket(GradientFilter):
        def before(self) -> None:  # type: ignore[override]
            pass

    text = raises(trigram.MisuseError, trigram.with_bagua, Net(), filters=[NoBucket()])
    says(text, "NoBucket", "before(bucket)", "before()")
    model = trigram.with_bagua(Net(), filters=[Times(1.0)])
    says(raises(unsupported, trigram.switch, model, "async"), "filters=")
    other = [Times(1.0)] if rank else []
    text = raises(trigram.MismatchError, trigram.with_bagua, Net(), filters=other)
    says(text, "different")


class Replaces(GradientFilter):
    """Does not change values in place, in each way that there is."""

    def __init__(self, how: str) -> None:
        self.how = how

    def before(self, bucket: Any) -> None:
        clipped = [view.clamp(-0.1, 0.1) for view in bucket.views]
        if self.how == "views":
            bucket.views = clipped
        elif self.how == "values":
            bucket.values = bucket.values.clamp(-0.1, 0.1)
        elif self.how == "item":
            bucket.views[0] = clipped[0]
        elif self.how == "returned":
            return clipped  # type: ignore[return-value]
        else:
            for param, view in zip(bucket.tensors, clipped, strict=True):
                param.grad = view


@CASES.over("views", "values", "item", "grad", "returned")
def what_would_not_be_averaged(rank: int, world: int, how: str) -> None:
    """It is an error on all ranks, not the gradients of the step before."""
    model = trigram.with_bagua(Net(), filters=[Replaces(how)])
    says(raises(trigram.MisuseError, lambda: loss(model, rank, 0).backward()), "in place")


class InPlace(GradientFilter):
    """Operators that write in place are assignments to Python."""

    def before(self, bucket: Any) -> None:
        bucket.values *= 2
        for k in range(len(bucket.views)):
            bucket.views[k] *= 0.5


@CASES
def operators_in_place(rank: int, world: int) -> None:
    found = [
        train(trigram.with_bagua(net, filters=chain), torch.optim.SGD(net.parameters(), lr=0.1), rank, 3)
        for net, chain in ((Net(), [InPlace()]), (Net(), [GradientFilter()]))
    ]
    equal(*found)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", list(CASES))
def test_filters(world: int, case: str, in_launch: Callable[..., None]) -> None:
    in_launch("CASES", case, world)


@ALONE
def alone(rank: int, world: int) -> None:
    """They are called too where no other rank is."""
    times = Times(2.0)
    model, plain = trigram.with_bagua(Net(), filters=[times]), Net()
    loss(model, rank, 0).backward()
    loss(plain, rank, 0, 2.0).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            close(mine.grad, other.grad, 1e-6, "of one rank")
    assert times.passes == times.ends == 1
    trigram.unwrap(model)
    exact = trigram.with_bagua(Net(), "topk", filters=[Times(2.0)])  # nothing is left out for nobody
    loss(exact, rank, 0).backward()
    for mine, other in zip(exact.parameters(), plain.parameters(), strict=True):
        if mine.grad is not None and other.grad is not None:
            close(mine.grad, other.grad, 1e-6, "of one rank, with a codec")


@pytest.mark.parametrize("case", list(ALONE))
def test_a_rank_alone(in_launch: Callable[..., None], case: str) -> None:
    in_launch("ALONE", case, 1)
