"""Runs a training script under DistributedDataParallel and under trigram, and checks what it has trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from tests.reference.torch_gloo import gloo
from tests.support.cases import Cases
from tests.support.checks import close, same_on_all_ranks

ALGORITHMS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "decentralized": {},
    "local_sgd": {"every": 2},
}
PATIENCE = 240.0  # seconds for one case: inductor compiles on a busy machine
_serial = count()

Counts = list[tuple[int, int]]  # for each wrapped model: backward passes, updates


class Run:
    """One run of a script on this rank: under an algorithm of trigram, or under DDP if it is None.

    Attributes:
        losses: What the script trains down, on this rank's data; one number for each of its steps.
        modules: The models that the script wraps.
        kept: Other modules whose weights must be DDP's, such as averages that the script keeps.
    """

    def __init__(self, rank: int, world: int, algorithm: str | None) -> None:
        self.rank, self.world, self.algorithm = rank, world, algorithm
        self.losses: list[float] = []
        self.modules: list[nn.Module] = []
        self.kept: list[nn.Module] = []

    def wrap(self, module: nn.Module) -> Any:
        """`with_bagua` or DDP."""
        self.modules.append(module)
        if self.algorithm is None:
            return DistributedDataParallel(module)
        return trigram.with_bagua(module, self.algorithm, **ALGORITHMS[self.algorithm])

    def data(self, *shape: int, salt: int = 0) -> Tensor:
        """Normal numbers, the same in each run and others on each rank."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * salt + self.rank))

    def labels(self, count: int, *shape: int, salt: int = 0) -> Tensor:
        """Integers below `count`, the same in each run and others on each rank."""
        generator = torch.Generator().manual_seed(1000 * salt + self.rank)
        return torch.randint(count, shape, generator=generator)

    def mean(self, value: Tensor) -> Tensor:
        """A number that all ranks must agree on where gradients are averaged: its mean over the ranks."""
        value = value.detach().clone()
        if self.algorithm is None:
            torch.distributed.all_reduce(value)
            return value / self.world
        if self.algorithm == "gradient_allreduce":
            trigram.all_reduce(value, op="avg")
        return value

    def weights(self) -> dict[str, Tensor]:
        """All parameters and buffers, on this rank."""
        return {
            f"{number}.{name}": tensor.detach().clone()
            for number, module in enumerate([*self.modules, *self.kept])
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }


Script = Callable[..., Counts | None]


def _play(script: Script, run: Run, args: tuple[Any, ...]) -> Counts:
    torch.manual_seed(7 + 100 * run.rank)  # rank 0's weights are to reach everybody; dropout differs by rank
    torch._dynamo.reset()
    counts = script(run, *args)
    return counts or [(len(run.losses), len(run.losses))] * len(run.modules)


def check(
    rank: int, world: int, script: Script, args: tuple[Any, ...], algorithm: str, tolerance: float
) -> None:
    """The script trains under the algorithm; under `gradient_allreduce` to the weights of DDP."""
    expected: dict[str, Tensor] = {}
    if algorithm == "gradient_allreduce":
        with gloo(rank, world):
            ddp = Run(rank, world, None)
            _play(script, ddp, args)
            expected = ddp.weights()
    run = Run(rank, world, algorithm)
    counts = _play(script, run, args)
    weights = run.weights()

    quarter = max(1, len(run.losses) // 4)
    first, last = fmean(run.losses[:quarter]), fmean(run.losses[-quarter:])
    assert last < first, f"the loss does not fall: {run.losses}"

    for number, (module, (passes, updates)) in enumerate(zip(run.modules, counts, strict=True)):
        stats = trigram.stats(module)
        due = passes if algorithm == "gradient_allreduce" else updates
        assert stats["steps"] == due, f"model {number}: counted {stats['steps']} steps, made {due}"
        every = {"decentralized": 1, "local_sgd": 2}.get(algorithm)
        if every is not None:  # the last may be due in the forward pass that does not come
            fine = {due // every - late for late in range(2 if every > 1 else 3)}
            assert stats["rounds"] in fine, (
                f"model {number}: {stats['rounds']} averages of weights in {due} steps"
            )
    if expected:
        assert weights.keys() == expected.keys()
        for name, e in expected.items():
            close(weights[name], e, tolerance, name)
        _same(run, [*run.modules, *run.kept])
    for module in run.modules:
        trigram.consensus(module)
    _same(run, run.modules)
    for module in run.modules:
        trigram.unwrap(module)


def _same(run: Run, modules: Iterable[nn.Module]) -> None:
    parameters = [p for module in modules for p in module.parameters()]
    same_on_all_ranks(run.rank, run.world, f"library-{next(_serial)}", parameters)


def script(cases: Cases, *choices: tuple[Any, ...], tolerance: float = 0.0) -> Callable[[Script], Script]:
    """Adds a script to the cases, under each algorithm, once for each of the choices of its arguments.

    `tolerance` is the greatest distance of any weight from DDP's; 0 demands the same bits.
    """

    def add(fn: Script) -> Script:
        for args in choices or ((),):
            for algorithm in ALGORITHMS:
                name = "-".join([fn.__name__, *map(str, args), algorithm])
                cases[name] = lambda rank, world, args=args, algorithm=algorithm: check(
                    rank, world, fn, args, algorithm, tolerance
                )
        return fn

    return add
