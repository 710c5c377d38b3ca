"""Elastic jobs: who lives goes on with the same step, under every algorithm."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import pytest
import torch

import trigram
from tests.support import patience
from tests.support.checks import close, raises, says
from tests.support.elastic_run import Negated, await_step, come, reduce, reference, sums, the_same, train
from tests.support.harness import Died, Ranks, await_flag, flag, run, say
from tests.support.marks import long, long_unless
from trigram.averaging import GradientBucket, GradientFilter

pytestmark = pytest.mark.waits


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("world, dies", [(2, {1: 4}), (3, {0: 3}), (4, {1: 3, 3: 6}), (4, {2: 5, 3: 5})])
def test_the_living_go_on_with_the_same_step(world: int, dies: dict[int, int], transport: str) -> None:
    steps = 10
    with Ranks(world, train, steps, "gradient_allreduce", dies, transport=transport) as ranks:
        results = ranks.results(90, dies=dies)
    living = [r for r in range(world) if r not in dies]
    for r in dies:
        assert results[r] == Died(-signal.SIGKILL)
    got = the_same(results, living)
    expected = [tuple(r for r in range(world) if dies.get(r, steps) > step) for step in range(steps)]
    assert got["history"] == expected
    torch.testing.assert_close(got["weights"], reference(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_scripts_own_calls_go_on_too(transport: str) -> None:
    """The n-th group of all ranks that are left is another than the world of the n-th epoch."""
    dies = {1: 3, 2: 6}
    with Ranks(4, reduce, 10, dies, transport=transport) as ranks:
        results = ranks.results(60, dies=dies)
    for each in (results[0], results[3]):
        assert each["history"][-1] == (0, 3) and each["sums"] == sums(each["history"])


@pytest.mark.parametrize("where, counts", [("inside", False), ("commit", True), ("after", True)])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_step_counts_for_all_or_for_none(where: str, counts: bool, transport: str) -> None:
    """Whose averages all had before it died has taken part in that step; else the step is done without it."""
    world, steps, victim, last = 4, 12, 1, 5
    arguments = (steps, "gradient_allreduce", {victim: last}, 0.0, False, None, where)
    with Ranks(world, train, *arguments, transport=transport) as ranks:
        results = ranks.results(60, dies=[victim])
    living = [r for r in range(world) if r != victim]
    got = the_same(results, living)
    whole = last + counts
    expected = [tuple(range(world))] * whole + [tuple(living)] * (steps - whole)
    torch.testing.assert_close(got["weights"], reference(expected), rtol=1e-9, atol=1e-12)


def test_what_filters_have_changed_is_sent_again() -> None:
    """In a pass that is repeated they are not called again."""
    world, steps, victim, last = 3, 8, 1, 4
    options = {"filters": [Negated()]}
    arguments = (steps, "gradient_allreduce", {victim: last}, 0.0, False, options, "inside")
    with Ranks(world, train, *arguments) as ranks:
        results = ranks.results(60, dies=[victim])
    got = the_same(results, [0, 2])
    expected = [tuple(range(world))] * last + [(0, 2)] * (steps - last)
    torch.testing.assert_close(got["weights"], reference(expected, -1.0), rtol=1e-9, atol=1e-12)


class Ones(GradientFilter):
    """Whatever a gradient was, it is 1."""

    def before(self, bucket: GradientBucket) -> None:
        for view in bucket.views:
            view.fill_(1.0)


def _loses_one_in_the_midst(rank: int, world: int, algorithm: str) -> bool:
    """Rank 1 dies with some buckets sent; the others come to the rest later."""
    trigram.init(elastic=True)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    trigram.with_bagua(net, algorithm, optimizer=optimizer, elastic=True, bucket_mb=0.001, filters=[Ones()])
    now = [0]

    def in_the_midst(_grad: torch.Tensor) -> None:
        if now[0] == 3 and rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        if now[0] == 3:
            time.sleep(1.5)

    net[3].weight.register_hook(in_the_midst)
    for step in range(6):
        now[0] = step
        optimizer.zero_grad()
        net(torch.randn(4, 16)).square().mean().backward()
        for p in net.parameters():
            assert p.grad is not None
            close(p.grad, torch.ones_like(p), 0.02, f"step {step}: a gradient that was not filtered")
        optimizer.step()
    return True


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_what_was_not_sent_goes_through_filters_too(algorithm: str) -> None:
    with Ranks(3, _loses_one_in_the_midst, algorithm) as ranks:
        results = ranks.results(60, dies=[1])
    assert results[0] is True and results[2] is True


ALGORITHMS = [
    "bytegrad",
    "local_sgd",
    "diloco",
    "decentralized",
    "low_precision_decentralized",
    "async",
    "async_decentralized",
    "async_low_precision_decentralized",
    "push_sum",
]


OF_EACH_KIND = ["bytegrad", "diloco", "low_precision_decentralized", "async", "push_sum"]


@pytest.mark.parametrize("algorithm", long_unless(OF_EACH_KIND, ALGORITHMS))
def test_every_algorithm_goes_on_and_lets_in(algorithm: str) -> None:
    _goes_on_and_lets_in(algorithm, None, 1)


@pytest.mark.parametrize("victim, overlap", [(0, True), long(0, False), long(1, False)])
def test_a_quorum_goes_on_without_its_leader_and_lets_it_in(victim: int, overlap: bool) -> None:
    options = {"every": 3, "quorum": 2, "grace": 0.001, "overlap": overlap}
    _goes_on_and_lets_in("local_sgd", options, victim)


@pytest.mark.parametrize(
    ("algorithm", "warmup"),
    [
        ("decentralized", 20),
        ("local_sgd", 250),
        ("qadam", 20),
        long("bytegrad", 20),
        long("bytegrad", 250),
        long("async", 20),
        long("qadam", 250),
    ],
)
def test_who_joins_in_a_warmup_or_after_it(algorithm: str, warmup: int) -> None:
    """A rank is lost in the warm-up, which ends before it is back, or after that."""
    _goes_on_and_lets_in(algorithm, {"warmup_steps": warmup}, 1)


def _goes_on_and_lets_in(algorithm: str, options: dict[str, Any] | None, victim: int) -> None:
    world, steps = 3, 300
    arguments = (steps, algorithm, {victim: 5}, 0.01)
    with Ranks(world, train, *arguments, False, options, "before", True) as ranks:
        await_step(ranks, 2, 8)
        come(ranks, victim, *arguments, True, options, "before", True)
        results = ranks.results(120)
    entered = results[victim]["first"]
    assert 5 < entered < steps, "it came back, and in time"
    # A newcomer begins with the slowest. Where ranks do not wait for each other, its state may come from one
    # that is some steps ahead: then its buffers and its optimizer's state count these too.
    ahead = float(results[victim]["own"][0]) - steps
    assert ahead == 0 or (ahead > 0 and "async" in algorithm), "it got the buffers"
    for r in range(world):
        done = steps + (ahead if r == victim else 0)
        assert bool(results[r]["weights"].isfinite().all()), f"rank {r}"
        assert results[r]["steps"] == steps and results[r]["history"][-1] == (0, 1, 2)
        assert torch.equal(results[r]["own"], torch.full((3,), float(done))), f"rank {r}"
        mean = torch.full((3,), steps + ahead / world)
        close(results[r]["count"], mean, 1e-4 if ahead else 0.0, "the mean of all ranks' buffers")
        assert results[r]["adam"] == {done}, "it got the optimizer's state"
    for r in range(world):
        assert torch.equal(results[r]["weights"], results[0]["weights"]), f"rank {r} differs"


@pytest.mark.parametrize("algorithm", ["local_sgd", "diloco", "decentralized"])
def test_rounds_of_those_who_were_apart_are_of_all_again(algorithm: str) -> None:
    """When rank 2 dies rank 0 waits in the round that rank 1 has yet to reach."""
    world, steps, victim = 3, 60, 2
    arguments = (steps, algorithm, {victim: 12}, (0.0, 0.05, 0.03), False, None, "before", True)
    with Ranks(world, train, *arguments) as ranks:
        results = ranks.results(90, dies=[victim])
    the_same(results, [0, 1])


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd", "decentralized"])
def test_who_leaves_is_gone_on_without(algorithm: str) -> None:
    world, steps, victim = 4, 60, 2
    arguments = (steps, algorithm, {victim: 12}, (0.0, 0.01, 0.02, 0.005), False, None, "leaves", True)
    with Ranks(world, train, *arguments, transport="tcp") as ranks:
        results = ranks.results(90)
    the_same(results, [0, 1, 3])


@pytest.mark.parametrize("algorithm", ["decentralized", "async_decentralized"])
def test_gossip_goes_on_beyond_the_neighbours_of_the_dead(algorithm: str) -> None:
    world, steps, victim = 5, 60, 3  # ranks 0 and 1 do not talk with it
    with Ranks(world, train, steps, algorithm, {victim: 5}, 0.005) as ranks:
        results = ranks.results(120, dies=[victim])
    living = [r for r in range(world) if r != victim]
    for r in living:
        assert results[r]["steps"] == steps and bool(results[r]["weights"].isfinite().all()), f"rank {r}"
    weights = [results[r]["weights"] for r in living]
    spread = max(float((a - b).norm()) for a, b in itertools.combinations(weights, 2))
    moved = float((weights[0] - reference([])).norm())
    assert spread < moved / 2, (spread, moved)


@pytest.mark.parametrize("transport", [long("shm"), "tcp"])
def test_a_stopped_rank_is_left_behind(transport: str) -> None:
    world, steps = 3, 300
    arguments, env = (steps, "gradient_allreduce", None, 0.005), {"TRIGRAM_SILENCE": patience.silence(1.2)}
    with Ranks(world, train, *arguments, transport=transport, env=env) as ranks:
        await_step(ranks, 1, 20)
        ranks.signal(1, signal.SIGSTOP)
        others = [ranks.ranks[r] for r in (0, 2)]
        end = time.monotonic() + 60
        while any(r.answer is None and not r.ended for r in others) and time.monotonic() < end:
            ranks.hear(0.2)
        for number in (signal.SIGCONT, signal.SIGKILL):
            if ranks.ranks[1].process.is_alive():
                ranks.signal(1, number)
        results = ranks.results(30, dies=[1])
    got = the_same(results, [0, 2])
    history = got["history"]
    assert history[0] == (0, 1, 2) and history[-1] == (0, 2)
    torch.testing.assert_close(got["weights"], reference(history), rtol=1e-8, atol=1e-11)


# Without a model.


def bare(rank: int, world: int) -> list[int]:
    """Collectives of the script's own: an error, `recover`, and on."""
    group = trigram.init(elastic=True)
    registered = trigram.empty(1000)
    for i in range(1000):
        if rank == 1 and i == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        registered.fill_(float(rank))
        try:
            trigram.all_reduce(registered)
        except trigram.PeerLostError as e:
            assert e.rank == 1
            break
    assert trigram.recover() is group
    before = trigram.stats()["direct_bytes"]
    registered.fill_(float(rank))
    trigram.all_reduce(registered)
    assert torch.equal(registered, torch.full((1000,), 5.0))
    assert (trigram.rank(), trigram.world_size()) == ([0, 2, 3].index(rank), 3)
    if os.environ["TRIGRAM_TRANSPORT"] == "shm":
        assert trigram.stats()["direct_bytes"] > before, "memory registered before is registered still"
    raises(trigram.MisuseError, trigram.broadcast, registered, 1)
    says(raises(trigram.MisuseError, trigram.new_group, [0, 1]), "[0, 2, 3]")
    trigram.broadcast(registered, 3)
    return list(group.ranks)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_recover(transport: str) -> None:
    with Ranks(4, bare, transport=transport) as ranks:
        results = ranks.results(60, dies=[1])
        assert all("continues with ranks 0, 2, 3" in ranks.log(r) for r in (0, 2, 3))
    assert [r for r in results if not isinstance(r, Died)] == [[0, 2, 3]] * 3


