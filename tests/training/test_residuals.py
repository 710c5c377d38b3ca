"""Error feedback with heads in turn: what was applied, and what is left in residuals, are all gradients.

A parameter that no rank used in a pass gets no gradient. So nothing of its residual may be sent in that pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.support.cases import Cases
from tests.support.checks import equal, relative
from tests.support.twin_training import x
from trigram.algorithms.options import AlgorithmOptions
from trigram.algorithms.robust import RobustAggregation
from trigram.averaging.groups import ModelGroups
from trigram.codecs import find
from trigram.gradients.compressors import (
    CodecCompressor,
    GradientCompressor,
    MomentumCompressor,
    MomentumCorrectedCompressor,
    RobustCompressor,
    make,
)
from trigram.gradients.gradient_sync import GradientSync
from trigram.runtime.world import resolve

CASES = Cases()
STEPS = 40


class Heads(nn.Module):
    """A trunk, and three heads of which a forward takes one; sizes that need padding."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 33)
        self.heads = nn.ModuleList(nn.Linear(33, 29) for _ in range(3))

    def forward(self, inputs: Tensor, which: int) -> Tensor:
        return self.heads[which](torch.tanh(self.trunk(inputs)))


def in_turn(rank: int, step: int) -> int:
    """All ranks use the same of two heads."""
    return step % 2


def apart(rank: int, step: int) -> int:
    """Two ranks use two of three heads, in turn; others use the same as rank 0."""
    return (step + (rank == 1)) % 3


def loss(model: nn.Module, rank: int, step: int, which: Callable[[int, int], int]) -> Tensor:
    return (model(x(rank, step), which(rank, step)) - rank).square().mean()


def both(name: str) -> Callable[[trigram.QAdam], GradientCompressor]:
    return lambda optimizer: CodecCompressor(find(name), find(name), (True, True))


def robust(kind: str, codec: str) -> Callable[[trigram.QAdam], GradientCompressor]:
    coded = find(codec), find(codec)
    return lambda optimizer: RobustCompressor(RobustAggregation.parse(kind), coded, (True, True))


LINEAR: dict[str, Callable[[trigram.QAdam], GradientCompressor]] = {
    **{name: both(name) for name in ("topk:0.05", "randomk:0.05", "sign", "int8", "int4", "fp8")},
    "powersgd": lambda optimizer: make("powersgd:2", AlgorithmOptions()),
    "qadam": lambda optimizer: MomentumCompressor(optimizer, 1, None),
}
"""What loses nothing: the residuals of both phases are fed back."""
KEEPING = LINEAR | {
    "signsgd": lambda optimizer: make("sign", AlgorithmOptions()),
    "topk momentum": lambda optimizer: MomentumCorrectedCompressor(find("topk:0.05"), 0.9),
    "median": robust("median", "topk:0.05"),
    "clip": robust("clip:1", "sign"),
}


class Training:
    """Hooks with a compressor on one model, and a model without hooks for the gradients of all ranks."""

    def __init__(self, world: int, make: Callable[[trigram.QAdam], GradientCompressor]) -> None:
        torch.manual_seed(5)
        self.world, self.model = world, Heads()
        self.twin = copy.deepcopy(self.model)
        self.optimizer = trigram.QAdam(self.model.parameters(), lr=1e-3)
        for head in range(3):  # the variance that qadam freezes
            loss(self.model, 0, 0, lambda r, s, head=head: head).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        compressor = make(self.optimizer)
        # Small buckets: a parameter is alone in its bucket, or shares it, or is cut by the border of a shard.
        self.hooks = GradientSync(self.model, ModelGroups(resolve(None)), 3000, compressor)

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def gradients(self, step: int, which: Callable[[int, int], int]) -> dict[str, Tensor]:
        """The mean of the gradients of all ranks; without what no rank used."""
        self.twin.load_state_dict(self.model.state_dict())
        self.twin.zero_grad()
        for rank in range(self.world):
            (loss(self.twin, rank, step, which) / self.world).backward()
        return {k: p.grad.clone() for k, p in self.twin.named_parameters() if p.grad is not None}

    def kept(self) -> dict[str, dict[str, Tensor]]:
        """The state that this rank keeps of each parameter; ``owned`` of the shards of all ranks."""
        found = {}
        names = list(self.parameters())
        for bucket in self.hooks.buckets:
            owned = getattr(bucket.average, "mean_residual", None)
            if owned is not None:
                whole = owned.new_empty(bucket.memory.numel())
                trigram.all_gather(whole, owned)
            parts_of = self.hooks.buckets._parts(bucket)
            for i, view in zip(bucket.params, bucket.views, strict=True):
                parts = parts_of[self.hooks.params[i]].named
                found[names[i]] = {k: part.clone().flatten() for k, part in parts.items() if k != "centre"}
                if owned is not None:
                    at = view.storage_offset() - bucket.memory.storage_offset()
                    found[names[i]]["owned"] = whole[at : at + view.numel()]
        return found

    def left(self) -> dict[str, Tensor]:
        """What the mean of the residuals of all ranks has of each parameter."""
        left = {}
        for name, parts in self.kept().items():
            like = self.parameters()[name]
            left[name] = torch.zeros(like.numel())
            if "residual" in parts:
                left[name] = parts["residual"].clone()
                trigram.all_reduce(left[name], "avg")
            left[name] += parts.get("owned", 0)
            left[name] = left[name].view_as(like)
        return left


def all_arrives(rank: int, world: int, name: str, which: Callable[[int, int], int]) -> None:
    training = Training(world, LINEAR[name])
    came = {k: torch.zeros_like(p) for k, p in training.parameters().items()}
    went = {k: torch.zeros_like(p) for k, p in training.parameters().items()}
    for step in range(STEPS):
        new = training.gradients(step, which)
        for k, p in training.parameters().items():
            if name == "qadam" and k in new:
                new[k] = 0.1 * new[k] + 0.9 * training.optimizer.state[p]["exp_avg"]
        loss(training.model, rank, step, which).backward()
        for k, p in training.parameters().items():
            assert (p.grad is None) == (k not in new), f"step {step}: {k}"
            if p.grad is not None:
                came[k] += new[k]
                went[k] += p.grad
        training.optimizer.step()
        training.optimizer.zero_grad()
    left = training.left()
    for k, total in came.items():
        # The third head gets no gradient if the heads are used in turn.
        far = relative(went[k] + left[k], total) if bool(total.any()) else float(left[k].norm())
        assert far < 1e-4, f"{name}: of the gradients of {k}, {100 * far:.2f} % are lost"
    assert all(bool(total.any()) == (which is apart or "heads.2" not in k) for k, total in came.items())


CASES |= {f"in_turn-{k}": lambda r, w, k=k: all_arrives(r, w, k, in_turn) for k in LINEAR}
CASES |= {f"apart-{k}": lambda r, w, k=k: all_arrives(r, w, k, apart) for k in LINEAR}


@CASES.over(*KEEPING)
def untouched(rank: int, world: int, name: str) -> None:
    """A pass does not change what is kept of parameters that no rank uses in it."""
    training = Training(world, KEEPING[name])
    compared = 0
    for step in range(12):
        used = training.gradients(step, apart)
        value = loss(training.model, rank, step, apart)
        before = training.kept()
        value.backward()
        after = training.kept()
        for k in set(before) - set(used):
            for what, was in before[k].items():
                equal(after[k][what], was, f"step {step}: {what} of {k}")
                compared += bool(was.any())
        training.optimizer.step()
        training.optimizer.zero_grad()
    if world == 2:  # of three ranks, two use the same head
        assert compared > 0


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_residuals(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world)
