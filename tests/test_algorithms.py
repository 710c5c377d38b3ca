"""Every algorithm against a simulation of all its ranks in one process: the weights after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests import algorithm_reference as reference
from tests.algorithm_reference import (
    Algorithm,
    AsyncPairs,
    CentralWeights,
    Choco,
    CodedGradients,
    Edges,
    FullGradients,
    Gossip,
    Graph,
    PowerSGD,
    PushSum,
    QAdam,
    Simulation,
    flatten,
    graph,
    how_many,
)
from tests.cases import Cases
from tests.checks import same_on_all_ranks
from tests.pairs import x
from trigram import graphs

CASES = Cases()
TIGHT = 3e-6  # distance over length, where no codec rounds
FLIPS = 0.05  # of the elements may have been rounded to the other side when the two first part
DRIFT = 4e-3  # distance over length, after that

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "qadam": lambda m: trigram.QAdam(m.parameters(), lr=0.01),
    "qadam with decay": lambda m: trigram.QAdam(m.parameters(), lr=0.02, betas=(0.8, 0.99), weight_decay=0.1),
}


def every_third(done: int) -> bool:
    return done % 3 == 0


def irregular(done: int) -> bool:
    return done in (1, 2, 4, 7)


def always(done: int) -> bool:
    return True


def lent(kind: str) -> Callable[[int], Graph]:
    """A random graph is trigram's own; its properties are checked below."""

    def on(n: int) -> Graph:
        found = graphs.find(kind, n)
        return lambda round: torch.as_tensor(found.matrix(round)).float()

    return on


def fixed(kind: str) -> Callable[[int], Graph]:
    return lambda n: graph(kind, n)


def coded_gossip(kind: str, n: int, codec: str, **more: Any) -> Gossip:
    """By edge where the graph changes; among two ranks, one_peer and pairs do not."""
    w = lent(kind)(n) if kind == "random" else graph(kind, n, symmetric=True)
    changes = kind == "random" or (kind in ("one_peer", "pairs") and n > 2)
    return (Edges if changes else Choco)(w, codec, **more)


@dataclass(frozen=True)
class Row:
    """An algorithm, how it is asked for, and what it must do."""

    algorithm: str
    reference: Callable[[int], Algorithm]  # of the world's size
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    given: bool = False  # the optimizer goes to with_bagua too
    coded: bool = False  # a codec rounds
    same: bool = False  # all ranks hold the same bits after every step
    agree: int = 0  # H: all ranks hold the same bits in the forward after each H-th step
    steps: int = 8

    @property
    def warmup(self) -> int:
        return int(self.options.get("warmup_steps", 0))


ROWS: dict[str, Row] = {}


def row(label: str, algorithm: str, reference: Callable[[int], Algorithm], **more: Any) -> None:
    known = set(Row.__dataclass_fields__)
    options = {k: v for k, v in more.items() if k not in known}
    assert label not in ROWS
    ROWS[label] = Row(algorithm, reference, options, **{k: v for k, v in more.items() if k in known})


# Gradients.
for _o in ("sgd", "momentum", "adam"):
    row(f"gradient_allreduce {_o}", "gradient_allreduce", lambda n: FullGradients(), optimizer=_o, same=True)
    row(
        f"bytegrad {_o}",
        "bytegrad",
        lambda n: CodedGradients("int8"),
        optimizer=_o,
        same=True,
        coded=True,
    )
row("central full sync", "central/full/sync", lambda n: FullGradients(), same=True)
row(
    "bytegrad block",
    "bytegrad",
    lambda n: CodedGradients("int8", 64),
    block=64,
    same=True,
    coded=True,
)
row(
    "bytegrad warmup",
    "bytegrad",
    lambda n: CodedGradients("int8"),
    warmup_steps=3,
    optimizer="momentum",
    same=True,
    coded=True,
)
for _c in ("int8", "int4", "fp8", "bf16", "f16", "sign", "topk:0.1"):
    row(
        f"central {_c}",
        f"central/{_c}/sync",
        lambda n, c=_c: CodedGradients(c),
        same=True,
        coded=True,
    )
