"""`lossless` trains with the bits of `gradient_allreduce`, and sends fewer bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.cases import Cases
from tests.support.checks import raises, says
from trigram.averaging import GradientAverage
from trigram.codecs import lossless

CASES = Cases()
KINDS = ("autocast", "plain", "zeros", "infinite", "two_dtypes")


class Net(nn.Module):
    """Linear layers and a norm; one layer that some steps do not use."""

    def __init__(self, wide: int = 40) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(24, wide), nn.Linear(wide, wide)
        self.norm, self.three = nn.LayerNorm(wide), nn.Linear(wide, 3)

    def forward(self, inputs: torch.Tensor, rests: bool = False) -> torch.Tensor:
        hidden = torch.relu(self.one(inputs))
        out: torch.Tensor = self.three(self.norm(hidden if rests else torch.relu(self.two(hidden))))
        return out


class InOrder(GradientAverage):
    """The reference: all gradients of all ranks, added in the order of the ranks."""

    def phases(self, step: int) -> Any:
        everybody = torch.empty(self.groups.size, len(self.memory))
        yield trigram.all_gather(everybody, self.memory.clone(), group=self.groups.main, async_op=True)
        total = everybody[0].clone()
        for theirs in everybody[1:]:
            total += theirs
        self.memory.copy_(total / self.groups.size)


def trained(rank: int, name: str, kind: str, steps: int = 5) -> tuple[list[torch.Tensor], nn.Module]:
    torch.manual_seed(3)
    module = Net()
    if kind == "two_dtypes":
        module.three.double()
    model = trigram.with_bagua(module, name, bucket_mb=0.004)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
        if kind == "zeros":
            inputs *= rank > 0
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            if kind == "two_dtypes":
                hidden = module.norm(torch.relu(module.two(torch.relu(module.one(inputs)))))
                out = module.three(hidden.double())
            else:
                out = model(inputs, rests=step == 2 and rank == 0)
        loss = out.float().square().mean()
        if kind == "infinite" and step == 3 and rank == 1:
            loss = loss * float("inf")
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()], model


@CASES.over(*KINDS)
def the_bits_of_the_default(rank: int, world: int, kind: str) -> None:
    if "in order" not in [entry["name"] for entry in trigram.algorithms()]:
        trigram.register("in order", trigram.Trigram(), average=InOrder)
    found = {}
    # A ring or a tree adds three values or more in another order.
    same = ["gradient_allreduce"] if world == 2 or os.environ["TRIGRAM_TRANSPORT"] == "shm" else []
    for name in ("lossless", *(["in order"] if kind != "two_dtypes" else []), *same):
        found[name], model = trained(rank, name, kind)
        trigram.unwrap(model)
    got = found.pop("lossless")
    for name, want in found.items():
        pairs = zip(got, want, strict=True)
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs), (kind, name)


@CASES
def fewer_bytes(rank: int, world: int) -> None:
    """Under autocast, of a net whose weights are nearly all in matrices."""
    sent = {}
    for name in ("gradient_allreduce", "lossless"):
        torch.manual_seed(3)
        model = trigram.with_bagua(Net(400), name)
        for step in range(3):
            inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * step + rank))
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(inputs)
            out.float().square().mean().backward()
        sent[name] = trigram.stats(model)["bytes_per_step"]
        trigram.unwrap(model)
    part = sent["lossless"] / sent["gradient_allreduce"]
    assert part < (0.42 if world == 2 else 0.66), (part, sent)


@CASES
def refused(rank: int, world: int) -> None:
    for name in ("gossip:ring/lossless/sync", "central/lossless/every:4", "central:median/lossless/sync"):
        says(raises(trigram.UnsupportedError, trigram.with_bagua, Net(), name), "lossless", "central")
    says(raises(trigram.UnsupportedError, trigram.with_bagua, Net(), "lossless", fused=True), "fused")


@CASES
def fails_on_one(rank: int, world: int) -> None:
    """A pass that fails on one rank ends on all, and training goes on with equal weights."""
    torch.manual_seed(3)
    model = trigram.with_bagua(Net(), "lossless", bucket_mb=0.004)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(fails: bool) -> None:
        optimizer.zero_grad()
        inputs = torch.randn(8, 24, requires_grad=True)
        inputs.register_hook(lambda g: 1 / 0 if fails else None)
        model(inputs).square().mean().backward()
        optimizer.step()

    for _round in range(3):
        step(False)
        error = raises((ZeroDivisionError, trigram.TrigramError), step, rank == world - 1)
        says(error, "division" if rank == world - 1 else "exception")
    step(False)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everybody = torch.empty(world, len(weights))
    trigram.all_gather(everybody, weights)
    assert torch.equal(everybody, everybody[:1].expand(world, -1))


@CASES
def a_length_that_cannot_be(rank: int, world: int) -> None:
    """A rank that announces a longer code than there is, is named on all ranks."""
    model = trigram.with_bagua(Net(), "lossless")
    encode, last = lossless.encode, 1 if world == 2 else world  # of the shards that it encodes
    made = [0]

    def longer(values: torch.Tensor, out: torch.Tensor) -> int:
        made[0] += 1
        return encode(values, out) + (5 * values.nbytes if made[0] == last else 0)

    if rank == 1:
        lossless.encode = longer
    inputs = torch.randn(8, 24)
    text = raises(trigram.CorruptError, lambda: model(inputs).square().mean().backward())
    says(text, "rank 1", "bytes")
    lossless.encode = encode
    model.zero_grad()
    model(inputs).square().mean().backward()


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("case", list(CASES))
def test_lossless(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)


def test_codes_of_tensors() -> None:
    values = torch.randn(10_000).bfloat16().float()
    out = torch.empty(lossless.most(10_000), dtype=torch.uint8)
    size = lossless.encode(values, out)
    assert size < 0.37 * values.nbytes
    read = torch.ones(10_000)
    lossless.decode(out[:size], read, add=True)
    assert torch.equal(read, 1 + values)
    says(raises(trigram.CorruptError, lossless.decode, out[: size - 1], read, sender=3), "rank 3", "10000")
    says(raises(trigram.MisuseError, lossless.encode, values, out[:5]), "bytes")
    says(raises(trigram.UnsupportedError, lossless.encode, values.double(), out), "float64")
    says(raises(trigram.UnsupportedError, lossless.encode, values.half(), out), "float16")
