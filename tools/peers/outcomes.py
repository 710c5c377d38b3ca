"""What a suite has come to, and how its tests are run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
Outcomes = dict[str, str]
"""By test: passed, failed or skipped."""


@dataclass(frozen=True)
class Suite:
    """A suite that has been run.

    Attributes:
        title: Its name and version.
        how: What was run, and in what place Trigram was: one paragraph.
        ours: With Trigram.
        theirs: With what it replaces; None: that was not run.
        theirs_name: The name of that.
        reasons: Why a test that does not pass does not, by the beginning of its name.
    """

    title: str
    how: str
    ours: Outcomes
    theirs: Outcomes | None = None
    theirs_name: str = "gloo"
    reasons: dict[str, str] = field(default_factory=dict)

    def reason(self, test: str) -> str:
        """Why a test does not pass."""
        fitting = [begin for begin in self.reasons if test.startswith(begin)]
        return self.reasons[max(fitting, key=len)] if fitting else "**not known yet**"


POSING = Path(__file__).with_name("posing")
"""A folder for ``PYTHONPATH``, with which gloo is Trigram."""


def path_of(*folders: Path | str) -> str:
    """A value of ``PYTHONPATH``, with this repository at its end."""
    return os.pathsep.join([*map(str, folders), str(ROOT)])


def unpack(clone: Path | None, folder: str, what: str, repository: str) -> None:
    """Copies a folder of a clone, as it was committed."""
    if clone is None:
        name = repository.rpartition("/")[2].upper()
        raise SystemExit(f"name a clone of github.com/{repository}: make test-peers PEER_{name}=PATH")
    packed = subprocess.run(
        ["git", "-C", str(clone), "archive", "HEAD", what], stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)


def of_clone(
    clone: Path | None, repository: str, run: Callable[[Path, str], Outcomes]
) -> tuple[Outcomes, Outcomes]:
    """The outcomes of a clone's ``tests`` with Trigram in the place of gloo, and with gloo.

    Args:
        clone: The clone; None: the command named none.
        repository: OWNER/NAME, for the error.
        run: Runs the tests in a folder, with a value of ``PYTHONPATH``.
    """
    with tempfile.TemporaryDirectory() as folder:
        unpack(clone, folder, "tests", repository)
        tests = Path(folder) / "tests"
        return run(tests, path_of(POSING, tests)), run(tests, path_of(tests))


def python(*command: str, cwd: Path | None = None, limit: float = 900, **environment: str) -> int:
    """Runs Python; the exit status, or 124 after ``limit`` seconds."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": programs}
    env |= {"PYTHONHASHSEED": "0"} | environment  # names of tests may have their place in a set
    try:
        return subprocess.run(
            [sys.executable, *command], cwd=cwd, env=env, timeout=limit, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return 124


def pytest(*options: str, cwd: Path | None = None, limit: float = 900, **environment: str) -> Outcomes:
    """Runs tests; what has come of each."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        plain = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--tb=short", f"--junitxml={report}"]
        python("-m", "pytest", *plain, *options, cwd=cwd, limit=limit, **environment)
        return read(report) if report.exists() else {"the suite as a whole": FAILED}


def read(report: Path) -> Outcomes:
    """The outcomes of a report of pytest's."""
    found: Outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        how = FAILED if kinds & {"failure", "error"} else SKIPPED if "skipped" in kinds else PASSED
        found[f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"] = how
    return found
