"""Averaging steps with a quorum: who takes part, what comes out, and that nobody waits for ever."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.support.algorithm_run import loss, net
from tests.support.cases import Cases
from tests.support.checks import close, equal, raises, says
from tests.support.harness import Died, Ranks, await_flag, flag, run, say
from trigram.model.wrapped import lookup

CASES = Cases()
EVERY = 4


class Walk(nn.Module):
    """Weights that fall by the learning rate in each step, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(700))
        self.v = nn.Parameter(torch.zeros(3, 5))

    def forward(self) -> Tensor:
        return self.w.sum() + self.v.sum()

    def value(self) -> float:
        """What all weights are."""
        found = torch.cat([self.w.detach(), self.v.detach().flatten()])
        equal(found, found[0].expand(715))
        return float(found[0])


def walk(
    rank: int, quorum: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Walk, nn.Module, Callable[[], None]]:
    """The module, the model, and a function that makes a training step."""
    module = Walk().to(dtype)
    model = trigram.with_bagua(module, f"central/full/every:{EVERY}", quorum=quorum, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125 * (rank + 1))

    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return module, model, step


def _one_is_late(
    rank: int, model: nn.Module, step: Callable[[], None], period: int
) -> tuple[float, int, int]:
    """Ranks 0 and 1 make three averaging steps, one in each period of steps; rank 2 is late for two of them.

    Returns:
        A weight after the second one, and the training steps of rank 2 that count in its first; and the one
        after it, if it heard in that one that it takes part: 1 or 0.
    """
    if rank < 2:
        for _ in range(2 * period):
            step()
        two = float(next(model.parameters()).detach()[0])
        assert trigram.stats(model)["rounds"] == 2
        flag(f"two-{rank}")
        await_flag("says it is there")
        for _ in range(period):
            step()
        assert trigram.stats(model)["rounds"] == 3
        return two, 0, 0
    step()
    await_flag("two-0")
    await_flag("two-1")
    for _ in range(period):
        step()
    trained = 1 + period
    assert trigram.stats(model)["rounds"] == 0
    flag("says it is there")
    schedule = lookup(model, "test").hooks.schedule
    while trigram.stats(model)["rounds"] == 0:
        time.sleep(0.02)
        step()
        trained += 1
    assert schedule.counts.made == 0, "its next one is due when that of the others is"
    since = min(schedule.counts.trained)  # of the fragment that was averaged
    return 0.0, trained - since, since


