"""Optimizers that torch does not have: what is found about them, and what they do besides `step`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.sharded.twins import Net, Twins
from tests.support.cases import Cases
from tests.support.checks import raises, says
from tests.support.marks import long
from tests.support.twin_training import mlp, square
from trigram.optimizers import optimizer_trial

CASES = Cases()
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Own(torch.optim.Optimizer):
    """Gradient descent with momentum, and one of `what` an update may depend on besides."""

    def __init__(self, params: Any, what: str = "", lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})
        self.what, self.steps = what, 0

    def factor(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Any:
        """What the update is multiplied with."""
        with_grads = [q for g in self.param_groups for q in g["params"] if q.grad is not None]
        return {
            "": lambda: 1.0,
            "norm": lambda: p.norm() / (grad.norm() + 1e-6),
            "norm of a large one": lambda: 1 / grad.norm() if min(p.shape, default=0) > 100 else 1.0,
            "norm of all": lambda: 1 / torch.stack([q.grad.norm() for q in with_grads]).norm().clamp(min=1.0),
            "steps": lambda: 1 / (1 + group["steps"]),
            "own steps": lambda: 1 / (1 + self.steps),
            "random": lambda: torch.rand(()),
            "matrix": lambda: 1.0,
            "closure": lambda: 1.0,
            "object": lambda: 1.0,
        }[self.what]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.what == "closure":
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.what == "matrix":  # of no effect in the first steps
                    self.state[p].setdefault("matrix", torch.eye(p.shape[0] if p.dim() else 1))
                if self.what == "object":
                    self.state[p].setdefault("object", object())
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad * self.factor(p, p.grad, group))
                p.sub_(m, alpha=group["lr"])
            group["steps"] += 1
        self.steps += 1


FOUND: dict[str, tuple[bool, bool, bool] | None] = {
    "": (True, True, True),
    "norm": (False, True, True),
    "norm of a large one": (False, True, True),
    "norm of all": (False, False, False),
    "steps": (True, True, True),
    "own steps": (True, True, False),
    "matrix": (False, True, True),
    "random": None,
    "closure": None,
}


@pytest.mark.parametrize("what", list(FOUND))
def test_what_is_found(what: str) -> None:
    model = nn.ModuleList([Net(), nn.Linear(150, 120)])
    optimizer = Own(model.parameters(), what, lr=0.0)  # as a scheduler that warms up has left it
    before = copy.deepcopy([p.detach() for p in model.parameters()])
    found = optimizer_trial.found(optimizer)
    assert (None if found is None else (found.values, found.whole, found.fused)) == FOUND[what]
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not optimizer.state and optimizer.steps == 0 and optimizer.param_groups[0]["steps"] == 0


def test_groups_that_are_alike_are_tried_once() -> None:
    layers = [nn.Linear(6, 6, bias=False) for _ in range(50)]
    named = [
        {"params": [(str(k), layer.weight)], "lr": 0.01 * (k + 1), "steps": k % 2}
        for k, layer in enumerate(layers)
    ]
    trial = optimizer_trial._Trial(Own(named))
    assert [len(group) for group in trial.groups] == [2, 2] + [0] * 48


def test_optimizers_of_torch_are_found_as_they_are_listed() -> None:
    from trigram.optimizers.optimizer_kinds import ELEMENTWISE, WHOLE

    model = nn.Linear(200, 150, bias=False)
    for name in (*ELEMENTWISE, *WHOLE):
        if name != "Adagrad":  # its state is made by the constructor
            found = optimizer_trial.found(getattr(torch.optim, name)(model.parameters(), lr=0.01))
            assert found == optimizer_trial.Found(name in ELEMENTWISE, True, True, True), name


class Averaging(torch.optim.Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): trains at y, and `eval` exchanges it for the average x."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    def _move(self, train: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != train else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], 1 - group["beta"] if train else 1 - 1 / group["beta"])
            group["train_mode"] = train

    @torch.no_grad()
    def train(self) -> None:
        self._move(True)

    @torch.no_grad()
    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            c, beta = 1 / (group["k"] + 1), group["beta"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    p.lerp_(z, c).sub_(p.grad, alpha=group["lr"] * (1 - beta * (1 - c)))
                    z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "shards": {"gradients": "shards"},
    "fused": {"fused": True},
    "whole": {"elementwise": False},
    "overlap": {"overlap": True},
    "replicated": {"algorithm": "gradient_allreduce", "fused": True},
}


def optimizer_of(kind: type[Any], *args: Any) -> Make:
    return lambda m: kind(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1]},
            {"params": [p for p in m.parameters() if p.dim() <= 1], "lr": 0.01},
        ],
        *args,
    )


@CASES.over(*MODES)
def counts_in_its_groups(rank: int, world: int, mode: str) -> None:
    """What is counted in a group is counted once per update, also where there is one for each bucket."""
    twins = Twins(rank, world, mlp, optimizer_of(Own, "steps"), **MODES[mode])
    twins.train(steps=5)
    twins.check_state("counted")


@CASES.over(*MODES)
def exchanges_weights(rank: int, world: int, mode: str) -> None:
    """`train` and `eval` do with slices what they do with parameters; states are saved and loaded in both."""
    twins = Twins(rank, world, mlp, optimizer_of(Averaging), **MODES[mode])
    for step in range(4):
        for _, optimizer in twins.pairs:
            optimizer.train()
        twins.step(step)
        for _ in range(2):  # the second changes nothing
            for _, optimizer in twins.pairs:
                optimizer.eval()
            twins.check(f"evaluation {step}")
        twins.check_state("in evaluation")
    saved = [(copy.deepcopy(m.state_dict()), copy.deepcopy(o.state_dict())) for m, o in twins.pairs]
    other = Twins(rank, world, mlp, optimizer_of(Averaging), **MODES[mode])
    for (model, optimizer), (weights, state) in zip(other.pairs, saved[::-1], strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        optimizer.train()
    other.train(4, 2)
    trigram.unwrap(other.models[1])
    for _, optimizer in other.pairs:
        optimizer.eval()
    other.check("unwrapped")


@CASES
def an_exchange_of_one_rank(rank: int, world: int) -> None:
    """An evaluation of rank 0 alone: an error on all ranks."""
    twins = Twins(rank, world, mlp, optimizer_of(Averaging))
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    optimizer.zero_grad()
    if rank == 0:
        says(raises(trigram.MismatchError, optimizer.eval), "all ranks")
    else:
        raises(trigram.MismatchError, lambda: twins.loss(model, 2).backward())


@CASES
def state_of_a_parameter(rank: int, world: int) -> None:
    """It is not here, and asking for it is an error instead of a new, empty entry."""
    twins = Twins(rank, world, mlp, optimizer_of(Own))
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    weight = model[0].weight
    says(raises(trigram.MisuseError, lambda: optimizer.state[weight]), "state_dict()", "part")
    assert weight not in optimizer.state and optimizer.state.get(weight) is None
    other = nn.Parameter(torch.ones(1))
    assert optimizer.state[other] == {}
    del optimizer.state[other]
    assert type(copy.deepcopy(optimizer).state[weight]) is dict
    trigram.unwrap(model)
    assert optimizer.state[weight] and optimizer.state[other] == {}


@CASES
def declared_otherwise(rank: int, world: int) -> None:
    def refused(kind: type[BaseException], *words: str, what: str, **options: Any) -> None:
        model = mlp()
        algorithm = options.pop("algorithm", "sharded")
        given = {"optimizer": Own(model.parameters(), what), **options}
        says(raises(kind, trigram.with_bagua, model, algorithm, **given), "Own", *words)

    refused(trigram.UnsupportedError, "norm of all gradients", what="norm of all")
    refused(trigram.UnsupportedError, "norm of all gradients", what="norm of all", elementwise=False)
    refused(trigram.MisuseError, "elementwise=True", what="norm", elementwise=True)
    refused(trigram.UnsupportedError, "elementwise=False", "random", what="random")
    refused(trigram.UnsupportedError, "objects", what="object")
    refused(trigram.UnsupportedError, "step for each bucket", what="own steps", fused=True)
    fused = {"algorithm": "gradient_allreduce", "fused": True}
    refused(trigram.UnsupportedError, "step for each bucket", what="own steps", **fused)
    model = mlp()
    muon = torch.optim.Muon([model[0].weight], lr=0.1)
    text = raises(trigram.MisuseError, trigram.with_bagua, model, "sharded", optimizer=muon, elementwise=True)
    says(text, "Muon", "elementwise=True")


class Around(Own):
    """Has a `state_dict` that torch's hooks do not see."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"state": dict(self.state), "param_groups": self.param_groups}