row(
    "signsgd",
    "signsgd",
    lambda n: CodedGradients("sign"),
    optimizer="momentum",
    same=True,
    coded=True,
    steps=10,
)
row("signsgd block", "signsgd", lambda n: CodedGradients("sign", 64), block=64, same=True, coded=True)
row("topk", "topk", lambda n: CodedGradients("topk:0.01"), optimizer="adam", same=True, coded=True)
row("topk fraction", "topk", lambda n: CodedGradients("topk:0.05"), fraction=0.05, same=True, coded=True)
row(
    "topk momentum",
    "topk",
    lambda n: CodedGradients("topk:0.05", momentum=0.9),
    fraction=0.05,
    momentum=0.9,
    given=True,
    same=True,
    coded=True,
    steps=10,
)
row(
    "topk warmup",
    "topk",
    lambda n: CodedGradients("topk:0.05"),
    fraction=0.05,
    warmup_steps=3,
    same=True,
    coded=True,
)
row("powersgd", "powersgd", lambda n: PowerSGD(2), warmup_steps=0, same=True, steps=10)
row(
    "powersgd rank",
    "powersgd",
    lambda n: PowerSGD(4),
    rank=4,
    warmup_steps=2,
    optimizer="momentum",
    same=True,
)
row(
    "powersgd written",
    "central/powersgd:1/sync",
    lambda n: PowerSGD(1),
    warmup_steps=0,
    same=True,
)
for _bits in (8, 1):
    row(
        f"qadam {_bits}",
        "qadam",
        lambda n, bits=_bits: QAdam(bits, lr=0.01),
        bits=_bits,
        warmup_steps=3,
        optimizer="qadam",
        given=True,
        same=True,
        coded=True,
        steps=10,
    )
row(
    "qadam decay",
    "qadam",
    lambda n: QAdam(8, block=64, lr=0.02, betas=(0.8, 0.99), weight_decay=0.1),
    block=64,
    warmup_steps=4,
    optimizer="qadam with decay",
    given=True,
    same=True,
    coded=True,
)

# Weights, central.
row("local_sgd", "local_sgd", lambda n: CentralWeights(2), every=2, agree=2)
row("local_sgd adam", "local_sgd", lambda n: CentralWeights(3), every=3, optimizer="adam", agree=3)
for _o in ("momentum", "adam"):
    row(
        f"local_sgd state {_o}",
        "local_sgd",
        lambda n: CentralWeights(2, state=True),
        every=2,
        optimizer=_o,
        given=True,
        agree=2,
    )
row("local_sgd warmup", "local_sgd", lambda n: CentralWeights(2), every=2, warmup_steps=4, agree=2)
row("local_sgd overlap", "local_sgd", lambda n: CentralWeights(2, overlap=True), every=2, overlap=True)
row("local_sgd default", "local_sgd", lambda n: CentralWeights(8), agree=8, steps=10)
row("central full every", "central/full/every:3", lambda n: CentralWeights(3), agree=3)
row("diloco", "diloco", lambda n: CentralWeights(2, outer=(0.7, 0.9)), every=2, agree=2)
row(
    "diloco options",
    "diloco",
    lambda n: CentralWeights(3, outer=(0.5, 0.6)),
    every=3,
    outer_lr=0.5,
    outer_momentum=0.6,
    optimizer="adam",
    agree=3,
    steps=10,
)
row(
    "diloco overlap",
    "diloco",
    lambda n: CentralWeights(2, outer=(0.7, 0.9), overlap=True),
    every=2,
    overlap=True,
)
for _c in ("int8", "int4", "bf16", "sign", "topk:0.1"):
    row(
        f"central {_c} every",
        f"central/{_c}/every:2",
        lambda n, c=_c: CentralWeights(2, c),
        coded=True,
        steps=9,
    )
