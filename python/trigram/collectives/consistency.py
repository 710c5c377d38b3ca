"""Checks that ranks agree: gathers a few integers from all ranks, and finds the ranks that differ."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from trigram.collectives import calls, coalesced
from trigram.errors import CorruptError
from trigram.runtime.group import Group

_CHUNK = 4 << 20
"""Bytes that are hashed at a time, so that copies of tensors on GPUs and of views stay small."""


def tell_all(words: Sequence[int], group: Group) -> list[list[int]]:
    """Gathers 64-bit integers, the same number from each rank; indexed by group rank."""
    everyone = torch.empty(group.size, len(words), dtype=torch.int64, device="cpu")
    calls.all_gather(everyone, torch.tensor(words, dtype=torch.int64, device="cpu"), group)
    gathered: list[list[int]] = everyone.tolist()
    return gathered


def tell_all_floats(values: Sequence[float], group: Group) -> list[list[float]]:
    """The same for floats, bit for bit."""
    words = list(struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values)))
    everyone = tell_all(words, group)
    return [list(struct.unpack(f"{len(of)}d", struct.pack(f"{len(of)}q", *of))) for of in everyone]


def ranks_that(flag: bool, group: Group) -> list[int]:
    """The world ranks whose ``flag`` is True."""
    gathered = tell_all([int(flag)], group)
    return [rank for rank, (theirs,) in zip(group.ranks, gathered, strict=True) if theirs]


def ranks_unlike_first(text: str, group: Group) -> list[int]:
    """The world ranks whose ``text`` differs from that of the group's first rank."""
    digests = tell_all(_words(hashlib.blake2b(text.encode(), digest_size=16).digest()), group)
    return [rank for rank, digest in zip(group.ranks, digests, strict=True) if digest != digests[0]]


def listed(ranks: Iterable[int]) -> str:
    """Ranks as error messages list them: ``1, 2``."""
    return ", ".join(map(str, ranks))


def fingerprint(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The BLAKE2b digest (128 bits) of the tensors' bytes, as two 64-bit integers."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (p for t in tensors if t.numel() for p in coalesced.parts(_plain(t), _CHUNK)):
        digest.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return _words(digest.digest())


def _plain(t: torch.Tensor) -> torch.Tensor:
    """The values; a view that conjugates or negates when it is read has no bytes of its own."""
    return t.detach().resolve_conj().resolve_neg()


def _words(digest: bytes) -> list[int]:
    return [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]


def same_everywhere(tensors: Iterable[torch.Tensor], group: Group) -> bool:
    """Whether the tensors have the same bits on all ranks."""
    prints = tell_all(fingerprint(tensors), group)
    return all(theirs == prints[0] for theirs in prints)


def unequal(tensors: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """The tensors that do not have the same bits on all ranks."""
    if not tensors:
        return []
    prints = tell_all([word for t in tensors for word in fingerprint([t])], group)
    by_tensor = zip(*(zip(theirs[::2], theirs[1::2], strict=True) for theirs in prints), strict=True)
    return [t for t, theirs in zip(tensors, by_tensor, strict=True) if len(set(theirs)) > 1]


def check_replicas(tensors: Iterable[torch.Tensor], group: Group, step: int) -> None:
    """Raises on all ranks of the group if the weights of a rank differ from those of most ranks.

    Averages give all ranks the same bits. Ranks differ if memory is faulty, if one rank changes a parameter,
    or if an operator is not deterministic. A rank that differs corrupts every later average, which no loss
    curve shows.

    Raises:
        CorruptError: Its ``rank`` is the first rank that differs; the message lists all.
    """
    prints = [tuple(theirs) for theirs in tell_all(fingerprint(tensors), group)]
    (common, count), *_ = Counter(prints).most_common()
    if count == group.size:
        return
    other = [rank for rank, mine in zip(group.ranks, prints, strict=True) if mine != common]
    most = f"differ from those of the other {count} ranks" if count > 1 else "all differ from each other"
    raise CorruptError(
        f"check_replicas: before step {step} the weights of rank(s) {listed(other)} {most}; "
        "check for a parameter that only some ranks change and for memory errors, then load a checkpoint",
        other[0],
    )
