"""Passes on what ranks write, whole lines at a time, so that lines of two ranks do not mix.

A program whose output is no terminal writes when its buffer is full, in the middle of a line. So ranks write
into pipes of this process, which writes on what ends in a newline.
"""

from __future__ import annotations

import os
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
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []

    @contextmanager
    def pipes(self) -> Iterator[tuple[int | None, int | None]]:
        """Where a rank that is started in this context writes; None: as this process."""
        try:
            one = os.path.sameopenfile(_STDOUT, _STDERR)
        except OSError:  # closed
            yield None, None
            return
        # One pipe if both go to one file, so that they keep their order.
        stdout = self._pipe(_STDOUT)
        stderr = stdout if one else self._pipe(_STDERR)
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

    def _pipe(self, target: int) -> int | None:
        if os.isatty(target):
            return None
        read, write = os.pipe()
        thread = threading.Thread(target=self._pass_on, args=(read, target), daemon=True)
        self.threads.append(thread)
        thread.start()
        return write

    def _pass_on(self, read: int, target: int) -> None:
        rest = b""
        with suppress(OSError), open(read, "rb", buffering=0) as source:  # closed: the rank is told so too
            while chunk := source.read(_READ):
                text = rest + chunk
                end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1  # \r: a progress bar
                end = end or (len(text) if len(text) > _READ else 0)
                rest = text[end:]
                self._write(target, text[:end])
            self._write(target, rest)

    def _write(self, target: int, text: bytes) -> None:
        with self.lock:
            while text:
                text = text[os.write(target, text) :]
