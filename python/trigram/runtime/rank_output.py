"""Passes on what ranks write, and remembers the end of it, which says why a rank has failed.

A program whose output is no terminal writes when its buffer is full, in the middle of a line. So ranks write
into pipes of this process, which writes on what ends in a newline: lines of two ranks do not mix. Where the
output is a terminal, ranks write into terminals of their own, and show there what they show nowhere else,
such as colours.
"""

from __future__ import annotations

import fcntl
import math
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_STDOUT, _STDERR = 1, 2
_READ = 1 << 16
"""Bytes that are read at a time; a longer line is passed on in parts."""
_END_SECONDS = 1.0
"""How long to wait for the last lines: a process that a rank has started may hold its pipe open."""
_PART_MILLISECONDS = 20
"""How long the rest of a line may take on a terminal."""
_REMEMBERED = 1 << 16
"""Bytes of a rank's output that are remembered."""
_LINES = 20
"""Of them shown, if there is no traceback."""
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_COLOURS = 6


class RankOutput:
    """The stdout and stderr of ranks.

    Args:
        prefix: Each line begins with the rank's number, on a terminal too, and goes to where ``print`` writes
            in this process: in a notebook, below the cell.
        tee: A folder that also gets what each rank writes, as ``rank3.log``; None: none does.

    Attributes:
        last: The rank that has written last, -1: none has.
    """

    def __init__(self, prefix: bool = False, tee: Path | None = None) -> None:
        self.prefix, self.tee = prefix, tee
        self.streams = {_STDOUT: sys.stdout, _STDERR: sys.stderr} if prefix else {}
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.last = -1
        self._ends: dict[tuple[int, int], bytearray] = {}  # by rank and stream
        self._raised: dict[int, float] = {}

    @contextmanager
    def pipes(self, rank: int) -> Iterator[tuple[int | None, int | None]]:
        """Where this rank, which is started in this context, writes; None: as this process."""
        try:
            terminals = not self.prefix and os.isatty(_STDOUT) and os.isatty(_STDERR)
            one = terminals or (not self.prefix and os.path.sameopenfile(_STDOUT, _STDERR))
        except OSError:  # closed
            yield None, None
            return
        self._forget(rank)
        # One pipe if both go to one file, so that they keep their order.
        stdout = self._pipe(_STDOUT, rank)
        stderr = stdout if one else self._pipe(_STDERR, rank)
        try:
            yield stdout, stderr
        finally:
            for end in {stdout, stderr}:
                if end is not None:
                    os.close(end)

    def _forget(self, rank: int) -> None:
        """What a rank wrote that is started again does not count."""
        self._raised.pop(rank, None)
        for target in (_STDOUT, _STDERR):
            self._ends.pop((rank, target), None)

    def drain(self) -> None:
        """Waits until what the ranks that have ended wrote is passed on."""
        deadline = time.monotonic() + _END_SECONDS
        for thread in self.threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def raised_at(self, rank: int) -> float:
        """When the first traceback of a rank came, as ``time.monotonic()``; infinite: none has."""
        return self._raised.get(rank, math.inf)

    def end_of(self, rank: int) -> str:
        """The end of what a rank has written to stderr: its last traceback, or its last lines."""
        kept = self._ends.get((rank, _STDERR)) or self._ends.get((rank, _STDOUT)) or bytearray()
        text = kept.decode(errors="replace")
        begin = text.rfind(_TRACEBACK)
        while begin > 0 and text[:begin].rstrip().endswith(_CHAINED):
            begin = text.rfind(_TRACEBACK, 0, begin)
        if begin >= 0:
            begin = text.rfind("\n", 0, begin) + 1  # torch and rich write something before it
            return text[begin:].strip("\r\n")
        return "\n".join(text.strip("\r\n").splitlines()[-_LINES:])

    def _pipe(self, target: int, rank: int) -> int:
        begin, terminal = b"", False
        if self.prefix:
            begin = _colour(rank, self.streams[target]).encode()
        elif os.isatty(target):
            terminal = True
        read, write = _terminal(target) if terminal else os.pipe()
        thread = threading.Thread(
            target=self._pass_on, args=(read, target, rank, begin, terminal), daemon=True
        )
        self.threads.append(thread)
        thread.start()
        return write

    def _pass_on(self, read: int, target: int, rank: int, begin: bytes, terminal: bool) -> None:
        rest, more = b"", select.poll()
        more.register(read, select.POLLIN)
        with suppress(OSError), open(read, "rb", buffering=0) as source:  # closed: the rank is told so too
            while True:
                try:
                    chunk = source.read(_READ)
                except OSError:  # the end of a terminal
                    chunk = b""
                text = rest + (chunk or b"")
                end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1  # \r: a progress bar
                # On a terminal part of a line is shown too (a question), unless the rest follows at once:
                # lines of other ranks would come in between.
                is_part = terminal and end < len(text) and not more.poll(_PART_MILLISECONDS)
                end = len(text) if is_part or not chunk or len(text) > _READ > end == 0 else end
                rest = text[end:]
                self._keep(target, rank, text[:end])
                self._write(target, rank, _begun(text[:end], begin))
                if not chunk:
                    return

    def _keep(self, target: int, rank: int, text: bytes) -> None:
        """Remembers the end of what a rank has written, and adds it to its file."""
        kept = self._ends.setdefault((rank, target), bytearray())
        seen = max(0, len(kept) - len(_TRACEBACK))
        kept += text
        if rank not in self._raised and kept.find(_TRACEBACK.encode(), seen) >= 0:
            self._raised[rank] = time.monotonic()
        if len(kept) > 2 * _REMEMBERED:
            del kept[:-_REMEMBERED]
        if self.tee is None or not text:
            return
        with self.lock, suppress(OSError), (self.tee / f"rank{rank}.log").open("ab", buffering=0) as log:
            log.write(text)  # a full disk ends no rank

    def _write(self, target: int, rank: int, text: bytes) -> None:
        stream = self.streams.get(target)
        with self.lock:
            self.last = rank if text else self.last
            if stream is not None:
                with suppress(Exception):  # a stream of the script's own; ranks that write must not end by it
                    known = text.decode(errors="replace")
                    encoding = getattr(stream, "encoding", None) or "utf-8"
                    stream.write(known.encode(encoding, "replace").decode(encoding))
                    stream.flush()
                return
            while text:
                text = text[os.write(target, text) :]


def _terminal(like: int) -> tuple[int, int]:
    """A terminal of the size of another: the end to read, which gets what is written as it is, and the one to
    write."""
    read, write = os.openpty()
    settings = termios.tcgetattr(write)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(write, termios.TCSANOW, settings)
    with suppress(OSError):
        fcntl.ioctl(write, termios.TIOCSWINSZ, fcntl.ioctl(like, termios.TIOCGWINSZ, bytes(8)))
    return read, write


def _colour(rank: int, stream: IO[str]) -> str:
    """What the lines of a rank begin with."""
    shows = hasattr(stream, "isatty") and stream.isatty() and not os.environ.get("NO_COLOR")
    return f"\x1b[{31 + rank % _COLOURS}m[{rank}]\x1b[0m " if shows else f"[{rank}] "


def _begun(text: bytes, begin: bytes) -> bytes:
    """The text with ``begin`` before each of its lines."""
    return b"".join(begin + line for line in text.splitlines(keepends=True)) if begin else text