@CASES
def other_state_dicts(rank: int, world: int) -> None:
    model = mlp()
    optimizer = Around(model.parameters())
    text = raises(trigram.UnsupportedError, trigram.with_bagua, model, "sharded", optimizer=optimizer)
    says(text, "Around", "state_dict of its own")

    class Calls(Own):
        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {**super().state_dict(), "more": 1}

    calls = Calls(model.parameters())
    trigram.with_bagua(model, "sharded", optimizer=calls)
    square(model, rank, 0).backward()
    calls.step()
    assert len(calls.state_dict()["state"]) == 6


@CASES
def options_of_one_rank(rank: int, world: int) -> None:
    """A scheduler that follows each rank's own loss: weights would be updated with several rates."""
    twins = Twins(rank, world, mlp)
    twins.train(steps=3)
    model, optimizer = twins.pairs[1]
    optimizer.zero_grad()
    twins.loss(model, 3).backward()
    optimizer.param_groups[0]["lr"] *= 1 + rank
    says(raises(trigram.MismatchError, optimizer.step), "lr", "schedulers", "rank(s) 1")


@CASES
def left_by_random_numbers(rank: int, world: int) -> None:
    """What cannot be tried is what the script says."""
    model = mlp()
    optimizer = Own(model.parameters(), "random")
    trigram.with_bagua(model, "sharded", optimizer=optimizer, elementwise=True)
    kept = model[0].weight.detach().clone()
    square(model, rank, 0).backward()
    optimizer.step()
    assert not torch.equal(model[0].weight.detach(), kept)


@CASES.over("full", "shards", "overlap")
def compiled_step(rank: int, world: int, mode: str) -> None:
    """A script compiles the optimizer's step: the communication in it is not traced."""
    torch._dynamo.reset()
    twins = Twins(rank, world, mlp, lambda m: torch.optim.Adam(m.parameters(), lr=0.01), **MODES[mode])
    fast = [torch.compile(o.step, backend="eager") for o in twins.optimizers]
    for step in range(3):
        for (model, optimizer), update in zip(twins.pairs, fast, strict=True):
            optimizer.zero_grad()
            twins.loss(model, step).backward()
            update()
        twins.check(f"step {step}")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, long(3)])
def test_other_optimizers(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")
