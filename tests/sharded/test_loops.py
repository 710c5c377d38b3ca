"""What a script does with a sharded optimizer: each against the same script with a plain one, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import trigram
from tests.sharded import twins as twin_models
from tests.sharded.twins import Net, Twins, adamw
from tests.support.cases import Cases
from tests.support.checks import close, raises, says
from tests.support.marks import long
from tests.support.twin_training import mlp
from trigram.gradients.in_parts import ShardedGradient

CASES = Cases()
MATRICES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.05),
    "muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.02),
    "said to be": adamw,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True, weight_decay=0.01),
    "adamw foreach": lambda m: adamw(m, foreach=True),
    "adamw fused": lambda m: adamw(m, fused=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.01),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=1.0),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.01),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.05, t0=2),
}


@CASES.over(*OPTIMIZERS)
def optimizer(rank: int, world: int, name: str) -> None:
    """Each optimizer of torch that updates value by value, on a model with a bit of everything."""
    twins = Twins(rank, world, Net, OPTIMIZERS[name])
    twins.train(steps=5)
    twins.check_state(name)
    twins.train(5, 2)
    twins.check_ranks()


@CASES.over(*MATRICES)
def whole_parameters(rank: int, world: int, name: str) -> None:
    """Optimizers that need whole parameters: each parameter belongs to one rank."""
    layers = lambda: nn.Sequential(*(nn.Linear(6, 6, bias=name != "muon") for _ in range(5)))  # noqa: E731
    make = Net if name == "said to be" else layers
    given: dict[str, Any] = {"elementwise": False} if name == "said to be" else {}
    twins = Twins(rank, world, make, MATRICES[name], **given)
    twins.train(steps=4)
    twins.check_state(name)
    state = twins.optimizers[1].state_dict()
    for optimizer in twins.optimizers:
        optimizer.load_state_dict(copy.deepcopy(state))
    twins.train(4, 2)
    twins.check_ranks()


@CASES
def state_is_divided(rank: int, world: int) -> None:
    """All ranks together hold one state."""
    twins = Twins(rank, world, lambda: nn.Linear(6, 4300), adamw)
    twins.train(steps=2)
    held = sum(
        t.numel() for s in twins.optimizers[1].state.values() for n, t in s.items() if n.startswith("exp")
    )
    total = torch.tensor([held])
    trigram.all_reduce(total)
    assert int(total) == 2 * 30_100 and held <= 2 * 30_100 // world + 2 * 64 * world * 2
    assert trigram.stats(twins.models[1])["sharded_values"] * 2 == held


@CASES
def an_empty_parameter_elsewhere(rank: int, world: int) -> None:
    """A parameter without values is not the sharded optimizer's; the one that has it is stepped too."""
    twins = Twins(rank, world, WithEmpty, with_values)
    others = [torch.optim.SGD([m.empty], lr=0.1, momentum=0.9) for m in twins.models]
    for step in range(4):
        twins.train(step, 1)
        for other, model in zip(others, twins.models, strict=True):
            other.step()
            assert model.empty.grad.shape == (0, 6)


class WithEmpty(nn.Module):
    """A layer without outputs, as a width of 0 makes."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 6))
        self.out = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(inputs) + nn.functional.linear(inputs, self.empty).sum()


def with_values(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW of the parameters that are not empty."""
    return torch.optim.AdamW([p for p in model.parameters() if p.numel()], lr=0.01)


@CASES
def fewer_values_than_ranks(rank: int, world: int) -> None:
    Twins(rank, world, lambda: nn.Linear(6, 1, bias=False), adamw).train(steps=3)


@CASES
def schedulers_and_clipping(rank: int, world: int) -> None:
    """A scheduler edits the groups; the norm is taken over them, as Lightning does."""
    twins = Twins(rank, world, exact=False)
    schedulers = [LambdaLR(o, lambda t: 1 / (1 + t)) for o in twins.optimizers]
    for step in range(5):
        for (model, optimizer), scheduler in zip(twins.pairs, schedulers, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            twins.loss(model, step).backward()
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.05)
            optimizer.step()
            scheduler.step()
        twins.check(f"step {step}")


@CASES
def scaler(rank: int, world: int) -> None:
    """A GradScaler skips the step of all ranks where one rank finds an infinite value."""
    twins = Twins(rank, world, exact=False)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        for (model, optimizer), scaler in zip(twins.pairs, scalers, strict=True):
            optimizer.zero_grad()
            loss = twins.loss(model, step)
            if step == 2 and rank == world - 1:
                loss = loss + float("inf") * model.scale  # of which one rank has the gradient
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        twins.check(f"step {step}")
    assert scalers[1].get_scale() < 256.0 * 4


