"""Times of several models: which one is shown, sums that never decrease, groups that are let go."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trigram
from tests.support.harness import run
from trigram.observe import rank_report, snapshots, steps
from trigram.runtime import world as runtime


def _step(times: steps.StepTimes, count: int = 1) -> None:
    for _ in range(count):
        for phase in (steps.FORWARD, steps.BACKWARD, steps.OPTIMIZER, steps.INPUT):
            times.enter(phase)
    times.enter(steps.FORWARD)  # which ends the step before


def test_sums_of_twins_never_decrease() -> None:
    name = "Twin"
    a, b = steps.StepTimes(name), steps.StepTimes(name)
    seen = [steps.totals()[name]]
    for k in range(20):
        _step((a, b)[k % 2], 1 + k % 3)
        if k == 10:
            a.close()
            a = steps.StepTimes(name)  # as after a warm-up
        if k == 15:
            b.close()
            del b
            b = steps.StepTimes(name)
        seen.append(steps.totals()[name])
        assert all(new >= old for new, old in zip(seen[-1], seen[-2], strict=True))
    assert seen[-1][0] == sum(1 + k % 3 for k in range(20))
    a.close()
    b.close()


def test_which_model_is_shown() -> None:
    """While a job runs the one that has stepped last; at its end the one with the most steps."""
    teacher, student = steps.StepTimes("Teacher"), steps.StepTimes("Student")
    _step(teacher, 30)
    assert steps.latest() is teacher
    _step(student, 5)
    assert steps.latest() is student and steps.longest() is teacher
    student.close()
    assert steps.latest() is teacher
    teacher.close()
    assert steps.latest() is None and steps.longest() is teacher


def test_what_another_model_computes_is_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models take turns, as those of a GAN: the first waits for the second between its steps, and not for
    its input."""
    passed = [1]
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic_ns=lambda: passed[0]))
    first, second = steps.StepTimes("Generator"), steps.StepTimes("Discriminator")
    for _ in range(5):
        for phase in (steps.FORWARD, steps.BACKWARD, steps.OPTIMIZER, steps.INPUT):
            first.enter(phase)
        for phase in (steps.FORWARD, steps.BACKWARD, steps.OPTIMIZER):
            second.enter(phase)
            passed[0] += 10_000_000
        second.enter(steps.INPUT)
        passed[0] += 5_000_000  # the input of both
    first.enter(steps.FORWARD)
    found = first.summary()
    assert found["step"]["count"] == 4
    assert found["input"]["median"] == pytest.approx(0.005), found
    assert found["other"]["median"] == pytest.approx(0.03), found
    first.close()
    second.close()


def test_other_threads_look_while_models_are_made() -> None:
    stop, errors = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            try:
                steps.latest()
                steps.longest()
            except RuntimeError as error:
                errors.append(error)

    kept = [steps.StepTimes("Kept") for _ in range(50)]
    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(20_000):
        steps.StepTimes("Short").close()
    stop.set()
    thread.join()
    for times in kept:
        times.close()
    assert errors == []


def _train(model: torch.nn.Module, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def _models(rank: int, world: int, how: str) -> tuple[str, int, list[int]]:
    model = trigram.with_bagua(torch.nn.Linear(8, 8))
    _train(model, 9)
    times = steps.latest()
    assert times is not None and times.group is not None
    group = weakref.ref(times.group)
    if how == "unwrapped":
        trigram.unwrap(model)
    del model
    gc.collect()
    assert steps.latest() is None and times.group is None
    assert how != "unwrapped" or group() is None or group() is trigram.init()
    present = runtime.present()
    assert present is not None
    row = rank_report.of_this_rank(present, steps.longest())
    return row.model, row.steps, row.ranks


@pytest.mark.parametrize("how", ["unwrapped", "dropped"])
def test_figures_outlive_the_model(how: str) -> None:
    """Its group is let go: otherwise a process that makes thousands of models ends with too many groups."""
    assert run(2, _models, how) == [("Linear", 7, [0, 1])] * 2


class Student(torch.nn.Linear):
    """Another class."""


def _two_stages(rank: int, world: int) -> list[Any]:
    present = runtime.world_size() and runtime.present()
    assert present
    teacher = trigram.with_bagua(torch.nn.Linear(8, 8))
    publisher = snapshots.Publisher(snapshots.connect_again(torch.distributed.HashStore()), present)
    _train(teacher, 20)
    seen = [publisher.take(present)]
    student = trigram.with_bagua(Student(8, 8), "local_sgd", warmup_steps=5)
    _train(student, 10)
    seen.append(publisher.take(present))
    _train(student, 5)
    seen.append(publisher.take(present))
    publisher.close()
    times = steps.latest()
    assert times is not None and times.earlier == 5
    return [(taken.model, taken.steps, set(taken.seconds)) for taken in seen]


def test_the_snapshot_is_of_the_model_that_trains() -> None:
    keys = {"step", *steps.PHASES}
    for seen in run(2, _two_stages):
        assert [(model, taken) for model, _, taken in seen] == [("Linear", keys), *[("Student", keys)] * 2]
        assert 19 <= seen[0][1] <= 20 and 8 <= seen[1][1] <= 10 and 13 <= seen[2][1] <= 15


class Broken(snapshots.ReconnectingStore):
    """A store that fails once, in a way of its own."""

    fails = True

    def put(self, key: str, value: bytes | str) -> None:
        """See the class."""
        if self.fails:
            self.fails = False
            raise ValueError("planned")
        super().put(key, value)


def _published(rank: int, world: int) -> bool:
    trigram.init()
    present = runtime.present()
    assert present is not None
    store = Broken(torch.distributed.HashStore(), None)
    publisher = snapshots.Publisher(store, present)
    publisher.publish()
    alive = not publisher._stop.is_set()
    publisher.close()
    return alive and store.get(snapshots.KEY.format(rank)) is not None


def test_a_snapshot_that_fails_is_not_the_last() -> None:
    assert run(1, _published) == [True]
