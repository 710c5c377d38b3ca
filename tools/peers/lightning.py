"""Lightning's own tests of collectives and of DistributedDataParallel on several ranks, from a clone."""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path

from tools.peers.outcomes import POSING, Outcomes, Suite, path_of, pytest, unpack

FILES = [
    "tests_fabric/plugins/collectives/test_torch_collective.py",
    "tests_fabric/strategies/test_ddp_integration.py",
    "tests_fabric/utilities/test_distributed.py",
    "tests_pytorch/strategies/test_ddp_integration.py",
    "tests_pytorch/models/test_ddp_fork_amp.py",
]
REASONS: dict[str, str] = {}


def run(path: Path | None) -> Suite:
    """Runs the tests, with those that ask for a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(path, folder, "tests", "Lightning-AI/lightning")
        tests = Path(folder) / "tests"
        ours, theirs = _all(tests, str(POSING)), _all(tests)
    return Suite(
        f"Lightning {importlib.metadata.version('lightning')}",
        f"`{'`, `'.join(FILES)}` of a clone's `tests`, on CPUs: they ask for gloo, and get Trigram.",
        ours,
        theirs,
        reasons=REASONS,
    )


def _all(tests: Path, *first: str) -> Outcomes:
    found: Outcomes = {}
    for file in FILES:
        environment = {"PYTHONPATH": path_of(*first, tests), "PL_RUN_STANDALONE_TESTS": "0"}
        found |= pytest(file, "--timeout", "300", cwd=tests, limit=1800, **environment)
    return found