row(
    "central int8 every 1",
    "central/int8/every:1",
    lambda n: CentralWeights(1, "int8", 64),
    block=64,
    optimizer="momentum",
    coded=True,
)
row(
    "central int8 outer",
    "central/int8/every:2",
    lambda n: CentralWeights(2, "int8", outer=(0.7, 0.9)),
    outer_lr=0.7,
    outer_momentum=0.9,
    coded=True,
)
for _name, _s in (("third", every_third), ("irregular", irregular), ("always", always)):
    row(f"async {_name}", "async", lambda n, s=_s: CentralWeights(script=s), script=_s)
    row(
        f"async_low_precision {_name}",
        "async_low_precision",
        lambda n, s=_s: CentralWeights(codec="int8", script=s),
        script=_s,
        coded=True,
    )
row("async adam", "async", lambda n: CentralWeights(script=irregular), script=irregular, optimizer="adam")
row("async staleness", "async", lambda n: CentralWeights(script=always), staleness=1, optimizer="momentum")
row("async written", "central/full/async:1", lambda n: CentralWeights(script=always))
row(
    "async_low_precision staleness",
    "async_low_precision",
    lambda n: CentralWeights(codec="int8", block=64, script=always),
    block=64,
    staleness=1,
    coded=True,
)
for _c in ("sign", "topk:0.1", "bf16"):
    row(
        f"central {_c} async",
        f"central/{_c}/async:1",
        lambda n, c=_c: CentralWeights(codec=c, script=always),
        coded=True,
    )

# Weights, gossip.
row("decentralized", "decentralized", lambda n: Gossip(graph("one_peer", n)))
row("decentralized adam", "decentralized", lambda n: Gossip(graph("one_peer", n)), optimizer="adam")
row(
    "decentralized pause",
    "decentralized",
    lambda n: Gossip(graph("one_peer", n), overlap=False),
    overlap=False,
    optimizer="momentum",
)
FIXED = ("ring", "exponential", "torus", "complete")
for _k in (*FIXED, "pairs", "random"):
    _find = lent(_k) if _k == "random" else fixed(_k)
    row(f"decentralized {_k}", "decentralized", lambda n, f=_find: Gossip(f(n)), topology=_k)
row(
    "decentralized warmup",
    "decentralized",
    lambda n: Gossip(graph("ring", n)),
    topology="ring",
    warmup_steps=3,
)
row(
    "gossip every",
    "gossip:exponential/full/every:3",
    lambda n: Gossip(graph("exponential", n), every=3),
)
row(
    "gossip every pause",
    "gossip:pairs/full/every:2",
    lambda n: Gossip(graph("pairs", n), every=2, overlap=False),
    overlap=False,
)
row(
    "low_precision_decentralized",
    "low_precision_decentralized",
    lambda n: Choco(graph("ring", n), "int8"),
    coded=True,
)
row(
    "low_precision_decentralized adam",
    "low_precision_decentralized",
    lambda n: Choco(graph("ring", n), "int8", 64),
    block=64,
    optimizer="adam",
    coded=True,
)
row(
    "low_precision_decentralized pause",
    "low_precision_decentralized",
    lambda n: Choco(graph("ring", n), "int8", gamma=0.5, overlap=False),
    gamma=0.5,
    overlap=False,
    optimizer="momentum",
    coded=True,
)
for _k in ("exponential", "torus", "complete"):
    row(
        f"low_precision_decentralized {_k}",
        "low_precision_decentralized",
        lambda n, k=_k: Choco(graph(k, n, symmetric=True), "int8"),
        topology=_k,
        coded=True,
    )
for _k in ("one_peer", "pairs", "random"):
    row(
        f"low_precision_decentralized {_k}",
        "low_precision_decentralized",
        lambda n, k=_k: coded_gossip(k, n, "int8"),
        topology=_k,
        coded=True,
        steps=10,
    )
for _c in ("bf16", "f16", "fp8", "int4", "sign", "topk:0.1", "topk:0.01"):
    row(
        f"gossip ring {_c}",
        f"gossip:ring/{_c}/sync",
        lambda n, c=_c: Choco(graph("ring", n), c),
        coded=True,
    )
