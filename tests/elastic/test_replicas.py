"""Replicas of several ranks in an elastic job: FSDP2 inside, an algorithm between them."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.support import patience
from tests.support.checks import close, raises, says
from tests.support.elastic_run import awaited, backward, come, loss_of, model
from tests.support.harness import Died, Ranks, await_flag, flag, run, say, scratch
from trigram.elastic.membership import current

pytestmark = pytest.mark.waits
SIZE = 2


def _optimizer(net: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def _weights(net: torch.nn.Module) -> torch.Tensor:
    """All of them, of this rank's replica."""
    return torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()])


def _await_all(step: int) -> None:
    """Until all members have said that they have made this step: what they have seen of it is of that time.
    Not for ever: one of them may have died."""
    limit = patience.Limit(5)
    while not limit.is_over():
        if all((scratch() / f"flag-did-{r}-{step}").exists() for r in current()[1].ranks):
            return
        time.sleep(0.01)


def _inner(rank: int, life: int) -> Any:
    """The replica's own process group, of another backend; returns its mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    store = dist.FileStore(str(scratch() / f"replica-{rank // SIZE}-{life}"), SIZE)
    dist.init_process_group("gloo", store=store, rank=rank % SIZE, world_size=SIZE)
    return init_device_mesh("cpu", (SIZE,))


class Ema:
    """An average of weights, whose state are DTensors."""

    def __init__(self, net: torch.nn.Module) -> None:
        self.of: Any = dict(net.named_parameters())
        self.kept: Any = {name: p.detach().clone() for name, p in self.of.items()}

    def update(self) -> None:
        with torch.no_grad():
            for name, p in self.of.items():
                self.kept[name].mul_(0.9).add_(p.detach(), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = {name: t.clone() for name, t in state["kept"].items()}


def _trains(
    rank: int,
    world: int,
    steps: int,
    dies: dict[int, int] | None = None,
    algorithm: str = "local_sgd",
    options: dict[str, Any] | None = None,
    where: str = "before",
    life: int = 0,
    drains: dict[int, int] | None = None,
    kind: str = "sgd",
    pause: float = 0.0,
) -> dict[str, Any]:
    """A rank; `dies`: in which step which ranks end, `where` in it."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    trigram.init(elastic=True, replica_size=SIZE)
    mesh = _inner(rank, life)
    net = model()
    if life:
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(float("nan"))  # nothing of a newcomer's own weights may matter
    net.register_buffer("count", torch.full((3,), float("nan") if life else 0.0))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt, ema = _optimizer(net, kind), Ema(net)
    shards = trigram.with_bagua(
        trigram.local_shards(net),
        algorithm,
        optimizer=opt,
        elastic=[ema],
        **({"every": 1} if options is None else options),
    )
    first = trigram.stats(shards)["steps"]
    flag(f"entered-{rank}")
    history = []
    try:
        for step in range(first, steps):
            mine = (dies or {}).get(rank) == step and not life
            if (drains or {}).get(rank) == step:
                trigram.drain()
            if mine:
                _await_all(step - 1)
            if mine and where == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = loss_of(net, step, rank)
            opt.zero_grad()
            if mine and where == "inside":
                net[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            opt.step()
            if mine and where == "update":
                os.kill(os.getpid(), signal.SIGKILL)
            net.count += 1
            trigram.step(shards)
            ema.update()
            history.append(tuple(trigram.stats(shards)["ranks"]))
            flag(f"did-{rank}-{step}")
            say(("did", step))
            time.sleep(0.5 if steps - step <= 50 and awaited() else pause)
    except (trigram.PeerLostError, RuntimeError) as error:
        return {"error": str(error), "history": history}
    except SystemExit:
        return {"left": True, "history": history}
    _await_all(steps - 1)
    assert net.count.tolist() == [steps] * 3
    return {
        "weights": _weights(net),
        "history": history,
        "first": first,
        "size": trigram.world_size(),
        "ema": torch.cat([t.full_tensor().flatten() for t in ema.kept.values()]),
    }


def _reference(history: Sequence[Sequence[int]], kind: str = "sgd") -> torch.Tensor:
    """The weights after steps that these replicas have made, in one process: each has its own optimizer,
    whose state one that joins takes over from the first; each step ends with the mean of their weights."""
    nets: dict[int, tuple[torch.nn.Module, torch.optim.Optimizer]] = {}
    for step, replicas in enumerate(history):
        first = nets[min(set(replicas) & set(nets))] if nets else (model(), None)
        for number in replicas:
            if number not in nets:
                net = copy.deepcopy(first[0])
                opt = _optimizer(net, kind)
                if first[1] is not None:
                    opt.load_state_dict(copy.deepcopy(first[1].state_dict()))
                nets[number] = net, opt
        nets = {number: nets[number] for number in replicas}
        for number, (net, opt) in nets.items():
            opt.zero_grad()
            ranks = range(SIZE * number, SIZE * number + SIZE)
            torch.stack([loss_of(net, step, r) for r in ranks]).mean().backward()
            opt.step()
        with torch.no_grad():
            for each in zip(*(net.parameters() for net, _ in nets.values()), strict=True):
                mean = torch.stack(list(each)).mean(0)
                for p in each:
                    p.copy_(mean)
    return torch.cat([p.detach().flatten() for p in nets[min(nets)][0].parameters()])


@pytest.mark.parametrize("where", ["before", "inside"])
def test_a_lost_rank_takes_its_replica_out(where: str) -> None:
    """The others go on with the next step; the rest of its replica is told, and ends."""
    steps = 8
    results = run(6, _trains, steps, {3: 4}, "local_sgd", {"every": 1}, where, dies=[3])
    assert results[3] == Died(-signal.SIGKILL)
    assert "error" in results[2]
    replicas = [(0, 1, 2)] * 4 + [(0, 2)] * 4
    for r in (0, 1, 4, 5):
        assert results[r]["history"] == [tuple(SIZE * n + r % SIZE for n in numbers) for numbers in replicas]
        assert torch.equal(results[r]["weights"], results[0]["weights"]), f"rank {r}"
        assert results[r]["size"] == 4
    close(results[0]["weights"], _reference(replicas), 1e-9)


def test_who_dies_after_its_update_counts_in_shards_that_were_averaged() -> None:
    """Each shard has the mean of all replicas or of those that remain; all replicas have the same."""
    steps = 5
    results = run(6, _trains, steps, {3: 4}, "local_sgd", {"every": 1}, "update", dies=[3])
    assert results[3] == Died(-signal.SIGKILL) and "error" in results[2]
    for r in (0, 1, 4, 5):
        assert torch.equal(results[r]["weights"], results[0]["weights"]), f"rank {r}"
    found, everyone = results[0]["weights"], [(0, 1, 2)] * 4
    means = [_reference([*everyone, last]) for last in ((0, 1, 2), (0, 2))]
    ok = [(found - mean).abs() < 1e-9 for mean in means]
    assert bool((ok[0] | ok[1]).all()), [int(each.sum()) for each in ok]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_replica_joins_again(kind: str) -> None:
    """Both of its ranks are started again, one a while after the other; they have the optimizer's state of
    their shards from the ranks of their places."""
    steps = 60
    with Ranks(6, _trains, steps, {3: 4}, "local_sgd", {"every": 1}, "before", 0, None, kind, 0.03) as ranks:
        ranks.await_said(0, ("did", 6), 60)
        arguments = steps, None, "local_sgd", {"every": 1}, "before", 1, None, kind, 0.03
        come(ranks, 3, *arguments, run=_trains)
        time.sleep(1)
        come(ranks, 2, *arguments, run=_trains)
        results = ranks.results(90)
    replicas = [tuple(r // SIZE for r in row) for row in results[0]["history"]]
    assert replicas[:4] == [(0, 1, 2)] * 4 and replicas[4] == (0, 2) and replicas[-1] == (0, 1, 2)
    for r in range(6):
        assert torch.equal(results[r]["weights"], results[0]["weights"]), f"rank {r}"
    for r in range(6):
        assert torch.equal(results[r]["ema"], results[0]["ema"]), f"rank {r}"
    assert replicas[results[2]["first"] - 1] == (0, 2) and results[2]["first"] == results[3]["first"]
    assert replicas[results[2]["first"]] == (0, 1, 2)
    close(results[0]["weights"], _reference(replicas, kind), 1e-9)


def _mean_gradients(trained: Sequence[Sequence[int]], kind: str) -> torch.Tensor:
    """The weights after steps with the mean of these replicas' gradients, in one process."""
    net = model()
    opt = _optimizer(net, kind)
    for step, replicas in enumerate(trained):
        opt.zero_grad()
        ranks = [r for number in replicas for r in range(SIZE * number, SIZE * number + SIZE)]
        torch.stack([loss_of(net, step, r) for r in ranks]).mean().backward()
        opt.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("where", ["before", "inside"])
def test_gradients_of_shards(where: str) -> None:
    """FSDP2 inside of replicas and the mean of gradients between them: a step is repeated without the replica
    that was lost in it."""
    steps = 8
    results = run(6, _trains, steps, {3: 4}, "gradient_allreduce", {}, where, dies=[3])
    assert results[3] == Died(-signal.SIGKILL)
    assert "error" in results[2], results[2]
    replicas = [(0, 1, 2)] * 4 + [(0, 2)] * 4
    for r in (0, 1, 4, 5):
        assert results[r]["history"] == [tuple(SIZE * n + r % SIZE for n in numbers) for numbers in replicas]
        assert torch.equal(results[r]["weights"], results[0]["weights"]), f"rank {r}"
    close(results[0]["weights"], _mean_gradients(replicas, "sgd"), 1e-9)


@pytest.mark.parametrize("kind, algorithm", [("sgd", "gradient_allreduce"), ("adamw", "bytegrad")])
def test_a_replica_joins_where_gradients_of_shards_are_averaged(kind: str, algorithm: str) -> None:
    """It contributes nothing to its first step, and has the weights and the optimizer's state after it."""
    steps, options = 60, {"warmup_steps": 0} if algorithm == "bytegrad" else {}
    with Ranks(6, _trains, steps, {3: 4}, algorithm, options, "before", 0, None, kind, 0.03) as ranks:
        ranks.await_said(0, ("did", 6), 60)
        arguments = steps, None, algorithm, options, "before", 1, None, kind, 0.03
        come(ranks, 3, *arguments, run=_trains)
        come(ranks, 2, *arguments, run=_trains)
        results = ranks.results(90)
    for r in range(6):
        assert torch.equal(results[r]["weights"], results[0]["weights"]), f"rank {r}"
        assert torch.equal(results[r]["ema"], results[0]["ema"]), f"rank {r}"
    replicas = [tuple(r // SIZE for r in row) for row in results[0]["history"]]
    joined = results[2]["first"]
    assert joined == results[3]["first"] and replicas[joined - 1] == (0, 2), replicas
    assert replicas[joined:] == [(0, 1, 2)] * (steps - joined), replicas
    if algorithm == "gradient_allreduce":
        replicas[joined] = (0, 2)
        close(results[0]["weights"], _mean_gradients(replicas, kind), 1e-9)


class Summed(torch.autograd.Function):
    """The sum of what the ranks of a replica have, whose gradient all of them have."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Halved(torch.nn.Module):
    """`elastic_run.model`, its hidden layer divided between the ranks of a replica (tensor parallelism)."""

    def __init__(self, place: int) -> None:
        super().__init__()
        whole = model()
        half = slice(8 * place, 8 * place + 8)
        self.one, self.two = torch.nn.Linear(20, 8).double(), torch.nn.Linear(8, 5, bias=False).double()
        with torch.no_grad():
            self.one.weight.copy_(whole[0].weight[half])
            self.one.bias.copy_(whole[0].bias[half])
            self.two.weight.copy_(whole[2].weight[:, half])
        self.bias = torch.nn.Parameter(whole[2].bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Summed.apply(self.two(self.one(x).tanh())) + self.bias


def _in_parts(
    rank: int,
    world: int,
    steps: int,
    dies: dict[int, int] | None = None,
    algorithm: str = "gradient_allreduce",
    where: str = "before",
    life: int = 0,
    spares: Sequence[int] = (),
    drains: dict[int, int] | None = None,
) -> dict[str, Any]:
    """A rank whose replica divides each layer; all of a replica have the same batch."""
    torch.set_num_threads(1)
    trigram.init(elastic=True, replica_size=SIZE, spare=rank in spares)
    _inner(rank, life)
    net = Halved(rank % SIZE)
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=True, bucket_mb=0.001)
    first = trigram.stats(net)["steps"]
    flag(f"entered-{rank}")
    trained = []
    try:
        for step in range(first, steps):
            mine = (dies or {}).get(rank) == step and not life
            if (drains or {}).get(rank) == step:
                trigram.drain()
            if mine:
                _await_all(step - 1)
            if mine and where == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = loss_of(net, step, rank // SIZE)
            opt.zero_grad()
            backward(net, loss, where, mine, world if step in (dies or {}).values() else 0)
            trained.append(tuple(sorted({r // SIZE for r in current()[1].training()})))
            opt.step()
            flag(f"did-{rank}-{step}")
            say(("did", step))
            time.sleep(0.5 if steps - step <= 50 and awaited() else 0.0)
    except (trigram.PeerLostError, RuntimeError) as error:
        return {"error": str(error)}
    except SystemExit:
        return {"left": True}
    _await_all(steps - 1)
    return {"weights": [p.detach() for p in net.parameters()], "trained": trained, "first": first}


def _check_parts(results: Sequence[Any], living: Sequence[int], trained: Sequence[Sequence[int]]) -> None:
    """The weights are those of one process with the whole model."""
    net = model()
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for step, replicas in enumerate(trained):
        opt.zero_grad()
        torch.stack([loss_of(net, step, number) for number in replicas]).mean().backward()
        opt.step()
    for r in living:
        half = slice(8 * (r % SIZE), 8 * (r % SIZE) + 8)
        for found, other in zip(results[r]["weights"], results[living[r % SIZE]]["weights"], strict=True):
            assert torch.equal(found, other), f"rank {r}"
        want = [net[2].bias, net[0].weight[half], net[0].bias[half], net[2].weight[:, half]]
        for found, each in zip(results[r]["weights"], want, strict=True):
            close(found, each.detach(), 1e-9, f"rank {r}")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("where", ["before", "inside", "after", "commit"])
def test_gradients_of_parts(where: str, transport: str) -> None:
    """No step is lost or applied twice, and all places count the same replicas."""
    steps = 8
    arguments = 6, _in_parts, steps, {3: 4}, "gradient_allreduce", where
    results = run(*arguments, transport=transport, dies=[3])
    assert results[3] == Died(-signal.SIGKILL) and "error" in results[2], results[2]
    alone = 5 if where in ("after", "commit") else 4
    counted = [*[(0, 1, 2)] * alone, *[(0, 2)] * (steps - alone)]
    living = [0, 1, 4, 5]
    for r in living:
        found = results[r]["trained"]
        found[4] = counted[4] if where in ("after", "commit") else found[4]
        assert found == counted, f"rank {r}"
    _check_parts(results, living, counted)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "lossless"])
def test_a_spare_replica_takes_the_place(algorithm: str) -> None:
    steps = 8
    results = run(8, _in_parts, steps, {3: 4}, algorithm, "inside", 0, [6, 7], dies=[3])
    counted = [(0, 1, 2)] * 4 + [(0, 2, 3)] * 4
    living = [0, 1, 4, 5, 6, 7]
    assert all(results[r]["trained"] == counted for r in living)
    _check_parts(results, living, counted)


def test_who_is_asked_to_leave_takes_its_replica_along() -> None:
    """With gradients at once, with weights after an averaging step; both of its ranks end well."""
    steps = 8
    results = run(6, _in_parts, steps, None, "gradient_allreduce", "", 0, (), {2: 3})
    assert results[2] == results[3] == {"left": True}
    trained = results[0]["trained"]
    assert trained[0] == (0, 1, 2) and trained[-1] == (0, 2)
    _check_parts(results, [0, 1, 4, 5], trained)
    results = run(6, _trains, steps, None, "local_sgd", {"every": 2}, "", 0, {3: 2})
    assert results[2]["left"] and results[3]["left"]
    for r in (0, 1, 4, 5):
        assert torch.equal(results[r]["weights"], results[0]["weights"]), f"rank {r}"
        assert len(results[r]["history"]) == steps and len(results[r]["history"][-1]) == 2


@pytest.mark.parametrize(
    "algorithm, options",
    [
        ("diloco", {"every": 4}),
        ("diloco", {"every": 4, "fragments": 2, "overlap": True}),
        ("central/int8/every:2", {}),
        ("decentralized", {}),
        ("sparta", {"share": 0.5}),
    ],
)
def test_every_algorithm_between_replicas(algorithm: str, options: dict[str, Any]) -> None:
    """They go on after a loss, and end alike where weights are averaged."""
    results = run(6, _trains, 24, {3: 9}, algorithm, options, "inside", dies=[3])
    assert results[3] == Died(-signal.SIGKILL) and "error" in results[2]
    for r in (0, 1, 4, 5):
        assert len(results[r]["history"]) == 24 and results[r]["history"][-1] == tuple(
            SIZE * n + r % SIZE for n in (0, 2)
        )
        assert bool(results[r]["weights"].isfinite().all())
        close(results[r]["weights"], results[0]["weights"], 0.3)


def _wrong(rank: int, world: int, case: str) -> None:
    if case == "sizes differ":
        says(
            raises(trigram.MisuseError, lambda: trigram.init(elastic=True, replica_size=1 + rank // 2)),
            "rank 2",
        )
    elif case == "not a divisor":
        says(
            raises(trigram.MisuseError, lambda: trigram.init(elastic=True, replica_size=3)), "does not divide"
        )
    elif case == "not elastic":
        says(raises(trigram.MisuseError, lambda: trigram.init(replica_size=2)), "elastic=True")
    elif case == "zero":
        says(
            raises(trigram.ConfigError, lambda: trigram.init(elastic=True, replica_size=0)), "replica_size=0"
        )
    elif case == "some spares":
        start = lambda: trigram.init(elastic=True, replica_size=2, spare=rank == 3)  # noqa: E731
        says(raises(trigram.MisuseError, start), "ranks 2 to 3", "only some are spares")
    elif case == "sharded":
        trigram.init(elastic=True, replica_size=2)
        net = model()
        opt = torch.optim.Adam(net.parameters())
        call = lambda: trigram.with_bagua(net, "sharded", optimizer=opt, elastic=True)  # noqa: E731
        says(raises(trigram.UnsupportedError, call), "replica_size", "fully_shard")
    elif case == "async":
        trigram.init(elastic=True, replica_size=2)
        net = model()
        opt = torch.optim.Adam(net.parameters())
        call = lambda: trigram.with_bagua(net, "async", optimizer=opt, elastic=True)  # noqa: E731
        says(raises(trigram.UnsupportedError, call), "replica_size", "in step")


@pytest.mark.parametrize(
    "case", ["sizes differ", "not a divisor", "not elastic", "zero", "some spares", "sharded", "async"]
)
def test_what_is_refused(case: str) -> None:
    run(4, _wrong, case)


def _rest_is_stuck(rank: int, world: int, steps: int) -> int:
    """Rank 5 dies, and rank 4 does not notice until the others have done all their steps."""
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    trigram.init(elastic=True, replica_size=SIZE)
    net = model()
    fully_shard(net, mesh=_inner(rank, 0))
    opt = _optimizer(net, "sgd")
    shards = trigram.with_bagua(trigram.local_shards(net), "local_sgd", every=1, optimizer=opt, elastic=True)
    for step in range(steps):
        if step == 3 and rank == 5:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and rank == 4:
            await_flag("done-0", 40)  # as in a call of NCCL, until its watchdog ends it
            os.kill(os.getpid(), signal.SIGKILL)
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
        trigram.step(shards)
    flag(f"done-{rank}")
    return int(trigram.stats(shards)["steps"])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_nobody_waits_for_the_rest_of_a_broken_replica(transport: str) -> None:
    results = run(6, _rest_is_stuck, 8, transport=transport, dies=[4, 5])
    assert results[:4] == [8] * 4 and results[4:] == [Died(-signal.SIGKILL)] * 2


def _fails_in_one_place(rank: int, world: int, case: str) -> list[str]:
    torch.set_num_threads(1)
    trigram.init(elastic=True, replica_size=SIZE)
    _inner(rank, 0)
    net = Halved(rank % SIZE)
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    trigram.with_bagua(net, optimizer=opt, elastic=True, bucket_mb=0.001, check_finite=case == "NaN")
    said = []
    for step in range(5):
        opt.zero_grad()
        loss = loss_of(net, step, rank // SIZE)
        if step == 2 and rank == 0 and case == "NaN":
            net.one.weight.register_hook(lambda g: g * float("nan") if step == 2 else g)  # noqa: B023
        if step == 2 and rank == 0 and case == "raises":
            net.one.weight.register_hook(_raises_once())
        try:
            loss.backward()
            said.append("well")
        except (trigram.TrigramError, ValueError) as error:
            said.append(type(error).__name__)
        opt.step() if said[-1] == "well" else opt.zero_grad()
    return said


def _raises_once() -> Any:
    left = [None]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if left:
            left.pop()
            raise ValueError("of the script")
        return gradient

    return hook


@pytest.mark.parametrize("case", ["NaN", "raises"])
def test_a_pass_that_fails_in_one_place_fails_in_all(case: str) -> None:
    """Otherwise the other places wait in its commit."""
    results = run(4, _fails_in_one_place, case)
    errors = {0: "ValueError"} if case == "raises" else {}
    for rank, said in enumerate(results):
        other = "CorruptError" if case == "NaN" else "AbortedError"
        assert said == ["well", "well", errors.get(rank, other), "well", "well"], results


def _evaluates(rank: int, world: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    trigram.init(elastic=True, replica_size=SIZE)
    net = model()
    fully_shard(net, mesh=_inner(rank, 0))
    opt = _optimizer(net, "sgd")
    shards = trigram.with_bagua(
        trigram.local_shards(net), "local_sgd", every=100, optimizer=opt, elastic=True
    )
    x = torch.randn(3, 20, dtype=torch.float64)
    sharded: Any = list(net.parameters())  # in the module they are others while they are gathered

    def gathered() -> torch.Tensor:
        whole = model()
        with torch.no_grad():
            for p, of in zip(whole.parameters(), sharded, strict=True):
                p.copy_(of.full_tensor())
        return whole(x)

    for step in range(3):
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
        trigram.step(shards)
        own = gathered()
        with torch.no_grad(), trigram.consensus(shards):
            mean = net(x)
            close(mean, gathered().detach(), 1e-12)
        close(net(x).detach(), own.detach(), 1e-12)
        assert not torch.equal(mean, own)


def test_a_model_that_was_evaluated_computes_with_its_shards() -> None:
    """FSDP keeps the root's parameters gathered after a forward pass that no backward pass follows."""
    run(4, _evaluates)
