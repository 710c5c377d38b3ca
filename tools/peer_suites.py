"""Runs test suites of the libraries that Trigram takes the place of, as they are, on two ranks.

    python tools/peer_suites.py horovod PATH        # a clone of github.com/horovod/horovod

``make test-peers PEER_HOROVOD=PATH`` calls it. docs/conformance.md says what passes, and why the rest does
not. Nothing of the suites is copied into the project: they are run from a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

IN_PLACE = """
from trigram.compat.horovod import *
import trigram.compat.horovod as _here
def __getattr__(name): return getattr(_here, name)
"""
"""The module that the suite imports as ``horovod.torch``."""
COMMON = """
import contextlib, os, tempfile
def mpi_env_rank_and_size(): return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def skip_or_fail_gpu_test(test, message): test.skipTest(message)
@contextlib.contextmanager
def temppath():
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "file")
"""
"""What the suite imports of Horovod's own ``test/utils/common.py``."""
CONFTEST = """
import os
os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"] = os.environ["RANK"], os.environ["WORLD_SIZE"]
"""
LEFT_OUT = "not join and not duplicate_name_error"
"""Tests in which ranks make different calls, after which no later test would find them together."""


def horovod(path: Path) -> int:
    """Runs ``test/parallel/test_torch.py`` of Horovod; returns the exit status."""
    suite = (path / "test/parallel/test_torch.py").read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = folder / "horovod" / "torch"
        package.mkdir(parents=True)
        (folder / "horovod" / "__init__.py").touch()
        (package / "__init__.py").write_text(IN_PLACE)
        for file, text in (("common.py", COMMON), ("conftest.py", CONFTEST), ("test_torch.py", suite)):
            (folder / file).write_text(text)
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfEs", "--timeout", "100"]
        command = [
            sys.executable,
            "-m",
            "trigram",
            "run",
            "-n",
            "2",
            *pytest,
            "test_torch.py",
            "-k",
            LEFT_OUT,
        ]
        return subprocess.call(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})


def main() -> int:
    """Runs the suite that the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=["horovod"])
    parser.add_argument("path", type=Path)
    asked = parser.parse_args()
    return horovod(asked.path.resolve())


if __name__ == "__main__":
    sys.exit(main())
