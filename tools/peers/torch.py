"""torch's own tests of c10d, which its wheel ships (``DistributedTest``)."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path

from tools.peers.outcomes import Outcomes, Suite, python

WORLDS = [2, 3, 4]
REASONS = {"": "see `tests/backend/left_out.txt`"}


def run(path: Path | None) -> Suite:
    """Runs the tests on 2, 3 and 4 ranks."""
    del path
    return Suite(
        f"torch {importlib.metadata.version('torch').partition('+')[0]}",
        "`DistributedTest`, the tests of c10d and of DistributedDataParallel that the wheel has, on 2, 3 and "
        "4 ranks on CPUs: they ask for gloo, and get Trigram. Most of what is skipped needs GPUs.",
        _all(),
        _all("--real"),
        reasons=REASONS,
    )


def _all(*options: str) -> Outcomes:
    found: Outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS:
            out = Path(folder) / f"{world}.json"
            asked = ["--world", str(world), "--as", "gloo", "--out", str(out)]
            python("-m", "tests.backend.shipped", *asked, *options, limit=3600)
            outcomes = json.loads(out.read_text())
            found |= {f"{name} ({world} ranks)": how for name, (how, _) in outcomes.items()}
    return found
