"""What torch offers to a training: each against DistributedDataParallel or one process on the whole batch."""

from __future__ import annotations

import collections
import copy
import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import trigram
from tests.reference.torch_gloo import gloo
from tests.support.cases import Cases
from tests.support.checks import close, fingerprint, raises, same_on_all_ranks, says
from tests.support.marks import long
from tests.support.twin_training import Pair, mlp, sgd, square

CASES = Cases()
Train = Callable[[Callable[[nn.Module], Any]], list[Tensor]]


def like_ddp(rank: int, world: int, train: Train, name: str, everywhere: bool = True) -> None:
    """`train(wrap)` gives the same tensors under trigram as under DDP; with 2 ranks bit for bit."""
    with gloo(rank, world):
        expected = train(DistributedDataParallel)
    actual = train(lambda module: trigram.with_bagua(module, "gradient_allreduce"))
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        size = float(e.double().abs().max()) if e.numel() else 0.0
        tolerance = 0.0 if world == 2 else size * (0.05 if e.dtype == torch.bfloat16 else 1e-4)
        close(a, e, tolerance, f"{name}: tensor {i}")
    if everywhere:
        same_on_all_ranks(rank, world, name, actual)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


@CASES.over("uneven", "none at all", "with buffers")
def join(rank: int, world: int, kind: str) -> None:
    """Ranks run out of inputs at different times; who is done shadows the others, and gets their weights.

    Buffers follow a rank that still has inputs; rank 0 is the first to have none.
    """
    batches = 3 * min(rank, 1) if kind == "none at all" else 2 + 2 * rank

    def train(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        module = with_norm() if kind == "with buffers" else mlp()
        model = wrap(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        is_ddp = isinstance(model, DistributedDataParallel)
        joined: AbstractContextManager[None] = model.join() if is_ddp else trigram.join(model)
        with joined:
            for step in range(batches):
                optimizer.zero_grad()
                square(model, rank, step).backward()
                optimizer.step()
        after = [*weights(model), *(b.clone() for b in module.buffers())]
        if not is_ddp:  # and the model is as useful as before
            optimizer.zero_grad()
            square(model, rank, 50).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            same_on_all_ranks(rank, world, f"after-join-{kind}", gradients)
        return after

    like_ddp(rank, world, train, f"join-{kind}")


def _exchange(t: Tensor) -> Tensor:
    got = torch.empty_like(t)
    rank, world = trigram.rank(), trigram.world_size()
    work = trigram.send(t, (rank + 1) % world, async_op=True)
    trigram.recv(got, (rank - 1) % world)
    work.wait()
    return got


def _wait_for(t: Tensor) -> Tensor:
    trigram.all_reduce(t, async_op=True).wait()
    return t


CALLS: dict[str, Callable[[Tensor, int], Any]] = {
    "all_reduce": lambda t, n: trigram.all_reduce(t, "avg"),
    "list": lambda t, n: trigram.all_reduce([t, t.clone()]),
    "async": lambda t, n: _wait_for(t),
    "all_gather": lambda t, n: trigram.all_gather(torch.empty(n, *t.shape), t),
    "broadcast": lambda t, n: trigram.broadcast(t, 0),
    "reduce_scatter": lambda t, n: trigram.reduce_scatter(torch.empty_like(t), torch.cat([t] * n)),
    "all_to_all": lambda t, n: trigram.all_to_all(torch.empty(n, len(t)), torch.stack([t] * n)),
    "messages": lambda t, n: _exchange(t),
    "barrier": lambda t, n: trigram.barrier(),
}


@CASES.over(*CALLS)
def compiled_calls(rank: int, world: int, call: str) -> None:
    """In a compiled function, with other shapes: from the second on sizes are symbols in a trace."""

    def body(t: Tensor) -> Tensor:
        t = t * (2 + rank)
        CALLS[call](t, world)
        return t + 1

    torch._dynamo.reset()
    compiled = torch.compile(body, backend="eager")
    for length in (8, 12, 20):
        t = torch.arange(float(length))
        assert torch.equal(compiled(t), body(t)), length


@CASES.over("gradient_allreduce", "bytegrad", "topk", "decentralized", "local_sgd")
def compiled_steps(rank: int, world: int, algorithm: str) -> None:
    """A whole step in a compiled function: the hooks run in a backward pass that it starts."""
    options: dict[str, Any] = {"topk": {"fraction": 0.5}, "local_sgd": {"every": 2}}.get(algorithm, {})
    models = [trigram.with_bagua(mlp(), algorithm, **options) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def steps(model: nn.Module) -> Callable[[Tensor], None]:
        optimizer = sgd(model)

        def step(inputs: Tensor) -> None:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    torch._dynamo.reset()
    plain, compiled = steps(models[0]), torch.compile(steps(models[1]), backend="eager")
    for k, length in enumerate((4, 8, 6)):
        inputs = torch.randn(length, 6, generator=torch.Generator().manual_seed(10 * k + rank))
        plain(inputs)
        compiled(inputs)
    for a, b in zip(*(weights(m) for m in models), strict=True):
        close(a, b, 0.0, algorithm)
    assert trigram.stats(models[1])["steps"] == 3


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), amsgrad=True),
}


