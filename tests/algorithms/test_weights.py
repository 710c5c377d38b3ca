"""Every algorithm against a simulation of all its ranks in one process: the weights after every step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.reference.central import FullGradients
from tests.reference.simulation import Simulation, flatten
from tests.support.algorithm_rows import NAMES_ONCE, ROWS, Row
from tests.support.algorithm_run import OPTIMIZERS, Reversed, Run, distance, loss, net, total
from tests.support.cases import Cases
from tests.support.checks import same_on_all_ranks
from tests.support.marks import long, long_unless
from tests.support.twin_training import x

CASES = Cases()


@CASES.over(1, 2)
def no_boundary_between_two_optimizers(rank: int, world: int, every: int) -> None:
    """The first averaging step too waits for an optimizer that has not stepped yet."""
    torch.manual_seed(2)
    model = net()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    trigram.with_bagua(model, "local_sgd", every=every)
    for step in range(2 * every):
        model.zero_grad()
        loss(model, rank, step).backward()
        first.step()
        if step >= every - 1:
            second.step()
        if step % every == every - 1:
            assert trigram.stats(model)["rounds"] == (step + 1) // every
            # The last layer has no optimizer, and is the same from the start.
            same_on_all_ranks(rank, world, f"boundary-{every}-{step}", model.parameters())


@CASES.over(*ROWS)
def trains(rank: int, world: int, label: str) -> None:
    row = ROWS[label]
    run = Run(rank, world, row, once=True)
    run.train(row.steps)
    run.end(world, f"trains-{label.replace('/', '-')}")
    stats = trigram.stats(run.model)
    assert stats["steps"] == row.steps, stats


@CASES.over("bytegrad sgd", "topk momentum", "powersgd", "qadam 1", "low_precision_decentralized")
def in_another_order(rank: int, world: int, label: str) -> None:
    """From the second step on a bucket is in the order of arrival; what is kept of a parameter moves too."""
    run = Run(rank, world, ROWS[label], Reversed, once=True)
    run.train(6)
    run.end(world, f"order-{label}")


class Strided(nn.Module):
    """Parameters in channels-last order, transposed, and of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, (1, 2)).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(3, 7).t())
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.conv(inputs.view(-1, 1, 1, 6)).mean((2, 3))
        return self.scale * (inputs @ self.turned[:6] + seen[:, :3])


@CASES
def shares_of_strided(rank: int, world: int) -> None:
    """Wherever values lie in memory: each averaging step makes a third of them means, and three make all."""
    torch.manual_seed(7)
    module = Strided()
    model = trigram.with_bagua(module, "central/share:0.3/sync")
    params = list(module.parameters())
    total = sum(p.numel() for p in params)
    starts = [p.detach().clone() for p in params]
    apart = [0.1 * (1 + torch.arange(p.numel())).view(p.shape) for p in params]
    with torch.no_grad():
        for p, d in zip(params, apart, strict=True):
            p.add_(d, alpha=rank + 1)
    optimizer = torch.optim.SGD(params, lr=0.0)
    for step in range(1, 4):
        model(x(rank, step, 4, 6)).sum().backward()
        optimizer.step()
        means = [s + d * (world + 1) / 2 for s, d in zip(starts, apart, strict=True)]
        off = [(p.detach() - m).abs() > 1e-5 for p, m in zip(params, means, strict=True)]
        alone = [int(bad.sum()) for bad in off]
        if 2 * rank + 1 != world:  # where a rank's own values are not the means
            assert total - sum(alone) in {round(total * step / 3 + k) for k in (-1, 0, 1)}, (step, alone)
    assert not any(alone), alone


@CASES
def powersgd_is_exact(rank: int, world: int) -> None:
    """Where the mean gradient has no more than r ranks, nothing is lost, whatever Q was at the start."""

    def one(model: nn.Module, r: int, step: int) -> Tensor:
        inputs = x(r, step, 1, 6)
        return (model(inputs) - inputs[:, :3].sin() - r).square().mean()

    torch.manual_seed(7)
    row = Row("powersgd", lambda n: FullGradients(), {"rank": 5, "warmup_steps": 0})
    sim = Simulation(FullGradients(), world, wide, OPTIMIZERS["sgd"])
    torch.manual_seed(7)
    module = wide()
    optimizer = OPTIMIZERS["sgd"](module)
    model = trigram.with_bagua(module, row.algorithm, **row.options)
    for step in range(5):
        sim.step(lambda m, r, step=step: [one(m, r, step)])
        optimizer.zero_grad()
        one(model, rank, step).backward()
        optimizer.step()
        far = flatten(list(model.parameters())) - sim.weights(rank)
        assert float(far.norm() / sim.weights(rank).norm()) < 1e-5, f"step {step}: {float(far.norm()):.2e}"


def large() -> nn.Module:
    """Half a megabyte: several pieces on their way at once."""
    return nn.Sequential(nn.Linear(6, 301), nn.Tanh(), nn.Linear(301, 409), nn.Tanh(), nn.Linear(409, 3))


@CASES.over(
    *("gradient_allreduce sgd", "bytegrad sgd", "topk", "qadam 8", "powersgd", "local_sgd", "async third"),
    *("decentralized", "low_precision_decentralized", "low_precision_decentralized random", "push_sum"),
    *("central int8 every", "async_low_precision third", "async_decentralized third", "gossip ring topk:0.1"),
)
def trains_more(rank: int, world: int, label: str) -> None:
    run = Run(rank, world, ROWS[label], large, once=True)
    run.train(4)
    run.end(world, f"more-{label}")