def refused(rank: int, world: int) -> None:
    """What cannot be elastic says so."""
    linear = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(linear.parameters(), lr=0.1)
    with pytest.raises(trigram.MisuseError, match="optimizer"):
        trigram.with_bagua(linear, elastic=True)
    with pytest.raises(trigram.MisuseError, match="state_dict"):
        trigram.with_bagua(linear, optimizer=opt, elastic=[3])
    for words, options in [
        ("group", {"group": object()}),
        ("warm-up", {"algorithm": "bytegrad", "state": "sharded", "warmup_steps": 3}),
        ("fused", {"fused": True}),
    ]:
        with pytest.raises(trigram.UnsupportedError, match=words):
            trigram.with_bagua(linear, optimizer=opt, elastic=True, **options)
    with pytest.raises(trigram.UnsupportedError, match="helper"):
        trigram.init(elastic=True, helper=True)
    trigram.init()
    with pytest.raises(trigram.MisuseError, match="init"):
        trigram.with_bagua(linear, optimizer=opt, elastic=True)
    with pytest.raises(trigram.MisuseError, match="elastic"):
        trigram.recover()
    trigram.shutdown()
    trigram.init(elastic=True)
    one = trigram.with_bagua(linear, optimizer=opt, elastic=True)
    with pytest.raises(trigram.UnsupportedError, match="join"), trigram.join(one):
        pass
    two = torch.nn.Linear(3, 3)
    with pytest.raises(trigram.MisuseError, match="another model"):
        trigram.with_bagua(two, optimizer=torch.optim.SGD(two.parameters(), lr=0.1), elastic=True)
    assert one is not None
    flag(f"done{rank}")
    for r in range(world):
        await_flag(f"done{r}")
    say("over")


