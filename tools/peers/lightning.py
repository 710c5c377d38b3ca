"""Lightning's own tests of collectives and of DistributedDataParallel on several ranks, from a clone."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from tools.peers.outcomes import Outcomes, Suite, of_clone, pytest

FILES = [
    "tests_fabric/plugins/collectives/test_torch_collective.py",
    "tests_fabric/strategies/test_ddp_integration.py",
    "tests_fabric/utilities/test_distributed.py",
]
REASONS: dict[str, str] = {}


def run(path: Path | None) -> Suite:
    """Runs the tests, with those that ask for a process of their own."""
    ours, theirs = of_clone(path, "Lightning-AI/lightning", _all)
    return Suite(
        f"Lightning {importlib.metadata.version('lightning')}",
        f"`{'`, `'.join(FILES)}` of a clone's `tests`, on CPUs: they ask for gloo, and get Trigram. Most of "
        "what is skipped needs GPUs. Those of `tests_pytorch` need the release that the clone is of.",
        ours,
        theirs,
        reasons=REASONS,
    )


def _all(tests: Path, path: str) -> Outcomes:
    found: Outcomes = {}
    for file in FILES:
        environment = {"PYTHONPATH": path, "PL_RUN_STANDALONE_TESTS": "0"}
        found |= pytest(file, "--timeout", "300", cwd=tests, limit=1800, **environment)
    return found
