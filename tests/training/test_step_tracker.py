"""The tracker of training steps by itself: lists of events in, boundaries out; no ranks, no tensors.

`step_events.json` has what real runs of the table of loops have told it, and what it saw and said then.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import trigram
from tests.support import step_events
from trigram.steps.step_tracker import MOST_PERTURBATIONS, StepTracker

RECORDED: list[dict[str, Any]] = json.loads(step_events.FILE.read_text())

MAKES_NO_TRACKER = {"scripted_before", "not_finite_on_one", "replicas_checked", "sync_batch_norm"}
"""Rows that are refused before there is one."""


class Scripted:
    """Sees what it is told to see, once each, in this order."""

    title = "the weights"

    def __init__(self) -> None:
        self.will_see: list[tuple[str, list[Any], Any]] = []

    def _next(self, name: str, *args: Any) -> Any:
        expected, given, found = self.will_see.pop(0)
        assert name == expected, f"looked at {name}, where a real run looked at {expected}"
        assert [sorted(a) if isinstance(a, set) else a for a in args] == given, f"{name}{args}, not {given}"
        return set(found) if isinstance(found, list) else found

    @property
    def taken(self) -> bool:
        return bool(self._next("taken"))

    def moved(self) -> bool:
        return bool(self._next("moved"))

    def reset(self, but: int | None) -> bool:
        return bool(self._next("reset", but))

    def has_optimizer(self) -> bool:
        return bool(self._next("has_optimizer"))

    def is_assigned(self, updated: Any) -> bool:
        return bool(self._next("is_assigned", set(updated)))

    def assigned(self) -> None:
        self._next("assigned")

    def used(self, updated: Any) -> None:
        self._next("used", set(updated))

    def with_gradients(self, reached: Any) -> set[int]:
        return set(self._next("with_gradients", set(reached)))

    def managed(self, unknown: Any) -> set[int]:
        return set(self._next("managed", set(unknown)))


def replay(events: list[step_events.Event]) -> None:
    """A tracker that is told these events sees, says and counts the same."""
    looks = Scripted()
    tracker = StepTracker(looks)
    for number, (name, args, seen, result, counts) in enumerate(events):
        looks.will_see = [tuple(look) for look in seen]
        given = [set(a) if isinstance(a, list) else a for a in args]
        try:
            said = getattr(tracker, name)(*given)
        except trigram.MisuseError:
            said = "raised"
        assert (said, step_events.numbers(tracker)) == (result, counts), f"event {number}, {name}{args}"
        assert not looks.will_see, f"event {number}, {name}: did not look at {looks.will_see}"


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: r["rows"][0])
def test_events_of_real_runs(recorded: dict[str, Any]) -> None:
    replay(recorded["events"])


def test_the_events_are_those_of_the_table() -> None:
    names = {name for recorded in RECORDED for name in recorded["rows"]}
    assert names == set(step_events.recordable()) - MAKES_NO_TRACKER
    told = {event[0] for recorded in RECORDED for event in recorded["events"]}
    assert told >= set(step_events.EVENTS) - {"skip_boundary"}, "which is of joins that end early"


@pytest.mark.long
def test_real_runs_are_as_recorded() -> None:
    assert step_events.record(step_events.recordable()) == RECORDED


class Seen(Scripted):
    """Sees the same whenever it looks."""

    def __init__(self, **found: Any) -> None:
        super().__init__()
        defaults = {
            "taken": True,
            "moved": False,
            "reset": False,
            "has_optimizer": True,
            "is_assigned": False,
            "with_gradients": {0, 1},
            "managed": set(),
        }
        self.found = {**defaults, **found}

    def _next(self, name: str, *args: Any) -> Any:
        return self.found.get(name)


def backward(tracker: StepTracker) -> int:
    tracker.pass_begins(0)
    tracker.pass_ends()
    return tracker.weights_may_change()


def made(tracker: StepTracker, upto: int) -> int:
    """Makes boundaries; how many."""
    count = 0
    while tracker.last < upto:
        tracker.next_boundary()
        count += 1
    return count


def test_a_step_ends_when_all_that_has_gradients_is_updated() -> None:
    tracker = StepTracker(Seen(managed={1}))
    assert made(tracker, backward(tracker)) == 0
    assert made(tracker, tracker.updated({0}, False)) == 0  # another optimizer has parameter 1
    assert made(tracker, tracker.updated({1}, False)) == 1
    assert (tracker.steps, tracker.last, tracker.due) == (1, 1, False)


def test_what_no_optimizer_has_is_not_waited_for() -> None:
    tracker = StepTracker(Seen(managed=set()))
    backward(tracker)
    assert made(tracker, tracker.updated({0}, False)) == 1


def test_several_passes_are_one_step() -> None:
    tracker = StepTracker(Seen())
    for _ in range(4):
        assert made(tracker, backward(tracker)) == 0
    assert tracker.steps == 1
    assert made(tracker, tracker.updated({0, 1}, False)) == 1


@pytest.mark.parametrize("seen", [{"reset": True}, {"moved": True, "has_optimizer": False}])
def test_a_step_without_an_update_ends_where_the_root_is_called(seen: dict[str, Any]) -> None:
    tracker = StepTracker(Seen(**seen))
    backward(tracker)
    assert made(tracker, tracker.late()) == 1


def test_without_the_root_it_ends_before_the_next_update() -> None:
    tracker = StepTracker(Seen(reset=True))
    backward(tracker)
    assert made(tracker, backward(tracker)) == 0  # weights must not change during backward
    assert tracker.owed == 1
    assert made(tracker, tracker.owed) == 1
    assert made(tracker, tracker.updated({0, 1}, False)) == 1
    assert tracker.last == tracker.steps == 2


def test_weights_moved_by_hand_where_an_optimizer_steps_are_no_update() -> None:
    tracker = StepTracker(Seen(moved=True))
    backward(tracker)
    assert made(tracker, tracker.late()) == 0
    assert made(tracker, tracker.updated({0, 1}, False)) == 1


def test_moved_by_hand_again_and_again_is_refused() -> None:
    tracker = StepTracker(Seen(moved=True, reset=True))
    for _ in range(MOST_PERTURBATIONS - 1):
        backward(tracker)
        tracker.late()
    backward(tracker)
    with pytest.raises(trigram.MisuseError, match=r"trigram\.step"):
        tracker.late()


def test_weights_that_change_without_optimizer_and_root_are_refused() -> None:
    tracker = StepTracker(Seen(moved=True, has_optimizer=False))
    backward(tracker)
    with pytest.raises(trigram.MisuseError, match="without an optimizer"):
        tracker.pass_begins(0)


def test_updates_inside_backward_wait_for_its_end() -> None:
    tracker = StepTracker(Seen())
    tracker.pass_begins(0)
    assert made(tracker, tracker.updated({0, 1}, True)) == 0
    tracker.pass_ends()
    assert made(tracker, tracker.weights_may_change()) == 1


def test_a_failed_pass_counts_and_is_owed() -> None:
    tracker = StepTracker(Seen())
    tracker.pass_begins(0)
    tracker.pass_ends()
    tracker.pass_failed()
    assert made(tracker, tracker.late()) == 1
    assert not tracker.due


def test_assigned_gradients_are_a_step_of_their_own() -> None:
    tracker = StepTracker(Seen(is_assigned=True))
    assert made(tracker, tracker.updated({0, 1}, False)) == 1
    assert tracker.steps == 1


def test_the_script_may_say_it() -> None:
    tracker = StepTracker(Seen())
    for n in range(1, 4):
        backward(tracker)
        if n != 2:
            made(tracker, tracker.updated({0, 1}, False))
        made(tracker, tracker.script_step())
        tracker.all_made()
        assert tracker.steps == tracker.last == n
    made(tracker, tracker.script_step())  # without a backward pass
    tracker.all_made()
    assert tracker.steps == tracker.last == 4


def test_draining_makes_the_boundary_of_a_step_that_may_yet_be_updated() -> None:
    tracker = StepTracker(Seen())
    backward(tracker)
    assert made(tracker, tracker.draining()) == 1
    assert tracker.awaits_update()
    assert made(tracker, tracker.updated({0, 1}, False)) == 0  # it is made
    assert not tracker.awaits_update()
