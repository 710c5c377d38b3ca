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
from trigram import _command

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


@pytest.mark.parametrize("words", [["--help"], ["run", "-n", "2", "SCRIPT"]], ids=["help", "run"])
def test_who_only_starts_ranks_does_without_torch(words: list[str], tmp_path: Path) -> None:
    """Its import takes seconds, and half a gigabyte of the machine that is to train."""
    script = tmp_path / "script.py"
    script.write_text("print('it runs')\n")
    words = [str(script) if word == "SCRIPT" else word for word in words]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trigram", *words],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=True,
    )
    imported = re.findall(r"^import time: .*\| +(\S+)$", done.stderr, re.MULTILINE)
    assert "trigram.cli" in imported and "torch" not in imported
    assert done.stdout.count("it runs") == (2 if "run" in words else 0), done.stdout


@pytest.mark.parametrize(
    ("argv", "orig_argv", "it_is"),
    [
        (["/venv/bin/trigram", "run"], ["python", "/venv/bin/trigram", "run"], True),
        (["trigram.exe"], ["trigram.exe"], True),
        (["-m", "--help"], ["python", "-X", "dev", "-m", "trigram", "--help"], True),
        (["-m"], ["python", "-m", "trigram.cli.bench"], False),
        (["-m"], ["python", "-m", "mine.train", "-m", "trigram"], False),
        (["train.py", "trigram"], ["python", "train.py", "-m", "trigram"], False),
        (["-c"], ["python", "-c", "import trigram"], False),
        ([""], ["python"], False),
        ([], [], False),
    ],
)
def test_which_process_is_the_command(argv: list[str], orig_argv: list[str], it_is: bool) -> None:
    assert _command.runs(argv, orig_argv) is it_is


def test_what_scripts_use_is_there_in_a_process_of_that_name(tmp_path: Path) -> None:
    script = tmp_path / "trigram"
    script.write_text(
        "import sys, trigram.errors\n"
        "from trigram import collectives\n"
        "import trigram.algorithms.graphs\n"
        "assert 'trigram.model' not in sys.modules\n"
        "assert trigram.TimeoutError is trigram.errors.TimeoutError\n"
        "assert 'trigram.model' in sys.modules and len(trigram.algorithms()) > 8\n"
        "from trigram import *\n"
        "assert with_bagua is trigram.with_bagua and trigram.collectives is collectives\n"
        "assert sorted(trigram.__all__) == trigram.__all__\n"
        "try:\n"
        "    trigram.no_such_name\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=False,
    )
    assert done.stdout == "module 'trigram' has no attribute 'no_such_name'\n", done.stderr


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
