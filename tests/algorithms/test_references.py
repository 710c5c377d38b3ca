"""The yardstick of the algorithms: mistakes that are easily made must show, and the references learn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.reference.central import CentralWeights, CodedGradients, PowerSGD, QAdam
from tests.reference.gossip import AsyncPairs, Choco, Edges, Gossip
from tests.reference.graphs import graph
from tests.reference.simulation import Algorithm, Simulation
from tests.support.algorithm_rows import NAMES_ONCE, ROWS, always, every_third, lent
from tests.support.algorithm_run import Run, Yardstick, loss, net
from tests.support.marks import long_unless

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
    "an error that stays": (
        "sparseloco",
        lambda n: CentralWeights(2, "chunktopk:0.1", feedback=1.0),
    ),
    "the error in the weights": ("sparseloco", lambda n: CentralWeights(2, "chunktopk:0.1")),
    "values in full": ("sparseloco", lambda n: CentralWeights(2, "topk:0.1", feedback=0.95)),
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
        sims.append(Simulation(make(3), 3, net, Run.optimizer_for(row, 3), row.warmup))
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


@pytest.mark.parametrize("label", long_unless(NAMES_ONCE, list(ROWS)))
def test_the_reference_learns(label: str) -> None:
    """The simulation by itself: losses fall, for every row."""
    row = ROWS[label]
    torch.set_num_threads(1)
    torch.manual_seed(99)
    sim = Simulation(row.reference(3), 3, net, Run.optimizer_for(row, 3), row.warmup)
    losses: list[float] = []

    def once(model: nn.Module, rank: int) -> Sequence[Tensor]:
        value = loss(model, rank, 0)
        losses.append(float(value.detach()))
        return [value]

    for _ in range(30):
        sim.step(once)
    # What remains is what ranks disagree on.
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3]), (losses[:3], losses[-3:])
