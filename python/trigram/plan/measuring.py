"""Measures a job while its own script runs: ``TRIGRAM_PLAN_MEASURE``, which ``trigram plan -- SCRIPT`` sets.

The first steps average gradients as the default algorithm does, the others not at all: the first tell how
long a step takes now, the others what computation alone takes, with the times at which gradients become
ready. Then the ranks measure links, codecs and copies together, rank 0 compares the algorithms, and
every rank ends its script with ``SystemExit(0)``. Nothing that the script has trained is kept.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
import os
import socket
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from trigram import collectives
from trigram.collectives.consistency import tell_all
from trigram.errors import ConfigError
from trigram.gradients.probe import sample
from trigram.plan import costs
from trigram.plan.inputs import Compute, Costs, Job, Machines, Tensor
from trigram.plan.losses import ALLOWED
from trigram.runtime.group import Group
from trigram.runtime.memory import empty

VARIABLE = "TRIGRAM_PLAN_MEASURE"
"""``STEPS:ALLOWED:FILE``: steps of each kind, what the decision may change, and where the plan goes."""
UNTIMED = 3
"""Steps of each kind that do not count: memory is allocated, buckets are rebuilt."""
PROBES, SHORT_PROBES = 3, 20
PROBE_BYTES, SHORT_SECONDS = 1 << 20, 0.05
"""Of the first transfer over the links; one that takes less time is repeated with eight times as much."""
LEARN = {"every": 1 << 40}
"""Options of ``local_sgd`` with which ranks never average."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What ``TRIGRAM_PLAN_MEASURE`` asks for."""

    steps: int
    allowed: str
    path: Path

    @property
    def communicating(self) -> int:
        """Steps that average gradients."""
        return UNTIMED + self.steps


