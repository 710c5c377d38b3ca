"""``TRIGRAM_REPORT=DIR``: each rank leaves its figures in a folder when it ends, and rank 0 prints them.

Nothing is sent between ranks for it. Ranks of one host share the folder; those of other hosts leave their
figures in the job's store too, sealed as the snapshots of ``trigram top`` are. ``TRIGRAM_REPORT=1`` means
``trigram-report``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trigram.errors import ConfigError
from trigram.observe import figures, report, steps
from trigram.runtime import exit_status, job, logs, seals, world
from trigram.runtime.job import Part
from trigram.runtime.live_store import ReconnectingStore, connect_again

VARIABLE = world.REPORT
KEY = "report/{}/{}"
"""Of the figures in the store: the job, and the rank."""
_LONGEST = 1 << 20
_PATIENCE = 5.0
"""Seconds that rank 0 waits for the figures of the other ranks when it has left."""


def _folder() -> Path | None:
    asked = os.environ.get(VARIABLE, "")
    return Path("trigram-report" if asked == "1" else asked) if world.asks(VARIABLE) else None


def sealed(row: figures.Rank, key: bytes | None) -> bytes:
    """A rank's figures as they are stored: a seal, and JSON."""
    body = figures.line(row).encode()
    return seals.sealed(f"figures {row.rank}", body, key)


def unsealed(value: bytes, rank: int, key: bytes | None) -> figures.Rank | None:
    """The figures of a rank that a store holds; None if they are something else, or sealed otherwise: any
    process may write to a store."""
    body = seals.opened(f"figures {rank}", value[: _LONGEST + 1], key)
    if body is None or len(value) > _LONGEST:
        return None
    try:
        row = figures.parsed(json.loads(body))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return row if row.rank == rank else None


def of_this_rank(present: job.World, times: steps.StepTimes | None) -> figures.Rank:
    """What this rank says of itself and of a model now."""
    whole = times.summary() if times is not None else None
    keys = ("step", *steps.PHASES)
    ranks, rates = times.links() if times is not None else steps.links(present.group)
    counters: dict[str, Any] = dict(present.engine.counters())
    return figures.Rank(
        rank=present.rank,
        world_size=present.size,
        host=socket.gethostname(),
        model=times.name if times is not None else "",
        steps=times.step.count if times is not None else 0,
        mean={key: whole[key]["mean"] if whole else 0.0 for key in keys},
        median={key: whole[key]["median"] if whole else 0.0 for key in keys},
        buckets=list(times.buckets) if times is not None else [],
        ranks=ranks,
        rates=rates,
        sent=sum(counters["sent_bytes"]),
        fidelity=times.fidelity() if times is not None else {},
        hosts=len(set(present.engine.hosts)),
        trained_by=times.trained_by if times is not None else "",
        on_gpu=times is not None and times.on_gpu,
        asynchronous=times is not None and times.asynchronous,
        job=present.name,
        coded=times is not None and times.coded,
        recent=[ns * 1e-9 for ns in times.recent.copy()] if times is not None else [],
    )


@dataclass
class _Awaited:
    """What the rank that prints the report waits for when it has left the job.

    Attributes:
        folder: Where the files are.
        near: The ranks of its host, which write there.
        far: The others.
        store: Where these leave their figures; None: nowhere.
        job: Which job it was.
        mine: The figures of this rank.
    """

    folder: Path
    near: set[int]
    far: set[int]
    store: ReconnectingStore | None
    job: str
    mine: figures.Rank

    def fetch(self, key: bytes | None, deadline: float) -> None:
        """Writes what has come from other hosts into the folder; ends at the ``deadline``, a time of
        ``time.monotonic``, or where the store cannot be reached."""
        for rank in sorted(self.far) if self.store is not None else []:
            if self.store is None or time.monotonic() > deadline:
                return
            value = self.store.get(KEY.format(self.job, rank))
            if self.store.store is None:  # each further try may take a second
                return
            row = unsealed(value, rank, key) if value is not None else None
            if row is not None:
                figures.write(self.folder, row)
            if value is not None:
                self.far.discard(rank)


@job.told_first
class _Report(Part):
    """The report of a job, if ``TRIGRAM_REPORT`` asks for it."""

    def __init__(self) -> None:
        self._awaited: _Awaited | None = None

    def begin(self) -> None:
        """See the class."""
        folder, present = _folder(), world.present()
        if folder is not None and present is not None:
            exit_status.watch()
            # Rank 0 removes what an earlier job has left of ranks of other hosts.
            for rank in range(present.size) if present.rank == 0 else [present.rank]:
                with contextlib.suppress(OSError):  # what cannot be written is told at the end
                    (folder / f"{figures.PREFIX}{rank}.json").unlink(missing_ok=True)

    def finish(self) -> None:
        """Leaves this rank's figures where the first rank looks for them."""
        folder, present = _folder(), world.present()
        if folder is None or present is None:
            return
        row = of_this_rank(present, steps.longest())
        try:
            figures.write(folder, row)
        except OSError as error:
            logs.warning(f"{VARIABLE}: rank {present.rank} cannot write its figures to {folder}: {error}")
        hosts = present.engine.hosts
        store = None
        if present.store is not None and (present.rank == 0 or hosts[present.rank] != hosts[0]):
            store = connect_again(present.store)
        if present.rank:
            if store is not None:
                store.put(KEY.format(present.name, present.rank), sealed(row, seals.secret()))
            return
        if not exit_status.has_failed():
            near = {r for r in range(present.size) if hosts[r] == hosts[0]}
            others = set(range(present.size)) - near
            self._awaited = _Awaited(folder, near, others, store, present.name, row)

    def left(self) -> None:
        """Nobody waits for this rank while it waits for the figures of the others."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            _print(awaited)


def _print(awaited: _Awaited) -> None:
    """Prints the report, with what has come in time."""
    deadline = time.monotonic() + _PATIENCE
    try:
        while True:
            awaited.fetch(seals.secret(), deadline)
            rows = figures.read(awaited.folder, awaited.mine)
            here = {row.rank for row in rows}
            # Without a store others may still share the disk: their files are there, or are not awaited.
            if awaited.near <= here and (awaited.store is None or awaited.far <= here):
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        text = report.text(rows)
    except (ConfigError, OSError) as error:  # a file that something else has left there, or a full disk
        text = f"trigram report: none, because {error}"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
