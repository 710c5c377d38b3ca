"""Makes this machine look like one with many slow cores: every thread gets a share of a core of its own.

A few fast cores cannot show what a program gains by more threads. With a share so small that all threads
together leave the cores idle now and then, each thread runs as on a core of its own, which is slower. The
kernel limits a control group by the time that it may run in each period, so short calls, which fit into one
period, look too fast and then too slow: this is for calls that take many periods. Needs root, and the control
groups' version 1, in which threads of one process can be apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

ROOT = Path("/sys/fs/cgroup/cpu")
QUOTA_US = 1000
"""The least that the kernel takes."""


class SlowCores:
    """A context manager that keeps the control groups.

    Args:
        share: Of a core, for each thread.
    """

    def __init__(self, share: float) -> None:
        self.period_us = round(QUOTA_US / share)
        self.folder = ROOT / f"tgbench{os.getpid()}"
        self.known: set[int] = set()

    def __enter__(self) -> SlowCores:
        self.folder.mkdir()
        return self

    def limit(self, pids: Iterable[int]) -> None:
        """Gives every thread that these processes have, and did not have before, a core of its own."""
        threads = {int(task.name) for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()}
        for thread in threads - self.known:
            group = self.folder / str(thread)
            group.mkdir()
            (group / "cpu.cfs_period_us").write_text(str(self.period_us))
            (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
            with suppress(ProcessLookupError):
                (group / "tasks").write_text(str(thread))
        self.known |= threads

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in self.folder.iterdir():
            if group.is_dir():
                for task in (group / "tasks").read_text().split():
                    with suppress(ProcessLookupError):
                        (ROOT / "tasks").write_text(task)
                group.rmdir()
        self.folder.rmdir()
