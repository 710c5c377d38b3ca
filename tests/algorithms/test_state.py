"""What a training must keep to go on: saved and loaded, changed on the way, averaged at its end."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.reference.central import CentralWeights
from tests.reference.simulation import flatten
from tests.support.algorithm_rows import NAMES_ONCE, ROWS, Row
from tests.support.algorithm_run import OPTIMIZERS, Reversed, Run, Yardstick, distance, loss, net, total
from tests.support.cases import Cases
from tests.support.checks import close, equal, fingerprint, raises, same_on_all_ranks, says
from tests.support.harness import await_flag, flag, scratch
from tests.support.marks import long
from tests.support.twin_training import x

SAVE, LOAD = Cases(), Cases()
CASES = Cases()
BEFORE, AFTER = 5, 4

STATEFUL = [
    *NAMES_ONCE,
    "topk momentum",
    "qadam 1",
    "qadam decay",
    "local_sgd state adam",
    "central int8 every",
    "central int8 outer",
    "central topk:0.1 async",
    "diloco overlap",
    "decentralized pause",
    "low_precision_decentralized random",
    "gossip ring topk:0.1",
    "gossip random sign",
    "powersgd rank",
    "topk warmup",
    "push_sum pause",
    "async staleness",
]
ASYNC = [k for k in STATEFUL if "async" in k]


def start(rank: int, label: str, make: Callable[[], nn.Module]) -> tuple[Any, torch.optim.Optimizer]:
    row = ROWS[label]
    module = make()
    optimizer = OPTIMIZERS[row.optimizer](module)
    given = {"optimizer": optimizer} if row.given else {}
    return trigram.with_bagua(module, row.algorithm, **given, **row.options), optimizer


def go(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, steps: int) -> list[Tensor]:
    """The weights after each step."""
    seen = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        seen.append(flatten(list(model.parameters())))
    return seen


def place(label: str, rank: int) -> Path:
    return Path(os.environ.get("TRIGRAM_STATES", scratch())) / f"{label.replace('/', '-')}-{rank}.pt"


def makes(label: str) -> Callable[[], nn.Module]:
    """Gradients that arrive in an order of their own: what is kept must be found again."""
    return Reversed if label in ("topk momentum", "powersgd", "qadam 1", "gossip ring topk:0.1") else net


@SAVE.over(*STATEFUL)
def state(rank: int, world: int, label: str) -> None:
    """A training that is asked for its state goes on as one that is not (where nothing is in flight)."""
    undisturbed = []
    if label not in ASYNC:
        torch.manual_seed(4 + rank)
        undisturbed = go(*start(rank, label, makes(label)), rank, 0, BEFORE + AFTER)
    torch.manual_seed(4 + rank)
    model, optimizer = start(rank, label, makes(label))
    go(model, optimizer, rank, 0, BEFORE)
    kept = {"algorithm": trigram.algorithm_state(model)}  # first: what is in flight lands
    kept |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(kept, place(label, rank))
    later = go(model, optimizer, rank, BEFORE, AFTER)
    for step, (a, e) in enumerate(zip(later, undisturbed[BEFORE:], strict=False)):
        equal(a, e, f"{step + 1} steps after the state was asked for")
    torch.save(later, place(f"{label}-later", rank))


@LOAD.over(*STATEFUL)
def state_(rank: int, world: int, label: str) -> None:
    torch.manual_seed(1000 + rank)
    model, optimizer = start(rank, label, makes(label))
    kept = torch.load(place(label, rank))
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    trigram.load_algorithm_state(model, kept["algorithm"])
    expected = torch.load(place(f"{label}-later", rank))
    for step, (a, e) in enumerate(zip(go(model, optimizer, rank, BEFORE, AFTER), expected, strict=True)):
        equal(a, e, f"{step + 1} steps after loading")


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("states")


@pytest.mark.parametrize("case", [c.removeprefix("state-") for c in SAVE])
@pytest.mark.parametrize("world", [2, long(3)])
def test_goes_on_in_new_processes(
    in_launch: Callable[..., None], states: Path, world: int, case: str
) -> None:
    """Bit for bit."""
    kept = states / str(world)
    kept.mkdir(exist_ok=True)
    env = {"TRIGRAM_STATES": str(kept)}
    in_launch("SAVED", case, world, env=env)
    in_launch("LOADED", case, world, env=env)


SAVED = Cases({k.removeprefix("state-"): v for k, v in SAVE.items()})
LOADED = Cases({k.removeprefix("state_-"): v for k, v in LOAD.items()})


@CASES.over(*(k for k in ASYNC if "script" in ROWS[k].options))
def drained(rank: int, world: int, label: str) -> None:
    """Asked for the state, what is in flight lands at once; then training goes on from there."""
    run = Run(rank, world, ROWS[label])
    for steps in (4, 2, 3):
        run.train(steps)
        trigram.algorithm_state(run.model)
        run.sim.algorithm.drain()
        run.yardstick.check(run.weights(), run.sim.weights(rank), f"drained after {run.done} steps")
    run.train(3)


@CASES.over("bytegrad sgd", "topk momentum", "low_precision_decentralized", "diloco", "push_sum")
def state_of_another_time(rank: int, world: int, label: str) -> None:
    """The model has trained on before it is sent back."""
    torch.manual_seed(4)
    model, optimizer = start(rank, label, net)
    go(model, optimizer, rank, 0, BEFORE)
    algorithm = trigram.algorithm_state(model)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    first = go(model, optimizer, rank, BEFORE, AFTER)
    assert ROWS[label].optimizer == "sgd"  # which has no state of its own
    model.load_state_dict(weights)
    trigram.load_algorithm_state(model, algorithm)
    for a, e in zip(go(model, optimizer, rank, BEFORE, AFTER), first, strict=True):
        equal(a, e, "the second time")


@CASES
def state_of_another_algorithm(rank: int, world: int) -> None:
    """Refused in words, on all ranks."""
    model, _ = start(rank, "diloco", net)
    other, optimizer = start(rank, "topk momentum", net)
    go(other, optimizer, rank, 0, 2)
    kept = trigram.algorithm_state(other)
    text = raises(trigram.TrigramError, trigram.load_algorithm_state, model, kept)
    says(text, "topk", "every:2")


@CASES.over(
    "gradient_allreduce sgd", "bytegrad sgd", "topk", "topk momentum", "powersgd rank", "signsgd", "qadam 1"
)
def state_in_other_buckets(rank: int, world: int, label: str) -> None:
    """Buckets of another size, or another order: what is kept of each parameter moves with it."""
    torch.manual_seed(4)
    row = ROWS[label]
    module = Reversed()
    module_of_many = [copy.deepcopy(module), copy.deepcopy(module)]
    before, after = [], []
    for k, model in enumerate([module, *module_of_many]):
        optimizer = OPTIMIZERS[row.optimizer](model)
        size = 25 if k == 0 else 0.001
        trigram.with_bagua(model, row.algorithm, optimizer=optimizer, bucket_mb=size, **row.options)
        if k == 0:
            go(model, optimizer, rank, 0, BEFORE)
            kept = {
                "model": copy.deepcopy(model.state_dict()),
                "optimizer": copy.deepcopy(optimizer.state_dict()),
                "algorithm": trigram.algorithm_state(model),
            }
            before = go(model, optimizer, rank, BEFORE, AFTER)
            continue
        if k == 2:
            go(model, optimizer, rank, 0, 2)  # it has residuals of its own, which are to go
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))
        trigram.load_algorithm_state(model, kept["algorithm"])
        assert trigram.stats(model)["steps"] == BEFORE
        assert len(trigram.stats(model)["buckets"]) >= 2
        after.append(go(model, optimizer, rank, BEFORE, AFTER))
        same_on_all_ranks(rank, world, f"other-buckets-{label}-{k}", after[-1])
    for a, b in zip(*after, strict=True):
        equal(a, b, "a new model, and one that had trained")
    if label == "gradient_allreduce sgd":
        for a, b in zip(after[0], before, strict=True):
            equal(a, b, "the same as in the old buckets")
    if "topk" in label:
        # The largest of other buckets are other ones, but nothing that was kept is lost: it moves on.
        fresh = copy.deepcopy(module)
        fresh.load_state_dict(kept["model"])
        optimizer = OPTIMIZERS[row.optimizer](fresh)
        optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))
        trigram.with_bagua(fresh, row.algorithm, optimizer=optimizer, bucket_mb=0.002, **row.options)
        without = go(fresh, optimizer, rank, BEFORE, AFTER)
        assert float((without[0] - after[0][0]).norm()) > 0, "no residual was loaded"


@CASES
def residuals_move_between_buckets(rank: int, world: int) -> None:
    """Their sum over all ranks, of both phases, stays what it was."""

    def total_residual(model: nn.Module) -> float:
        mine = torch.zeros((), dtype=torch.float64)
        for average, _ in trigram.algorithm_state(model)["carrier"]["buckets"]:
            mine += average["residual"].double().sum()
            if "owned" in average:  # the error of a mean counts once for each rank
                mine += world * average["owned"].double().sum()
        trigram.all_reduce(mine)
        return float(mine)

    torch.manual_seed(4)
    model, optimizer = start(rank, "topk", net)
    go(model, optimizer, rank, 0, BEFORE)
    kept, expected = trigram.algorithm_state(model), total_residual(model)
    assert abs(expected) > 1e-3
    other = trigram.with_bagua(net(), "topk", bucket_mb=0.001)
    assert total_residual(other) == 0
    trigram.load_algorithm_state(other, kept)
    assert abs(total_residual(other) - expected) < 1e-5 * max(1, abs(expected))


@CASES.over("bytegrad", "central/int8/sync", "value", "low_precision_decentralized", "local_sgd")
def state_by_another_name(rank: int, world: int, name: str) -> None:
    """The same trigram written out is the same algorithm."""
    written: dict[str, tuple[Any, dict[str, Any]]] = {
        "bytegrad": ("central/int8/sync", {}),
        "central/int8/sync": ("bytegrad", {}),
        "value": (trigram.Trigram("central", "int8", "sync"), {}),
        "low_precision_decentralized": ("gossip:ring/int8/sync", {}),
        "local_sgd": ("central/full/every:3", {}),
    }
    first = {"value": "bytegrad"}.get(name, name)
    model = trigram.with_bagua(net(), first, **({"every": 3} if name == "local_sgd" else {}))
    go(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 0, 4)
    algorithm, options = written[name]
    other = trigram.with_bagua(net(), algorithm, **options)
    trigram.load_algorithm_state(other, trigram.algorithm_state(model))
    assert trigram.stats(other)["steps"] == 4


def damaged(state: dict[str, Any], how: str) -> Any:
    """A state that does not fit."""
    state = copy.deepcopy(state)
    carrier = state["carrier"]
    if how == "no state":
        return {"model": 1}
    if how == "ranks":
        state["world_size"] += 1
    elif how == "a shape":
        average, _ = carrier["buckets"][-1]
        average["residual"] = average["residual"][:-64]
    elif how == "a dtype":
        average, _ = carrier["buckets"][-1]
        average["residual"] = average["residual"].double()
    elif how == "an option":
        del carrier["buckets"][-1][0]["residual"]
    elif how == "parameters":
        carrier["order"] = carrier["order"][:-1]
    elif how == "buckets":
        carrier["buckets"] = carrier["buckets"][:-1]
    return state


WORDS = {
    "no state": ("algorithm_state",),
    "ranks": ("residual", "ranks"),
    "a shape": ("residual", "shape"),
    "a dtype": ("residual", "float64"),
    "an option": ("residual", "options"),
    "parameters": ("parameters", "requires_grad"),
    "buckets": ("buckets",),
}


@CASES.over(*WORDS)
def state_that_does_not_fit(rank: int, world: int, how: str) -> None:
    """On the last rank only: all ranks refuse, the error names what differs, and nothing was loaded."""
    models = []
    for _ in range(2):
        torch.manual_seed(4)
        model = trigram.with_bagua(net(), "topk", fraction=0.1, bucket_mb=0.002)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        go(model, optimizer, rank, 0, 3)
        models.append((model, optimizer))
    (model, optimizer), (twin, twins) = models
    torch.manual_seed(5)
    other, others = start(rank, "topk", net)
    other = trigram.switch(other, "topk", fraction=0.1) or other
    go(other, others, rank, 10, 6)
    kept = trigram.algorithm_state(other)
    if rank == world - 1:
        kept = damaged(kept, how)
    text = raises(trigram.MisuseError, trigram.load_algorithm_state, model, kept)
    says(text, "load_algorithm_state", *(WORDS[how] if rank == world - 1 else (f"rank(s) {world - 1}",)))
    assert trigram.stats(model)["steps"] == 3
    mine, theirs = (trigram.algorithm_state(m)["carrier"]["buckets"] for m in (model, twin))
    for (a, _), (b, _) in zip(mine, theirs, strict=True):
        assert a.keys() == b.keys() and all(a[k].shape == b[k].shape for k in a)
    weights = [go(m, o, rank, 3, 2)[-1] for m, o in ((model, optimizer), (twin, twins))]
    close(*weights, 1e-6, "training goes on as if nothing had been tried")


@CASES
def states_of_two_trainings(rank: int, world: int) -> None:
    """Ranks that load states of different moments are named."""
    model, optimizer = start(rank, "topk", Reversed)
    early = trigram.algorithm_state(model)
    go(model, optimizer, rank, 0, 3)
    late = trigram.algorithm_state(model)
    text = raises(
        trigram.MisuseError, trigram.load_algorithm_state, model, early if rank == world - 1 else late
    )
    says(text, f"rank(s) {world - 1}", "another")


@CASES
def state_of_a_warm_up(rank: int, world: int) -> None:
    """Saved in the warm-up: it is loaded in the warm-up, and refused after it. Saved after it: the warm-up
    ends, and the weights that were loaded before stay."""
    options: dict[str, Any] = {"warmup_steps": 3, "topology": "complete"}
    model = trigram.with_bagua(net(), "decentralized", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    go(model, optimizer, rank, 0, 2)
    early = trigram.algorithm_state(model)
    go(model, optimizer, rank, 2, 4)
    late, weights = trigram.algorithm_state(model), copy.deepcopy(model.state_dict())
    says(raises(trigram.MisuseError, trigram.load_algorithm_state, model, early), "warm-up", "unwrap")
    for state in (early, late):
        fresh = trigram.with_bagua(net(), "decentralized", **options)
        fresh.load_state_dict(weights)
        trigram.load_algorithm_state(fresh, state)
        for name, t in fresh.state_dict().items():
            equal(t, weights[name], f"loaded weights, each rank its own: {name}")
        assert trigram.stats(fresh)["steps"] == (2 if state is early else 6)


@CASES.over("gradient_allreduce sgd", "decentralized", "local_sgd", "diloco", "async third", "bytegrad sgd")
def state_of_another_world(rank: int, world: int, label: str) -> None:
    """Saved on fewer ranks: where nothing belongs to a rank, any rank's state will do."""
    group = trigram.new_group(range(world - 1))
    place_of_it = place(f"another-world-{label}", 0)
    row = ROWS[label]
    if rank < world - 1 and world > 2:
        model = net()
        optimizer = OPTIMIZERS[row.optimizer](model)
        trigram.with_bagua(model, row.algorithm, group=group, **row.options)
        go(model, optimizer, rank, 0, BEFORE)
        state = trigram.algorithm_state(model)
        if rank == 0:
            torch.save(state, place_of_it)
    trigram.barrier()
    if world == 2:
        return
    model, optimizer = start(rank, label, net)
    trigram.load_algorithm_state(model, torch.load(place_of_it))
    assert trigram.stats(model)["steps"] == BEFORE
    go(model, optimizer, rank, BEFORE, 2)


