"""`trigram chaos`: does random harm to the ranks of a job, and reports what it survived.

The job is a script of the user's, started as torchrun would start it, once per rank. A rank that was ended
is started again, as a supervisor of preemptible machines does; with `--no-restart` it stays away. The same
seed gives the same faults at the same times, as far as the job keeps time.

| fault | what is done |
|---|---|
| kill | SIGKILL |
| stop | SIGSTOP, for longer than anyone is awaited; then SIGKILL |
| pause | SIGSTOP for a moment, then SIGCONT |
| slow | stopped half of the time, for two seconds |
| cut | over TCP: nothing leaves the rank and nothing arrives; SIGKILL three seconds later |
| corrupt | over TCP: one bit of what it sends is flipped |
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

from trigram.cli.launch import end, free_port

FAULTS = ("kill", "stop", "pause", "slow", "cut", "corrupt")
LASTING = ("kill", "stop", "cut")
"""Faults that a rank does not survive."""
_FLIP, _CUT = 1, 2


@dataclass
class Settings:
    """What is done to whom, and how often."""

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
    """A rank's process, now."""

    process: subprocess.Popen[bytes]
    log: Path
    control: mmap.mmap
    starts: int = 1
    old_log: int = 0  # characters that earlier lives have written
    settling: float | None = field(default_factory=time.monotonic)  # since then; None: not yet ready