@CASES
def accumulation(rank: int, world: int) -> None:
    """no_sync, two backward passes in one step, and gradients of which some are None."""
    twins = Twins(rank, world)
    for step in range(4):
        for model, optimizer in twins.pairs:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with model.no_sync():
                for micro in range(1 + rank):
                    twins.loss(model, 10 * step + 3 * micro).backward()
            twins.loss(model, 10 * step + 1).backward()
            if step == 2:
                twins.loss(model, 10 * step + 2).backward()
            optimizer.step()
        twins.check(f"step {step}")


@CASES
def closures(rank: int, world: int) -> None:
    twins = Twins(rank, world)
    for step in range(4):
        for model, optimizer in twins.pairs:

            def closure(model: Any = model, optimizer: Any = optimizer, step: int = step) -> Any:
                optimizer.zero_grad()
                loss = twins.loss(model, step)
                loss.backward()
                return loss

            optimizer.step(closure)
        twins.check(f"step {step}")


@CASES
def no_gradient_at_all(rank: int, world: int) -> None:
    """A step without a backward pass, and one before the first."""
    twins = Twins(rank, world)
    for _, optimizer in twins.pairs:
        optimizer.step()
    twins.train(steps=2)
    for _, optimizer in twins.pairs:
        optimizer.zero_grad()
        optimizer.step()
    twins.train(2, 2)


@CASES
def accumulation_in_no_sync(rank: int, world: int) -> None:
    """Also without a pass that synchronizes: the gradients are averaged before the update."""
    twins = Twins(rank, world)
    for step in range(4):
        for model, optimizer in twins.pairs:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with model.no_sync():
                twins.loss(model, 10 * step).backward()
                twins.loss(model, 10 * step + 3).backward()
            if step < 2:
                twins.loss(model, 10 * step + 1).backward()
            optimizer.step()
        twins.check(f"step {step}")


@CASES
def frozen_and_thawed(rank: int, world: int) -> None:
    twins = Twins(rank, world)
    for first, trains in ((0, True), (3, False), (6, True)):
        for model, _ in twins.pairs:
            model.sometimes.requires_grad_(trains)
            model.frozen.requires_grad_(not trains)
        twins.train(first, 3)
    twins.check_state("after changes")


@CASES
def clipped_by_trigram(rank: int, world: int) -> None:
    """All orders of norms, and an error where the norm is not finite."""
    twins = Twins(rank, world)
    for step, order in enumerate((2.0, 1.0, float("inf"))):
        norms = []
        for model, optimizer in twins.pairs:
            optimizer.zero_grad()
            twins.loss(model, step).backward()
            norms.append(trigram.clip_grad_norm_(model, 0.01, order))
            optimizer.step()
        assert torch.allclose(*norms, rtol=1e-5), norms
        for p, q in zip(*(m.parameters() for m in twins.models), strict=True):
            assert torch.allclose(p, q, rtol=1e-4, atol=1e-5)
    model, optimizer = twins.pairs[1]
    optimizer.zero_grad()
    (twins.loss(model, 4) * (float("nan") if rank == 0 else 1.0)).backward()
    raises(RuntimeError, trigram.clip_grad_norm_, model, 0.01, 2.0, True)


@CASES
def clipped_by_value(rank: int, world: int) -> None:
    twins = Twins(rank, world)
    for step in range(3):
        for model, optimizer in twins.pairs:
            model.zero_grad()
            twins.loss(model, step).backward()
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
        twins.check(f"step {step}")


@CASES
def frozen_and_unfrozen(rank: int, world: int) -> None:
    """Layers are frozen, unfrozen and given to the optimizer in the middle of training."""

    def some(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for n, p in model.named_parameters() if "inner" not in n], lr=0.01)

    twins = Twins(rank, world, Net, some)
    twins.train(steps=3)
    for model, optimizer in twins.pairs:
        model.sometimes.requires_grad_(False)
        model.frozen.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.inner.parameters()), "lr": 0.05})
    twins.train(3, 3)
    for model, _ in twins.pairs:
        model.sometimes.requires_grad_(True)
    twins.train(6, 3)
    twins.check_state("after changes")


