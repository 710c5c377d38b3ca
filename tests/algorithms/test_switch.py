"""`switch`: from every algorithm to every other in the middle of a training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.reference.central import CentralWeights
from tests.reference.simulation import flatten
from tests.support.algorithm_rows import NAMES_ONCE, ROWS, Row
from tests.support.algorithm_run import Run, Yardstick, distance, go, loss, net, start, total
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, same_on_all_ranks, says
from tests.support.marks import long

CASES = Cases()


def circuit(n: int) -> list[int]:
    """A walk through all ordered pairs of n places, each once (Hierholzer)."""
    left = {i: [j for j in range(n) if j != i] for i in range(n)}
    stack, walk = [0], []
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def switch_options(label: str) -> dict[str, Any]:
    return {k: min(v, 1) if k == "warmup_steps" else v for k, v in ROWS[label].options.items()}


@CASES
def switch_between_all(rank: int, world: int) -> None:
    """Every name after every other, two steps each."""
    walk = [NAMES_ONCE[i] for i in circuit(len(NAMES_ONCE))]
    assert len(walk) == len(NAMES_ONCE) * (len(NAMES_ONCE) - 1) + 1
    torch.manual_seed(8)
    module = small()
    sgd = torch.optim.SGD(module.parameters(), lr=0.02)
    qadam = trigram.QAdam(module.parameters(), lr=0.002)
    model = trigram.with_bagua(module, ROWS[walk[0]].algorithm, **switch_options(walk[0]))
    weights = []
    for i, (old, new) in enumerate(zip(["", *walk], walk, strict=False)):
        is_qadam = ROWS[new].algorithm == "qadam"
        optimizer = qadam if is_qadam else sgd
        try:
            if i > 0:
                given = {"optimizer": qadam} if is_qadam else {}
                trigram.switch(model, ROWS[new].algorithm, **given, **switch_options(new))
                weights.append(flatten(list(module.parameters())))
                assert trigram.stats(model)["algorithm"] == ROWS[new].algorithm
            for step in range(2):
                optimizer.zero_grad()
                loss(model, rank, 2 * i + step).backward()
                optimizer.step()
        except Exception as e:
            raise AssertionError(f"from {old} to {new}") from e
        assert bool(flatten(list(module.parameters())).isfinite().all()), f"from {old} to {new}"
        if i % 30 == 29:
            same_on_all_ranks(rank, world, f"switch-{i}", weights)
    same_on_all_ranks(rank, world, "switch-end", weights)


@CASES.over("decentralized", "async third", "local_sgd", "gradient_allreduce sgd", "topk momentum")
def switch_finds_the_mean(rank: int, world: int, label: str) -> None:
    """Replicas that differ become their average; those that do not stay as they are. Then: the new one."""
    model, optimizer = start(rank, label, net)
    go(model, optimizer, rank, 0, 5 if label == "local_sgd" else 4)  # between two of its averages
    before = flatten(list(model.parameters()))
    in_flight = label == "async third"
    apart = distance(model, total(model) / world)
    expected = (total(model) / world).float()
    trigram.switch(model, "central/full/every:2")
    after = flatten(list(model.parameters()))
    same_on_all_ranks(rank, world, f"mean-{label}", [after])
    if ROWS[label].same:
        assert apart < 1e-6
        equal(after, before, "equal replicas")
    elif not in_flight:  # else what lands first has its part in it
        assert apart > 1e-3
        close(after, expected, 1e-6, "the average")
    # The new algorithm starts with what there is.
    torch.manual_seed(8)
    run = Run(rank, world, Row("gradient_allreduce", lambda n: CentralWeights(2)))
    run.sim.set_weights([after] * world)
    run.sim.algorithm.r = after.clone()  # type: ignore[attr-defined]
    yardstick = Yardstick(False)
    for step in range(5):
        run.sim.step(lambda m, r, step=step: [loss(m, r, 10 + step)])
        go(model, optimizer, rank, 10 + step, 1)
        yardstick.check(flatten(list(model.parameters())), run.sim.weights(rank), f"step {step} after")


@CASES.over("decentralized", "async third", "local_sgd")
def optimizers_are_equal_after_a_switch(rank: int, world: int, label: str) -> None:
    """Momenta of each rank's own gradients would part the ranks again, though all have the mean gradients;
    so would their own learning rates."""
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
    }
    for name, kind in kinds.items():
        torch.manual_seed(8)
        model = net()
        optimizer = kind(model.parameters())
        trigram.with_bagua(model, ROWS[label].algorithm, **ROWS[label].options)
        go(model, optimizer, rank, 0, 5)
        optimizer.param_groups[0]["lr"] *= 1 + rank
        trigram.switch(model, "gradient_allreduce")
        go(model, optimizer, rank, 5, 4)
        same_on_all_ranks(rank, world, f"optimizers-{label}-{name}", model.parameters())


@CASES.over("decentralized", "async third", "local_sgd")
def switch_before_the_update(rank: int, world: int, label: str) -> None:
    """From weights to gradients between backward and step, here on one rank: that step would use this rank's
    gradients, and the ranks would never meet again. After the step, or a skipped one, it is right."""
    model, optimizer = start(rank, label, net)
    go(model, optimizer, rank, 0, 4)
    optimizer.zero_grad()
    loss(model, rank, 4).backward()
    if rank:
        optimizer.step()
    for new, options in (("bytegrad", {}), ("local_sgd", {"warmup_steps": 3})):
        text = raises(trigram.MisuseError, trigram.switch, model, new, **options)
        says(text, "rank(s) 0", "switch")
    if rank == 0:
        optimizer.zero_grad()
    trigram.switch(model, "bytegrad")
    go(model, optimizer, rank, 5, 3)
    same_on_all_ranks(rank, world, f"update-{label}", model.parameters())


AFTER_A_SKIPPED_UPDATE: dict[str, Callable[[nn.Module, dict[str, Any]], object]] = {
    "state": lambda model, saved: trigram.algorithm_state(model),
    "load": trigram.load_algorithm_state,
    "weights": lambda model, saved: trigram.switch(model, "local_sgd", every=2),
    "gradients": lambda model, saved: trigram.switch(model, "gradient_allreduce"),
    "unwrap": lambda model, saved: trigram.with_bagua(trigram.unwrap(model), "gradient_allreduce"),
}


@CASES.over(*AFTER_A_SKIPPED_UPDATE)
def after_a_skipped_update(rank: int, world: int, call: str) -> None:
    """One rank skips the update after which all average. The others wait for it there, and it in the call."""
    model, optimizer = start(rank, "local_sgd", net)  # every=2
    saved = trigram.algorithm_state(model)
    for step in range(6):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        if (rank, step) != (0, 5):
            optimizer.step()
    if rank == 0 and call == "gradients":
        optimizer.zero_grad()  # else it is an error, see above
    AFTER_A_SKIPPED_UPDATE[call](model, saved)
    go(model, optimizer, rank, 6, 6)
    same_on_all_ranks(rank, world, f"after-{call}", model.parameters())


@CASES
def switch_to_nonsense(rank: int, world: int) -> None:
    """The old one goes on."""
    run = Run(rank, world, ROWS["low_precision_decentralized"])
    run.train(3)
    says(raises(trigram.UnsupportedError, trigram.switch, run.model, "carrier_pigeon"), "carrier_pigeon")
    says(raises(trigram.UnsupportedError, trigram.switch, run.model, "topk", wings=2), "wings")
    text = raises(trigram.UnsupportedError, trigram.switch, run.model, "topk", check_replicas=2)
    says(text, "check_replicas", "with_bagua")
    run.train(3)


@CASES.over("gradient_allreduce sgd", "powersgd", "local_sgd")
def switch_to_different_ones(rank: int, world: int, label: str) -> None:
    """All ranks are told, also of an optimizer of another model, and the old one goes on: nobody trains
    without averages."""
    run = Run(rank, world, ROWS[label])
    run.train(4)
    asked = "bytegrad" if rank else "decentralized"
    says(raises(trigram.MismatchError, trigram.switch, run.model, asked), "different algorithm")
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    says(raises(trigram.MisuseError, trigram.switch, run.model, "sharded", optimizer=other), "none of the")
    assert trigram.stats(run.model)["algorithm"].startswith(label.partition(" ")[0])
    before = trigram.stats(run.model)["bytes"]
    for step in range(4):
        run.optimizer.zero_grad()
        loss(run.model, rank, step).backward()
        run.optimizer.step()
    assert trigram.stats(run.model)["bytes"] > before
    trigram.consensus(run.model)
    same_on_all_ranks(rank, world, f"different-{label}", run.model.parameters())


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [long(2), 3])
def test_switch(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm", patience=90)


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("switch_finds")])
@pytest.mark.parametrize("world", [4])
def test_switch_over_tcp(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="tcp")
