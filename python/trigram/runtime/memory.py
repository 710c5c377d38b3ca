"""Registered memory: tensors that the ranks of a host share, so that collectives copy nothing."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch

from trigram import _core
from trigram.errors import MisuseError
from trigram.runtime.world import current


def empty(
    *shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """An uninitialised tensor in registered memory: collectives on it copy nothing inside a host.

    The memory is shared with the ranks of this host. It is released when the tensor is garbage-collected.

    Args:
        *shape: As for ``torch.empty``.
        dtype: None: torch's default dtype.
        device: None: the CPU. For a GPU, this is ``torch.empty``.

    Raises:
        MisuseError: A dimension is negative.
        IoError: The system has not enough shared memory.
    """
    dims = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    sizes = [int(d) for d in dims]  # type: ignore[arg-type]
    dtype = dtype or torch.get_default_dtype()
    count = math.prod(sizes)
    if any(d < 0 for d in sizes):
        raise MisuseError(f"empty: shape {sizes} has a negative dimension; all must be 0 or more")
    if count == 0 or (device is not None and torch.device(device).type != "cpu"):
        with torch.inference_mode(False):  # as below
            return torch.empty(sizes, dtype=dtype, device="cpu" if device is None else device)
    block = current().engine.allocate(count * dtype.itemsize)
    # The tensor keeps the array alive, and the array keeps the block alive.
    array = _Owned.of(block)
    with torch.inference_mode(False):  # a tensor made in this mode can never be written outside of it
        return torch.frombuffer(array, dtype=dtype, count=count).view(sizes)


class _Owned:
    """A ctypes array over a block of registered memory, which it keeps alive."""

    @staticmethod
    def of(block: _core.RegisteredMemory) -> Any:
        """The array of a block's bytes."""
        array = (ctypes.c_char * block.nbytes).from_address(block.address)
        array._owner = block  # type: ignore[attr-defined]
        return array
