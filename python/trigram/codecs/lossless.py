"""Exact codes of float32 tensors on CPUs, whose length is known only when they are written.

The format is in ``rust/core/src/lossless.rs``.
"""

from __future__ import annotations

import torch

from trigram import _core
from trigram.codecs.codec import check_bytes, check_dtype
from trigram.errors import MisuseError, UnsupportedError


def most(n: int) -> int:
    """The most bytes that the code of ``n`` values can take."""
    return _core.lossless_size(n)


def encode(values: torch.Tensor, out: torch.Tensor) -> int:
    """Writes the code of a tensor to the beginning of another.

    Args:
        values: Contiguous, float32, on the CPU.
        out: uint8, at least ``most(values.numel())`` bytes.

    Returns:
        The length of the code, in bytes.

    Raises:
        UnsupportedError: The values are of another dtype, or on a GPU.
        MisuseError: A tensor is not contiguous, or ``out`` has too few bytes.
    """
    _check(values, "lossless.encode")
    check_bytes(out, values, None, "lossless.encode")
    if values.data_ptr() < out.data_ptr() + out.nbytes and out.data_ptr() < values.data_ptr() + values.nbytes:
        raise MisuseError("lossless.encode: the tensors share memory; pass another for the code")
    return _core.lossless_encode(values.data_ptr(), values.numel(), out.data_ptr(), out.numel())


def decode(code: torch.Tensor, out: torch.Tensor, add: bool = False, ranks: int = 0, sender: int = 0) -> None:
    """Decodes into ``out``, or adds the values to it.

    Args:
        code: uint8, exactly the bytes that :func:`encode` has written; those from the network may be invalid.
        out: Contiguous, float32, on the CPU, as long as the values were.
        add: Adds to what is there.
        ranks: With ``add``: divides the sums by this number; 0: does not.
        sender: The rank that a ``CorruptError`` names.

    Raises:
        CorruptError: The bytes are no code of ``out.numel()`` values.
        UnsupportedError, MisuseError: As :func:`encode`.
    """
    _check(out, "lossless.decode")
    check_bytes(code, out, None, "lossless.decode")
    if out.data_ptr() < code.data_ptr() + code.nbytes and code.data_ptr() < out.data_ptr() + out.nbytes:
        raise MisuseError("lossless.decode: the tensors share memory; pass another for the values")
    _core.lossless_decode(code.data_ptr(), code.numel(), out.data_ptr(), out.numel(), add, ranks, sender)


def _check(values: torch.Tensor, what: str) -> None:
    check_dtype(values, what)
    if values.dtype != torch.float32 or not values.is_cpu:
        raise UnsupportedError(
            f"{what}: the values are {values.dtype} on {values.device}; it takes float32 on the CPU"
        )
