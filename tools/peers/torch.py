"""torch's own tests of c10d, which its wheel ships (``DistributedTest``)."""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path

from tools.peers.outcomes import ROOT, Outcomes, Suite, python

WORLDS = [2, 3, 4]


def reasons() -> dict[str, str]:
    """Why tests do not run, as `tests/backend/left_out.txt` has it."""
    rows = [line.split(" | ") for line in (ROOT / "tests/backend/left_out.txt").read_text().splitlines()]
    return {
        f"{row[2]} ({world} ranks)": row[3]
        for row in rows
        if len(row) == 4 and row[0] == "gloo"
        for world in row[1].split(",")
    }


def run(path: Path | None) -> Suite:
    """Runs the tests on 2, 3 and 4 ranks."""
    del path
    return Suite(
        f"torch {importlib.metadata.version('torch').partition('+')[0]}",
        "`DistributedTest`, the tests of c10d and of DistributedDataParallel that the wheel has, on 2, 3 and "
        "4 ranks on CPUs: they ask for gloo, and get Trigram. Most of what is skipped needs GPUs.",
        _all(),
        _all("--real"),
        reasons=reasons(),
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
