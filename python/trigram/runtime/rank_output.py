"""Passes on what ranks write, whole lines at a time, so that lines of two ranks do not mix.

A program whose output is no terminal writes when its buffer is full, in the middle of a line. So ranks write
into pipes of this process, which writes on what ends in a newline.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_STDOUT, _STDERR = 1, 2
_READ = 1 << 16
"""Bytes that are read at a time; a longer line is passed on in parts."""
_END_SECONDS = 1.0
"""How long to wait for the last lines: a process that a rank has started may hold its pipe open."""


class RankOutput:
    """The stdout and stderr of ranks: pipes to those of this process, which are its own where they are a
    terminal.

    A program writes to a terminal line by line, and shows there what it shows nowhere else, such as colours.

    Args:
        prefix: Each line begins with the rank's number, on a terminal too, and goes to where ``print`` writes
            in this process: in a notebook, below the cell.
    """

    def __init__(self, prefix: bool = False) -> None:
        self.prefix = prefix
        self.streams = {_STDOUT: sys.stdout, _STDERR: sys.stderr} if prefix else {}
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []

    @contextmanager
    def pipes(self, rank: int) -> Iterator[tuple[int | None, int | None]]:
        """Where this rank, which is started in this context, writes; None: as this process."""
        try:
            one = not self.prefix and os.path.sameopenfile(_STDOUT, _STDERR)
        except OSError:  # closed
            yield None, None
            return
        # One pipe if both go to one file, so that they keep their order.
        begin = f"[{rank}] ".encode() if self.prefix else b""
        stdout = self._pipe(_STDOUT, begin)
        stderr = stdout if one else self._pipe(_STDERR, begin)
        try:
            yield stdout, stderr
        finally:
            for end in {stdout, stderr}:
                if end is not None:
                    os.close(end)

    def drain(self) -> None:
        """Waits until what the ranks that have ended wrote is passed on."""
        deadline = time.monotonic() + _END_SECONDS
        for thread in self.threads:
            thread.join(max(deadline - time.monotonic(), 0))

    def _pipe(self, target: int, begin: bytes) -> int | None:
        if os.isatty(target) and not begin:
            return None
        read, write = os.pipe()
        thread = threading.Thread(target=self._pass_on, args=(read, target, begin), daemon=True)
        self.threads.append(thread)
        thread.start()
        return write

    def _pass_on(self, read: int, target: int, begin: bytes) -> None:
        rest = b""
        with suppress(OSError), open(read, "rb", buffering=0) as source:  # closed: the rank is told so too
            while chunk := source.read(_READ):
                text = rest + chunk
                end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1  # \r: a progress bar
                end = end or (len(text) if len(text) > _READ else 0)
                rest = text[end:]
                self._write(target, _begun(text[:end], begin))
            self._write(target, _begun(rest, begin))

    def _write(self, target: int, text: bytes) -> None:
        stream = self.streams.get(target)
        with self.lock:
            if stream is not None:
                with suppress(Exception):  # a stream of the script's own; ranks that write must not end by it
                    known = text.decode(errors="replace")
                    encoding = getattr(stream, "encoding", None) or "utf-8"
                    stream.write(known.encode(encoding, "replace").decode(encoding))
                    stream.flush()
                return
            while text:
                text = text[os.write(target, text) :]


def _begun(text: bytes, begin: bytes) -> bytes:
    """The text with ``begin`` before each of its lines."""
    return b"".join(begin + line for line in text.splitlines(keepends=True)) if begin else text