class Dead(nn.Module):
    """Outputs that nobody looks at: their weights have gradients of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 20), nn.Linear(20, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(inputs)))[:, :3]


@CASES.over("qadam 8", "qadam 1")
def no_variance_no_step(rank: int, world: int, label: str) -> None:
    """A sign has no zero: what is decoded must not be divided by a variance of zero."""
    run = Run(rank, world, ROWS[label], Dead)
    before = [p[3:].detach().clone() for p in run.model.head.parameters()]
    run.train(8)
    for p, old in zip(run.model.head.parameters(), before, strict=True):
        assert bool((p[3:] == old).all()), f"moved by {float((p[3:] - old).abs().max()):.1e}"


def even() -> nn.Module:
    """1024 weights in multiples of 16: no padding for two and four ranks."""
    last = nn.Linear(26, 3).requires_grad_(False)
    return nn.Sequential(
        nn.Linear(6, 32, bias=False), nn.Tanh(), nn.Linear(32, 26, bias=False), nn.Tanh(), last
    )


@CASES.over("signsgd block", "central sign every", "central sign async", "gossip ring sign")
def signs_without_padding(rank: int, world: int, label: str) -> None:
    """A sign has no zero, so padding is the first suspect where `trains` fails and this does not."""
    if world % 2:
        return
    run = Run(rank, world, ROWS[label], even, once=True)
    run.train(6)
    run.end(world, f"even-{label}")


@CASES.over("bytegrad block", "signsgd block", "topk fraction", "qadam 1", "central sign every")
def forgets_an_infinity(rank: int, world: int, label: str) -> None:
    """It goes to all ranks once: a step that all skip. The next is clean, padding and residuals too."""
    row = ROWS[label]
    torch.manual_seed(8)
    module = net()
    optimizer = OPTIMIZERS[row.optimizer](module)
    given = {"optimizer": optimizer} if row.given else {}
    model = trigram.with_bagua(module, row.algorithm, **given, **row.options)
    for step in range(9):
        optimizer.zero_grad()
        value = loss(model, rank, step)
        (value * float("inf") if step == 5 and rank == world - 1 else value).backward()
        bad = not all(bool(p.grad.isfinite().all()) for p in model.parameters())
        if row.same:
            assert bad == (step == 5), f"step {step}: gradients are {'not ' if bad else ''}finite"
        if not bad:
            optimizer.step()
        assert bool(flatten(list(model.parameters())).isfinite().all()), f"step {step}"


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


@CASES.over("push_sum", "decentralized", "low_precision_decentralized", "gossip random sign")
def mean_preserved(rank: int, world: int, label: str) -> None:
    """Without training, exchanges move weights between ranks, and neither make nor lose any.

    Push-sum's own weights (y / w) do not keep the mean, but come to agree on it.
    """
    row = ROWS[label]
    torch.manual_seed(5)
    module = net()
    model = trigram.with_bagua(module, row.algorithm, **row.options)
    loss(model, rank, 0).backward()
    with torch.no_grad():  # the step: everybody goes elsewhere
        for k, p in enumerate(module.parameters()):
            p.add_(x(rank, k, *p.shape, salt=5), alpha=0.1)
    before = total(module)
    apart = distance(module, before / world)
    for step in range(1, 40):
        loss(model, rank, step).backward()
        module.zero_grad()
    after = total(module)
    if label == "push_sum":
        assert distance(module, before / world) < 1e-3 * apart, "not at the mean of the start"
    else:
        assert float((after - before).norm() / before.norm()) < 1e-5, "the mean has moved"
        assert distance(module, after / world) < 0.3 * apart, "no consensus"


def test_all_names_are_here() -> None:
    names = {a["name"] for a in trigram.algorithms()}
    assert names == {ROWS[label].algorithm for label in NAMES_ONCE}


OTHERS = [k for k in NAMES_ONCE if not ROWS[k].same]


def test_which_carry_gradients() -> None:
    assert {ROWS[k].algorithm for k in OTHERS} == {
        *("decentralized", "low_precision_decentralized", "async", "async_low_precision"),
        *("async_decentralized", "async_low_precision_decentralized", "local_sgd", "diloco", "push_sum"),
        *("noloco", "sparta", "sparseloco"),
    }


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [3, long(4)])
def test_algorithm(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")


GRAPHS = ("decentralized", "gossip", "push")
MOST = [c for c in CASES if any(k in c for k in (*GRAPHS, *NAMES_ONCE)) or not c.startswith("trains")]


@pytest.mark.parametrize("case", MOST)
@pytest.mark.parametrize("world", [2, long(5)])
def test_algorithm_few_and_many(in_launch: Callable[..., None], world: int, case: str) -> None:
    """Two and five ranks: where graphs are special."""
    in_launch("CASES", case, world, transport="shm")


OF_GRAPHS = [c for c in MOST if c.startswith("trains-") and any(k in c for k in GRAPHS)]


@pytest.mark.parametrize(
    ("world", "case"), [(5, case) for case in OF_GRAPHS] + [long(4, case) for case in OF_GRAPHS]
)
def test_graphs_of_more(in_launch: Callable[..., None], world: int, case: str) -> None:
    """Where graphs are special again: 4 is a power of two, 5 is odd."""
    in_launch("CASES", case, world, transport="shm")


@pytest.mark.parametrize("case", long_unless([f"trains-{k}" for k in NAMES_ONCE], MOST))
@pytest.mark.parametrize("world", [3])
def test_algorithm_over_tcp(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="tcp")