@CASES.over("topk", "signsgd", "push_sum", "low_precision_decentralized", "powersgd rank")
def state_of_another_world_refused(rank: int, world: int, label: str) -> None:
    """Where residuals or references belong to a rank, they are named."""
    if world == 2:
        return
    row = ROWS[label]
    group = trigram.new_group(range(world - 1))
    place_of_it = place(f"another-world-{label}", 0)
    if rank < world - 1:
        model = net()
        optimizer = OPTIMIZERS[row.optimizer](model)
        trigram.with_bagua(model, row.algorithm, group=group, **row.options)
        go(model, optimizer, rank, 0, BEFORE)
        state = trigram.algorithm_state(model)
        if rank == 0:
            torch.save(state, place_of_it)
    trigram.barrier()
    model, _ = start(rank, label, net)
    text = raises(trigram.MisuseError, trigram.load_algorithm_state, model, torch.load(place_of_it))
    says(text, "belongs to one of them", f"saved on {world - 1} ranks", f"{world} ranks train")


# Switching.


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
    torch.manual_seed(8)
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


@CASES
def switch_to_nonsense(rank: int, world: int) -> None:
    """The old one goes on."""
    run = Run(rank, world, ROWS["low_precision_decentralized"])
    run.train(3)
    says(raises(trigram.UnsupportedError, trigram.switch, run.model, "carrier_pigeon"), "carrier_pigeon")
    says(raises(trigram.UnsupportedError, trigram.switch, run.model, "topk", wings=2), "wings")
    run.train(3)


