"""Control groups of the kernel, for tests that freeze ranks or limit their memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.harness import until


@contextmanager
def new(root: str, file: str) -> Iterator[Path]:
    """The folder of a new cgroup in the hierarchy `root` that has `file`; skips the test if there is none."""
    folder = Path(root) / f"trigram-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as e:
        pytest.skip(f"this machine lets nobody make a cgroup in {root}: {e.strerror}")
    try:
        if not (folder / file).exists():
            pytest.skip(f"cgroups in {root} have no {file}")
        yield folder
    finally:
        with suppress(OSError):
            until(lambda: not (folder / "cgroup.procs").read_text(), 30)
        folder.rmdir()
