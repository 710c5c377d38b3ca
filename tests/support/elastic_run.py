"""A training that can be done by one process too, which knows who took part in which step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import trigram
from tests.support.harness import Ranks, await_flag, flag, say, scratch
from trigram.averaging import GradientBucket, GradientFilter
from trigram.steps.elastic_model import ElasticModel

FEATURES, CLASSES, BATCH = 20, 5, 12


def model() -> torch.nn.Module:
    """The same on every call."""
    torch.manual_seed(7)
    with torch.device("cpu"):
        layers = [torch.nn.Linear(FEATURES, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES)]
    return torch.nn.Sequential(*layers).double().to(torch.get_default_device())


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sees in a step."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH, FEATURES, generator=g, dtype=torch.float64, device="cpu")
    right = torch.arange(FEATURES * CLASSES, device="cpu").reshape(FEATURES, CLASSES).sin().double()
    here = torch.get_default_device()  # a GPU, in tests/gpu
    return x.to(here), (x @ right).argmax(1).to(here)


def optimizer(net: torch.nn.Module) -> torch.optim.Optimizer:
    """One with a state that a newcomer must get."""
    return torch.optim.Adam(net.parameters(), lr=0.01)


def loss_of(net: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of one rank's batch."""
    x, y = batch(step, rank)
    return torch.nn.functional.cross_entropy(net(x), y)


class Negated(GradientFilter):
    """What is done twice is not done."""

    def before(self, bucket: GradientBucket) -> None:
        bucket.values.neg_()


def reference(history: list[tuple[int, ...]], sign: float = 1.0) -> torch.Tensor:
    """The weights after steps in which these ranks took part, made in one process."""
    net = model()
    opt = optimizer(net)
    for step, ranks in enumerate(history):
        opt.zero_grad()
        (sign * torch.stack([loss_of(net, step, r) for r in ranks]).mean()).backward()
        opt.step()
    return weights(net)


def weights(net: torch.nn.Module) -> torch.Tensor:
    """All of them in one."""
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def come(ranks: Ranks, rank: int, *arguments: Any, run: Callable[..., Any] | None = None) -> None:
    """Starts a rank, again or for the first time; who trains slows down at the end until it has entered."""
    (ranks.dir / f"flag-entered-{rank}").unlink(missing_ok=True)
    (ranks.dir / f"flag-comes-{rank}").touch()
    ranks.restart(rank, run or train, *arguments)


def awaited() -> bool:
    """In a rank: another has been started that has not entered."""
    coming = {f.name.removeprefix("flag-comes-") for f in scratch().glob("flag-comes-*")}
    return not all((scratch() / f"flag-entered-{rank}").exists() for rank in coming)


def train(
    rank: int,
    world: int,
    steps: int,
    algorithm: str = "gradient_allreduce",
    dies: dict[int, int] | None = None,
    pause: float | Sequence[float] = 0.0,
    again: bool = False,
    options: dict[str, Any] | None = None,
    where: str = "before",
    meets: bool = False,
) -> dict[str, Any]:
    """A rank of the job; `dies`: in which step which ranks end themselves; `again`: this is a second life.

    `where` in the step: "before" it (killed, or it "leaves"), "inside" of backward with a bucket sent, at its
    "commit", when all have all averages and none has counted the step, or "after" backward. A buffer counts
    the steps: what is broadcast, and what newcomers get of it, shows. `meets`: at the end all take the mean.
    """
    torch.set_num_threads(1)
    pause = pause if isinstance(pause, float) else pause[rank]
    trigram.init(elastic=True)
    net = model()
    if again:
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(float("nan"))  # nothing of a newcomer's own weights may matter
    opt = trigram.QAdam(net.parameters(), lr=0.01) if algorithm == "qadam" else optimizer(net)
    net.register_buffer("count", torch.full((3,), float("nan") if again else 0.0))
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=True, bucket_mb=0.001, **(options or {}))
    first = trigram.stats(net)["steps"]
    say(("begins", first))
    flag(f"entered-{rank}")
    history = []
    for step in range(first, steps):
        loss = loss_of(net, step, rank)
        if not again or step > first:
            assert bool(net.count.isfinite().all()), "a newcomer's buffers have been given to the others"
        mine = (dies or {}).get(rank) == step and not again
        if mine and where == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if mine and where == "leaves":
            time.sleep(0.004)  # some wait for the others' next round by now, some are on their way to it
            trigram.shutdown()
            return {}
        opt.zero_grad()
        backward(net, loss, where, mine, world if step in (dies or {}).values() else 0)
        opt.step()
        net.count += 1
        history.append(tuple(trigram.stats(net)["ranks"]))
        say(("did", step))
        time.sleep(0.5 if steps - step <= 50 and awaited() else pause)
    own = net.count.clone()
    if meets:
        trigram.consensus(net, timeout=60)
    return {
        "first": first,
        "weights": weights(net),
        "history": history,
        "steps": trigram.stats(net)["steps"],
        "own": own,
        "count": net.count.clone(),
        "adam": {float(s["step"]) for s in opt.state.values()},
    }


def backward(net: torch.nn.Module, loss: torch.Tensor, where: str, dies: bool, meet: int) -> None:
    """The backward pass; in it a rank that `dies` ends itself, as `where` says. `meet`: so many ranks meet at
    their commit, if it is there."""
    if dies and where == "inside":
        next(net.parameters()).register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    if meet and where == "commit":
        _meet_at_commit(meet, dies)
    loss.backward()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)


def _meet_at_commit(world: int, dies: bool) -> None:
    """All ranks are seen to have everything of a step before it is counted; there one ends itself."""
    commit = ElasticModel._commit

    def met(part: ElasticModel) -> bool:
        flag(f"complete-{trigram.rank()}")
        ElasticModel._commit = commit
        if dies:
            for r in range(world):
                await_flag(f"complete-{r}")
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(part)

    ElasticModel._commit = met


# In the test.


def await_step(ranks: Ranks, rank: int, step: int, timeout: float = 60.0) -> None:
    """Waits until a rank has done a step."""
    ranks.await_said(rank, ("did", step), timeout)


def the_same(results: list[Any], living: list[int]) -> dict[str, Any]:
    """All living ranks hold the same bits after the same number of steps."""
    first: dict[str, Any] = results[living[0]]
    for r in living:
        assert torch.equal(results[r]["weights"], first["weights"]), f"rank {r} differs"
        assert results[r]["steps"] == first["steps"]
        assert torch.equal(results[r]["count"], torch.full((3,), float(first["steps"]))), f"rank {r}"
    return first


def reduce(rank: int, world: int, steps: int, dies: dict[int, int]) -> dict[str, Any]:
    """A rank of a job that sums after each step: over the world, and over a new group of its own."""
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    history, found = [], []
    for step in range(steps):
        if dies.get(rank) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        loss_of(net, step, rank).backward()
        opt.step()
        ranks = trigram.stats(net)["ranks"]
        for group in (None, trigram.new_group(ranks)):
            t = torch.full((2,), float(rank + 1))
            trigram.all_reduce(t, group=group)
            found.append(t.tolist())
        history.append(tuple(ranks))
    return {"history": history, "sums": found}


def sums(history: list[tuple[int, ...]]) -> list[list[float]]:
    """What `reduce` finds."""
    return [[float(sum(ranks) + len(ranks))] * 2 for ranks in history for _ in range(2)]
