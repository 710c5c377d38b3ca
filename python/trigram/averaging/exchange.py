"""An exchange between ranks, written as what it does from top to bottom; and what runs it.

An exchange of several phases needs what other ranks have sent before it can go on: it encodes, an all-to-all
carries that, it adds up, an all-gather carries the sums. Written as a generator it is a sequential program,
which yields each collective that it waits for. When it starts, how far it has come, and how it ends are the
same for all of them, and are here.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial

from trigram.collectives.work import Work
from trigram.errors import AbortedError, MisuseError, TrigramError
from trigram.runtime import serving
from trigram.runtime.serving import Pending


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

    def serve_when_done(self) -> None:
        """See :meth:`trigram.collectives.Work.serve_when_done`."""
        for part in self.parts:
            if isinstance(part, (Together, Work)):
                part.serve_when_done()

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
    start; the others are in ``second_phase``, in the same order, which a :class:`Line` keeps.

    Attributes:
        calls: How many calls follow the first.
        around: Makes a context in which they are started, for observers.
        is_awaited: Whether threads that wait have something to do when it has ended.
    """

    calls = 0
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    is_awaited = False
    _turn: threading.Lock | None = None
    _program: Phases | None = None
    _pending: Pending | None = None
    _left = 0

    @property
    def line(self) -> Line | None:
        """That of the process groups in which the calls are made; None: no other exchange has calls there."""
        return getattr(getattr(self, "groups", None), "line", None)

    def phases(self, step: int) -> Phases:
        """Exchange number ``step``: starts each call and yields it, and goes on when it has ended."""
        raise MisuseError(
            f"{type(self).__name__} does not say what it sends: define phases(self, number), a generator "
            "that yields each call that it starts with async_op=True"
        )

    def start(self, step: int) -> None:
        """Starts exchange number ``step``, without waiting."""
        if self._turn is None:
            self._turn = threading.Lock()  # threads that wait go on with it too
        with self._turn:
            self._program, self._left = self._generator(step), self.calls
            self._run()
        if self._left and self._pending is not None and self.line is not None:
            self.line.add(self)

    def _generator(self, step: int) -> Phases:
        made = self.phases(step)
        if not isinstance(made, Generator):
            raise MisuseError(
                f"{type(self).__name__}.phases: returned {made!r}; it must be a generator, which yields each "
                "call that it starts with async_op=True, even a single one"
            )
        return made

    @property
    def is_over(self) -> bool:
        """Whether no call is left to start. One that has failed is not over: its owner is to hear of it."""
        return self._pending is None or (not self._left and not isinstance(self._pending, _Interrupted))

    def advance(self) -> bool:
        """Goes on as far as that needs no waiting; True once no call is left to start."""
        if self._pending is None or self._turn is None:
            return True
        if not self._turn.acquire(blocking=False):
            return False
        try:
            while self._left and self._pending is not None and self._pending.is_completed():
                self._go_on(_error_of(self._pending.wait))
            return self.is_over
        finally:
            self._turn.release()

    def ready(self) -> bool:
        """Goes on as far as that needs no waiting; True if :meth:`wait` would return at once."""
        return self.advance() and (self._pending is None or self._pending.is_completed())

    def wait(self) -> None:
        """Waits until the exchange has ended. Raises the error of the call that failed."""
        while (pending := self._pending) is not None:
            error = _error_of(partial(self.wait_for, pending))
            assert self._turn is not None
            with self._turn:
                if self._pending is pending:  # else it went on while this thread waited
                    try:
                        self._go_on(error)
                    except Exception:
                        # The owner hears of it now. Kept, its frames would keep the script's model alive.
                        if isinstance(self._pending, _Interrupted):
                            self._pending.error = None
                        raise

    def await_end(self) -> None:
        """Waits until the call under way has ended, after a failure or an abort; the result is not used."""
        with self._turn or contextlib.nullcontext():
            pending, self._pending = self._pending, None
            program, self._program, self._left = self._program, None, 0
        if self.line is not None:
            self.line.remove(self)
        if pending is not None and not isinstance(pending, _Interrupted):
            pending.wait()
        del program  # closed only now: until then the call may write into memory that it has

    def _go_on(self, error: TrigramError | None) -> None:
        """The call under way has ended: runs the program up to the next."""
        assert self._program is not None
        if error is not None:
            # It stays what this exchange waits for, so that nobody takes half of it for its result, and no
            # exchange after it goes on before its owner has heard of it.
            with contextlib.suppress(StopIteration):
                self._program.throw(error)
            raise error
        self._left -= 1
        self._run()

    def wait_for(self, pending: Pending) -> None:
        """Waits for the call under way."""
        pending.wait()

    def _run(self) -> None:
        """Runs the program up to the next call that has not ended."""
        assert self._program is not None
        interrupted = self._pending = _Interrupted()
        try:
            for pending in self._program:
                if self._left < 0:
                    raise MisuseError(
                        f"{type(self).__name__}: more calls than its `calls` says ({self.calls} after the "
                        "first); the calls of several averages would get out of order"
                    )
                if pending is not None:
                    self._pending = pending
                    if (self._left or self.is_awaited) and isinstance(pending, (Together, Work)):
                        pending.serve_when_done()
                    return
                self._left -= 1
        except Exception as error:
            interrupted.error = error  # perhaps nobody hears of it here, see `serving.Server`
            raise
        self._pending = None


def _error_of(wait: Callable[[], object]) -> TrigramError | None:
    """What a wait raises."""
    try:
        wait()
    except TrigramError as error:
        return error
    return None


class Line:
    """The exchanges of one model that have calls left to start, in the order in which they were started: all
    ranks start these calls in this order."""

    def __init__(self) -> None:
        self._waiting: deque[Exchange] = deque()
        self._changing = threading.Lock()
        self._turn = threading.Lock()

    def add(self, exchange: Exchange) -> None:
        """The exchange was started."""
        with self._changing:
            self._take_out(exchange)
            self._waiting.append(exchange)
            serving.add(self, anywhere=True)

    def remove(self, exchange: Exchange) -> None:
        """The exchange was aborted, or its owner waits for it in another way."""
        with self._changing:
            self._take_out(exchange)

    def clear(self) -> None:
        """All are about to be aborted: when this returns, no call of theirs is started any more."""
        with self._turn, self._changing:
            self._waiting.clear()
            serving.remove(self)

    def advance(self) -> bool:
        """Starts the calls whose turn it is, as far as that needs no waiting; True once none is left."""
        if not self._waiting:
            return True
        if not self._turn.acquire(blocking=False):
            return False
        try:
            while self._waiting:
                first = self._waiting[0]
                with first.around():
                    if not first.advance():
                        return False
                with self._changing:
                    if first.is_over:  # else its owner has started it again
                        self._take_out(first)
        finally:
            self._turn.release()
        return True

    def serve(self, idle: bool) -> None:
        """See :class:`trigram.runtime.serving.Server`."""
        self.advance()

    def _take_out(self, exchange: Exchange) -> None:
        with contextlib.suppress(ValueError):
            self._waiting.remove(exchange)
        if not self._waiting:
            serving.remove(self)


class _Interrupted:
    """In place of a call: the program was ended by an exception while it ran itself.

    Attributes:
        error: The exception; None: it is none of the program's, but Ctrl-C perhaps.
    """

    error: Exception | None = None

    def is_completed(self) -> bool:
        """True: :meth:`wait` does not wait."""
        return True

    def wait(self) -> None:
        """Raises."""
        raise self.error or AbortedError(
            "an average was interrupted by an exception on this rank, so it has no result"
        )