for _c in ("int8", "bf16", "sign", "topk:0.1"):
    row(
        f"gossip random {_c}",
        f"gossip:random/{_c}/sync",
        lambda n, c=_c: Edges(lent("random")(n), c),
        coded=True,
        steps=10,
    )
row(
    "gossip pairs int8 every",
    "gossip:pairs/int8/every:2",
    lambda n: coded_gossip("pairs", n, "int8", every=2),
    coded=True,
    steps=10,
)
row(
    "gossip exponential topk every",
    "gossip:exponential/topk:0.1/every:2",
    lambda n: Choco(graph("exponential", n, symmetric=True), "topk:0.1", every=2, overlap=False),
    overlap=False,
    coded=True,
)
row("push_sum", "push_sum", lambda n: PushSum(lent("push:random")(n)))
row(
    "push_sum pause",
    "push_sum",
    lambda n: PushSum(lent("push:random")(n), overlap=False),
    overlap=False,
    optimizer="momentum",
)
for _k in ("one_peer", "exponential"):
    row(f"push_sum {_k}", "push_sum", lambda n, k=_k: PushSum(graph(k, n)), topology=_k, optimizer="adam")
row("push written", "push:random/full/every:2", lambda n: PushSum(lent("push:random")(n), every=2))

# Weights, gossip, asynchronous.
for _name, _s in (("third", every_third), ("irregular", irregular)):
    row(
        f"async_decentralized {_name}",
        "async_decentralized",
        lambda n, s=_s: AsyncPairs(lent("random")(n), s),
        script=_s,
        steps=10,
    )
row(
    "async_decentralized pairs",
    "async_decentralized",
    lambda n: AsyncPairs(graph("pairs", n), always),
    script=always,
    topology="pairs",
    optimizer="adam",
)
for _k in ("random", "pairs"):
    _find = lent(_k) if _k == "random" else fixed(_k)
    row(
        f"async_low_precision_decentralized {_k}",
        "async_low_precision_decentralized",
        lambda n, f=_find: AsyncPairs(f(n), irregular, "int8", 64),
        script=irregular,
        topology=_k,
        block=64,
        coded=True,
        steps=10,
    )
row(
    "gossip random topk async",
    "gossip:random/topk:0.1/async:4",
    lambda n: AsyncPairs(lent("random")(n), every_third, "topk:0.1"),
    script=every_third,
    coded=True,
    steps=10,
)


def net() -> nn.Module:
    """Odd sizes: every parameter is padded."""
    return nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 29), nn.Tanh(), nn.Linear(29, 3))


def loss(model: nn.Module, rank: int, step: int, micro: int = 0, salt: int = 0) -> Tensor:
    """Ranks want different things, so that replicas part."""
    inputs = x(rank, step, 8, 6, salt=salt + 100 * micro)
    return (model(inputs) - ((1 + rank) * inputs[:, :3]).sin() - 0.5 * rank).square().mean()


class Yardstick:
    """Whether two runs are the same, one of them rounded by codecs.

    Additions in another order can put a number on the other side of a rounding boundary: where the two
    first differ, only few elements may, and from then on the whole is watched.
    """

    def __init__(self, coded: bool) -> None:
        self.coded, self.parted = coded, False

    def check(self, actual: Tensor, expected: Tensor, what: str) -> None:
        assert actual.isfinite().all(), f"{what}: not finite"
        far = (actual.double() - expected.double()).abs()
        length = float(expected.double().norm())
        distance = float(far.norm()) / length
        if not self.coded:
            assert distance <= TIGHT, f"{what}: off by {distance:.2e}, largest {float(far.max()):.2e}"
            return
        off = far > 1e-5 + 3e-5 * expected.double().abs()
        share = float(off.double().mean())
        if not self.parted:
            assert share <= FLIPS, (
                f"{what}: {100 * share:.1f} % of the elements differ where the two first part, by up to "
                f"{float(far.max()):.2e}; off by {distance:.2e}"
            )
        self.parted = self.parted or bool(off.any())
        assert distance <= DRIFT, f"{what}: off by {distance:.2e}, largest {float(far.max()):.2e}"