@CASES
def weights_by_hand(rank: int, world: int) -> None:
    """A script clamps the weights after each step, loads others, and gives parameters other memory."""
    twins = Twins(rank, world)
    kept = {k: v.clone() for k, v in twins.models[0].state_dict().items()}
    for step in range(6):
        twins.step(step)
        for model, _ in twins.pairs:
            for p in model.parameters():
                p.data.clamp_(-0.3, 0.3)
            if step == 2:
                model.inner.weight.data = model.inner.weight.data.clone() * 0.5
            if step == 3:
                model.load_state_dict(kept)
        twins.check(f"step {step}")


class Formats(nn.Module):
    """Weights that are not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 6).t())
        self.flat = nn.Conv2d(3, 5, 3, padding=1)
        self.deep = nn.Conv3d(5, 7, 3, padding=1).to(memory_format=torch.channels_last_3d)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        images = self.flat(inputs.reshape(-1, 3, 1, 2).expand(-1, -1, 2, 2))
        return (inputs @ self.transposed).sum() + self.deep(images[..., None]).square()


@CASES
def memory_formats(rank: int, world: int) -> None:
    """Weights that are not row-major, and others that a script moves to another format later."""
    twins = Twins(rank, world, Formats)
    twins.train(steps=3)
    twins.check_state("before the move")
    state = copy.deepcopy(twins.optimizers[0].state_dict())
    for model, optimizer in twins.pairs:
        optimizer.zero_grad()
        model.flat.to(memory_format=torch.channels_last)
        optimizer.load_state_dict(copy.deepcopy(state))
    # In a bucket the weight has its old format again: some processors round a convolution of that otherwise.
    twins.tolerance = max(twins.tolerance, 1e-6)
    twins.train(3, 3)


@CASES
def evaluation_between_steps(rank: int, world: int) -> None:
    twins = Twins(rank, world)
    for step in range(4):
        twins.step(step)
        outputs = []
        for model, _ in twins.pairs:
            model.eval()
            with torch.no_grad():
                outputs.append(model(torch.ones(2, 6, dtype=twins.dtype)))
            model.train()
        close(outputs[1], outputs[0], twins.tolerance, f"evaluation {step}")
        with trigram.consensus(twins.models[1]):
            twins.check(f"step {step}")


class Careful(torch.optim.AdamW):
    """Calls the step of its base class, which torch's hooks know too, and skips frozen parameters."""

    def step(self, closure: Any = None) -> Any:
        frozen = [p for g in self.param_groups for p in g["params"] if not p.requires_grad]
        for p in frozen:
            p.grad = None
        return super().step(closure)


@CASES
def a_step_inside_its_own(rank: int, world: int) -> None:
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # so that torch hooks the base class
    twins = Twins(rank, world, mlp, lambda m: Careful(m.parameters(), lr=0.01), elementwise=True)
    twins.train(steps=4)
    twins.check_state("nested")


@CASES
def everything_of_an_optimizer_frozen(rank: int, world: int) -> None:
    """Its step does what a plain one does: nothing, or decay by gradients of 0."""
    pairs: list[Any] = []
    for k in range(2):
        torch.manual_seed(5)
        model = mlp()
        back, head = adamw(model[0]), adamw(model[2:])
        given: dict[str, Any] = {"optimizer": back} if k else {}
        fused = twin_models.mode.get("fused", False)
        word = twin_models.mode.get("algorithm", "sharded")
        trigram.with_bagua(
            model, word if k else "gradient_allreduce", **given, **({"fused": fused} if k else {})
        )
        pairs.append((model, back, head))
    for step in range(6):
        for model, *both in pairs:
            if step == 2:
                model[0].requires_grad_(False)
            for optimizer in both:
                optimizer.zero_grad(set_to_none=step < 4)
            model(torch.ones(2, 6) * (rank + step)).square().mean().backward()
            for optimizer in both:
                optimizer.step()
        for p, q in zip(*(m.parameters() for m, *_ in pairs), strict=True):
            close(q, p, 1e-6, f"step {step}")


@CASES
def frozen_with_gradients_of_zero(rank: int, world: int) -> None:
    """A frozen layer whose gradients are 0 is still decayed; versions of untouched weights stay."""
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    for step in range(2, 4):
        for model, optimizer in twins.pairs:
            model[0].requires_grad_(False)
            optimizer.zero_grad(set_to_none=False)
            twins.loss(model, step).backward()
            optimizer.step()
        twins.check(f"step {step}")
    model, optimizer = twins.pairs[1]
    optimizer.zero_grad()
    version = model[0].weight._version
    twins.loss(model, 5).backward()
    optimizer.step()
    assert model[0].weight._version == version


