"""Whether replicas agree: a hash of the weights, now and then, so that one that has drifted is named.

Averages give all ranks the same bits, but memory that fails, a parameter that one rank alone has touched
or an operator that is not deterministic do not. Such a rank spoils every later average, and no loss
curve says so.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import torch

from trigram.collectives import calls as collectives
from trigram.errors import CorruptError
from trigram.runtime.world import Group


def fingerprint(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """128 bits of the tensors' bytes (BLAKE2b), as two int64."""
    digest = hashlib.blake2b(digest_size=16)
    for t in tensors:
        whole = t.detach().cpu().contiguous().flatten()
        if whole.numel():
            digest.update(whole.view(torch.uint8).numpy().data)
    words = digest.digest()
    return torch.tensor([int.from_bytes(words[at : at + 8], "little", signed=True) for at in (0, 8)])


def agree(tensors: Iterable[torch.Tensor], group: Group, step: int) -> None:
    """Raises on all ranks of the group if one holds other bits than most.

    Raises:
        CorruptError: Its ``rank`` is the first that differs; the message names all.
    """
    everyone = torch.empty(group.size, 2, dtype=torch.int64)
    collectives.all_gather(everyone, fingerprint(tensors), group)
    prints = [tuple(row) for row in everyone.tolist()]
    (common, count), *_ = Counter(prints).most_common()
    if count == group.size:
        return
    other = [rank for rank, mine in zip(group.ranks, prints, strict=True) if mine != common]
    most = f"differ from those of the {count} others" if count > 1 else "differ, each from each"
    raise CorruptError(
        f"check_replicas: before step {step} the weights of rank(s) {', '.join(map(str, other))} {most}; "
        "look for a parameter that is changed on some ranks only, for memory errors, and load a checkpoint",
        other[0],
    )
