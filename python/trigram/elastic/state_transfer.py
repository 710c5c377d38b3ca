"""How the training state of one rank comes to those that join an elastic job, while all train on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.collectives import serialization
from trigram.elastic.membership import current
from trigram.errors import TrigramError
from trigram.runtime.group import Group


class StateTransfer:
    """The transfers of one model. Several ranks that join together are served by one broadcast: its source
    sends the bytes once, however many there are.

    Attributes:
        receiving: This rank waits for a state: its bytes, uint8; the call that brings them; the rank that
            sends them. None: it has one.
        sending: The calls that send this rank's state.
    """

    def __init__(self) -> None:
        self.receiving: tuple[torch.Tensor, collectives.Work, int] | None = None
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

    def expect(self, source: int, newcomers: Sequence[int], control: Group) -> None:
        """On each newcomer: starts to receive the state that `source` sends."""
        group = _group_of(source, newcomers, control)
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        collectives.broadcast(size, source, group)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        work = collectives.broadcast(data, source, group, async_op=True)
        assert work is not None
        self.receiving = data, work, source

    def receive(self) -> Any:
        """Waits for the state that this rank expects, and returns it."""
        assert self.receiving is not None
        data, work, source = self.receiving
        work.wait()
        return serialization.unpack(data, source)

    def release_sent(self) -> None:
        """Releases the memory of transfers that have ended."""
        for work in [w for w in self.sending if w.is_completed()]:
            self.sending.remove(work)
            with contextlib.suppress(TrigramError):  # a receiver is lost: the next pass raises that
                work.wait()


def _group_of(source: int, newcomers: Sequence[int], control: Group) -> Group:
    """The source and the ranks that join; the other ranks need not make it."""
    ranks = sorted([source, *newcomers])
    return current()[0].among(control, "joining ranks", ranks)
