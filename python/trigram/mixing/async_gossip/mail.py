"""The messages of :mod:`trigram.mixing.async_gossip.offers`, between neighbours: three int32 each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.mixing.async_gossip.offers import Kind, Message

_TAG = 2


class _Inbox:
    """Receives the messages of one neighbour."""

    def __init__(self, groups: ModelGroups, sender: int) -> None:
        self.group, self.sender = groups.main, groups.main.ranks[sender]
        self.memory = torch.zeros(3, dtype=torch.int32, device="cpu")
        self.receiving: collectives.Work | None = None
        self.listen()

    def listen(self) -> None:
        """Starts to receive the next message."""
        self.receiving = collectives.recv(self.memory, self.sender, _TAG, self.group, async_op=True)
        assert self.receiving is not None
        self.receiving.serve_when_done()

    def take(self) -> Message | None:
        """The next message if one has arrived, else None. After a goodbye none follows."""
        if self.receiving is None or not self.receiving.is_completed():
            return None
        self.receiving.wait()
        kind, first, number = self.memory.tolist()
        self.receiving = None
        if kind != Kind.GOODBYE:
            self.listen()
        return Message(Kind(kind), first, number)


class Mail:
    """The messages between this rank and its neighbours.

    Args:
        groups: The model's process groups.
        neighbours: Ranks of the group.
    """

    def __init__(self, groups: ModelGroups, neighbours: Iterable[int]) -> None:
        self.group = groups.main
        self.inboxes = {j: _Inbox(groups, j) for j in neighbours}

    def tell(self, j: int, message: Message) -> None:
        """Sends a message, without waiting."""
        words = torch.tensor(message, dtype=torch.int32, device="cpu")
        collectives.send(words, self.group.ranks[j], _TAG, self.group, async_op=True)

    def take(self) -> Iterator[tuple[int, Message]]:
        """The messages that have arrived, each with its sender."""
        for j, inbox in self.inboxes.items():
            while (message := inbox.take()) is not None:
                yield j, message

    def say_goodbye(self) -> None:
        """Sends the last message to all neighbours."""
        for j in self.inboxes:
            self.tell(j, Message(Kind.GOODBYE))

    def is_over(self) -> bool:
        """Takes what arrives after this rank's goodbye; whether all neighbours have said theirs."""
        for _ in self.take():
            pass
        return all(inbox.receiving is None for inbox in self.inboxes.values())
