"""An elastic job goes on with a communicator of the ranks that are left; over the stand-in
(tests/support/gpu_standin.py)."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import trigram
from tests.support import elastic_run, gpu_standin
from tests.support.harness import Ranks, until
from tests.support.marks import long
from trigram import _core
from trigram.gpu import communicators
from trigram.runtime.group import Group

STEPS = 30
TIMEOUT = 60.0


def _train(rank: int, world: int, *args: Any) -> dict[str, Any]:
    """Trains, and counts the communicators that were made of others."""
    shrunk, names = [], []
    from_former = communicators._shrunk

    def named(group: Group, *made: Any) -> Any:
        result = from_former(group, *made)
        if result is not None:
            names.append(group.name)
        return result

    communicators._shrunk = named
    shrink = _core.DeviceGroup.shrink

    class Counting:
        """The class cannot be changed: it is Rust's."""

        def __init__(self, *made: Any) -> None:
            self.real = _core_group(*made)

        def shrink(self, *asked: Any) -> Any:
            other = object.__new__(Counting)
            if os.environ.get("TEST_CANNOT_SHRINK") == str(rank):
                raise trigram.IoError("this rank's NCCL cannot shrink")
            other.real = shrink(self.real, *asked)
            shrunk.append(list(asked[3]))
            return other

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    _core_group = _core.DeviceGroup
    _core.DeviceGroup = Counting  # type: ignore[misc, assignment]
    communicators._SHRINKING = 10 * TIMEOUT  # nobody waits so long for a rank that could not
    run = elastic_run.reduce if len(args) == 2 else elastic_run.train
    results = run(rank, world, *args)
    return results | {"shrunk": shrunk, "names": names, "kept": len(communicators._kept().made)}


def goes_on(env: dict[str, str], dies: dict[int, int]) -> list[Any]:
    """The ranks that are left take the steps of the job alone; how each went on."""
    args = (STEPS, "gradient_allreduce", dies, 0.02)
    with Ranks(4, _train, *args, env=env) as ranks:
        results = ranks.results(TIMEOUT, dies=dies)
    living = [r for r in range(4) if r not in dies]
    first = elastic_run.the_same(results, living)
    assert first["history"][0] == (0, 1, 2, 3) and first["history"][-1] == tuple(living)
    want = elastic_run.reference(first["history"])
    assert float((first["weights"] - want).norm() / want.norm()) < 1e-9
    return [results[r]["shrunk"] for r in living]


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_the_ranks_that_are_left_go_on(way: str) -> None:
    assert goes_on(gpu_standin.env(way), {1: 8}) == [[]] * 3


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_the_ranks_that_are_left_go_on_in_two_levels(several_hosts: None, algorithm: str) -> None:
    """A host loses one of its two ranks: each of its shards has another owner then, and another length."""
    args, env = (STEPS, algorithm, {1: 8}, 0.02), gpu_standin.env("hierarchical")
    with Ranks(4, _train, *args, env=env, transport="auto", hosts=[0, 0, 1, 1]) as ranks:
        results = ranks.results(TIMEOUT, dies={1: 8})
    first = elastic_run.the_same(results, [0, 2, 3])
    assert first["history"][0] == (0, 1, 2, 3) and first["history"][-1] == (0, 2, 3)


SHRINK = {"TRIGRAM_GPU_SHRINK": "1"}


def test_they_shrink_the_communicator_again_and_again() -> None:
    told = goes_on(gpu_standin.env("nccl") | SHRINK, {1: 8, 2: 16})
    assert told[0] and told == [told[0]] * 2, told
    # Rank 2 has the place of rank 1 when that is gone.
    assert {tuple(lost) for lost in told[0]} == {(1,)}, told


@pytest.mark.parametrize("who", ["all", "2"])
def test_they_make_a_new_one_if_nccl_cannot_shrink(who: str) -> None:
    """NCCL's network has seen an error, on all ranks or on one."""
    env = gpu_standin.env("nccl") | SHRINK | {"STANDIN_NETWORK_ERROR": who}
    assert goes_on(env, {1: 8}) == [[]] * 3


def test_a_rank_that_cannot_shrink_tells_the_others() -> None:
    env = gpu_standin.env("nccl") | SHRINK | {"TEST_CANNOT_SHRINK": "2"}
    assert goes_on(env, {1: 8}) == [[]] * 3


def test_the_world_shrinks_too_and_old_groups_keep_no_communicator() -> None:
    dies = {1: 6, 2: 12}
    with Ranks(4, _train, 20, dies, env=gpu_standin.env("nccl") | SHRINK) as ranks:
        results = ranks.results(TIMEOUT, dies=dies)
    for each in (results[0], results[3]):
        assert each["sums"] == elastic_run.sums(each["history"]) and each["history"][-1] == (0, 3)
        assert {"world, epoch 1", "world, epoch 2", "gradients"} <= set(each["names"]), each["names"]
        assert each["kept"] <= 6, "20 groups of the script have come and gone"


@pytest.mark.parametrize(("way", "more"), [long("host", {}), long("nccl", {}), ("nccl", SHRINK)])
def test_a_rank_comes_back(way: str, more: dict[str, str]) -> None:
    args = (200, "gradient_allreduce", {1: 8}, 0.01)
    with Ranks(3, _train, *args, env=gpu_standin.env(way) | more) as ranks:
        elastic_run.await_step(ranks, 0, 12)
        elastic_run.come(ranks, 1, *args, True)
        results = ranks.results(TIMEOUT)
    first = elastic_run.the_same(results, [0, 1, 2])
    assert first["history"][-1] == (0, 1, 2) and (0, 2) in first["history"]
    assert {tuple(lost) for lost in results[0]["shrunk"]} == ({(1,)} if more else set())


def test_nobody_shrinks_after_a_rank_has_come_without_the_variable() -> None:
    """It keeps no communicator: the others end theirs, and a loss after that makes a new one."""
    env, args = gpu_standin.env("nccl"), (300, "gradient_allreduce", {1: 8}, 0.02)
    with Ranks(4, _train, *args, env=env | SHRINK) as ranks:
        elastic_run.await_step(ranks, 0, 12)
        ranks.extra = env
        elastic_run.come(ranks, 1, *args, True, run=_train)
        until((ranks.dir / "flag-entered-1").exists, TIMEOUT, "rank 1")
        ranks.signal(2, signal.SIGKILL)
        results = ranks.results(TIMEOUT, dies=[2])
    first = elastic_run.the_same(results, [0, 1, 3])
    assert [len(members) for members in dict.fromkeys(first["history"])] == [4, 3, 3], first["history"]
    # The communicators of rank 2's loss are new: a shrunk one would have lost place 2.
    shrunk = [{tuple(lost) for lost in results[r]["shrunk"]} for r in (0, 1, 3)]
    assert shrunk == [{(1,)}, set(), {(1,)}]
    assert [results[r]["kept"] for r in (0, 1, 3)] == [0, 0, 0]