# Consensus.


def part(module: nn.Module, rank: int) -> None:
    """Replicas go apart."""
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.add_(x(rank, k, *p.shape, salt=6), alpha=0.1)
        for k, b in enumerate(module.buffers()):
            if b.is_floating_point():
                b.add_(x(rank, k, *b.shape, salt=7).abs())


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3))


def average(t: Tensor, world: int) -> Tensor:
    t = t.detach().clone()
    trigram.all_reduce(t)
    return t / world


WEIGHTS = ["decentralized", "low_precision_decentralized", "async third", "local_sgd", "push_sum"]


@CASES.over(*WEIGHTS, "async_decentralized third")
def consensus(rank: int, world: int, label: str) -> None:
    """All ranks get the average, weights and buffers; inside of `with` only for a while."""
    torch.manual_seed(8)
    model, optimizer = start(rank, label, normed)
    go(model, optimizer, rank, 0, 1)
    trigram.algorithm_state(model)  # what is in flight lands
    part(model, rank)
    floats = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    expected = [average(t, world) for t in floats]
    before = [t.detach().clone() for t in floats]
    model.eval()
    with trigram.consensus(model):
        for t, e in zip(floats, expected, strict=True):
            close(t.detach(), e, 1e-6, "inside")
        same_on_all_ranks(rank, world, f"inside-{label}", floats)
        if rank == 0:  # an evaluation; nobody else need take part
            with torch.no_grad():
                model(x(0, 5))
    model.train()
    for t, e in zip(floats, before, strict=True):
        equal(t.detach(), e, "replicas come back")
    trigram.consensus(model)
    for t, e in zip(floats, expected, strict=True):
        close(t.detach(), e, 1e-6, "a plain call")
    same_on_all_ranks(rank, world, f"plain-{label}", floats)
    go(model, optimizer, rank, 2, 3)


