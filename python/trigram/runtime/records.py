"""Byte strings of any length, gathered from or broadcast to the ranks of a group."""

from __future__ import annotations

import torch

from trigram.runtime import engine_codes
from trigram.runtime.group import Group

_BYTE = engine_codes.DTYPES[torch.uint8]


def all_gather_bytes(group: Group, mine: bytes) -> list[bytes]:
    """The byte strings of all ranks, indexed by group rank."""
    sizes = [int.from_bytes(size, "little") for size in _gather(group, len(mine).to_bytes(8, "little"))]
    most = max(sizes)
    padded = _gather(group, mine.ljust(most, b"\0")) if most else [b""] * group.size
    return [data[:size] for data, size in zip(padded, sizes, strict=True)]


def broadcast_bytes(group: Group, mine: bytes, root: int) -> bytes:
    """The byte string of group rank ``root``, on all ranks; the other ranks' ``mine`` is ignored."""
    is_root = group.rank == root
    size = _broadcast(group, len(mine).to_bytes(8, "little") if is_root else bytes(8), root)
    length = int.from_bytes(size, "little")
    return _broadcast(group, mine if is_root else bytes(length), root) if length else b""


def _gather(group: Group, mine: bytes) -> list[bytes]:
    source = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    target = torch.empty(group.size * len(mine), dtype=torch.uint8, device="cpu")
    memory = (source.data_ptr(), source.nbytes, target.data_ptr(), target.nbytes)
    group.core.run((engine_codes.ALL_GATHER, _BYTE, len(mine), 0, 0, 0), memory, group.timeout)
    data = target.numpy().tobytes()
    return [data[at : at + len(mine)] for at in range(0, len(data), len(mine))]


def _broadcast(group: Group, mine: bytes, root: int) -> bytes:
    data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    memory = (data.data_ptr(), data.nbytes, data.data_ptr(), data.nbytes)
    group.core.run((engine_codes.BROADCAST, _BYTE, len(mine), 0, 0, root), memory, group.timeout)
    return data.numpy().tobytes()
