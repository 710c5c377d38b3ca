"""The command line, as users type it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import trigram
from tests.support import patience
from tests.support.marks import long

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("transport", "vias"), [("shm", 6), long("tcp", 5)])
def test_bench_measures_every_schedule(tmp_path: Path, transport: str, vias: int) -> None:
    """The library's choice, and then each; over TCP "shared" is skipped, and the rest is measured."""
    file = tmp_path / "rows.json"
    argv = [
        "bench",
        "all_reduce",
        "--transport",
        transport,
        "--via",
        "all",
        "--sizes",
        "4,64K,5",  # 5 bytes are measured as 4, once
        "--iters",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "trigram", *argv, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert len(rows) == 2 * vias and not any(row["wrong"] for row in rows)
    assert len({row["via"] for row in rows}) == vias
    assert ("skipped" in done.stdout) == (transport == "tcp")


def test_version_names_the_commit() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trigram", "--version"],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=True,
    )
    found = re.fullmatch(
        r"trigram (\S+) \(commit ([0-9a-f]{12})(-dirty)?, torch \S+, Python \S+\)\n", done.stdout
    )
    assert found is not None, done.stdout
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert head.stdout.startswith(found[2])
    cited = (ROOT / "CITATION.cff").read_text()
    assert found[1] == trigram.__version__ and f"\nversion: {found[1]}\n" in cited


def test_the_conda_package_needs_what_the_wheel_needs() -> None:
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    assert f'\n  version: "{trigram.__version__}"\n' in recipe
    listed = re.search(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    needs = re.search(r"^  run:\n    - python\n((?:    - .*\n)+)", recipe, re.MULTILINE)
    assert listed is not None and needs is not None
    of_wheel = [text.strip(' "') for text in listed[1].split(",")]
    assert [text.strip("- ") for text in needs[1].splitlines()] == [
        text.replace("torch", "pytorch").replace(">=", " >=") for text in of_wheel
    ]


def test_algorithms_are_told_whole() -> None:
    """In a narrow terminal too, no column is cut or missing."""
    terminal, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "trigram", "algorithms"], stdout=theirs, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # the terminal's end
            while part := os.read(terminal, 4096):
                said += part
    os.close(terminal)
    assert process.returncode == 0
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in said.decode().splitlines()]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines), lines
    for entry in trigram.algorithms():
        row = [entry["name"], f"{entry['who']}/{entry['what']}/{entry['when']}", entry["carry"]]
        at = [line.split() for line in lines].index(row)
        assert entry["about"] in " ".join(line.strip() for line in lines[at + 1 : at + 3]), entry


def test_via_is_for_all_reduce_only() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trigram", "bench", "broadcast", "--via", "ring"],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=False,
    )
    assert done.returncode == 2 and "only all_reduce" in done.stderr