@CASES
def whole_parameters_thaw(rank: int, world: int) -> None:
    """Only one rank has the state of a whole parameter when others are divided."""

    def make() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    twins = Twins(rank, world, make, elementwise=False)
    twins.train(steps=2)
    for model, _ in twins.pairs:
        model[0].requires_grad_(True)
    twins.train(2, 3)


@CASES
def norms_of_several_dtypes(rank: int, world: int) -> None:
    """The norm of all gradients is in the widest dtype, as torch's."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 64).to(torch.bfloat16)
            self.last = nn.Linear(64, 512)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(inputs.bfloat16()).float())

    models = []
    for k in range(2):
        torch.manual_seed(5)
        model = Mixed()
        given = {"optimizer": adamw(model), "gradients": "shards"} if k else {}
        trigram.with_bagua(model, "sharded" if k else "gradient_allreduce", **given)
        (1000 * model(torch.ones(2, 6) + rank).square().mean()).backward()
        models.append(model)
    plain, ours = (trigram.clip_grad_norm_(m, 1.0) for m in models)
    assert ours.dtype == plain.dtype == torch.float32
    close(ours, plain, 1e-3 * float(plain), "norm")


@CASES
def stale_graphs_are_noticed(rank: int, world: int) -> None:
    """After a step, a backward pass through the old weights raises as it does without sharding."""
    twins = Twins(rank, world, mlp)
    twins.step(0)
    for model, optimizer in twins.pairs:
        optimizer.zero_grad()
        loss = twins.loss(model, 1)
        loss.backward(retain_graph=True)
        optimizer.step()
        try:
            loss.backward()
        except RuntimeError as e:
            assert "inplace operation" in str(e)
        else:
            raise AssertionError("the old graph was used with new weights")


@CASES.over("bytegrad", "topk", "central:median/full/sync", "central/f16/sync")
def codecs(rank: int, world: int, algorithm: str) -> None:
    """WHAT is free: gradients through a codec, and the state is divided all the same."""
    twins = Twins(rank, world, mlp, adamw, algorithm=algorithm, plain=algorithm, state="sharded")
    twins.train(steps=4)


@CASES
def checked(rank: int, world: int) -> None:
    twins = Twins(rank, world, mlp, adamw, check_replicas=2, check_finite=True)
    twins.train(steps=5)
    model, optimizer = twins.pairs[1]
    optimizer.zero_grad()
    loss = twins.loss(model, 9) * (float("nan") if rank == 1 else 1.0)
    says(raises(trigram.CorruptError, loss.backward), "rank(s) 1")


@CASES
def weighted(rank: int, world: int) -> None:
    """The means are those of the samples."""
    twins = Twins(rank, world, mlp, adamw, sample_weight=1.0 + rank)
    trigram.unwrap(twins.models[0])
    trigram.with_bagua(twins.models[0], "gradient_allreduce", bucket_mb=0.001, sample_weight=1.0 + rank)
    twins.train(steps=5)


@CASES
def switched_and_unwrapped(rank: int, world: int) -> None:
    """The optimizer's state is whole again under another algorithm and after unwrap, and divided later."""
    twins = Twins(rank, world)
    model, optimizer = twins.pairs[1]
    twins.train(steps=3)
    trigram.switch(model, "gradient_allreduce")
    assert all(p in optimizer.state for p in model.inner.parameters())
    twins.train(3, 2)
    trigram.switch(model, "sharded", optimizer=optimizer)
    twins.train(5, 2)
    twins.check_state("sharded again")
    trigram.unwrap(model)
    trigram.with_bagua(model, "sharded", optimizer=optimizer)
    twins.train(7, 2)
    trigram.unwrap(model)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    twins.check_state("unwrapped")


@CASES
def switched_before_gradients_are_reset(rank: int, world: int) -> None:
    """Gradients of which a rank has a part go with the algorithm, also those that nobody has reset."""
    twins, more = Twins(rank, world), dict(twin_models.mode)
    model, optimizer = twins.pairs[1]
    twins.train(steps=3)
    trigram.switch(model, "gradient_allreduce")
    assert not any(isinstance(p.grad, ShardedGradient) for p in model.parameters())
    twins.train(3, 2)
    trigram.switch(model, "sharded", optimizer=optimizer, **more)
    twins.train(5, 2)
    trigram.unwrap(model)
    twins.loss(model, 7).backward()  # plain gradients, of this rank
    trigram.with_bagua(model, "sharded", optimizer=optimizer, bucket_mb=0.001, **more)
    twins.train(7, 2)
    twins.check_state("wrapped again")