def test_what_cannot_be_elastic() -> None:
    with Ranks(2, refused) as ranks:
        ranks.results(60)


def _waits_for_slow_neighbour(rank: int, world: int, algorithm: str, limit: float) -> str:
    """Rank 1 does not come to its second step before rank 0 has an error."""
    trigram.init(elastic=True, op_timeout=limit)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net = trigram.with_bagua(net, algorithm, optimizer=optimizer, elastic=True, overlap=False)
    for step in range(3):
        if rank == 1 and step == 1:
            await_flag("timed out", 60.0)
            return ""
        try:
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        except trigram.TimeoutError as e:
            flag("timed out")
            return str(e)
    return "no error"


@pytest.mark.parametrize("algorithm", ["decentralized", "low_precision_decentralized"])
def test_op_timeout_ends_a_wait_for_a_neighbour(algorithm: str) -> None:
    """The wait asks now and then whether ranks regroup; that question's timeout is not the message's."""
    text, _ = run(2, _waits_for_slow_neighbour, algorithm, patience.seconds(1.0), timeout=90)
    says(text, "timed out after", "rank 1")


def _saves_in_its_first_step(rank: int, world: int, algorithm: str) -> tuple[int, bool]:
    """Rank 2 dies where the others save the algorithm's state, before anything has been learned."""
    trigram.init(elastic=True)
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trigram.with_bagua(net, algorithm, optimizer=optimizer, elastic=True)
    states = []
    for step in range(6):
        optimizer.zero_grad()
        net(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        if step == 0 and rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        states.append(trigram.algorithm_state(net))
    trigram.load_algorithm_state(net, states[-1])
    return trigram.world_size(), all("carrier" in state for state in states)


@pytest.mark.parametrize("algorithm", ["bytegrad", "local_sgd"])
def test_a_rank_is_lost_while_others_save_the_state(algorithm: str) -> None:
    with Ranks(3, _saves_in_its_first_step, algorithm) as ranks:
        results = ranks.results(60, dies=[2])
    assert results[0] == results[1] == (2, True)
