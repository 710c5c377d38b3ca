"""What a training must keep to go on, saved and loaded: in new processes, other buckets, other worlds."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.algorithm_rows import NAMES_ONCE, ROWS
from tests.support.algorithm_run import OPTIMIZERS, Reversed, Run, go, net, start
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, same_on_all_ranks, says
from tests.support.harness import scratch
from tests.support.marks import long

SAVE, LOAD = Cases(), Cases()
CASES = Cases()
BEFORE, AFTER = 5, 4

STATEFUL = [
    *NAMES_ONCE,
    "topk momentum",
    "qadam 1",
    "qadam decay",
    "local_sgd state adam",
    "share 0.3",
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
    "noloco",
    "sparseloco",
    "async staleness",
]
ASYNC = [k for k in STATEFUL if "async" in k]


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
        undisturbed = go(*start(rank, label, makes(label), 4 + rank), rank, 0, BEFORE + AFTER)
    model, optimizer = start(rank, label, makes(label), 4 + rank)
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
    model, optimizer = start(rank, label, makes(label), 1000 + rank)
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


@CASES.over("topk", "topk momentum", "topk warmup", "signsgd")
def from_the_first_step_on(rank: int, world: int, label: str) -> None:
    """Buckets are in the order of the first pass's gradients from the second pass on, also after a load."""
    expected = go(*start(rank, label, Reversed, 4), rank, 0, 4)
    for at in (1, 2):
        model, optimizer = start(rank, label, Reversed, 4)
        go(model, optimizer, rank, 0, at)
        kept = trigram.algorithm_state(model), model.state_dict(), optimizer.state_dict()
        kept = copy.deepcopy(kept)
        trigram.unwrap(model)
        model, optimizer = start(rank, label, Reversed, 1000 + rank)
        trigram.load_algorithm_state(model, kept[0])
        model.load_state_dict(kept[1])
        optimizer.load_state_dict(kept[2])
        for a, e in zip(go(model, optimizer, rank, at, 4 - at), expected[at:], strict=True):
            equal(a, e, f"from step {at} on")


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
    model, optimizer = start(rank, label, net, 4)
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

    model, optimizer = start(rank, "topk", net, 4)
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
    other, others = start(rank, "topk", net, 5)
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


def saved_on_fewer(rank: int, world: int, label: str) -> Path:
    """All ranks but the last train in a group of their own; the path of rank 0's state."""
    path, row = place(f"another-world-{label}", 0), ROWS[label]
    group = trigram.new_group(range(world - 1))
    if rank < world - 1:
        model = net()
        optimizer = OPTIMIZERS[row.optimizer](model)
        trigram.with_bagua(model, row.algorithm, group=group, **row.options)
        go(model, optimizer, rank, 0, BEFORE)
        state = trigram.algorithm_state(model)
        if rank == 0:
            torch.save(state, path)
    trigram.barrier()
    return path


@CASES.over("gradient_allreduce sgd", "decentralized", "local_sgd", "diloco", "async third", "bytegrad sgd")
def state_of_another_world(rank: int, world: int, label: str) -> None:
    """Saved on fewer ranks: where nothing belongs to a rank, any rank's state will do."""
    if world == 2:
        return
    path = saved_on_fewer(rank, world, label)
    model, optimizer = start(rank, label, net)
    trigram.load_algorithm_state(model, torch.load(path))
    assert trigram.stats(model)["steps"] == BEFORE
    go(model, optimizer, rank, BEFORE, 2)


@CASES.over("topk", "signsgd", "push_sum", "low_precision_decentralized", "powersgd rank")
def state_of_another_world_refused(rank: int, world: int, label: str) -> None:
    """Where residuals or references belong to a rank, they are named."""
    if world == 2:
        return
    path = saved_on_fewer(rank, world, label)
    model, _ = start(rank, label, net)
    text = raises(trigram.MisuseError, trigram.load_algorithm_state, model, torch.load(path))
    says(text, "belongs to one of them", f"saved on {world - 1} ranks", f"{world} ranks train")


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [long(2), 3])
def test_state(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("drained")])
@pytest.mark.parametrize("world", [4])
def test_state_over_tcp(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="tcp")