@CASES
def consensus_of_buffers(rank: int, world: int) -> None:
    """Where weights are the same anyway, buffers are what differs."""
    torch.manual_seed(8)
    model, optimizer = start(rank, "bytegrad sgd", normed)
    go(model, optimizer, rank, 0, 3)
    weights, mean = fingerprint(model.parameters()), average(model[1].running_mean, world)
    own = model[1].running_mean.clone()
    with trigram.consensus(model):
        close(model[1].running_mean, mean, 1e-6, "inside")
    equal(model[1].running_mean, own, "it comes back")
    trigram.consensus(model)
    close(model[1].running_mean, mean, 1e-6, "a plain call")
    assert fingerprint(model.parameters()) == weights


@CASES.over(*WEIGHTS)
def consensus_within_a_training(rank: int, world: int, label: str) -> None:
    """With `with`, training goes on as if nothing had been asked."""
    if label == "async third":
        return  # what is in flight may land first
    run = Run(rank, world, ROWS[label])
    for _ in range(2):
        run.train(3)
        mean = flatten(run.sim.consensus())
        with trigram.consensus(run.model):
            Yardstick(True).check(run.weights(), mean, "inside")
    run.train(2)


@CASES
def consensus_and_an_error(rank: int, world: int) -> None:
    """Replicas come back when the block raises."""
    model, _ = start(rank, "decentralized", net)
    part(model, rank)
    before = fingerprint(model.parameters())

    def block() -> None:
        with trigram.consensus(model):
            raise ZeroDivisionError

    raises(ZeroDivisionError, block)
    assert fingerprint(model.parameters()) == before


