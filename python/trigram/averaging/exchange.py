"""An exchange between ranks, written as what it does from top to bottom; and what runs it.

An exchange of several phases needs what other ranks have sent before it can go on: it encodes, an all-to-all
carries that, it adds up, an all-gather carries the sums. Written as a generator it is a sequential program,
which yields each collective that it waits for. When it starts, how far it has come, and how it ends are the
same for all of them, and are here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Protocol

from trigram.errors import AbortedError, MisuseError, TrigramError


class Pending(Protocol):
    """What an exchange waits for: a collective, messages, or several of them."""

    def is_completed(self) -> bool:
        """Whether it has ended, or failed."""

    def wait(self) -> object:
        """Waits until it has ended; raises if it failed."""


class Together:
    """Several calls that were started together.

    Args:
        parts: The calls.
    """

    def __init__(self, parts: Sequence[Pending | None]) -> None:
        self.parts = [part for part in parts if part is not None]

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(part.is_completed() for part in self.parts)

    def wait(self) -> None:
        """Waits for all, then raises the first error if there was one."""
        error: TrigramError | None = None
        for part in self.parts:
            try:
                part.wait()
            except TrigramError as e:
                error = error or e
        if error is not None:
            raise error


Phases = Generator["Pending | None", None, None]
"""A program: what it yields is waited for. A call that ended as it was made is None."""


class Exchange:
    """One exchange after the other, each in the background. Subclasses define :meth:`phases`.

    All ranks make the same calls in the same order. So those of several exchanges that are under way together
    have groups of their own: the first call of each is in the group ``main``, in the order in which they
    start; the others are in ``second_phase``, in the same order, and whoever starts several exchanges calls
    :meth:`advance` of one after the other.

    Attributes:
        calls: How many calls follow the first.
    """

    calls = 0
    _program: Phases | None = None
    _pending: Pending | None = None
    _left = 0

    def phases(self, step: int) -> Phases:
        """Exchange number ``step``: starts each call and yields it, and goes on when it has ended."""
        raise NotImplementedError

    def start(self, step: int) -> None:
        """Starts exchange number ``step``, without waiting."""
        self._program, self._left = self.phases(step), self.calls
        self._run()

    def advance(self) -> bool:
        """Goes on as far as that needs no waiting; True once no call is left to start."""
        while self._left and self._pending is not None and self._pending.is_completed():
            self._go_on()
        return not self._left or self._pending is None

    def ready(self) -> bool:
        """Goes on as far as that needs no waiting; True if :meth:`wait` would return at once."""
        return self.advance() and (self._pending is None or self._pending.is_completed())

    def wait(self) -> None:
        """Waits until the exchange has ended. Raises the error of the call that failed."""
        while self._pending is not None:
            self._go_on()

    def await_end(self) -> None:
        """Waits until the call under way has ended, after a failure or an abort; the result is not used."""
        pending, self._pending = self._pending, None
        program, self._program, self._left = self._program, None, 0
        if pending is not None:
            pending.wait()
        del program  # closed only now: until then the call may write into memory that it has

    def _go_on(self) -> None:
        """Waits for the call under way, and runs the program up to the next."""
        assert self._pending is not None and self._program is not None
        try:
            self.wait_for(self._pending)
        except TrigramError as error:
            # It stays what this exchange waits for, so that nobody takes half of it for its result.
            with contextlib.suppress(StopIteration):
                self._program.throw(error)
            raise
        self._left -= 1
        self._run()

    def wait_for(self, pending: Pending) -> None:
        """Waits for the call under way."""
        pending.wait()

    def _run(self) -> None:
        """Runs the program up to the next call that has not ended."""
        assert self._program is not None
        self._pending = _Interrupted()
        for pending in self._program:
            if self._left < 0:
                raise MisuseError(
                    f"{type(self).__name__}: more calls than its `calls` says "
                    f"({self.calls} after the first); the calls of several averages would get out of order"
                )
            if pending is not None:
                self._pending = pending
                return
            self._left -= 1
        self._pending = None


class _Interrupted:
    """In place of a call: the program was ended by an exception, Ctrl-C perhaps, while it ran itself."""

    def is_completed(self) -> bool:
        """True: :meth:`wait` does not wait."""
        return True

    def wait(self) -> None:
        """Raises."""
        raise AbortedError("an average was interrupted by an exception on this rank, so it has no result")
