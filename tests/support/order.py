"""The order in which `tools/run_tests.py` hands out test modules: the longest first, so that none is left
over at the end. The others follow, those with the most tests first."""

from __future__ import annotations

from collections import Counter
from typing import Any

LONGEST = [
    "codecs/test_triton",
    "training/test_every_loop",
    "cli/test_chaos",
    "gpu/test_routes",
    "elastic/test_joining",
    "elastic/test_losses_while_joining",
    "elastic/test_simulated",
    "algorithms/test_weights",
    "training/test_torch_modes",
    "observe/test_report",
    "cli/test_tune",
    "faults/test_liveness",
    "elastic/test_recovery",
    "collectives/test_uneven",
    "cli/test_run",
    "sharded/test_loops",
    "elastic/test_sharded",
    "observe/test_top",
    "runtime/test_processes",
    "faults/test_machine",
    "training/test_exit",
    "training/test_with_bagua",
    "elastic/test_quorum",
    "gpu/test_elastic",
    "integrations/test_lightning",
    "observe/test_forked_child",
    "runtime/test_timeouts",
    "backend/test_shipped",
    "cli/test_commands",
]
"""From the times that a run prints."""


def longest_first(items: list[Any]) -> None:
    """Sorts tests by their modules."""
    counts = Counter(item.path for item in items)
    places = {name: place for place, name in enumerate(LONGEST)}

    def place(item: Any) -> tuple[int, int, str]:
        name = f"{item.path.parent.name}/{item.path.stem}"
        return places.get(name, len(places)), -counts[item.path], str(item.path)

    items.sort(key=place)  # which keeps the order of the tests of a module