@CASES
def overlapping(rank: int, world: int) -> None:
    """The gather is awaited by the next forward pass, an evaluation, a state_dict."""
    twins = Twins(rank, world, mlp, adamw, overlap=True)
    for step in range(6):
        twins.step(step)
        if step % 3 == 0:
            outputs = []
            for model, _ in twins.pairs:
                with torch.no_grad():
                    given = torch.ones(2, 6, dtype=twins.dtype)
                    outputs.append(model(given) if step else model[0](given))
            close(outputs[1], outputs[0], twins.tolerance, f"evaluation {step}")
        elif step % 3 == 1:
            twins.check(f"step {step}")
    twins.check("at the end")


@CASES
def given_to_other_processes(rank: int, world: int) -> None:
    """``share_memory`` moves weights, and the gradients that are there, between two steps."""
    twins = Twins(rank, world)
    twins.train(steps=2)
    for model, _ in twins.pairs:
        model.share_memory()
    twins.train(2, 2)
    twins.check_state("at the end")
    twins.check_ranks()


def _with(case: str, **mode: Any) -> Callable[[int, int], None]:
    def check(rank: int, world: int) -> None:
        twin_models.mode = mode
        try:
            CASES[case](rank, world)
        finally:
            twin_models.mode = {}

    return check


NEED_WHOLE_GRADIENTS = (
    "accumulation",
    "frozen_and_unfrozen",
    "switched_and_unwrapped",
    "codecs-",
    "everything_of",
)
SHARDS = {c: _with(c, gradients="shards") for c in CASES if not c.startswith(NEED_WHOLE_GRADIENTS)}
SHARDS |= {c: _with(c, gradients="shards") for c in ("accumulation_in_no_sync",)}
NEED_GRADIENTS = (
    *("schedulers_and", "scaler", "accumulation", "closures", "clipped", "codecs-", "checked", "weighted"),
    *("switched", "stale", "norms_of"),
)
FUSED = {c: _with(c, fused=True) for c in CASES if not c.startswith(NEED_GRADIENTS)}
FUSED |= {c: _with(c, fused=True) for c in ("accumulation_in_no_sync",)}


BOTH = {c: _with(c, gradients="shards", fused=True) for c in SHARDS.keys() & FUSED.keys()}
REPLICATED = {
    c: _with(c, fused=True, algorithm="gradient_allreduce")
    for c in FUSED
    if not c.startswith(("state_is", "overlapping"))
}


@pytest.mark.parametrize("case", list(REPLICATED))
@pytest.mark.parametrize("world", [long(2), 3])
def test_all_state_and_updated_in_backward(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("REPLICATED", case, world, transport="shm")


@pytest.mark.parametrize("case", list(FUSED))
@pytest.mark.parametrize("transport, world", [("shm", 2), long("tcp", 2), long("shm", 3), long("tcp", 3)])
def test_updated_in_backward(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("FUSED", case, world, transport=transport)


@pytest.mark.parametrize("case", sorted(BOTH))
@pytest.mark.parametrize("world", [long(2), 3])
def test_divided_gradients_and_updated_in_backward(
    in_launch: Callable[..., None], world: int, case: str
) -> None:
    in_launch("BOTH", case, world, transport="shm")


@pytest.mark.parametrize("case", list(SHARDS))
@pytest.mark.parametrize("transport, world", [("shm", 2), long("tcp", 3), long("shm", 3), long("tcp", 2)])
def test_with_divided_gradients(
    in_launch: Callable[..., None], transport: str, world: int, case: str
) -> None:
    in_launch("SHARDS", case, world, transport=transport)


ACROSS = {
    f"{c} {label}": _with(c, **mode)
    for c in ("optimizer-adamw fused", "frozen_and_thawed", "whole_parameters-muon")
    for label, mode in (
        ("full", {}),
        ("shards", {"gradients": "shards"}),
        ("fused", {"fused": True}),
        ("fused shards", {"gradients": "shards", "fused": True}),
    )
}


@pytest.mark.parametrize("case", list(ACROSS))
def test_across_hosts(in_launch: Callable[..., None], several_hosts: None, case: str) -> None:
    in_launch("ACROSS", case, 4, transport="auto", hosts=[0, 0, 1, 1])


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("transport, world", [long("shm", 2), ("tcp", 3), long("shm", 3), long("tcp", 2)])
def test_as_a_plain_optimizer(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)
