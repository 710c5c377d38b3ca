"""`trigram chaos`: injects random faults into the ranks of a job, and reports whether the job survived.

The job is a script of the user, started once per rank with torchrun's variables. A rank that a fault has
ended is started again, as a supervisor of preemptible machines does; with `--no-restart` it is not. The same
seed gives the same faults, at nearly the same times.

| fault | what happens to the rank |
|---|---|
| kill | SIGKILL |
| drain | SIGTERM: it ends its step and leaves, with status 0 (`trigram.drain`) |
| crash | SIGABRT; it writes a core dump if `ulimit -c` allows that |
| stop | SIGSTOP, and SIGKILL when the others have evicted it, 1.8 s after `TRIGRAM_SILENCE` |
| freeze | SIGSTOP for 0.5 to 5 s, at most half of `TRIGRAM_SILENCE`, then SIGCONT |
| pause | SIGSTOP for at most half a second, then SIGCONT |
| slow | stopped half of the time, for two seconds |
| cut | its TCP connections neither send nor receive; SIGKILL 1.8 s after `TRIGRAM_SILENCE` |
| outage | its TCP connections carry nothing for 0.5 to 5 s, at most half of `TRIGRAM_SILENCE`, and then all |
| corrupt | one bit of what it sends over TCP is flipped |

A rank survives freeze, pause, slow and outage: it has to go on as if nothing had happened.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from trigram.runtime.end_signals import EndSignals
from trigram.runtime.launch import end, job_environment, start_rank

FAULTS = ("kill", "drain", "crash", "stop", "freeze", "pause", "slow", "cut", "outage", "corrupt")
LASTING = ("kill", "drain", "crash", "stop", "cut")
"""Faults that a rank does not survive."""
_FLIP, _CUT, _OUTAGE = 1, 2, 3
"""What the engine reads from the file in TRIGRAM_CHAOS: flip a bit once, cut all TCP connections for good, or
hold up what they carry until the word is 0 again."""
_LEAVES = "leaves the job, as it was asked to"
"""What a rank says that was drained and not only ended."""
_SILENCE_SECONDS = 15.0
"""The silence after which a rank is lost, unless TRIGRAM_SILENCE is set."""
_EVICTION_SECONDS = 1.8
"""How long after that a rank is ended, by when the others have evicted it."""


@dataclass
class Settings:
    """What to run, and which faults to inject.

    Attributes:
        command: The program and its arguments.
        ranks: The number of ranks.
        seed: The seed of all random choices.
        seconds: For how long faults are injected.
        every: Mean seconds between two faults.
        faults: Which of `FAULTS`.
        restart: Restart a rank that a fault has ended.
        settle: Seconds without faults after a rank starts or, with `ready`, prints that text.
        ready: The text; None: count from the start of the process.
        patience: Seconds that the job has to become ready; and to end after the last fault, counted from the
            last word of a rank.
        logs: The folder for a log file per rank; None: a temporary one.
        environment: More environment variables for the ranks.
    """

    command: Sequence[str]
    ranks: int = 4
    seed: int = 0
    seconds: float = 60.0
    every: float = 5.0
    faults: Sequence[str] = FAULTS
    restart: bool = True
    settle: float = 8.0
    ready: str | None = None
    patience: float = 120.0
    logs: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Rank:
    """A rank's present process.

    Attributes:
        process: The process.
        log: The file that it writes to, as earlier processes of the rank did.
        control: The file in TRIGRAM_CHAOS, which the engine reads.
        log_start: The characters in the log that earlier processes have written.
        ready_since: Since when it counts as ready; None: it has not printed the text yet.
    """

    process: subprocess.Popen[bytes]
    log: Path
    control: mmap.mmap
    log_start: int = 0
    ready_since: float | None = field(default_factory=time.monotonic)


@dataclass
class Report:
    """The result of a run.

    Attributes:
        faults: How often each fault was injected.
        restarts: The number of restarted processes.
        unexpected: Rank and exit code of processes that failed without a fault.
        finished: Ranks whose script ended without error.
        hung: Ranks that still ran when `patience` had passed.
        logs: The output of each rank.
    """

    faults: Counter[str]
    restarts: int
    unexpected: list[tuple[int, int]]
    finished: list[int]
    hung: list[int]
    logs: dict[int, str]

    @property
    def survived(self) -> bool:
        """Whether faults were injected, scripts ended, none hung, and none failed without a fault."""
        return bool(self.faults and self.finished) and not self.hung and not self.unexpected

    def __str__(self) -> str:
        done = ", ".join(f"{n} x {name}" for name, n in sorted(self.faults.items())) or "none"
        lines = [f"faults    {done}", f"restarts  {self.restarts}"]
        lines.append(f"finished  ranks {', '.join(map(str, self.finished)) or 'none'}")
        for rank, code in self.unexpected:
            lines.append(f"FAILED    rank {rank}, exit code {code}: {_last(self.logs[rank])}")
        for rank in self.hung:
            lines.append(f"HUNG      rank {rank}: {_last(self.logs[rank])}")
        if not self.faults:
            lines.append("no fault was injected: the job ended before its ranks had run for --settle seconds")
        else:
            lines.append("the job survived" if self.survived else "the job did NOT survive")
        return "\n".join(lines)


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


class Chaos:
    """A job into which faults are injected. A context manager: it ends the job's processes on exit."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.stack = ExitStack()
        self.ranks: dict[int, Rank] = {}
        self.faults: Counter[str] = Counter()
        self.injected: dict[int, str] = {}  # by rank: the fault that it suffers now
        self.schedule: list[tuple[float, int, str]] = []  # time, rank and what to do then
        self.restarts = 0
        self.unexpected: list[tuple[int, int]] = []
        self.finished: set[int] = set()

    def __enter__(self) -> Self:
        temporary = tempfile.TemporaryDirectory(prefix="trigram-chaos-")
        self.dir = Path(self.stack.enter_context(temporary))
        self.logs = self.settings.logs or self.dir
        self.logs.mkdir(parents=True, exist_ok=True)
        job = job_environment(self.settings.ranks) | {"OMP_NUM_THREADS": "1"}
        self.environment = job | self.settings.environment
        silence = (os.environ | self.environment).get("TRIGRAM_SILENCE")
        self.silence = float(silence) if silence else _SILENCE_SECONDS
        self.signals = EndSignals(self.stack)
        self.stack.callback(lambda: end([r.process for r in self.ranks.values()], self.signals))
        for rank in range(self.settings.ranks):
            self._start(rank)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks.values():
            rank.process.send_signal(signal.SIGCONT)
        self.stack.close()

    def _start(self, rank: int) -> None:
        log, file = self.logs / f"rank{rank}.log", self.dir / f"rank{rank}.control"
        file.write_bytes(bytes(4))
        with file.open("r+b") as f:
            control = mmap.mmap(f.fileno(), 4)
        environment = self.environment | {"TRIGRAM_CHAOS": str(file)}
        log_start = len(log.read_text(errors="replace")) if log.exists() else 0
        with log.open("ab") as out:
            process = start_rank(
                rank, self.settings.command, environment, stdout=out, stderr=subprocess.STDOUT
            )
        self.ranks[rank] = Rank(process, log, control, log_start)
        if self.settings.ready is not None:
            self.ranks[rank].ready_since = None
        self.injected.pop(rank, None)

    def run(self) -> Report:
        """Waits until the job is ready, injects faults, and then waits for the job to end."""
        end = time.monotonic() + self.settings.patience
        while not self._all_ready() and not self._is_over() and time.monotonic() < end:
            self._handle_events()
            self.signals.pause(0.05)
        began = time.monotonic()
        next_fault = began + self._interval()
        while time.monotonic() < began + self.settings.seconds and not self._is_over():
            if time.monotonic() >= next_fault and not self.finished:
                self._inject_fault()
                next_fault = time.monotonic() + self._interval()
            self._handle_events()
            self.signals.pause(0.01)
        # As long as ranks say something, or end, they do not hang: on a busy machine all takes longer.
        last, heard = time.monotonic(), self._heard()
        while time.monotonic() < last + self.settings.patience and not self._is_over():
            self._handle_events()
            if (now := self._heard()) != heard:
                last, heard = time.monotonic(), now
            self.signals.pause(0.01)
        self._handle_events()
        hung = [r for r, rank in self.ranks.items() if rank.process.poll() is None]
        logs = {r: rank.log.read_text(errors="replace") for r, rank in self.ranks.items()}
        return Report(+self.faults, self.restarts, self.unexpected, sorted(self.finished), hung, logs)

    def _heard(self) -> tuple[int, ...]:
        """How much the ranks have written, and how many have ended."""
        written = [rank.log.stat().st_size if rank.log.exists() else 0 for rank in self.ranks.values()]
        return *written, sum(rank.process.poll() is not None for rank in self.ranks.values())

    def _all_ready(self) -> bool:
        """Notes which present processes have printed that they are ready; returns whether all have."""
        for rank in self.ranks.values():
            if rank.ready_since is None and self.settings.ready is not None:
                rank.ready_since = time.monotonic() if self.settings.ready in self._said(rank) else None
        return all(rank.ready_since is not None for rank in self.ranks.values())

    @staticmethod
    def _said(rank: Rank) -> str:
        """What the present process has written."""
        return rank.log.read_text(errors="replace")[rank.log_start :]

    def _interval(self) -> float:
        return self.settings.every * self.random.uniform(0.5, 1.5)

    def _is_over(self) -> bool:
        return not self.schedule and all(r.process.poll() is not None for r in self.ranks.values())

    def _inject_fault(self) -> None:
        """Injects a random fault into a random rank that suffers none now."""
        self._all_ready()
        latest = time.monotonic() - self.settings.settle
        healthy = [
            r
            for r, rank in self.ranks.items()
            if rank.process.poll() is None
            and r not in self.injected
            and rank.ready_since is not None
            and rank.ready_since < latest
        ]
        # More than half of the ranks must stay: they are the quorum that continues the job.
        few = len(healthy) <= self.settings.ranks // 2 + 1
        kinds = [f for f in self.settings.faults if not (few and f in (*LASTING, "corrupt"))]
        if not healthy or not kinds:
            return
        # Each kind once before a second of any; first those after which a rank takes time to come back, so
        # that the others are injected meanwhile.
        new = [f for f in kinds if not self.faults[f]]
        lasting = [f for f in new if f in (*LASTING, "corrupt")]
        fault = self.random.choice(lasting or new or kinds)
        victim = self.random.choice(healthy)
        process, now = self.ranks[victim].process, time.monotonic()
        self.faults[fault] += 1
        self.injected[victim] = fault
        if fault == "kill":
            process.kill()
        elif fault == "drain":
            process.send_signal(signal.SIGTERM)
        elif fault == "crash":
            process.send_signal(signal.SIGABRT)
        elif fault == "stop":
            process.send_signal(signal.SIGSTOP)
            self.schedule.append((now + self.silence + _EVICTION_SECONDS, victim, "kill"))
        elif fault in ("freeze", "outage"):
            if fault == "freeze":
                process.send_signal(signal.SIGSTOP)
            else:
                self.ranks[victim].control[0] = _OUTAGE
            end = now + self.random.uniform(0.5, max(0.5, min(5.0, self.silence / 2)))
            self.schedule.append((end, victim, "continue"))
            self.schedule.append((end + 0.5, victim, "recovered"))
        elif fault == "pause":
            process.send_signal(signal.SIGSTOP)
            self.schedule.append((now + self.random.uniform(0.05, 0.5), victim, "continue"))
            self.schedule.append((now + 1, victim, "recovered"))
        elif fault == "slow":
            for i in range(20):
                self.schedule.append((now + 0.1 * i, victim, "pause"))
                self.schedule.append((now + 0.1 * i + 0.05, victim, "continue"))
            self.schedule.append((now + 2.1, victim, "recovered"))
        elif fault == "cut":
            self.ranks[victim].control[0] = _CUT
            self.schedule.append((now + self.silence + _EVICTION_SECONDS, victim, "kill"))
        else:
            self.ranks[victim].control[0] = _FLIP
            self.schedule.append((now + 3, victim, "recovered"))

    def _handle_events(self) -> None:
        """Does what is due, and restarts ranks that a fault has ended."""
        now = time.monotonic()
        due = sorted(event for event in self.schedule if event[0] <= now)
        self.schedule = [event for event in self.schedule if event[0] > now]
        for _, r, action in due:
            process = self.ranks[r].process
            if action == "recovered":
                if self.injected.get(r) == "corrupt":
                    if self.ranks[r].control[0] != _FLIP:
                        continue  # a bit was flipped: however slow the machine, the others evict this rank
                    self.faults["corrupt"] -= 1  # the rank has sent nothing meanwhile
                self.injected.pop(r, None)
                self.ranks[r].control[0] = 0
            elif process.poll() is None:
                numbers = {"kill": signal.SIGKILL, "continue": signal.SIGCONT, "pause": signal.SIGSTOP}
                process.send_signal(numbers[action])
                if action == "continue" and self.injected.get(r) == "outage":
                    self.ranks[r].control[0] = 0
        for r, rank in self.ranks.items():
            code = rank.process.poll()
            if code is None or r in self.finished:
                continue
            drained = self.injected.get(r) == "drain" and _LEAVES in self._said(rank)
            if code == 0 and not drained:
                self.finished.add(r)
            elif drained or self.injected.get(r) in ({*LASTING, "corrupt"} - {"drain"}):
                # Not once a rank has finished: the job is ending, and no member would admit another.
                if self.settings.restart and not self.finished:
                    self.schedule = [event for event in self.schedule if event[1] != r]
                    self.restarts += 1
                    self._start(r)
                    return
            elif (r, code) not in self.unexpected:
                self.unexpected.append((r, code))


def run(settings: Settings) -> Report:
    """Checks the settings, exits with a message if they do not fit, and runs the job to its end."""
    unknown = [f for f in settings.faults if f not in FAULTS]
    if unknown:
        sys.exit(f"trigram chaos: unknown fault {', '.join(unknown)}: choose from {', '.join(FAULTS)}")
    over_tcp = sorted({"cut", "outage", "corrupt"} & set(settings.faults))
    env = os.environ | settings.environment
    if over_tcp and env.get("TRIGRAM_TRANSPORT") != "tcp":
        sys.exit(f"trigram chaos: {', '.join(over_tcp)}: only for TCP connections; set TRIGRAM_TRANSPORT=tcp")
    if "corrupt" in over_tcp and (env.get("TRIGRAM_TLS") == "1" or env.get("TRIGRAM_CHECKSUM") == "off"):
        sys.exit("trigram chaos: corrupt: only with checksums; unset TRIGRAM_TLS and TRIGRAM_CHECKSUM")
    with Chaos(settings) as chaos:
        return chaos.run()