class Run:
    """Our replica on this rank beside a simulation of all ranks."""

    def __init__(
        self,
        rank: int,
        world: int,
        row: Row,
        make: Callable[[], nn.Module] = net,
        micros: int = 1,
        salt: int = 0,
    ) -> None:
        self.rank, self.row, self.micros, self.salt = rank, row, micros, salt
        torch.manual_seed(99 + salt)
        self.sim = Simulation(row.reference(world), world, make, self.optimizer_for(row), row.warmup)
        torch.manual_seed(99 + salt if rank == 0 else 100 + rank)  # rank 0's weights are to reach everybody
        module = make()
        self.optimizer = OPTIMIZERS[row.optimizer](module)
        given = {"optimizer": self.optimizer} if row.given else {}
        self.model: Any = trigram.with_bagua(module, row.algorithm, **given, **row.options)
        self.yardstick = Yardstick(row.coded)
        self.same: list[Tensor] = []  # what must be the same bits everywhere
        self.done = 0

    @staticmethod
    def optimizer_for(row: Row) -> Callable[[nn.Module], torch.optim.Optimizer]:
        """The simulation steps for QAdam itself."""
        return OPTIMIZERS["sgd" if row.optimizer.startswith("qadam") else row.optimizer]

    def losses(self, model: nn.Module, rank: int) -> list[Tensor]:
        return [loss(model, rank, self.done, m, self.salt) for m in range(self.micros)]

    def weights(self) -> Tensor:
        return flatten([p for p in self.model.parameters() if p.requires_grad])

    def backward(self) -> None:
        """Ours, and the simulation's."""
        self.sim.boundary()
        self.sim.backward(self.losses)
        self.optimizer.zero_grad()
        for m in range(self.micros - 1):
            with trigram.no_sync(self.model):
                loss(self.model, self.rank, self.done, m, self.salt).backward()
        last = loss(self.model, self.rank, self.done, self.micros - 1, self.salt)
        if self.row.agree and self.done and self.done % self.row.agree == 0:
            self.same.append(self.weights())
        last.backward()

    def update(self) -> None:
        self.sim.update()
        self.optimizer.step()
        if self.row.same:
            self.same.append(self.weights())
        self.yardstick.check(self.weights(), self.sim.weights(self.rank), f"after step {self.done}")
        self.done += 1

    def step(self) -> None:
        self.backward()
        self.update()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def end(self, world: int, name: str) -> None:
        if self.same:
            same_on_all_ranks(self.rank, world, name, self.same)


@CASES.over(*ROWS)
def trains(rank: int, world: int, label: str) -> None:
    row = ROWS[label]
    run = Run(rank, world, row)
    run.train(row.steps)
    run.end(world, f"trains-{label.replace('/', '-')}")
    stats = trigram.stats(run.model)
    assert stats["steps"] == row.steps, stats


