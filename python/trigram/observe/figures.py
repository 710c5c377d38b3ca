"""What a rank says of the steps of a model, for the report: in a file of a folder, and as a line of JSON."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trigram.errors import ConfigError
from trigram.observe.phases import PHASES, WAIT, WITH_BAGUA

PREFIX = "report-rank"
VERSION = 1
_MOST_RANKS = 1 << 20


@dataclass
class Rank:
    """What a rank says of itself; times are seconds.

    Attributes:
        rank: World rank.
        world_size: Ranks of the job.
        host: Its host.
        model: The class of the model with most steps; "": no model was trained.
        steps: How many.
        mean: By phase, and ``step``: the mean of a step.
        median: The same, the median.
        buckets: Bytes of each gradient bucket; empty if weights are averaged.
        ranks: The world ranks that train the model.
        rates: Bytes per second of the link of each of them, if they were measured.
        sent: Bytes that it sent to other hosts or through pipes.
        fidelity: What averages lose (``TRIGRAM_GRADIENTS``), the same on all ranks.
        hosts: Of the job; 0: not known.
        trained_by: What brings the model's ranks together: ``with_bagua``, or a part of torch.
        on_gpu: Whether the model is on a GPU: times are then those of the host, which launches kernels and
            goes on, and its waiting includes what the GPU still has to do.
        asynchronous: Whether ranks average in the background: what they wait then is the averaging's own work
            (copies, codecs), and that for the bound ``staleness``.
        recent: The last steps without the waiting, oldest first.
        job: Which job it is; "": it came late into an elastic one, so it cannot say.
        coded: Whether a codec compresses what it sends.
    """

    rank: int
    world_size: int
    host: str
    model: str
    steps: int
    mean: dict[str, float]
    median: dict[str, float]
    buckets: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    sent: int = 0
    fidelity: dict[str, Any] = field(default_factory=dict)
    hosts: int = 0
    trained_by: str = WITH_BAGUA
    on_gpu: bool = False
    asynchronous: bool = False
    recent: list[float] = field(default_factory=list)
    job: str = ""
    coded: bool = False

    def own(self, typical: bool = False) -> float:
        """Seconds of a step, without waiting for others: the mean, or the median."""
        values = self.median if typical else self.mean
        return sum(values[phase] for phase in PHASES if phase != WAIT)

    @property
    def exposed(self) -> float:
        """The part of a step in which the training thread waits."""
        return self.mean[WAIT] / self.mean["step"] if self.mean["step"] else 0.0


def write(folder: Path, row: Rank) -> None:
    """Writes a rank's file; one that is read meanwhile is the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{PREFIX}{row.rank}.json"
    unfinished = path.with_suffix(".part")
    unfinished.write_text(line(row), encoding="utf-8")
    unfinished.replace(path)


def line(row: Rank) -> str:
    """A rank's figures as JSON."""
    return json.dumps({"version": VERSION, **asdict(row)})


def parsed(values: dict[str, Any]) -> Rank:
    """The figures in what :func:`line` has written.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: They are something else.
    """
    values = dict(values)
    if values.pop("version") != VERSION:
        raise ValueError("it is of another release")
    row = Rank(**values)
    if set(row.mean) != {"step", *PHASES} or set(row.median) != {"step", *PHASES}:
        raise ValueError("it lacks phases of a step")
    counts = (row.rank, row.world_size, row.steps, row.sent, row.hosts, *row.buckets, *row.ranks)
    if not all(type(n) is int and n >= 0 for n in counts) or row.world_size > _MOST_RANKS:
        raise ValueError("a count is none")
    for number in (*row.mean.values(), *row.median.values(), *row.recent, *row.rates):
        if type(number) not in (int, float) or not 0 <= number < math.inf:
            raise ValueError(f"{number!r} is no time or rate")
    texts = (row.host, row.model, row.trained_by, row.job)
    if not all(isinstance(t, str) and t.isprintable() for t in texts):
        raise ValueError("it names no host or model")
    if not isinstance(row.fidelity, dict):
        raise ValueError("it does not say what averages lose")
    return row


def read(where: Path, mine: Rank | None = None) -> list[Rank]:
    """The ranks of a folder, by rank, without those that an earlier job has left.

    Args:
        where: The folder.
        mine: The rank that reads it, whatever its file says.

    Raises:
        ConfigError: There is no file of a rank, or one is no report.
    """
    rows = {} if mine is None else {mine.rank: mine}
    for path in where.glob(f"{PREFIX}*.json") if where.is_dir() else []:
        found = re.fullmatch(rf"{PREFIX}(0|[1-9]\d*)\.json", path.name)
        if found is None or (mine is not None and int(found[1]) == mine.rank):
            continue
        try:
            row = parsed(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError) as error:
            raise ConfigError(f"{path} is no report of a rank: {error}") from error
        if row.rank == int(found[1]):
            rows[row.rank] = row
    if not rows:
        raise ConfigError(
            f"{where} has no {PREFIX}N.json; the ranks of a job write them there with TRIGRAM_REPORT={where}"
        )
    first = mine if mine is not None else rows[min(rows)]
    return [
        row
        for _, row in sorted(rows.items())
        if row.rank < first.world_size and ("" in (row.job, first.job) or row.job == first.job)
    ]
