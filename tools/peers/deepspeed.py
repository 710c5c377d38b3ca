"""DeepSpeed's own tests of its communication and of ZeRO, from a clone."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from tools.peers.outcomes import Outcomes, Suite, of_clone, pytest

FOLDERS = ["unit/comm", "unit/runtime/comm", "unit/runtime/zero"]
LEFT_OUT = "unit/runtime/zero/test_zero_tensor_fragment.py"
"""More than half of all, of one subject that makes no calls of its own."""
REASONS = {
    "TestDistributedFixture": "its fixtures need pytest before 8.4",
    "TestGatheredParametersAllRanksErrorOnModification": "asks for a device by number, which no CPU has",
    "TestMiCSGatheredParametersFree": "asks for `MiCS_Init`, which this version of DeepSpeed does not have",
}


def run(path: Path | None) -> Suite:
    """Runs the tests for up to two ranks."""
    ours, theirs = of_clone(path, "deepspeedai/DeepSpeed", _all)
    return Suite(
        f"DeepSpeed {importlib.metadata.version('deepspeed')}",
        f"`{'`, `'.join(FOLDERS)}` of a clone's `tests`, without `{Path(LEFT_OUT).name}`, on CPUs and up to "
        "two ranks: they ask for gloo, and get Trigram. Tests of more ranks and of GPUs skip themselves.",
        ours,
        theirs,
        reasons=REASONS,
    )


def _all(tests: Path, path: str) -> Outcomes:
    return pytest(
        *FOLDERS,
        f"--ignore={LEFT_OUT}",
        "--timeout=300",
        cwd=tests,
        limit=3000,
        PYTHONPATH=path,
        DS_ACCELERATOR="cpu",
        LOCAL_SIZE="2",
        DS_UNITTEST_TIMEOUT="120",
        DS_DISABLE_REUSE_DIST_ENV="1",
    )
