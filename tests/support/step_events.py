"""What a tracker of steps is told in a real run of a row of the table, what it sees, and what it answers.

`python -m tests.support.step_events` writes them anew to `tests/training/step_events.json`: two ranks train
each row under `local_sgd`, and rank 0 writes down each event.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import trigram
from tests.support.harness import Ranks, say
from tests.support.loops import judge
from tests.support.loops.table import ROWS
from trigram.steps import step_tracker
from trigram.training import weight_sync

FILE = Path(__file__).resolve().parents[1] / "training" / "step_events.json"
EVENTS = [
    name
    for name, of in vars(step_tracker.StepTracker).items()
    if callable(of) and not name.startswith("_") and name != "is_over"
]
LOOKS = [name for name in vars(step_tracker.Looks) if not name.startswith("_") and name != "title"]
ALGORITHM = "local_sgd"
MOST = 45
"""So many events of a row are kept: three steps and more."""

Event = list[Any]
"""The event, its arguments, what was seen in it, its result, and the tracker's numbers afterwards."""


def numbers(tracker: step_tracker.StepTracker) -> list[int]:
    """What a tracker has counted."""
    flags = [int(tracker.begun), int(tracker.forward_begun)]
    counts = [len(tracker.covered), len(tracker.reached)]
    return [tracker.steps, tracker.last, tracker.owed, tracker.early, *flags, *counts]


class _Numbered:
    """Small numbers in place of `id()`."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(self(v) for v in value)
        if isinstance(value, int) and value > 1 << 20:
            return self.known.setdefault(value, len(self.known))
        return value


class _Looks:
    """Writes down what is seen."""

    def __init__(self, looks: Any, note: Callable[[str, tuple[Any, ...], Any], Any]) -> None:
        self._looks, self._note = looks, note

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._looks, name)
        if name not in LOOKS:
            return found
        if not callable(found):
            return self._note(name, (), found)
        return lambda *args: self._note(name, args, found(*args))


class Recording(step_tracker.StepTracker):
    """A tracker that writes down its events."""

    all: ClassVar[list[Recording]] = []

    def __init__(self, looks: Any) -> None:
        self.events: list[Event] = []
        self._seen: list[Any] | None = None
        self._number = _Numbered()
        self._trained = lambda: looks.trained
        super().__init__(_Looks(looks, self._note))  # type: ignore[arg-type]
        Recording.all.append(self)

    def _note(self, name: str, args: tuple[Any, ...], found: Any) -> Any:
        if self._seen is not None:
            self._seen.append(
                [name, [self._number(set(a) if isinstance(a, set) else a) for a in args], self._number(found)]
            )
        return found

    def told(self, name: str, args: tuple[Any, ...]) -> Any:
        """One event."""
        method = getattr(super(), name)
        if self._seen is not None:  # inside another event
            return method(*args)
        for p in self._trained():
            self._number(id(p))  # in the order of the model
        self._seen = []
        given, result = [self._number(a) for a in args], "raised"
        try:
            result = method(*args)
        finally:
            self.events.append([name, given, self._seen, self._number(result), numbers(self)])
            self._seen = None
        return result


for _name in EVENTS:
    setattr(Recording, _name, lambda self, *args, _name=_name: self.told(_name, args))


def record_main(rank: int, world: int, names: list[str]) -> None:
    """In a rank: trains the rows, and says what the trackers of rank 0 were told."""
    trigram.init(op_timeout=20)
    weight_sync.StepTracker = Recording  # type: ignore[misc]
    for name in names:
        Recording.all = []
        outcome = judge._play(ROWS[name], ALGORITHM, rank, world)
        assert outcome.end in ("trained", "refused"), outcome.text
        if rank == 0:
            say((name, [tracker.events for tracker in Recording.all]))


def recordable() -> list[str]:
    """The rows in which all ranks do the same."""
    return [name for name, row in ROWS.items() if row.alike and ALGORITHM in row.only and not row.long]


def record(names: list[str]) -> list[dict[str, Any]]:
    """What happens at the beginning of these rows: each list of events that differs, with the rows' names."""
    with Ranks(2, record_main, names) as ranks:
        ranks.results(300, renew=True)
        said = {word[0]: word[1] for word in ranks.ranks[0].said}
    rows: dict[str, dict[str, None]] = {}
    for name in names:
        for events in said[name]:
            text = json.dumps(events[:MOST], separators=(",", ":"))
            rows.setdefault(text, {})[name] = None
    return [{"rows": list(of), "events": json.loads(text)} for text, of in rows.items()]


def write() -> None:
    """Writes all rows to `FILE`."""
    found = record(recordable())
    FILE.write_text("[\n" + ",\n".join(json.dumps(f, separators=(",", ":")) for f in found) + "\n]\n")
    print(f"{len(found)} lists of events, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    importlib.import_module("tests.support.step_events").write()  # the ranks import it by this name