def inputs_of(rank: int, epoch: int, world: int) -> int:
    """How many inputs a rank has in an epoch: in three of them others have most in turn, and one has none."""
    return 3 if epoch == 3 else 2 * ((rank + epoch) % world)


@CASES.over(*OPTIMIZERS)
def joined_optimizers(rank: int, world: int, kind: str) -> None:
    """After each block all ranks have the moments and counts of the rank that trained longest: as one process
    that makes all updates, where a rank without inputs adds gradients of 0."""
    torch.manual_seed(3)
    model, alone = mlp(), mlp()
    alone.load_state_dict(model.state_dict())
    optimizer, reference = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](alone.parameters())
    trigram.with_bagua(model)
    for epoch in range(4):
        with trigram.join(model):
            for k in range(inputs_of(rank, epoch, world)):
                optimizer.zero_grad()
                square(model, rank, 10 * epoch + k).backward()
                optimizer.step()
        counts = [inputs_of(r, epoch, world) for r in range(world)]
        for k in range(max(counts)):
            reference.zero_grad()
            torch.stack([square(alone, r, 10 * epoch + k) for r in range(world) if k < counts[r]]).sum().div(
                world
            ).backward()
            reference.step()
        for a, e in zip(model.parameters(), alone.parameters(), strict=True):
            close(a, e, 1e-5, f"{kind}: epoch {epoch}")
        same_on_all_ranks(rank, world, f"joined-{kind}-{epoch}", [p.detach() for p in model.parameters()])
        assert set(optimizer.state_dict()["state"]) == set(reference.state_dict()["state"])


@CASES
def joined_on_some_ranks(rank: int, world: int) -> None:
    """The model's group has other numbers than the job; each rank's GradScaler has a scale of its own."""
    members = list(range(1, world))
    group = trigram.new_group(members)
    if rank == 0:
        return
    torch.manual_seed(3)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trigram.with_bagua(model, group=group)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**rank)
    with trigram.join(model):
        for k in range(2 + 2 * (rank == world - 1)):
            optimizer.zero_grad()
            square(model, rank, k).backward()
            optimizer.step()
    assert scaler.state_dict()["scale"] == 2.0 ** (world - 1)
    assert {float(s["step"]) for s in optimizer.state_dict()["state"].values()} == {4.0}


