"""What ranks do together when a script has changed a model: replaced, added, frozen or loaded parameters, or
given buffers other shapes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.collectives.consistency import listed
from trigram.errors import MismatchError
from trigram.runtime.group import Group
from trigram.runtime.records import all_gather_bytes


def agree_on_change(tensors: Sequence[tuple[str, torch.Tensor]], groups: ModelGroups) -> None:
    """Checks that all ranks have made the same change.

    It is a call in the group of the averages, so that it meets the next average of a rank that has changed
    nothing: then all ranks raise an error at once, and none waits.

    Args:
        tensors: The names, parameters and buffers of the model as it is now.
        groups: The model's process groups.

    Raises:
        MismatchError: The changes differ, or only some ranks have changed the model; all ranks raise it.
    """
    lines = [
        f"{n} {tuple(t.shape)} {t.dtype} {t.requires_grad} {coalesced.is_channels_last(t)}"
        for n, t in tensors
    ]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
    word = int.from_bytes(digest, "little") >> 2
    extremes = torch.tensor([word, -word], dtype=torch.int64, device="cpu")
    collectives.all_reduce(extremes, "max", None, groups.main)
    if int(extremes[0]) != word or int(extremes[1]) != -word:
        raise MismatchError(
            f"{groups.name}: the model was changed differently on the ranks: the names, shapes, dtypes, "
            "requires_grad or memory formats of its parameters and buffers differ; make the same change on "
            "all ranks"
        )


def layouts(tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """The names, shapes, dtypes and memory formats of tensors, a line for each."""
    return "\n".join(
        f"{n} {tuple(t.shape)} {t.dtype}{' in channels-last' if coalesced.is_channels_last(t) else ''}"
        for n, t in tensors
    )


def agree_on_layouts(mine: str, group: Group) -> None:
    """Checks that tensors which one message will carry are alike on all ranks. Those of other shapes may take
    as much memory together, and the message would put values in wrong places.

    Args:
        mine: The :func:`layouts` of this rank's tensors.
        group: The ranks; all call it.

    Raises:
        MismatchError: They differ; all ranks raise it, and the message names the first that does.
    """
    # So many bytes that a call which one rank makes alone is not taken for this one.
    digest = torch.frombuffer(
        bytearray(hashlib.blake2b(mine.encode(), digest_size=24).digest()), dtype=torch.uint8
    )
    everyone = torch.empty(group.size, len(digest), dtype=torch.uint8, device="cpu")
    collectives.all_gather(everyone, digest, group)
    if bool((everyone == digest).all()):
        return
    told = [each.decode().splitlines() for each in all_gather_bytes(group, mine.encode())]
    first = next(lines for lines in zip_longest(*told, fillvalue="no other") if len(set(lines)) > 1)
    ranks: dict[str, list[int]] = {}
    for rank, line in zip(group.ranks, first, strict=True):
        ranks.setdefault(line, []).append(rank)
    raise MismatchError(
        f"rank {group.ranks[group.rank]}: the ranks have different parameters or buffers: "
        f"{', '.join(f'{line} on rank(s) {listed(of)}' for line, of in ranks.items())}. If each rank needs "
        "its own, as a cache that grows with the inputs, pass its name in ignore= to with_bagua; else give "
        "it the same shape and dtype on all ranks"
    )
