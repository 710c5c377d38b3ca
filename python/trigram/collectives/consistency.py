"""Which ranks differ: small words that all ranks tell each other, and who stands apart."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from trigram.collectives import calls
from trigram.errors import CorruptError
from trigram.runtime.group import Group


def tell_all(words: Sequence[int], group: Group) -> list[list[int]]:
    """Every rank's words (64-bit integers, as many on each rank), by place in the group."""
    everyone = torch.empty(group.size, len(words), dtype=torch.int64)
    calls.all_gather(everyone, torch.tensor(words, dtype=torch.int64), group)
    told: list[list[int]] = everyone.tolist()
    return told


def ranks_that(flag: bool, group: Group) -> list[int]:
    """The world ranks that give True."""
    told = tell_all([int(flag)], group)
    return [rank for rank, (given,) in zip(group.ranks, told, strict=True) if given]


def ranks_unlike_first(text: str, group: Group) -> list[int]:
    """The world ranks whose text is not that of the group's first rank."""
    told = tell_all(_words(hashlib.blake2b(text.encode(), digest_size=16).digest()), group)
    return [rank for rank, mine in zip(group.ranks, told, strict=True) if mine != told[0]]


def listed(ranks: Iterable[int]) -> str:
    """Ranks as messages list them."""
    return ", ".join(map(str, ranks))


def fingerprint(tensors: Iterable[torch.Tensor]) -> list[int]:
    """128 bits of the tensors' bytes (BLAKE2b), as two 64-bit integers."""
    digest = hashlib.blake2b(digest_size=16)
    for t in tensors:
        whole = t.detach().cpu().contiguous().flatten()
        if whole.numel():
            digest.update(whole.view(torch.uint8).numpy().data)
    return _words(digest.digest())


def _words(digest: bytes) -> list[int]:
    return [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]


def same_everywhere(tensors: Iterable[torch.Tensor], group: Group) -> bool:
    """Whether all ranks hold the same bits."""
    told = tell_all(fingerprint(tensors), group)
    return all(mine == told[0] for mine in told)


def check_replicas(tensors: Iterable[torch.Tensor], group: Group, step: int) -> None:
    """Raises on all ranks of the group if one holds other bits than most.

    Averages give all ranks the same bits, but memory that fails, a parameter that one rank alone has changed
    or an operator that is not deterministic do not. Such a rank spoils every later average, and no loss
    curve shows it.

    Raises:
        CorruptError: Its ``rank`` is the first that differs; the message names all.
    """
    prints = [tuple(told) for told in tell_all(fingerprint(tensors), group)]
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