def _perturbed(module: Walk, model: nn.Module) -> Callable[[], None]:
    """A step whose pass is at other weights, as those that look for flat minima make them."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.375)

    def move(by: float) -> None:
        with torch.no_grad():
            for p in module.parameters():
                p.add_(by)

    def step() -> None:
        optimizer.zero_grad()
        move(64.0)
        model().backward()
        move(-64.0)
        optimizer.step()

    return step


def _late(rank: int, world: int, perturbs: bool | None) -> tuple[float, float, float, int, int]:
    """Weights after the second averaging step and after the third, their mean, and the steps of rank 2."""
    weighs = {"sample_weight": lambda: 3.0} if perturbs is None else {}  # each step of all ranks, alike
    module, model, step = walk(rank, 2, grace=0.5, **weighs)
    if rank == 2 and perturbs:
        step = _perturbed(module, model)
    two, *trained = _one_is_late(rank, model, step, EVERY)
    three = module.value()
    with trigram.consensus(model):
        mean = module.value()
    kept = trigram.algorithm_state(model)["carrier"]["rounds"]
    assert kept.get("each", [kept["trained"]]) == trained[1:], (
        "what it has trained since counts after a resumption"
    )
    return two, three, mean, *trained


@pytest.mark.parametrize("transport, perturbs", [("shm", None), ("tcp", False), ("shm", True)])
def test_a_late_rank_is_merged(transport: str, perturbs: bool | None) -> None:
    """Two of three go on, and the third is in the next averaging step, weighted by all its training steps."""
    results = run(3, _late, perturbs, transport=transport, timeout=40)
    two = -2 * EVERY * 0.125 * 1.5
    _, _, mean, trained, since = results[2]
    assert results[0][0] == results[1][0] == two and trained >= EVERY + 1
    there = [two - EVERY * 0.125, two - EVERY * 0.25, -trained * 0.375]
    weights = [EVERY, EVERY, trained]
    expected = sum(x * w for x, w in zip(there, weights, strict=True)) / sum(weights)
    for rank, found in enumerate(results):
        own = since * 0.375 if rank == 2 else 0.0
        assert abs(found[1] - expected + own) < 1e-5, (results, expected)
    assert abs(mean - expected + since * 0.125) < 1e-5, (results, expected)


def _late_for_a_fragment(rank: int, world: int) -> tuple[list[float], int, int]:
    """The values of the weights after the third averaging step, which is of the second fragment, as the first
    was, and the training steps of rank 2."""
    module, model, step = walk(rank, 2, grace=0.5, fragments=2)
    _, trained, since = _one_is_late(rank, model, step, EVERY // 2)
    found = torch.cat([p.detach().flatten() for p in module.parameters()]).unique().tolist()
    with trigram.consensus(model):  # all ranks end the averaging steps together
        pass
    return found, trained, since


def test_a_late_rank_is_merged_fragment_by_fragment() -> None:
    results = run(3, _late_for_a_fragment, timeout=40)
    trained = results[2][1]
    first = -EVERY * 0.125 * 1.5  # of the first fragment, by ranks 0 and 1
    there = [-EVERY / 2 * 0.125 * 1.5 - EVERY * 0.125, -EVERY / 2 * 0.125 * 1.5 - EVERY * 0.25]
    there.append(-trained * 0.375)
    weights = [EVERY, EVERY, trained]
    mean = sum(x * w for x, w in zip(there, weights, strict=True)) / sum(weights)
    others = [first - EVERY / 2 * 0.125, first - EVERY / 2 * 0.25, -trained * 0.375]
    _are(results, mean, others)


def _are(results: list[Any], mean: float, others: list[float]) -> None:
    """Each rank has two values, but for what rank 2 has trained since it was taken in."""
    for rank, (found, *_) in enumerate(results):
        own = results[2][2] * 0.375 if rank == 2 else 0.0
        expected = sorted((mean - own, others[rank] - own))
        both = [found[0], found[-1]]  # they may be equal
        assert max(abs(a - b) for a, b in zip(both, expected, strict=True)) < 1e-5, (results, expected)


OUTER = {"outer_lr": 0.5, "outer_momentum": 0.25}


def _outer_steps(changes: list[float]) -> float:
    """The weights that all agree on, from 0, after outer steps with these means of differences."""
    weights = velocity = 0.0
    for change in changes:
        velocity = 0.25 * velocity + change
        weights += 0.5 * (change + 0.25 * velocity)
    return weights


def _late_for_an_outer_step(rank: int, world: int, fragments: int) -> tuple[list[float], int, int]:
    """Values of the weights after the third averaging step, and the training steps of rank 2."""
    module, model, step = walk(rank, 2, grace=0.5, fragments=fragments, **OUTER)
    _, trained, since = _one_is_late(rank, model, step, EVERY // fragments)
    found = torch.cat([p.detach().flatten() for p in module.parameters()]).unique().tolist()
    with trigram.consensus(model):
        pass
    return found, trained, since


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_late_rank_makes_the_outer_step_of_the_others(transport: str) -> None:
    """It began from weights that all agreed on before two averaging steps: its difference to those counts,
    and it goes on from what the others have agreed on, with their outer momentum."""
    results = run(3, _late_for_an_outer_step, 1, transport=transport, timeout=40)
    _, trained, since = results[2]
    each = [-EVERY * 0.125, -EVERY * 0.25, -trained * 0.375]
    weights = [EVERY, EVERY, trained]
    third = sum(x * w for x, w in zip(each, weights, strict=True)) / sum(weights)
    expected = _outer_steps([(each[0] + each[1]) / 2] * 2 + [third])
    for rank, (found, *_) in enumerate(results):
        own = since * 0.375 if rank == 2 else 0.0
        assert len(found) == 1 and abs(found[0] - expected + own) < 1e-5, (results, expected)


def test_a_late_rank_makes_the_outer_step_of_a_fragment() -> None:
    """It is behind for the second fragment, which the first averaging step was of, and not for the first."""
    results = run(3, _late_for_an_outer_step, 2, timeout=40)
    trained, half = results[2][1], EVERY // 2
    both = -1.5 * 0.125
    second = [-EVERY * 0.125, -EVERY * 0.25, -trained * 0.375]
    weights = [EVERY, EVERY, trained]
    third = sum(x * w for x, w in zip(second, weights, strict=True)) / sum(weights)
    mean = _outer_steps([half * both, third])
    first = _outer_steps([EVERY * both])
    others = [first - half * 0.125, first - half * 0.25, -trained * 0.375]
    _are(results, mean, others)


def _pauses_when_one_is_behind(rank: int, world: int) -> tuple[float, float, float]:
    """The means of all weights, when rank 2 has missed two averaging steps, and after the third; that of a
    rank that has gone on from the state of the first pause."""
    module, model, step = walk(rank, 2, grace=0.5, **OUTER)
    for _ in range(2 * EVERY if rank < 2 else 3):
        step()
    if rank == 2:
        await_flag("two-0")
        await_flag("two-1")
    else:
        flag(f"two-{rank}")
    with trigram.consensus(model):
        first = module.value()
    kept, state = [p.detach().clone() for p in module.parameters()], trigram.algorithm_state(model)
    found = []
    for goes_on in (False, True):
        if goes_on:
            trigram.unwrap(model)
            module, model, step = walk(rank, 2, grace=0.5, **OUTER)
            with torch.no_grad():
                for p, value in zip(module.parameters(), kept, strict=True):
                    p.copy_(value)
            trigram.load_algorithm_state(model, state)
        for _ in range(EVERY):
            step()
        with trigram.consensus(model):
            found.append(module.value())
    return first, found[0], found[1]


def test_all_agree_in_a_pause() -> None:
    """Who is behind gets what the others have agreed on; what it has trained is its difference to that."""
    results = run(3, _pauses_when_one_is_behind, timeout=40)
    both = -EVERY * 0.125 * 1.5
    two = _outer_steps([both, both])
    first = two - 3 * 0.375 / 3
    # Rank 2 has made three steps already, so that it waits for the others after one more, and makes three.
    changes = [first - two - EVERY * 0.125, first - two - EVERY * 0.25, first - two - 0.375]
    second = _outer_steps([both, both, sum(changes) / 3]) - 3 * 0.375 / 3
    for found in results:
        assert max(abs(a - b) for a, b in zip(found, (first, second, second), strict=True)) < 1e-5, (
            results,
            first,
            second,
        )


@CASES.over(
    *(
        f"{algorithm}, {fragments}, {how}"
        for algorithm in ("local_sgd", "diloco")
        for fragments in (1, 3)
        for how in ("at the boundary", "overlapping")
    )
)
def all_of_them(rank: int, world: int, what: str) -> None:
    """With a quorum of all ranks it is local SGD, or DiLoCo."""
    algorithm, fragments, how = what.split(", ")
    found = []
    late = {"overlap": how == "overlapping"}
    for options in ({"quorum": world}, {}):
        torch.manual_seed(8)
        module = net()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        model = trigram.with_bagua(module, algorithm, every=3, fragments=int(fragments), **late, **options)
        for step in range(13):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        due = 12 if late["overlap"] else 13  # the last one ends with the next step
        assert trigram.stats(model)["rounds"] == due * int(fragments) // 3
        found.append([p.detach().clone() for p in module.parameters()])
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-6 * float(b.abs().max()))


@CASES.over("quorum", "quorum, loads", "all", "all, loads")
def what_a_script_changes_by_hand(rank: int, world: int, what: str) -> None:
    """Between the backward pass and the update, while the average is under way, it is not lost; nor are
    weights that are loaded after the update of a step whose average is due."""
    options = {"quorum": world} if "quorum" in what else {}
    module, counts = Walk(), 10
    model = trigram.with_bagua(module, f"central/full/every:{EVERY}", overlap=True, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125 * (rank + 1))
    zeros = {name: torch.zeros_like(t) for name, t in module.state_dict().items()}
    for number in range(10):
        if "loads" in what and number == 2 * EVERY:
            module.load_state_dict(zeros)
            counts = 2
        optimizer.zero_grad()
        model().backward()
        with torch.no_grad():
            for p in module.parameters():
                p.data.sub_(0.5)
        optimizer.step()
    expected = -counts * (0.125 * (world + 1) / 2 + 0.5)
    with trigram.consensus(model):
        assert abs(module.value() - expected) < 1e-5, (module.value(), expected)
    trigram.unwrap(model)


@CASES
def a_pause(rank: int, world: int) -> None:
    """Evaluation, a checkpoint and another algorithm in the middle; averaging steps go on after them."""
    module, model, step = walk(rank, world)
    for _ in range(EVERY + 2):
        step()
    with trigram.consensus(model):
        mean = module.value()
    state = trigram.algorithm_state(model)
    assert abs(mean + (EVERY + 2) * 0.125 * (world + 1) / 2) < 1e-6
    for _ in range(2):
        step()
    assert trigram.stats(model)["rounds"] == 2
    agreed = module.value()
    step()
    trigram.load_algorithm_state(model, state)
    trigram.switch(model, "local_sgd", every=2)
    for _ in range(2):
        step()
    assert abs(module.value() - agreed + 0.125 * (world + 1) / 2 * 3) < 1e-6
    trigram.unwrap(model)


@CASES.over("float32", "float64")
def by_samples(rank: int, world: int, dtype: str) -> None:
    """A rank counts for its samples; one that has none may hold anything, and gets the mean of the others.
    Weights in float64 get differences, which repair no NaN."""
    for weights in ([3.0, 1.0, 2.0], [1.0, 0.0, 1.0]):
        module, model, step = walk(rank, world, getattr(torch, dtype), sample_weight=weights[rank])
        for number in range(EVERY):
            if number == EVERY - 1 and not weights[rank]:
                with torch.no_grad():
                    module.w.fill_(float("nan"))
            step()
        parts = [w * (k + 1) for k, w in enumerate(weights[:world])]
        expected = -EVERY * 0.125 * sum(parts) / sum(weights[:world])
        assert abs(module.value() - expected) < 1e-5
        trigram.unwrap(model)


@CASES
def a_state_in_a_period(rank: int, world: int) -> None:
    """What a rank has trained since the last average counts after a resumption."""
    weigh = iter([8.0, 8.0, 1.0, 1.0] if rank == 0 else [1.0] * 4)
    module, model, step = walk(rank, world, sample_weight=lambda: next(weigh))
    step()
    step()
    kept, state = [p.detach().clone() for p in module.parameters()], trigram.algorithm_state(model)
    # States of earlier versions have these, and are compared by them.
    assert state["carrier"]["rounds"].keys() == {"weight", "rounds", "trained"}
    trigram.unwrap(model)
    module, model, step = walk(rank, world, sample_weight=lambda: next(weigh))
    with torch.no_grad():
        for p, value in zip(module.parameters(), kept, strict=True):
            p.copy_(value)
    trigram.load_algorithm_state(model, state)
    step()
    step()
    parts = [18.0, *[4.0 * (k + 1) for k in range(1, world)]]
    expected = -EVERY * 0.125 * sum(parts) / (18.0 + 4.0 * (world - 1))
    assert abs(module.value() - expected) < 1e-5, (module.value(), expected)
    trigram.unwrap(model)


@CASES
def two_models(rank: int, world: int) -> None:
    """A rank could wait for the leader in one, and the leader for it in the other."""
    _, model, _ = walk(rank, world)
    says(raises(trigram.UnsupportedError, walk, rank, world), "another model", "quorum=")
    trigram.unwrap(model)
    _, model, step = walk(rank, world)
    step()
    trigram.unwrap(model)


@CASES.over(0, 1)
def ends_early(rank: int, world: int, who: int) -> None:
    """Nobody waits for a rank that has ended its training, be it the first; the others go on."""
    module, model, step = walk(rank, world)
    for _ in range(EVERY if rank == who else 5 * EVERY):
        step()
    alone = who == 0 or world == 2
    if rank != who and who == 0:
        assert trigram.stats(model)["rounds"] == 1
    elif rank != who:
        assert trigram.stats(model)["rounds"] == 5
    with trigram.consensus(model):
        value = module.value()
    assert alone or value < 0


@CASES
def a_state_between_fragments(rank: int, world: int) -> None:
    """A resumption goes on with the next fragment, and with what was trained since the last of each."""
    module, model, step = walk(rank, world, fragments=2)
    for _ in range(3):
        step()
    kept, state = [p.detach().clone() for p in module.parameters()], trigram.algorithm_state(model)
    assert state["carrier"]["rounds"]["next"] == 0  # on all ranks: any of them may load it
    for _ in range(6):
        step()
    went_on = [p.detach().clone() for p in module.parameters()]
    trigram.unwrap(model)
    module, model, step = walk(rank, world, fragments=2)
    with torch.no_grad():
        for p, value in zip(module.parameters(), kept, strict=True):
            p.copy_(value)
    trigram.load_algorithm_state(model, state)
    for _ in range(6):
        step()
    for p, value in zip(module.parameters(), went_on, strict=True):
        equal(p.detach(), value)
    trigram.unwrap(model)


@CASES.over("nan", "-1")
def no_weight(rank: int, world: int, weight: str) -> None:
    _, _, step = walk(rank, world, sample_weight=float(weight) if rank == 1 else 1.0)
    for _ in range(EVERY - 1):
        step()
    says(raises(trigram.MisuseError, step), "sample_weight", "rank 1", "nan" if weight == "nan" else "-4")


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "more than there are": ("local_sgd", {"quorum": 9}, ("quorum=9", "ranks")),
    "none": ("local_sgd", {"quorum": 0}, ("quorum=0",)),
    "no time": ("local_sgd", {"quorum": 1, "grace": -1}, ("grace=-1",)),
    "grace alone": ("local_sgd", {"grace": 1.0}, ("quorum=",)),
    "a codec": ("central/int8/every:4", {"quorum": 1}, ("quorum",)),
    "robust": ("central:median/full/every:4", {"quorum": 1}, ("quorum",)),
    "gossip": ("gossip:ring/full/every:4", {"quorum": 1}, ("quorum",)),
    "async": ("async", {"quorum": 1}, ("quorum",)),
}


@CASES.over(*REFUSED)
def refused(rank: int, world: int, label: str) -> None:
    algorithm, options, words = REFUSED[label]
    says(raises(trigram.UnsupportedError, trigram.with_bagua, net(), algorithm, **options), *words)


@CASES
def ranks_disagree(rank: int, world: int) -> None:
    options = {"quorum": 1 if rank == world - 1 else 2}
    raises(trigram.MismatchError, trigram.with_bagua, net(), "local_sgd", **options)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world, transport", [(2, "shm"), (3, "tcp")])
def test_quorum(in_launch: Callable[..., None], world: int, transport: str, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)


def _on_one_rank(rank: int, world: int) -> None:
    module, model, step = walk(rank, 3)
    for _ in range(EVERY):
        step()
    assert abs(module.value() + EVERY * 0.125) < 1e-6
    trigram.unwrap(model)


def test_on_one_rank_it_is_plain_training() -> None:
    """As every algorithm is, so a checkpoint of several can be looked at."""
    run(1, _on_one_rank)


def _meets_in_collectives(rank: int, world: int, quorum: int, overlap: bool) -> int:
    """Ranks of different speed, whose averaging steps are due at different steps, meet in calls."""
    trigram.init(op_timeout=20)
    _, model, step = walk(rank, quorum, grace=0.0, overlap=overlap)
    for number in range(30):
        time.sleep((0.001, 0.005, 0.02)[rank])
        step()
        if number % 5 == 4:
            total = torch.ones(1)
            trigram.all_reduce(total)
            assert total.item() == world
    trigram.barrier()
    return int(trigram.stats(model)["rounds"])


@pytest.mark.parametrize("quorum, overlap", [(1, False), (2, False), (2, True)])
def test_late_ranks_meet_in_collectives_of_the_script(quorum: int, overlap: bool) -> None:
    """One of them waits in a call, and another for a decision: neither waits for the other without an end."""
    assert min(run(3, _meets_in_collectives, quorum, overlap, timeout=60)) >= 1


def _consensus_of_another(rank: int, world: int) -> None:
    """The leader waits in the consensus of another model, and rank 1 for its decision."""
    trigram.init(op_timeout=10)
    other = trigram.with_bagua(torch.nn.Linear(2, 2), "decentralized")
    _, model, step = walk(rank, world)
    for _ in range(EVERY - 1 if rank == 0 else EVERY):
        step()
    with trigram.consensus(other):
        pass
    for _ in range(EVERY):
        step()
    with trigram.consensus(model):
        pass


def test_a_leader_in_the_consensus_of_another_model_lets_the_others_go_on() -> None:
    run(2, _consensus_of_another, timeout=60)


def _collective_while_an_average_is_under_way(rank: int, world: int) -> None:
    """Ranks 0 and 2 average, and wait in a collective of the script before they apply it; rank 1 is late, and
    waits for the next decision before it comes to that."""
    trigram.init(op_timeout=10)
    module = Walk()
    model = trigram.with_bagua(module, f"central/full/every:{EVERY}", quorum=2, grace=0.0, overlap=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(calls: bool = False) -> None:
        optimizer.zero_grad()
        model().backward()
        if calls:
            trigram.all_reduce(torch.ones(1))
        optimizer.step()

    if rank == 1:
        await_flag("decided", 30)
    for _ in range(2 * EVERY if rank == 1 else EVERY):
        step()
    flag("decided")
    step(calls=True)
    with trigram.consensus(model):
        pass


def test_a_leader_in_a_collective_lets_the_others_go_on_while_an_average_is_under_way() -> None:
    run(3, _collective_while_an_average_is_under_way, timeout=60)


def _stuck_as_a_member(rank: int, world: int) -> str:
    """Rank 2 is late, has said that it is there, and then does nothing."""
    trigram.init(op_timeout=2.0)
    _, _, step = walk(rank, 2, grace=0.1)
    for _ in range(EVERY - 1):
        step()
    try:
        if rank == 2:
            await_flag("made one", 30)
            step()
            flag("is there")
            await_flag("has given up", 60)
            return ""
        step()
        flag("made one")
        await_flag("is there", 30)
        for _ in range(EVERY):
            step()
    except trigram.TrigramError as e:
        flag("has given up")
        return f"{type(e).__name__}: {e}"
    return "went on"


def test_a_member_that_sends_nothing_is_named() -> None:
    results = run(3, _stuck_as_a_member)
    assert any("2 s for rank 2 in an averaging step" in said for said in results[:2]), results


def _until_killed(rank: int, world: int) -> str:
    _, _, step = walk(rank, 2)
    end = time.monotonic() + 15
    try:
        for number in range(100_000):
            step()
            if number == 12:
                say("in the loop")
            if time.monotonic() > end:
                return "went on"
    except (trigram.PeerLostError, trigram.AbortedError) as e:
        return str(e)
    return "went on"


@pytest.mark.parametrize("dead", [0, 1])
def test_killed_peer(dead: int) -> None:
    """A quorum is for late ranks; whoever needs a dead one is told, and does not wait."""
    with Ranks(3, _until_killed) as ranks:
        for r in range(3):
            ranks.await_said(r, "in the loop")
        ranks.signal(dead, signal.SIGKILL)
        results = ranks.results(30, dies=[dead])
    assert results[dead] == Died(-signal.SIGKILL)
    others = [results[r] for r in range(3) if r != dead]
    assert all("rank" in text for text in others), results
    assert any(f"rank {dead}" in text for text in others), results


def _alone_in_consensus(rank: int, world: int, who: int) -> str:
    _, model, step = walk(rank, world)
    step()
    if rank != who:
        await_flag("the other goes no further", 30)
        return ""
    try:
        raises(trigram.TimeoutError, trigram.consensus, model, timeout=0.3)
        return raises(trigram.MisuseError, step)
    finally:
        flag("the other goes no further")


@pytest.mark.parametrize("who", [0, 1])
def test_no_step_follows_a_consensus_that_fails(who: int) -> None:
    """The rank has said that it makes no more averaging steps, so the others may have gone on without it."""
    said = run(2, _alone_in_consensus, who)[who]
    says(said, "trigram.consensus", f"rank {who}", "checkpoint")


def _stuck(rank: int, world: int) -> str:
    trigram.init(op_timeout=1.5)
    _, _, step = walk(rank, 2)
    if rank == 1:
        await_flag("the other has given up", 30)
        return ""
    try:
        for _ in range(EVERY):
            step()
        return "went on"
    except trigram.TimeoutError as e:
        return str(e)
    finally:
        flag("the other has given up")


def test_a_quorum_that_does_not_come_is_an_error() -> None:
    """A rank that lives and does nothing is waited for as long as any call waits, and named."""
    said = run(2, _stuck)[0]
    assert "waited 1.5 s for a quorum of 2" in said and "rank 1" in said, said