class Reversed(nn.Module):
    """Gradients do not arrive in the reverse order of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(29, 3), nn.Linear(6, 33), nn.Linear(33, 29)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(inputs)))))


@CASES.over("bytegrad sgd", "topk momentum", "powersgd", "qadam 1", "low_precision_decentralized")
def in_another_order(rank: int, world: int, label: str) -> None:
    """From the second step on a bucket is in the order of arrival; what is kept of a parameter moves too."""
    run = Run(rank, world, ROWS[label], Reversed)
    run.train(6)
    run.end(world, f"order-{label}")


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
        far = reference.flatten(list(model.parameters())) - sim.weights(rank)
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
    run = Run(rank, world, ROWS[label], large)
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
    run = Run(rank, world, ROWS[label], even)
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


def total(model: nn.Module) -> Tensor:
    t = flatten(list(model.parameters())).double()
    trigram.all_reduce(t)
    return t


def distance(model: nn.Module, to: Tensor) -> float:
    """Root of the summed squares, over all ranks."""
    t = (flatten(list(model.parameters())).double() - to).square().sum().view(1)
    trigram.all_reduce(t)
    return float(t.sqrt())


NAMES_ONCE = [  # each name with the options that make it interesting within a few steps
    "gradient_allreduce sgd",
    "bytegrad sgd",
    "decentralized",
    "low_precision_decentralized",
    "async third",
    "async_low_precision third",
    "async_decentralized third",
    "async_low_precision_decentralized random",
    "qadam 8",
    "local_sgd",
    "diloco",
    "powersgd",
    "topk fraction",
    "signsgd",
    "push_sum",
]


def test_all_names_are_here() -> None:
    names = {a["name"] for a in trigram.algorithms()}
    assert names == {ROWS[label].algorithm for label in NAMES_ONCE}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [3, 4])
def test_algorithm(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")


GRAPHS = ("decentralized", "gossip", "push")
MOST = [c for c in CASES if any(k in c for k in (*GRAPHS, *NAMES_ONCE)) or not c.startswith("trains")]


@pytest.mark.parametrize("case", MOST)
@pytest.mark.parametrize("world", [2, 5])
def test_algorithm_few_and_many(in_launch: Callable[..., None], world: int, case: str) -> None:
    """Two and five ranks: where graphs are special."""
    in_launch("CASES", case, world, transport="shm")


@pytest.mark.parametrize("case", MOST)
@pytest.mark.parametrize("world", [3])
def test_algorithm_over_tcp(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="tcp")


# The yardstick itself: mistakes that are easily made must show.

MUTANTS: dict[str, tuple[str, Callable[[int], Algorithm]]] = {
    "the mean is not coded": ("bytegrad sgd", lambda n: CodedGradients("int8", second="full")),
    "another block": ("bytegrad sgd", lambda n: CodedGradients("int8", 256)),
    "int8 with feedback": ("bytegrad sgd", lambda n: CodedGradients("int8", feedback=True)),
    "sign without feedback": ("signsgd", lambda n: CodedGradients("sign", feedback=False)),
    "signs both ways": ("signsgd", lambda n: CodedGradients("sign", second="sign")),
    "topk without the owner's": (
        "topk fraction",
        lambda n: CodedGradients("topk:0.05", second_feedback=False),
    ),
    "momentum kept": ("topk momentum", lambda n: KeepsMomentum("topk:0.05", momentum=0.9)),
    "no momentum": ("topk momentum", lambda n: CodedGradients("topk:0.05")),
    "another rank": ("powersgd", lambda n: PowerSGD(3)),
    "signs without feedback": ("qadam 1", lambda n: without_feedback(QAdam(1, lr=0.01))),
    "bits": ("qadam 1", lambda n: QAdam(8, lr=0.01)),
    "too often": ("local_sgd", lambda n: CentralWeights(1)),
    "state left alone": ("local_sgd state momentum", lambda n: CentralWeights(2)),
    "no outer step": ("diloco", lambda n: CentralWeights(2)),
    "outer momentum": ("diloco", lambda n: CentralWeights(2, outer=(0.7, 0.8))),
    "no residual": ("central int4 every", lambda n: CentralWeights(2, "int4", owner_feedback=False)),
    "landed late": ("async third", lambda n: CentralWeights(script=lambda s: s % 3 == 1)),
    "landed early": ("async_low_precision third", lambda n: CentralWeights(codec="int8", script=always)),
    "in the pause": ("decentralized", lambda n: Gossip(graph("one_peer", n), overlap=False)),
    "always the same peer": ("decentralized", lambda n: Gossip(lambda k: graph("one_peer", n)(0))),
    "a round behind": ("decentralized", lambda n: Gossip(lambda k: graph("one_peer", n)(k + 1))),
    "half a gamma": ("low_precision_decentralized", lambda n: Choco(graph("ring", n), "int8", gamma=0.5)),
    "another codec": ("low_precision_decentralized", lambda n: Choco(graph("ring", n), "int4")),
    "no references": ("gossip random int8", lambda n: Forgets(lent("random")(n), "int8")),
    "fixed weights": ("push_sum", lambda n: Gossip(lent("push:random")(n))),
    "one matching": (
        "async_decentralized third",
        lambda n: AsyncPairs(lambda k: lent("random")(n)(0), every_third),
    ),
}


class KeepsMomentum(CodedGradients):
    """DGC, but the velocity is not stopped where it was sent."""

    def backward_ended(self, step: int) -> None:
        kept = [u.clone() for u in self.u]
        own = (
            [self.momentum * u + self.bucket(step, i) if kept else u for i, u in enumerate(kept)]
            if self.order
            else []
        )
        super().backward_ended(step)
        if own:
            self.u = own


class Forgets(Edges):
    """An edge without a reference."""

    def mix(self, x: list[Tensor], round: int) -> list[Tensor]:
        self.r.clear()
        return super().mix(x, round)


def without_feedback(algorithm: QAdam) -> QAdam:
    algorithm.owners.feedback = (False, False)
    return algorithm


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_the_yardstick_tells(mutant: str) -> None:
    label, wrong = MUTANTS[mutant]
    row = ROWS[label]
    torch.set_num_threads(1)
    sims = []
    for make in (row.reference, wrong):
        torch.manual_seed(99)
        sims.append(Simulation(make(3), 3, net, Run.optimizer_for(row), row.warmup))
    yardsticks = [Yardstick(row.coded) for _ in range(3)]
    for step in range(row.steps):
        for sim in sims:
            sim.step(lambda m, r, step=step: [loss(m, r, step)])
        try:
            for r, yardstick in enumerate(yardsticks):
                yardstick.check(sims[1].weights(r), sims[0].weights(r), mutant)
        except AssertionError:
            return
    pytest.fail(f"{label} and {mutant} are the same to it")


@pytest.mark.parametrize("label", list(ROWS))
def test_the_reference_learns(label: str) -> None:
    """The simulation by itself: losses fall, for every row."""
    row = ROWS[label]
    torch.set_num_threads(1)
    torch.manual_seed(99)
    sim = Simulation(row.reference(3), 3, net, Run.optimizer_for(row), row.warmup)
    losses: list[float] = []

    def once(model: nn.Module, rank: int) -> Sequence[Tensor]:
        value = loss(model, rank, 0)
        losses.append(float(value.detach()))
        return [value]

    for _ in range(30):
        sim.step(once)
    # What remains is what ranks disagree on.
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), (losses[:3], losses[-3:])


# Graphs: what the references borrow, and what they do not.


@pytest.mark.parametrize("kind", ["ring", "exponential", "one_peer", "pairs", "torus", "complete"])
def test_graph(kind: str) -> None:
    for n in range(1, 14):
        for round in range(9):
            actual = torch.as_tensor(graphs.find(kind, n).matrix(round)).float()
            assert torch.allclose(actual, graph(kind, n)(round), atol=1e-6), (n, round)


def test_random_graphs() -> None:
    """Matchings: symmetric, at most one sits out; pushes: everyone to one other. Both change."""
    for n in range(2, 10):
        seen = set()
        for round in range(20):
            w = torch.as_tensor(graphs.find("random", n).matrix(round))
            assert bool((w == w.T).all()) and bool((w.sum(1) == 1).all())
            assert int((w.diagonal() == 1).sum()) == n % 2 and bool((w[w > 0] >= 0.5).all())
            push = torch.as_tensor(graphs.find("push:random", n).matrix(round))
            assert bool((push.diagonal() == 0.5).all()) and bool((push.sum(0) == 1).all())
            assert bool(((push > 0).sum(0) == 2).all())
            seen.add((str(w.tolist()), str(push.tolist())))
        assert len(seen) > (n > 2) * 5
    assert how_many(0.01, 1360) == 14