@dataclass
class Report:
    """What happened.

    Attributes:
        faults: How often each was done.
        restarts: Processes started anew.
        unexpected: Ranks that ended with an error although nothing had been done to them: exit code by rank.
        finished: Ranks whose script came to its end.
        hung: Ranks that were still running when patience was over.
        logs: What each rank has written.
    """

    faults: Counter[str]
    restarts: int
    unexpected: list[tuple[int, int]]
    finished: list[int]
    hung: list[int]
    logs: dict[int, str]

    @property
    def survived(self) -> bool:
        """Whether harm was done, scripts came to their end, none hangs, and none failed but by that harm."""
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
    """A job under fire. Use with ``with``: at the end its processes are gone."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.stack = ExitStack()
        self.ranks: dict[int, Rank] = {}
        self.faults: Counter[str] = Counter()
        self.struck: dict[int, str] = {}
        self.agenda: list[tuple[float, int, str]] = []
        self.restarts = 0
        self.unexpected: list[tuple[int, int]] = []
        self.finished: set[int] = set()

    def __enter__(self) -> Chaos:
        temporary = tempfile.TemporaryDirectory(prefix="trigram-chaos-")
        self.dir = Path(self.stack.enter_context(temporary))
        self.logs = self.settings.logs or self.dir
        self.logs.mkdir(parents=True, exist_ok=True)
        shared = {"WORLD_SIZE": str(self.settings.ranks), "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
        self.environment = inherited | shared | self.settings.environment
        self.stack.callback(lambda: end([r.process for r in self.ranks.values()]))
        for rank in range(self.settings.ranks):
            self._start(rank)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks.values():
            rank.process.send_signal(signal.SIGCONT)
        self.stack.close()

    def _start(self, rank: int) -> None:
        log, word = self.logs / f"rank{rank}.log", self.dir / f"rank{rank}.word"
        word.write_bytes(bytes(4))
        with word.open("r+b") as f:
            control = mmap.mmap(f.fileno(), 4)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TRIGRAM_CHAOS": str(word)}
        old = len(log.read_text(errors="replace")) if log.exists() else 0
        with log.open("ab") as out:
            process = subprocess.Popen(
                list(self.settings.command),
                env=self.environment | own,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        starts = self.ranks[rank].starts + 1 if rank in self.ranks else 1
        self.ranks[rank] = Rank(process, log, control, starts, old)
        if self.settings.ready is not None:
            self.ranks[rank].settling = None
        self.struck.pop(rank, None)

    def run(self) -> Report:
        """Lets the job run under fire, then to its end."""
        end = time.monotonic() + self.settings.patience
        while not self._all_ready() and not self._over() and time.monotonic() < end:
            self._tend()
            time.sleep(0.05)
        began = time.monotonic()
        next_fault = began + self._pause()
        while time.monotonic() < began + self.settings.seconds and not self._over():
            if time.monotonic() >= next_fault and not self.finished:
                self._strike()
                next_fault = time.monotonic() + self._pause()
            self._tend()
            time.sleep(0.01)
        calm = time.monotonic()
        while time.monotonic() < calm + self.settings.patience and not self._over():
            self._tend()
            time.sleep(0.01)
        self._tend()
        hung = [r for r, rank in self.ranks.items() if rank.process.poll() is None]
        logs = {r: rank.log.read_text(errors="replace") for r, rank in self.ranks.items()}
        return Report(+self.faults, self.restarts, self.unexpected, sorted(self.finished), hung, logs)

    def _all_ready(self) -> bool:
        """Looks who has said that it is ready, in this life."""
        for rank in self.ranks.values():
            if rank.settling is None and self.settings.ready is not None:
                said = rank.log.read_text(errors="replace")[rank.old_log :]
                rank.settling = time.monotonic() if self.settings.ready in said else None
        return all(rank.settling is not None for rank in self.ranks.values())

    def _pause(self) -> float:
        return self.settings.every * self.random.uniform(0.5, 1.5)

    def _over(self) -> bool:
        return not self.agenda and all(r.process.poll() is not None for r in self.ranks.values())

    def _strike(self) -> None:
        """One fault, to one rank that nothing is being done to."""
        self._all_ready()
        settled = time.monotonic() - self.settings.settle
        whole = [
            r
            for r, rank in self.ranks.items()
            if rank.process.poll() is None
            and r not in self.struck
            and rank.settling is not None
            and rank.settling < settled
        ]
        # Enough must be left whole to go on: more than half.
        few = len(whole) <= self.settings.ranks // 2 + 1
        kinds = [f for f in self.settings.faults if not (few and f in (*LASTING, "corrupt"))]
        if not whole or not kinds:
            return
        # Each kind once before any comes again.
        fault = self.random.choice([f for f in kinds if not self.faults[f]] or kinds)
        victim = self.random.choice(whole)
        process, now = self.ranks[victim].process, time.monotonic()
        self.faults[fault] += 1
        self.struck[victim] = fault
        if fault == "kill":
            process.kill()
        elif fault == "stop":
            process.send_signal(signal.SIGSTOP)
            self.agenda.append((now + 3, victim, "kill"))
        elif fault == "pause":
            process.send_signal(signal.SIGSTOP)
            self.agenda.append((now + self.random.uniform(0.05, 0.5), victim, "continue"))
            self.agenda.append((now + 1, victim, "whole"))
        elif fault == "slow":
            for i in range(20):
                self.agenda.append((now + 0.1 * i, victim, "pause"))
                self.agenda.append((now + 0.1 * i + 0.05, victim, "continue"))
            self.agenda.append((now + 2.1, victim, "whole"))
        elif fault == "cut":
            self.ranks[victim].control[0] = _CUT
            self.agenda.append((now + 3, victim, "kill"))
        else:
            self.ranks[victim].control[0] = _FLIP
            self.agenda.append((now + 3, victim, "whole"))

    def _tend(self) -> None:
        """What is due is done, and who has ended is started again."""
        now = time.monotonic()
        due = sorted(a for a in self.agenda if a[0] <= now)
        self.agenda = [a for a in self.agenda if a[0] > now]
        for _, r, what in due:
            process = self.ranks[r].process
            if what == "whole":
                fault = self.struck.pop(r, None)
                if fault == "corrupt" and self.ranks[r].control[0] == _FLIP:
                    self.faults["corrupt"] -= 1  # nothing was sent that it could have flipped a bit of
                self.ranks[r].control[0] = 0
            elif process.poll() is None:
                numbers = {"kill": signal.SIGKILL, "continue": signal.SIGCONT, "pause": signal.SIGSTOP}
                process.send_signal(numbers[what])
        for r, rank in self.ranks.items():
            code = rank.process.poll()
            if code is None or r in self.finished:
                continue
            if code == 0:
                self.finished.add(r)
            elif self.struck.get(r) in (*LASTING, "corrupt"):
                if (
                    self.settings.restart and not self.finished
                ):  # else the job is over: nobody would let it in
                    self.agenda = [a for a in self.agenda if a[1] != r]
                    self.restarts += 1
                    self._start(r)
                    return
            elif (r, code) not in self.unexpected:
                self.unexpected.append((r, code))


def run(settings: Settings) -> Report:
    """A whole run, watched on this terminal."""
    unknown = [f for f in settings.faults if f not in FAULTS]
    if unknown:
        sys.exit(f"trigram chaos: unknown fault {', '.join(unknown)}: choose from {', '.join(FAULTS)}")
    over_tcp, env = sorted({"cut", "corrupt"} & set(settings.faults)), os.environ | settings.environment
    if over_tcp and env.get("TRIGRAM_TRANSPORT") != "tcp":
        sys.exit(f"trigram chaos: {', '.join(over_tcp)}: only for TCP connections; set TRIGRAM_TRANSPORT=tcp")
    if "corrupt" in over_tcp and (env.get("TRIGRAM_TLS") == "1" or env.get("TRIGRAM_CHECKSUM") == "off"):
        sys.exit("trigram chaos: corrupt: only with checksums; unset TRIGRAM_TLS and TRIGRAM_CHECKSUM")
    with Chaos(settings) as chaos:
        return chaos.run()
