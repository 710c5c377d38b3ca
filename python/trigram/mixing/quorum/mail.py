"""The messages of :mod:`trigram.mixing.quorum.protocol`, between the leader and each other rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.mixing.quorum.protocol import Kind, Message

_TO_LEADER, _FROM_LEADER = 4, 5
"""Tags of messages."""


class _Inbox:
    """Receives the messages of one rank."""

    def __init__(self, groups: ModelGroups, sender: int, tag: int, words: int) -> None:
        self.group, self.sender, self.tag = groups.main, groups.main.ranks[sender], tag
        self.memory = torch.zeros(words, dtype=torch.int32, device="cpu")
        self.receiving: collectives.Work | None = None
        self.taken: collectives.Work | None = None
        self.listen()

    def listen(self) -> None:
        """Starts to receive the next message."""
        self.receiving = collectives.recv(self.memory, self.sender, self.tag, self.group, async_op=True)
        assert self.receiving is not None
        self.receiving.serve_when_done()  # wherever this rank waits then

    def serve_again(self) -> None:
        """Has threads that wait look at this as if the last message had just arrived."""
        if self.taken is not None:
            self.taken.serve_when_done()

    @property
    def has_mail(self) -> bool:
        """Whether a message has arrived."""
        return self.receiving is not None and self.receiving.is_completed()

    @property
    def is_flushed(self) -> bool:
        """Whether the last message has been taken."""
        return self.receiving is None

    def take(self) -> Message | None:
        """The next message if one has arrived, else None. After a flush none follows."""
        if self.receiving is None or not self.receiving.is_completed():
            return None
        self.receiving.wait()
        kind, fragment, number, *each = self.memory.tolist()
        self.taken, self.receiving = self.receiving, None
        if kind != Kind.FLUSH:
            self.listen()
        return Message(Kind(kind), fragment, number, each)


class Mail:
    """What this rank receives of the protocol, and sends.

    Args:
        groups: The model's process groups; the first rank is the leader.
        fragments: Those of the weights.
    """

    def __init__(self, groups: ModelGroups, fragments: int) -> None:
        self.group, is_leader = groups.main, groups.rank == 0
        self.words = 3 + max(groups.size, fragments)
        self.tag = _FROM_LEADER if is_leader else _TO_LEADER
        senders = range(1, groups.size) if is_leader else [0]
        theirs = _TO_LEADER if is_leader else _FROM_LEADER
        self.inboxes = {j: _Inbox(groups, j, theirs, self.words) for j in senders}

    def tell(self, j: int, message: Message) -> None:
        """Sends a message, without waiting."""
        sent = [message.kind, message.fragment, message.number, *message.each]
        words = torch.zeros(self.words, dtype=torch.int32, device="cpu")
        words[: len(sent)] = torch.tensor(sent, dtype=torch.int32, device="cpu")
        collectives.send(words, self.group.ranks[j], self.tag, self.group, async_op=True)

    @property
    def has_come(self) -> bool:
        """Whether a message has arrived that is not taken."""
        return any(inbox.has_mail for inbox in self.inboxes.values())

    def take(self) -> Iterator[tuple[int, Message]]:
        """The messages that have arrived, each with its sender."""
        for j, inbox in self.inboxes.items():
            while (message := inbox.take()) is not None:
                yield j, message

    def serve_again(self, senders: Iterable[int]) -> None:
        """Has threads that wait look again at what these have said last."""
        for j in senders:
            self.inboxes[j].serve_again()

    def flush(self) -> None:
        """Sends the last message to all that this rank hears; see :attr:`is_flushed`."""
        for j in self.inboxes:
            self.tell(j, Message(Kind.FLUSH))

    @property
    def is_flushed(self) -> bool:
        """Whether the last message of all has been taken, so that none is under way."""
        return all(inbox.is_flushed for inbox in self.inboxes.values())

    def listen(self) -> None:
        """Receives again, after a flush."""
        for inbox in self.inboxes.values():
            inbox.listen()