class Counting(torch.optim.Optimizer):
    """SGD whose learning rate shrinks with what it counts in lists and for all parameters together."""

    kept: type = list

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        together: Any = self.state.setdefault("all", {"count": 0})  # type: ignore[call-overload]
        together["count"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                norms = self.state[p].setdefault("norms", self.kept())
                norms.append(float(p.grad.norm()))
                p.sub_(p.grad, alpha=group["lr"] / (1 + together["count"] + sum(norms)))


class CountingInDeque(Counting):
    """The same; its state cannot be sent."""

    kept = collections.deque


@CASES
def joined_states(rank: int, world: int) -> None:
    """State that is no tensor, or of no parameter, and beside it an older optimizer of the same class and an
    unused one of another."""
    torch.manual_seed(3)
    model = trigram.with_bagua(mlp())
    older, optimizer, unused = Counting(model.parameters()), Counting(model.parameters()), sgd(model)
    for one, most in ((older, 0), (optimizer, 2)):
        with trigram.join(model):
            for step in range(1 + most * rank):
                one.zero_grad()
                square(model, rank, step).backward()
                one.step()
    for step in range(3):
        optimizer.zero_grad()
        square(model, rank, step).backward()
        optimizer.step()
    same_on_all_ranks(rank, world, "joined-states", weights(model))
    assert optimizer.state["all"]["count"] == 4 + 2 * (world - 1)  # type: ignore[index]
    assert not unused.state
    optimizer = CountingInDeque(model.parameters())

    def uneven() -> None:
        with trigram.join(model):
            for step in range(1 + rank):
                optimizer.zero_grad()
                square(model, rank, step).backward()
                optimizer.step()

    says(raises(trigram.UnsupportedError, uneven), "deque", "state_dict()", f"rank {world - 1}")


@CASES
def joined_scaler(rank: int, world: int) -> None:
    """Scales grow with the updates, so they would differ after the block."""
    gc.collect()  # scalers of other cases
    torch.manual_seed(3)
    model = trigram.with_bagua(mlp())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def update(step: int) -> None:
        optimizer.zero_grad()
        scaler.scale(square(model, rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()

    with trigram.join(model):
        for step in range(2 * rank):  # one has none, and so no scale yet
            update(step)
    assert scaler.get_scale() == 8.0 * 2 ** (world - 1)
    for step in range(3):
        update(step)
    same_on_all_ranks(rank, world, "joined-scaler", weights(model))
    same_on_all_ranks(rank, world, "joined-scale", [torch.tensor(scaler.get_scale())])


@CASES
def joined_in_one_backward(rank: int, world: int) -> None:
    """One backward pass of two models, when a rank has no inputs left: an error at once on all ranks."""
    models = [trigram.with_bagua(mlp()) for _ in range(2)]

    def both() -> None:
        with trigram.join(*models):
            for step in range(1 + rank):
                sum(square(m, rank, step) for m in models).backward()  # type: ignore[union-attr]

    error: type[trigram.TrigramError] = trigram.AbortedError if rank == 0 else trigram.MisuseError
    says(raises(error, both), "backward")
    for model in models:  # and training goes on
        model.zero_grad()
        square(model, rank, 9).backward()
        same_on_all_ranks(rank, world, f"after-{id(model) and models.index(model)}", gradients_of(model))


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@CASES
def one_rank_skips_an_update(rank: int, world: int) -> None:
    """A step of the optimizer raises on one rank only: the next pass fails on all, and a checkpoint that all
    load ends it."""
    torch.manual_seed(3)
    model = trigram.with_bagua(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = copy.deepcopy(model.state_dict())

    def train(first: int, fails: bool = False) -> None:
        for step in range(first, first + 3):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            if not (fails and step == first):
                optimizer.step()

    train(0)
    text = raises(trigram.MismatchError, train, 3, rank == 0)
    says(text, "skipped an update", "checkpoint")
    optimizer.zero_grad()
    model.load_state_dict(saved)
    train(6)
    same_on_all_ranks(rank, world, "after-a-skipped-update", weights(model))


@CASES.over("epoch", "batch", "batch, as many")
def joined_schedulers(rank: int, world: int, stepped: str) -> None:
    """A scheduler that is stepped with each batch differs after the block, and all ranks get an error."""
    torch.manual_seed(3)
    model = trigram.with_bagua(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    each = stepped.startswith("batch")

    def train(batches: int) -> None:
        for step in range(batches):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            optimizer.step()
            if each:
                scheduler.step()

    for _ in range(2):
        with trigram.join(model):
            train(1 + 2 * rank if stepped != "batch, as many" else 2)
        if not each:
            scheduler.step()
    if stepped == "batch":
        text = raises(trigram.MismatchError, train, 3)
        says(text, "trigram.join", "scheduler", "rank(s) 1")
        optimizer.zero_grad()
    else:
        train(5)
        same_on_all_ranks(rank, world, f"scheduled-{stepped}", weights(model))


@CASES
def scaler(rank: int, world: int) -> None:
    """autocast and GradScaler: an infinity on one rank makes all ranks skip that step and halve the scale."""
    skipped: list[int] = []

    def train(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        model = wrap(mlp())
        optimizer, seen = sgd(model), []
        scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        skipped.clear()
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = square(model, rank, step).float()
            if step == 2 and rank == world - 1:
                loss = loss * float("inf")
            scale.scale(loss).backward()
            scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = fingerprint(model.parameters())
            scale.step(optimizer)
            scale.update()
            if fingerprint(model.parameters()) == before:
                skipped.append(step)
            seen += [torch.tensor(scale.get_scale()), *weights(model)]
        return seen

    like_ddp(rank, world, train, "scaler")
    assert skipped == [2], skipped


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(6, 8)
        self.brain = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.wide = nn.Linear(8, 2, dtype=torch.float64)
        self.again = nn.Linear(2, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        h = torch.tanh(self.brain(self.single(inputs).bfloat16()))
        return self.again(self.wide(h.double()).float())


@CASES
def mixed_types(rank: int, world: int) -> None:
    def train(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(3)
        model = wrap(Mixed())
        optimizer, seen = sgd(model), []
        for step in range(3):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            seen += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
        return seen

    like_ddp(rank, world, train, "mixed")


@CASES
def batch_norm(rank: int, world: int) -> None:
    """Buffers as DDP keeps them: rank 0's at the start of a forward, each rank's own after it; integers too.

    While gradients accumulate, DDP leaves the buffers alone in the forward after a silent one.
    """

    def train(wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(3 + rank)  # the buffers differ before anything is wrapped
        module = with_norm()
        module[1].running_mean.normal_()  # type: ignore[index,union-attr,operator]
        model = wrap(module)
        optimizer, seen = sgd(model), []
        for step in range(8):
            if step < 4 or step % 3 == 0:
                square(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with (
                    model.no_sync() if isinstance(model, DistributedDataParallel) else trigram.no_sync(model)
                ):
                    square(model, rank, step).backward()
            seen += [b.clone() for b in module.buffers()] + weights(model)
        return seen

    like_ddp(rank, world, train, "batch_norm", everywhere=False)


class Checkpointed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.reentrant = not kind.startswith("not")
        self.twice, self.at_end = "twice" in kind, "at the end" in kind
        self.first, self.block, self.last = (
            nn.Linear(6, 8),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            nn.Linear(8, 8),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        h = self.first(inputs)
        h = self.last(h) if self.at_end else h
        for _ in range(2 if self.twice else 1):
            h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return h if self.at_end else self.last(h)


@CASES.over("reentrant", "reentrant at the end", "not reentrant", "not reentrant, used twice")
def checkpointing(rank: int, world: int, kind: str) -> None:
    """Reentrant: a backward inside the backward, whose end is not the step's end.

    At the model's end the inner one brings the first gradients of all.
    """
    pair = Pair(rank, world, lambda: Checkpointed(kind), bucket_mb=0.0001)
    pair.train(square, 4)
    # Averaging after each inner backward as well would end in the same numbers.
    assert trigram.stats(pair.ours)["steps"] == 4


@CASES.over(25, 0.0001)
def checkpointing_twice_reentrant(rank: int, world: int, bucket_mb: float) -> None:
    """A parameter that two inner backwards touch: handled, or refused in words; never a wrong gradient."""
    pair = Pair(rank, world, lambda: Checkpointed("reentrant, twice"), bucket_mb=bucket_mb)
    try:
        pair.train(square, 3)
    except trigram.TrigramError as e:
        assert "checkpoint" in str(e), e
        pair.ours.zero_grad()
        assert bucket_mb < 25, "with one bucket nothing had been sent before the second gradient"


def without_inductor() -> str | None:
    """Why torch cannot compile C++ here, if so."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"inductor needs a C++ compiler; there is no {compiler}"
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        return "torch's inductor writes code that does not compile under ATEN_CPU_CAPABILITY=default"
    return None


@CASES.over("eager", *([] if without_inductor() else ["inductor"]))
def compiled(rank: int, world: int, backend: str) -> None:
    torch._dynamo.reset()
    if backend == "inductor":
        from torch._inductor import config

        config.compile_threads = 1
        # Of its own for each vector unit: the cache does not tell them apart, and its code is then wrong.
        unit = torch.backends.cpu.get_cpu_capability().lower()
        cache = Path(tempfile.gettempdir()) / f"trigram-inductor-{os.getuid()}-{unit}"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    pair = Pair(rank, world, mlp)
    fast = torch.compile(pair.ours, backend=backend)
    for step in range(3):
        pair.zero()
        square(fast, rank, step).backward()
        pair.backward_alone(square, step)
        pair.check_gradients(f"compiled with {backend}, step {step}")
        pair.update()
    pair.check_weights(f"compiled with {backend}")


@CASES
def compiled_first(rank: int, world: int) -> None:
    """A model that was compiled before it came to us."""
    torch._dynamo.reset()
    Pair(rank, world, lambda: torch.compile(mlp(), backend="eager")).train(square, 3)  # type: ignore[arg-type,return-value]


def test_inductor_is_among_the_cases() -> None:
    if (reason := without_inductor()) is not None:
        pytest.skip(reason)
    assert "compiled-inductor" in CASES


@pytest.mark.parametrize("case", ["joined_on_some_ranks"])
def test_the_group_of_a_model_joins(in_launch: Callable[..., None], case: str) -> None:
    in_launch("CASES", case, 3)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("transport, world", [("shm", 2), long("tcp", 3), long("shm", 3), long("tcp", 2)])
def test_mode(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport, patience=60)
