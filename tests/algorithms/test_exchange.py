"""Exchanges run by themselves: what is waited for, what fails, and what is told of it. No ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from trigram.averaging.exchange import Exchange, Line, Phases, Together
from trigram.errors import AbortedError, MisuseError, PeerLostError
from trigram.runtime import serving


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


def test_a_program_that_is_none_is_refused() -> None:
    class Plain(Exchange):
        def phases(self, step: int) -> Phases:
            return None  # type: ignore[return-value]

    with pytest.raises(MisuseError, match=r"Plain\.phases: returned None; it must be a generator"):
        Plain().start(0)


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


class Groups:
    """As those of a model."""

    def __init__(self) -> None:
        self.line = Line()


def two_in_a_line(*errors: BaseException | None) -> tuple[Groups, list[list[Call]], list[Two]]:
    """Two exchanges under way, their calls, and the error of the first call of each."""
    groups = Groups()
    calls = [[Call(error=error), Call()] for error in errors]
    exchanges = [Two(*made) for made in calls]
    for exchange in exchanges:
        exchange.groups = groups  # type: ignore[attr-defined]
        exchange.start(0)
    return groups, calls, exchanges


def test_who_waits_starts_second_phases_in_order() -> None:
    groups, calls, (first, second) = two_in_a_line(None, None)
    calls[1][0].ended = True
    serving.serve()
    assert second.done == [], "the other ranks start the first one's second phase first"

    def ends() -> bool:
        calls[0][0].ended = True
        return bool(second.done)

    assert serving.until(ends)
    assert first.done == second.done == ["0.0"] and groups.line.advance()


def test_a_failed_exchange_stays_in_its_place() -> None:
    """Until its owner has heard of it: else the next one's call would have its number."""
    groups, calls, (first, second) = two_in_a_line(PeerLostError("rank 1 is gone", 1), None)
    for made in calls:
        made[0].ended = True
    serving.serve()
    serving.serve()
    assert second.done == []
    with pytest.raises(PeerLostError):
        first.wait()
    for exchange in (first, second):
        with contextlib.suppress(PeerLostError):
            exchange.await_end()
    assert groups.line.advance() and second.done == []


def test_what_a_program_raises_while_another_waits_comes_to_its_owner() -> None:
    def wrong() -> None:
        raise ValueError("of the script's")

    groups, calls, (first, second) = two_in_a_line(None, None)
    first.between = wrong
    calls[0][0].ended = calls[1][0].ended = True
    for _ in range(2):
        serving.serve()
    assert second.done == [], "its call would have the first one's number"
    for _ in range(2):
        with pytest.raises(ValueError, match="of the script's"):
            first.wait()
    groups.line.clear()
    serving.serve()
    assert second.done == [], "an aborted pass makes no call"
    first.await_end()


def test_a_server_that_waits_is_not_entered_again() -> None:
    entered = []

    class Waits:
        def serve(self, idle: bool) -> None:
            entered.append("outer")
            serving.serve()

    class Other:
        def serve(self, idle: bool) -> None:
            entered.append("other")

    servers = [Waits(), Other()]
    for server in servers:
        serving.add(server)
    try:
        serving.serve()
    finally:
        for server in servers:
            serving.remove(server)
    assert entered == ["outer", "other", "other"], "the others are served meanwhile"


def test_a_look_ends_a_wait() -> None:
    def look() -> None:
        raise AbortedError("the ranks regroup")

    with serving.looking(look), pytest.raises(AbortedError, match="regroup"):
        serving.until(lambda: False)
    assert not serving.until(lambda: False, end=0.0)
