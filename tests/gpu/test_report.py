"""The report of what needs a GPU (tools/gpu_report.py), rehearsed without one; and how it reads results."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import patience
from tests.support.harness import ROOT
from tests.support.marks import long_unless

needs = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or shutil.which("cc") is None,
    reason="triton or a C compiler is not installed",
)


def load(file: str) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    folder = str((ROOT / file).parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


report = load("tools/gpu_report.py")
# By stage, figures that it must give, or tests that must have passed.
FOUND = {
    "machine": ["torch", "NCCL", "int8 of 1000 values: the CPU's bytes", "all_reduce of one rank"],
    "collectives": ["3 passed"],
    "kernels": ["2 passed"],
    "codecs": ["a copy", "int8, decode and add, 0.02 MiB"],
    "overlap": ["losses are DDP's, bit for bit", "step of DDP", "Work.wait, stream"],
    "faults": ["8 passed"],
    "training": ["1 passed"],
    "training-host": ["1 passed"],
    "network": ["0.02 MiB, sign, times faster than NCCL over TCP"],
    "plugin": ["0.02 MiB, the plugin, 1 streams"],
    "elastic": ["shrink: steps in which a rank is lost"],
}


@needs
@pytest.mark.parametrize("stage", long_unless(["machine"], report.NAMES))
def test_rehearsal(tmp_path: Path, stage: str) -> None:
    command = [sys.executable, "tools/gpu_report.py", "--rehearse", "--stages", stage, "--out", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=patience.seconds(280), check=False
    )
    page = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, page + done.stderr
    assert page.count("| not run |") == len(report.NAMES) - 1 and "A rehearsal" in page
    row = next(line for line in page.splitlines() if line.startswith(f"| {stage} |"))
    assert "| passed |" in row and "failed" not in row and "no |" not in page
    for what in FOUND[stage]:
        assert what in page, page


def test_a_stage_that_lasts_too_long_does_not_keep_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "import os, time; open(os.environ['TRIGRAM_FIGURES'], 'a').write(LINE); time.sleep(SECONDS)"
    line = json.dumps({"what": "so far", "value": 0.5, "unit": "x", "least": 0.7}) + "\n"
    half = line[: len(line) // 2]  # it was killed while it wrote

    def stage(name: str, seconds: float) -> Any:
        written = line + half if name == "slow" else line
        argv = ["-c", script.replace("LINE", repr(written)).replace("SECONDS", str(seconds))]
        return report.Stage(name, name, argv, argv)

    stages = [stage("slow", 60), stage("quick", 0), report.Stage("broken", "broken", ["-c", "1/0"], [])]
    skipped = ["-c", "print('tests/gpu/test_x.py::test_y[cuda] SKIPPED (no GPU) [100%]')"]
    stages.append(report.Stage("skipped", "skipped", skipped, []))
    monkeypatch.setattr(report, "STAGES", stages)
    monkeypatch.setattr(report, "NAMES", [s.name for s in stages])
    monkeypatch.setattr(report, "unpack", lambda: None)
    limit = str(round(patience.seconds(2)))
    argv = ["gpu_report", "--stages", "slow quick broken skipped", "--limit", limit, "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    assert report.main() == 1
    assert "quick: passed" in capsys.readouterr().out
    page = (tmp_path / "report.md").read_text()
    assert f"| slow | slow | ended after {limit} s |" in page and "| quick | quick | passed |" in page
    assert "| broken | broken | failed (exit code 1) |" in page and "ZeroDivisionError" in page
    assert "| skipped | skipped | failed (all tests were skipped) |" in page
    assert page.count("| so far | 0.5 x | 0.7 | no |") == 2  # what the slow one had found is kept
    assert page.count("0 of 1 bars reached") == 2
    assert page.count("0 of 1 bars reached; lines of figures left out: 1") == 1


def test_overlap_is_read_from_a_trace(tmp_path: Path) -> None:
    overlap = load("benches/gpu_overlap.py")
    spans = [("ncclDevKernel_AllReduce", 0, 10), ("gemm", 5, 10), ("gemm", 6, 2), ("ncclDevKernel_X", 20, 10)]
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "name": name, "ts": at, "dur": long} for name, at, long in spans
    ]
    events.append({"cat": "gpu_user_annotation", "name": "nccl:all_reduce", "ts": 0, "dur": 100})
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    ours, others = overlap.kernels(tmp_path / "trace.json")
    assert overlap.covered(ours, others) == (20.0, 5.0)