def wanted() -> Wanted | None:
    """What ``TRIGRAM_PLAN_MEASURE`` asks for; None: it is not set.

    Raises:
        ConfigError: It has another form.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    steps, _, rest = text.partition(":")
    allowed, _, path = rest.partition(":")
    if not steps.isdigit() or int(steps) < 1 or allowed not in ALLOWED or not path:
        raise ConfigError(
            f"{VARIABLE}={text!r} is invalid; write STEPS:ALLOWED:FILE, such as 12:exact:plan.json, with "
            f"ALLOWED one of {', '.join(ALLOWED)}"
        )
    return Wanted(int(steps), allowed, Path(path))


def unfit(trained: Sequence[torch.Tensor], sparse: bool) -> str:
    """Why predictions do not cover a model; empty if they do. The same on all ranks.

    Args:
        trained: The parameters whose gradients or weights are averaged.
        sparse: Whether some of their gradients are sparse.
    """
    if any(not p.is_cpu for p in trained):
        return "steps on GPUs are not predicted"
    if sparse or any(p.dtype != torch.float32 for p in trained):
        return "steps are predicted for dense float32 parameters only"
    return ""


Conclude = Callable[[Job, float, Wanted], None]
"""Gets what was measured, and the seconds of a step with the default algorithm."""


@dataclasses.dataclass
class _Step:
    """A training step of this rank: seconds since its begin."""

    seconds: float = 0.0
    processor: float = 0.0
    forward: float = 0.0
    ready: dict[int, float] = dataclasses.field(default_factory=dict)


class Watch:
    """Times the steps of a model, from the end of an optimizer's update to the end of the next.

    Args:
        model: The model, which ``with_bagua`` has wrapped.
        group: The ranks that train it.
        asked: What is wanted.
        conclude: Called on the group's first rank at the end.
    """

    def __init__(self, model: nn.Module, group: Group, asked: Wanted, conclude: Conclude) -> None:
        self.group, self.asked, self.conclude = group, asked, conclude
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.ids = {id(p) for p in self.params}
        self.steps: list[_Step] = []
        self.own: list[torch.Tensor] = []
        self.means: list[torch.Tensor] = []
        self.step, self.began, self.processor = _Step(), time.perf_counter(), time.process_time()
        self.handles: list[Any] = [model.register_forward_hook(self._forward_ends)]
        for i, p in enumerate(self.params):
            self.handles.append(p.register_post_accumulate_grad_hook(self._gradient(i)))
        self.handles.append(register_optimizer_step_post_hook(self._updated))
        atexit.register(self._ended_early)

    def _now(self) -> float:
        return time.perf_counter() - self.began

    def _forward_ends(self, *_: Any) -> None:
        self.step.forward = self._now()

    def _gradient(self, i: int) -> Callable[[torch.Tensor], None]:
        def note(param: torch.Tensor) -> None:
            self.step.ready[i] = self._now()
            # Here, and not after the step: the script may clip them meanwhile, and they have other bits then.
            if len(self.steps) == self.asked.communicating and param.grad is not None:
                self.own += sample(param.grad.detach().flatten())

        return note

    def _updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mine = any(id(p) in self.ids for group in optimizer.param_groups for p in group["params"])
        if not mine or not self.step.ready:
            return
        self.step.seconds = self._now()
        self.step.processor = time.process_time() - self.processor
        self.steps.append(self.step)
        if len(self.steps) == self.asked.communicating:
            grads = [p.grad.detach().flatten() for p in self.params if p.grad is not None]
            self.means = [part for grad in grads for part in sample(grad)]
        if len(self.steps) == self.asked.communicating + UNTIMED + self.asked.steps:
            self._finish(optimizer)
        self.step, self.began, self.processor = _Step(), time.perf_counter(), time.process_time()

    def _ended_early(self) -> None:
        if self.group.rank == 0 and sys.stderr is not None:
            needed = self.asked.communicating + UNTIMED + self.asked.steps
            sys.stderr.write(
                f"trigram plan: the script has ended after {len(self.steps)} training steps, and {needed} "
                "are needed; give it more steps, or trigram plan a smaller --steps. A step ends with "
                "step() of an optimizer of torch\n"
            )

    def _finish(self, optimizer: torch.optim.Optimizer) -> None:
        atexit.unregister(self._ended_early)
        for handle in self.handles:
            handle.remove()
        first = self.steps[UNTIMED : self.asked.communicating]
        alone = self.steps[self.asked.communicating + UNTIMED :]
        group = self.group
        now, _ = _of_all([s.seconds for s in first], group)
        slowest, typical = _of_all([s.seconds for s in alone], group)
        compute = self._compute(alone, slowest, typical, optimizer)
        collectives.barrier(group)
        measured = costs.measure([t.shape for t in compute.tensors])
        if self.own and self.means:
            codes = costs.exact(torch.cat(self.own), torch.cat(self.means))
            measured = dataclasses.replace(measured, exact=codes)
        machines, measured = links(group, measured, memory())
        if group.rank == 0:
            self.conclude(
                Job(compute, machines, measured, f"measured in {len(alone)} steps"), now, self.asked
            )
        collectives.barrier(group)
        raise SystemExit(0)

    def _compute(
        self, alone: list[_Step], slowest: float, typical: float, optimizer: torch.optim.Optimizer
    ) -> Compute:
        """The step of the slowest rank, with the proportions of this rank's steps."""
        stretch = slowest / statistics.median(s.seconds for s in alone)
        ready = {i: statistics.median(s.ready.get(i, s.seconds) for s in alone) for i in alone[-1].ready}
        order = sorted(ready, key=lambda i: ready[i])
        cores = sum(s.processor for s in alone) / sum(s.seconds for s in alone)
        weights = sum(p.nbytes for p in self.params)
        state = [
            t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)
        ]
        return Compute(
            slowest,
            stretch * statistics.median(s.forward for s in alone),
            tuple(Tensor(tuple(self.params[i].shape), stretch * ready[i]) for i in order),
            max(0.1, cores),
            typical,
            sum(t.nbytes for t in state) / weights,
        )


