"""How the training state of one rank comes to those that join an elastic job, while all train on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.collectives import serialization
from trigram.elastic.membership import current, why_aborted
from trigram.errors import AbortedError, TrigramError
from trigram.runtime import serving
from trigram.runtime.group import Group


class StateTransfer:
    """The transfers of one model. Several ranks that join together are served by one broadcast: its source
    sends the bytes once, however many there are.

    Args:
        is_called: Whether this rank must change the membership with the others.

    Attributes:
        receiving: What brings the state that this rank waits for; None: it has one.
        sending: The calls that send this rank's state.
    """

    def __init__(self, is_called: Callable[[], bool]) -> None:
        self._is_called = is_called
        self.receiving: _Coming | None = None
        self.sending: list[collectives.Work] = []

    def send(self, state: dict[str, Any], newcomers: Sequence[int], control: Group) -> None:
        """On the source: starts to send a state to ranks of a group, in the background."""
        data = serialization.pack(state, "elastic: the training state for a joining rank")
        me = control.ranks[control.rank]
        group = _group_of(me, newcomers, control)
        for message in (torch.tensor([data.numel()], device="cpu"), data):
            work = collectives.broadcast(message, me, group, async_op=True)
            assert work is not None
            self.sending.append(work)

    def expect(self, source: int, newcomers: Sequence[int], control: Group, later: bool) -> None:
        """On each newcomer: starts to receive the state that ``source`` sends; if ``later``, only
        :meth:`receive` does."""
        self.receiving = _Coming(source, _group_of(source, newcomers, control), later)
        if not later:
            self._begin(self.receiving)

    def receive(self) -> Any:
        """Waits for the state that this rank expects, and returns it.

        Raises:
            AbortedError: It was to come later, and the ranks change the membership before.
        """
        assert self.receiving is not None
        coming = self.receiving
        if coming.work is None:
            self._begin(coming)
        assert coming.work is not None
        coming.work.wait()
        return serialization.unpack(coming.data, coming.source)

    def _begin(self, coming: _Coming) -> None:
        """Waits until the source begins to send. If the ranks change the membership before, it may send
        nothing."""
        with serving.looking(self._look):
            coming.begin()

    def _look(self) -> None:
        if self._is_called():
            raise AbortedError(why_aborted())

    def release_sent(self) -> None:
        """Releases the memory of transfers that have ended."""
        for work in [w for w in self.sending if w.is_completed()]:
            self.sending.remove(work)
            with contextlib.suppress(TrigramError):  # a receiver is lost: the next pass raises that
                work.wait()


class _Coming:
    """A state that comes.

    Args:
        source: The rank that sends it.
        group: That and all that receive it.
        later: It comes when the source's step is over.

    Attributes:
        data: Its bytes, uint8.
        work: The call that brings them; None: not begun.
    """

    def __init__(self, source: int, group: Group, later: bool) -> None:
        self.source, self.group, self.later = source, group, later
        self.data = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.work: collectives.Work | None = None

    def begin(self) -> None:
        """Waits until the source begins to send."""
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        collectives.broadcast(size, self.source, self.group)
        self.data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self.work = collectives.broadcast(self.data, self.source, self.group, async_op=True)


def _group_of(source: int, newcomers: Sequence[int], control: Group) -> Group:
    """The source and the ranks that join; the other ranks need not make it."""
    ranks = sorted([source, *newcomers])
    return current()[0].among(control, "joining ranks", ranks)
