"""Sharded inside each replica, a local method between replicas: against the same training by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.sharded.twins import Net, adamw
from tests.support.cases import Cases
from tests.support.checks import close, raises, same_on_all_ranks, says

CASES = Cases()
EVERY = 3
DILOCO = {"every": EVERY, "outer_lr": 0.6, "outer_momentum": 0.5}
LOCAL = {"every": EVERY}


def _batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def _loss(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    return net(_batch(step, rank), step).square().mean()


def _by_hand(rows: int, columns: int, steps: int, outer: dict[str, Any] | None) -> nn.Module:
    """What the training is, in one process: a model and an AdamW per replica, and the outer SGD of DiLoCo
    (arXiv 2311.08105, algorithm 1)."""
    torch.manual_seed(0)
    shared = Net()
    trained = [p for p in shared.parameters() if p.requires_grad]
    momentum = {} if outer is None or not outer["outer_momentum"] else {"nesterov": True}
    lr, mu = (1.0, 0.0) if outer is None else (outer["outer_lr"], outer["outer_momentum"])
    sgd = torch.optim.SGD(trained, lr, momentum=mu, **momentum)
    nets = [copy.deepcopy(shared) for _ in range(rows)]
    adams = [adamw(net) for net in nets]
    for step in range(steps):
        for row, (net, adam) in enumerate(zip(nets, adams, strict=True)):
            adam.zero_grad()
            for column in range(columns):
                (_loss(net, step, row * columns + column) / columns).backward()
            adam.step()
        if (step + 1) % EVERY == 0:
            each = [[p for p in net.parameters() if p.requires_grad] for net in nets]
            for k, p in enumerate(trained):
                p.grad = p.detach() - torch.stack([ps[k].detach() for ps in each]).mean(0)
            sgd.step()
            with torch.no_grad():
                for ps in each:
                    for p, new in zip(ps, trained, strict=True):
                        p.copy_(new)
    return shared


class Job:
    """Ranks in rows: each row is a replica, and sharded; columns hold the same shards."""

    def __init__(self, rank: int, world: int, algorithm: str, seed: int = 0, **options: Any) -> None:
        self.rank, self.columns = rank, world // 2
        rows = [trigram.new_group([r * self.columns + c for c in range(self.columns)]) for r in range(2)]
        across = [trigram.new_group([c, c + self.columns]) for c in range(self.columns)]
        self.row, self.across = rows[rank // self.columns], across[rank % self.columns]
        torch.manual_seed(seed)
        self.net = Net()
        self.optimizer = adamw(self.net)
        inner = {k: options.pop(k) for k in ("gradients", "overlap") if k in options}
        trigram.with_bagua(self.net, "sharded", optimizer=self.optimizer, group=self.row, **inner)
        self.shards = trigram.with_bagua(
            trigram.local_shards(self.net), algorithm, group=self.across, **options
        )

    def train(self, steps: int, first: int = 0) -> None:
        """Trains."""
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            _loss(self.net, step, self.rank).backward()
            self.optimizer.step()
            trigram.step(self.shards)

    def weights(self) -> torch.Tensor:
        """All weights of this rank."""
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    def check_row(self) -> None:
        """The ranks of a replica hold the same weights."""
        first = self.weights()
        trigram.broadcast(first, src=self.row.ranks[0], group=self.row)
        assert torch.equal(first, self.weights())


@CASES.over("diloco", "diloco, shards", "diloco, overlap", "diloco, lr 1", "local_sgd")
def as_by_hand(rank: int, world: int, case: str) -> None:
    name, _, more = case.partition(", ")
    options: dict[str, Any] = dict(DILOCO if name == "diloco" else LOCAL)
    if more == "lr 1":
        options |= {"outer_lr": 1.0, "outer_momentum": 0.0}
    inner: dict[str, Any] = {"shards": {"gradients": "shards"}, "overlap": {"overlap": True}}.get(more, {})
    # The replicas begin apart, and with_bagua makes them alike.
    job = Job(rank, world, name, seed=0 if rank < world // 2 else 5, **options, **inner)
    job.train(2 * EVERY)
    want = _by_hand(2, world // 2, 2 * EVERY, options if name == "diloco" else None)
    for (n, a), b in zip(job.net.named_parameters(), want.parameters(), strict=True):
        if a.numel():
            close(a.detach(), b.detach(), 2e-5, f"{case}: {n}")
    same_on_all_ranks(rank, world, case, [p for p in job.net.parameters() if p.requires_grad])
    mine = sum(p.numel() for p in job.shards.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in job.net.parameters() if p.requires_grad)
    assert mine <= 1.1 * whole / (world // 2), (mine, whole)  # parameters are aligned


@CASES.over("decentralized", "async", "async_decentralized", "low_precision_decentralized")
def replicas_are_whole(rank: int, world: int, algorithm: str) -> None:
    """Under any algorithm that averages weights the ranks of a replica hold the same ones."""
    job = Job(rank, world, algorithm)
    for step in range(5):
        job.train(1, step)
        job.check_row()
    with trigram.consensus(job.shards):
        same_on_all_ranks(rank, world, algorithm, [p.detach().clone() for p in job.net.parameters()])
        inside = job.weights()
    job.check_row()
    apart = not torch.equal(inside, job.weights())
    assert apart or algorithm.startswith("async"), "the weights are those of the replica again"
    trigram.unwrap(job.shards)


@CASES
def left_and_wrapped_again(rank: int, world: int) -> None:
    """Without the shards the model is sharded as before; state goes back into a plain optimizer."""
    job = Job(rank, world, "diloco", **DILOCO)
    job.train(EVERY)
    trigram.unwrap(job.shards)
    job.optimizer.zero_grad()
    _loss(job.net, 7, job.rank).backward()
    job.optimizer.step()  # collects the weights itself
    job.check_row()
    job.shards = trigram.with_bagua(trigram.local_shards(job.net), "local_sgd", group=job.across, every=1)
    job.train(2, 8)
    same_on_all_ranks(rank, world, "again", [p for p in job.net.parameters() if p.requires_grad])
    trigram.unwrap(job.shards)
    trigram.unwrap(job.net)
    assert all(s["exp_avg"].shape == p.shape for p, s in job.optimizer.state.items())


@CASES
def a_step_that_is_forgotten(rank: int, world: int) -> None:
    job = Job(rank, world, "diloco", **DILOCO)
    job.train(1)
    job.optimizer.zero_grad()
    _loss(job.net, 1, rank).backward()
    job.optimizer.step()
    for call in (
        lambda: _loss(job.net, 2, rank),
        job.net.state_dict,
        job.optimizer.step,
        lambda: job.net.inner(_batch(0, 0)).sum().backward(),
    ):
        says(raises(trigram.MisuseError, call), "trigram.step(shards)")
    trigram.step(job.shards)
    job.train(1, 2)
    same_on_all_ranks(rank, world, "after", [p for p in job.net.parameters() if p.requires_grad])


@CASES
def the_model_leaves_before_its_shards(rank: int, world: int) -> None:
    job = Job(rank, world, "diloco", **DILOCO)
    job.train(1)
    trigram.unwrap(job.net)
    says(raises(trigram.MisuseError, lambda: trigram.step(job.shards)), "unwrapped or switched")
    trigram.unwrap(job.shards)


@CASES
def what_is_refused(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    optimizer = adamw(net)
    trigram.with_bagua(net, "sharded", optimizer=optimizer, fused=True)
    says(raises(trigram.UnsupportedError, lambda: trigram.local_shards(net)), "fused=True")
    trigram.unwrap(net)
    job = Job(rank, world, "diloco", **DILOCO)
    job.train(1)
    job.net.frozen.requires_grad_(True)
    job.optimizer.zero_grad()
    _loss(job.net, 1, rank).backward()
    says(raises(trigram.MisuseError, job.optimizer.step), "local_shards")


@CASES
def the_job_ends_before_its_shards(rank: int, world: int) -> None:
    """unwrap sends nothing then; each case has ranks of its own job."""
    job = Job(rank, world, "diloco", **DILOCO)
    job.train(1)
    trigram.shutdown()
    trigram.unwrap(job.shards)
    trigram.unwrap(job.net)
    trigram.init()


@pytest.mark.parametrize("case", list(CASES))
def test_replicas(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 4, patience=90.0)