def _of_all(seconds: list[float], group: Group) -> tuple[float, float]:
    """The median over steps of the slowest rank's time, and the median of all times."""
    everyone = tell_all([round(1e9 * s) for s in seconds], group)
    slowest = statistics.median(max(step) for step in zip(*everyone, strict=True))
    return slowest / 1e9, statistics.median(s for rank in everyone for s in rank) / 1e9


def memory(most_bytes: int = 64 * PROBE_BYTES) -> torch.Tensor:
    """The memory of the longest transfer of :func:`links`: what can fail on one rank alone."""
    return empty(most_bytes // 4, dtype=torch.float32)


def links(
    group: Group,
    measured: Costs,
    values: torch.Tensor,
    known: Sequence[float] = (),
    probes: int = PROBES,
    short_probes: int = SHORT_PROBES,
) -> tuple[Machines, Costs]:
    """Measures the links between the ranks of a group; all of them call it.

    Args:
        group: The ranks.
        measured: The costs so far.
        values: What is sent, from :func:`memory`: a transfer that was too short is repeated with more, up to
            all of it.
        known: Rates of the ranks' links that the engine has measured; empty: those of ``group``.
        probes: Transfers of each size that count.
        short_probes: Transfers of 4 bytes.

    Returns:
        The machines, and the costs with those of transfers.
    """
    hosts = group.core.hosts
    local, n = max(len(host) for host in hosts), group.size
    kernel = zlib.crc32(_kernel())
    kernels = [of for of, _ in tell_all([kernel, 0], group)]
    cores = len(os.sched_getaffinity(0)) / kernels.count(kernel)
    cores = min(c / 1e6 for (c,) in tell_all([round(1e6 * cores)], group))
    nbytes = PROBE_BYTES
    seconds, processor = _transfer(values[: nbytes // 4], group, probes)
    while seconds < SHORT_SECONDS and 8 * nbytes <= values.nbytes:
        nbytes *= 8
        seconds, processor = _transfer(values[: nbytes // 4], group, probes)
    if len(hosts) == 1:
        shared = dataclasses.replace(measured, shared=seconds / nbytes)
        return Machines((nbytes / seconds,), 0.0, local, cores), shared
    sent = 2 * (len(hosts) - 1) / len(hosts) * nbytes
    known = known or group.core.rates()
    rates = [sent / seconds] * len(hosts)
    if len(known) == n:
        # What the engine has measured tells links apart; the transfer has measured the slowest.
        by_host = [sum(known[rank] for rank in host) for host in hosts]
        rates = [sent / seconds * rate / min(by_host) for rate in by_host]
    short, _ = _transfer(values[:1], group, short_probes)
    latency = short / math.ceil(math.log2(len(hosts)))
    carried = 2 * (n - 1) / n * nbytes
    after = dataclasses.replace(measured, wire=processor / carried)
    return Machines(tuple(rates), latency, local, cores), after


def _kernel() -> bytes:
    """Something that tells the kernel that this rank runs on from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return socket.gethostname().encode()


def _transfer(values: torch.Tensor, group: Group, times: int = PROBES) -> tuple[float, float]:
    """Seconds and processor seconds of an all-reduce: the slowest rank's, median of a few."""
    values.zero_()
    found: list[tuple[float, float]] = []
    for _ in range(times + 1):
        collectives.barrier(group)
        began, before = time.perf_counter(), time.process_time()
        collectives.all_reduce(values, "sum", None, group)
        found.append((time.perf_counter() - began, time.process_time() - before))
    mine = [round(1e9 * statistics.median(column)) for column in zip(*found[1:], strict=True)]
    everyone = tell_all(mine, group)
    return max(s for s, _ in everyone) / 1e9, max(p for _, p in everyone) / 1e9
