"""`trigram top`: the ranks of a running job, live, from the snapshots that they leave in its store."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trigram.cli.job_store import open_store
from trigram.errors import AuthError
from trigram.observe.snapshots import KEY, PER_RANK, PERIOD, Snapshot, unseal
from trigram.observe.steps import FORWARD, INPUT, OPTIMIZER, PHASES, WAIT
from trigram.runtime import seals
from trigram.runtime.live_store import ReconnectingStore

_STALE = 3
"""Periods without a snapshot after which a rank counts as silent."""
_MOST = 1 << 14
_COLUMNS = (
    "rank",
    "host",
    "steps",
    "step ms",
    "input",
    "forward",
    "backward",
    "wait",
    "optimizer",
    "MB/s",
    "waits for",
    "",
)
_FOLDED = {"host": 12, "": 16}
"""Columns of text: in a narrow terminal it is broken into lines of so many letters, or more."""
_FIRST_TO_GO = ("optimizer", "forward", "input", "backward", "MB/s")
"""Columns for which a narrow terminal has no room: numbers are shown whole or not at all."""


class Job:
    """What is known of a job: the newest snapshot of each rank, and when it was first seen here."""

    def __init__(self, store: ReconnectingStore) -> None:
        self.store, self.key = store, seals.secret()
        self.ranks: dict[int, tuple[Snapshot, float]] = {}
        self.problem = ""

    def read(self) -> None:
        """Reads the snapshots of all ranks."""
        self.problem = ""
        size = max((s.world_size for s, _ in self.ranks.values()), default=1)
        for rank in range(min(size, _MOST)):
            self._read(rank)
        grown = max((s.world_size for s, _ in self.ranks.values()), default=1)
        for rank in range(size, min(grown, _MOST)):
            self._read(rank)
        # After a restart with fewer ranks the store still has those of the others.
        self.ranks = {rank: found for rank, found in self.ranks.items() if rank < self.size()}
        if self.store.store is None:
            self.problem = "the store does not answer any more: the job has ended, or begins again"
        elif not self.ranks and not self.problem:
            self.problem = "no snapshot in the store yet; start the ranks with TRIGRAM_TOP=1"

    def size(self) -> int:
        """The ranks of the job, as the newest snapshot says; 0: none is known."""
        newest = max((taken for taken, _ in self.ranks.values()), key=lambda taken: taken.time, default=None)
        return newest.world_size if newest is not None else 0

    def _read(self, rank: int) -> None:
        value = self.store.get(KEY.format(rank))
        if value is None:
            return
        try:
            found = unseal(value, rank, self.key)
        except (AuthError, ValueError) as error:
            self.problem = str(error)
            return
        before = self.ranks.get(rank)
        if before is None:  # how old it is, only the clocks can tell
            self.ranks[rank] = found, time.monotonic() - max(0.0, time.time() - found.time)
        elif (found.time, found.number) > (before[0].time, before[0].number):
            self.ranks[rank] = found, time.monotonic()

    def state(self, rank: int) -> str:
        """``left``, ``silent for N s``, or "" if all is well."""
        taken, seen = self.ranks[rank]
        period = max(PERIOD, PER_RANK * taken.world_size)
        silent = time.monotonic() - seen
        if taken.left:
            return "left"
        if silent > _STALE * period:
            return f"silent for {silent:.0f} s"
        return f"hears nothing of {', '.join(map(str, taken.silent))}" if taken.silent else ""

    def shown(self, most: int) -> list[int]:
        """The ranks for a table of so many rows: those with something to say first, then the slowest."""
        if len(self.ranks) <= most:
            return sorted(self.ranks)
        own = {rank: _own(taken) for rank, (taken, _) in self.ranks.items()}
        chosen = sorted(self.ranks, key=lambda r: (not self.state(r), -own[r], r))[: max(0, most)]
        return sorted(chosen)

    def table(self, most: int, width: int) -> Any:
        """What a terminal of ``width`` letters shows, with so many rows at most."""
        lines: list[Any] = [Text(self.headline())]
        if self.problem:
            lines.append(Text(self.problem, style="red"))
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        slowest = max(self.ranks, key=lambda r: _own(self.ranks[r][0]), default=-1)
        shown = self.shown(most)
        rows = [dict(zip(_COLUMNS, self._cells(rank), strict=True)) for rank in shown]
        columns = _fitting(rows, width)
        for name in columns:
            folded = name in _FOLDED
            table.add_column(name, justify="left" if folded else "right", no_wrap=not folded, overflow="fold")
        for rank, row in zip(shown, rows, strict=True):
            cells = [Text(row[name]) for name in columns]
            table.add_row(*cells, style="bold" if rank == slowest and len(self.ranks) > 1 else "")
        lines.append(table)
        if len(shown) < len(self.ranks):
            lines.append(Text(f"and {len(self.ranks) - len(shown)} other ranks"))
        return Group(*lines)

    def headline(self) -> str:
        """The job in a line."""
        trained = [taken for taken, _ in self.ranks.values() if taken.seconds.get("step")]
        text = f"trigram top: {len(self.ranks)} of {self.size()} ranks"
        if trained:
            most = max(trained, key=lambda taken: taken.steps)
            alike = [taken.seconds for taken in trained if taken.model == most.model]
            step = statistics.median(seconds["step"] for seconds in alike)
            wait = statistics.median(seconds[WAIT] / seconds["step"] for seconds in alike)
            text += f", {most.steps} steps of {most.model}, {1e3 * step:.3g} ms per step"
            text += f", {wait:.0%} of it waiting"
        return text

    def _cells(self, rank: int) -> Iterator[str]:
        taken, _ = self.ranks[rank]
        yield str(rank)
        yield taken.host
        yield str(taken.steps)
        for phase in ("step", INPUT, FORWARD, "backward", WAIT, OPTIMIZER):
            yield f"{1e3 * taken.seconds[phase]:.1f}" if phase in taken.seconds else "-"
        yield f"{taken.sent / 1e6:.1f}"
        yield f"{taken.waits_for} ({taken.waits:.0%})" if taken.waits > 0.01 else "-"
        yield self.state(rank)


def _fitting(rows: list[dict[str, str]], width: int) -> list[str]:
    """The columns that a terminal has room for."""
    columns = list(_COLUMNS)
    need = {name: max(len(name), *(len(row[name]) for row in rows), 0) for name in columns}
    need |= {name: min(need[name], least) for name, least in _FOLDED.items()}
    for name in _FIRST_TO_GO:
        if sum(need[column] + 1 for column in columns) > width:
            columns.remove(name)
    return columns


def _own(taken: Snapshot) -> float:
    """Seconds of a step without waiting for others."""
    return sum(taken.seconds.get(phase, 0.0) for phase in PHASES if phase != WAIT)


def show(store: str | None, once: bool) -> int:
    """Shows a job until Ctrl-C or SIGTERM, or until all ranks have left; ``once``, and where nothing can be
    drawn anew: prints one table.

    Returns:
        The exit code: 1 if nothing of the job was found.
    """
    job = Job(open_store(store))
    console = Console()
    job.read()
    if once or not console.is_terminal or console.is_dumb_terminal:
        console = console if console.is_terminal else Console(width=120)
        console.print(job.table(_MOST, console.width))
        return 0 if job.ranks else 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal is left as it was
    try:
        with Live(
            job.table(console.height - 4, console.width), console=console, auto_refresh=False, screen=True
        ) as live:
            while not job.ranks or not all(taken.left for taken, _ in job.ranks.values()):
                time.sleep(PERIOD / 2)
                job.read()
                live.update(job.table(console.height - 4, console.width), refresh=True)
    except KeyboardInterrupt:
        pass
    console.print(job.table(console.height - 4, console.width))
    return 0
