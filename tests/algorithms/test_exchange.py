"""Exchanges run by themselves: what is waited for, what fails, and what is told of it. No ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trigram.averaging.exchange import Exchange, Phases, Together
from trigram.errors import AbortedError, MisuseError, PeerLostError


class Call:
    """A call that ends when the test says so."""

    def __init__(self, ended: bool = False, error: BaseException | None = None) -> None:
        self.ended, self.error, self.waits = ended, error, 0

    def is_completed(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error


class Two(Exchange):
    """Two calls, and what it has done."""

    calls = 1

    def __init__(self, *made: Call, between: Callable[[], None] = lambda: None) -> None:
        self.made, self.between, self.done = made, between, list[str]()

    def phases(self, step: int) -> Phases:
        for k, call in enumerate(self.made):
            yield call
            self.done.append(f"{step}.{k}")
            self.between()


def test_goes_on_without_waiting() -> None:
    first, second = Call(), Call()
    exchange = Two(first, second)
    exchange.start(3)
    assert not exchange.advance() and not exchange.ready() and not exchange.done
    first.ended = True
    assert exchange.advance() and exchange.done == ["3.0"] and not exchange.ready()
    second.ended = True
    assert exchange.ready() and exchange.done == ["3.0"]
    exchange.wait()
    assert exchange.done == ["3.0", "3.1"] and exchange.ready() and second.waits == 1


def test_a_failure_comes_again() -> None:
    """Who swallows it must not take half of the exchange for its result."""
    exchange = Two(Call(ended=True, error=PeerLostError("rank 1 is gone", 1)), Call())
    exchange.start(0)
    for ask in (exchange.advance, exchange.wait, exchange.wait):
        with pytest.raises(PeerLostError):
            ask()
    assert exchange.done == []
    with pytest.raises(PeerLostError):
        exchange.await_end()
    exchange.wait()  # nothing is under way


def test_ctrl_c() -> None:
    """In a wait the call stays under way; in the program itself there is no result."""
    call = Call(error=KeyboardInterrupt())
    exchange = Two(call, Call())
    exchange.start(0)
    with pytest.raises(KeyboardInterrupt):
        exchange.wait()
    call.error = None
    exchange.wait()
    assert exchange.done == ["0.0", "0.1"]

    def interrupts() -> None:
        raise KeyboardInterrupt

    exchange = Two(Call(), Call(), between=interrupts)
    exchange.start(0)
    with pytest.raises(KeyboardInterrupt):
        exchange.wait()
    with pytest.raises(AbortedError, match="interrupted"):
        exchange.wait()


def test_more_calls_than_declared() -> None:
    exchange = Two(Call(), Call(), Call())
    exchange.start(0)
    with pytest.raises(MisuseError, match="more calls"):
        exchange.wait()


def test_a_program_may_end_what_it_has_started() -> None:
    ended = []

    class Cleans(Exchange):
        def phases(self, step: int) -> Phases:
            try:
                yield Call(error=PeerLostError("gone", 1))
            except PeerLostError:
                ended.append(step)

    exchange = Cleans()
    exchange.start(7)
    with pytest.raises(PeerLostError):
        exchange.wait()
    assert ended == [7]


def test_together_waits_for_all() -> None:
    calls = [Call(error=PeerLostError("first", 1)), Call(error=PeerLostError("second", 1)), Call()]
    with pytest.raises(PeerLostError, match="first"):
        Together([*calls, None]).wait()
    assert [call.waits for call in calls] == [1, 1, 1]