class Mixed(nn.Module):
    """Tied weights, a buffer of integers, one that is not saved, and a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = normed()
        self.tied = nn.Linear(6, 9)
        self.tied.weight = self.body[0].weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += 1
        return self.body(inputs) + self.tied(inputs)[:, :3]

    def get_extra_state(self) -> Any:
        return {"version": [3]}

    def set_extra_state(self, state: Any) -> None:
        pass


@CASES.over(*WEIGHTS, "gradient_allreduce sgd", "async_decentralized third")
def consensus_state_dict(rank: int, world: int, label: str) -> None:
    """The averaged state on every rank; the model keeps its weights, and trains on."""
    torch.manual_seed(8)
    model, optimizer = start(rank, label, Mixed)
    go(model, optimizer, rank, 0, 1)
    trigram.algorithm_state(model)  # what is in flight lands
    if not label.startswith("gradient"):
        part(model, rank)
    else:
        model.body[1].running_mean.add_(rank)
    before = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    expected = {k: average(v, world) for k, v in before.items() if v.is_floating_point()}
    state = trigram.consensus_state_dict(model)
    assert list(state) == list(model.state_dict()) and "scratch" not in state
    assert state["_extra_state"] == {"version": [3]} and state._metadata == model.state_dict()._metadata
    for name, e in expected.items():
        close(state[name], e, 1e-6, name)
        equal(model.state_dict()[name], before[name], f"the model's {name}")
        assert state[name].data_ptr() != model.state_dict()[name].data_ptr()
    tied = state["body.0.weight"], state["tied.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    same_on_all_ranks(
        rank, world, f"state-dict-{label}", [v for v in state.values() if isinstance(v, Tensor)]
    )
    fresh = Mixed()
    fresh.load_state_dict(state)
    if rank == 0:  # an evaluation; nobody else need take part
        fresh.eval()(x(0, 5))
    go(model, optimizer, rank, 1, 3)
    assert trigram.stats(model)["steps"] == 4


@CASES
def consensus_of_ignored(rank: int, world: int) -> None:
    """What `ignore` names is left alone, by every name that it has."""
    torch.manual_seed(8)
    module = Mixed()
    names = ["tied.weight", "body.1.running_var", "body.3.bias"]
    model = trigram.with_bagua(module, "local_sgd", ignore=names)
    part(model, rank)
    before = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    left = {*names, "body.0.weight"}
    for state in (trigram.consensus_state_dict(model), trigram.consensus(model) and model.state_dict()):
        for name, was in before.items():
            if was.is_floating_point():
                assert torch.equal(state[name], was) == (name in left), name


@CASES.over("gradient_allreduce", "local_sgd", "central:median/full/every:2")
def consensus_in_chunks(rank: int, world: int, algorithm: str) -> None:
    """The tensors that an average needs do not grow with the model, apart from the copy that is kept."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from trigram.averaging import mean
    from trigram.collectives import coalesced

    model = nn.Module()
    for k, shape in enumerate([(3 * mean.CHUNK,), (1024, mean.CHUNK // 1024), (5, 7)]):
        model.register_parameter(f"p{k}", nn.Parameter(torch.ones(shape) * (rank + 1)))
    model.register_buffer("turned", torch.ones(2048, mean.CHUNK // 2048 + 1).t())
    trigram.with_bagua(model, algorithm)
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            t.fill_(rank)
    whole = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    largest = max(t.nbytes for t in model.parameters())
    known, sizes = set(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                    sizes.append((t.untyped_storage().nbytes(), str(func)))
            return out

    known |= {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    made, registered = coalesced.empty, []
    coalesced.empty = lambda *a, **k: registered.append(made(*a, **k)) or registered[-1]
    try:
        with Watch():
            trigram.consensus(model)
    finally:
        coalesced.empty = made
    assert registered and max(t.nbytes for t in registered) <= 1.5 * mean.CHUNK
    copies = [n for n, func in sizes if "clone" in func]
    assert sum(copies) <= whole + 8 * mean.CHUNK
    others = [n for n in sizes if "clone" not in n[1]]
    assert max(n for n, _ in others) <= 2 * world * mean.CHUNK < largest * 2, others
    middle = (world - 1) / 2
    for t in (*model.parameters(), *model.buffers()):
        assert bool((t == middle).all())


@CASES
def consensus_without_one(rank: int, world: int) -> None:
    """Asked for on all ranks but the last: it is named, and nobody hangs."""
    model, _ = start(rank, "decentralized", net)
    trigram.barrier()
    if rank < world - 1:
        text = raises(
            (trigram.TimeoutError, trigram.MismatchError), lambda: trigram.consensus(model, timeout=2)
        )
        says(text, f"rank {world - 1}" if world == 2 else "rank")
        flag(f"consensus-{rank}")
    else:
        for r in range(world - 1):
            await_flag(f"consensus-{r}", 20)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [long(2), 3])
def test_state(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm", patience=90 if "all" in case else 40)


SOME = [c for c in CASES if c.startswith(("consensus", "drained", "switch_finds"))]


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("world", [4])
def test_state_over_tcp(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="tcp")
