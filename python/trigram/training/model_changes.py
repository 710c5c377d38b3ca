"""What ranks do together when a script has changed a model: replaced, added, frozen or loaded parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.errors import MismatchError


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
