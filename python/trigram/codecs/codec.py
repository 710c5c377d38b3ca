"""Codecs: fewer bits for the same numbers.

The formats, their errors and what becomes of values that are not finite are written down in
docs/algorithms.md; the loops are in ``rust/core/src/codec``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from trigram import _core
from trigram.errors import MisuseError, UnsupportedError

_FLOATS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}


class GpuKernel(Protocol):
    """A codec's counterpart for tensors on a GPU: the same bytes, the same numbers."""

    def encode(
        self,
        src: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        """As :meth:`Codec.encode`; the arguments have been checked."""

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, weight: float | None = None) -> None:
        """As :meth:`Codec.decode`; bytes that are no code decode to NaN."""


class Codec:
    """Turns n floats into exactly ``size(n)`` bytes, and back.

    Args:
        name: As :func:`trigram.codecs.find` knows it, ``topk:0.01``.
        block: Values per block; None: the codec's default.
        kernel: Makes the codec's GPU kernel, called with this codec when a tensor on a GPU first needs it.

    Attributes:
        name: As given.
        block: As given.
    """

    __slots__ = ("_core", "_kernel", "_make_kernel", "block", "name")

    def __init__(
        self, name: str, block: int | None = None, kernel: Callable[[Codec], GpuKernel] | None = None
    ) -> None:
        self.name = name
        self.block = block
        self._core = _core.Codec(name, block)
        self._make_kernel = kernel
        self._kernel: GpuKernel | None = None

    def __repr__(self) -> str:
        return f"Codec({self.name!r}, block={self.block})"

    def size(self, n: int) -> int:
        """Bytes of the code of ``n`` values."""
        return self._core.size(n)

    def encode(
        self,
        src: torch.Tensor,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> torch.Tensor:
        """Encodes a tensor.

        Args:
            src: Contiguous; float32, float16 or bfloat16.
            out: ``size(src.numel())`` bytes (uint8); None: made.
            residual: float32, as many values as ``src``; None: what the code drops is lost.
            feedback: True: the residual is added to ``src`` before encoding, and what the code
                drops of the sum replaces it (0 where that is not finite). False: the residual is
                overwritten with what the code drops of ``src``.
            seed: For codecs that draw: all ranks may use different ones.

        Returns:
            ``out``.
        """
        n = src.numel()
        dtype = _check(src, "encode")
        if out is None:
            out = torch.empty(self.size(n), dtype=torch.uint8, device=src.device)
        _bytes(out, src, "encode")
        if residual is not None and (
            residual.dtype != torch.float32
            or residual.numel() != n
            or not residual.is_contiguous()
            or residual.device != src.device
        ):
            raise MisuseError(
                f"encode: the residual is {residual.numel()} values of {residual.dtype} on "
                f"{residual.device}; it must be {n} contiguous values of float32 on {src.device}"
            )
        if not src.is_cpu:
            self._on_gpu().encode(src, out, residual, feedback, seed)
            return out
        at = 0 if residual is None else residual.data_ptr()
        seed &= (1 << 64) - 1
        self._core.encode(src.data_ptr(), n, dtype, at, feedback, seed, out.data_ptr(), out.numel())
        return out

    def decode(
        self, encoded: torch.Tensor, out: torch.Tensor, weight: float | None = None, sender: int = 0
    ) -> None:
        """Decodes into ``out``, or adds ``weight`` times the values to it.

        Args:
            encoded: What :meth:`encode` made, or whatever came from the network in its place.
            out: Contiguous; float32, float16 or bfloat16; float32 with ``weight``.
            weight: None: ``out`` is overwritten.
            sender: The rank that an error blames.

        Raises:
            CorruptError: The bytes are no code of ``out.numel()`` values.
        """
        dtype = _check(out, "decode")
        _bytes(encoded, out, "decode")
        if weight is not None and out.dtype != torch.float32:
            raise UnsupportedError(f"decode: with weight, out must be float32, not {out.dtype}")
        if not out.is_cpu:
            return self._on_gpu().decode(encoded, out, weight)
        self._core.decode(
            encoded.data_ptr(), encoded.numel(), out.data_ptr(), out.numel(), dtype, weight, sender
        )

    def _on_gpu(self) -> GpuKernel:
        """The same on a GPU."""
        if self._kernel is None:
            if self._make_kernel is None:
                raise UnsupportedError(f"codec {self.name!r} has no GPU kernel; move the tensor to the CPU")
            self._kernel = self._make_kernel(self)
        return self._kernel


def _check(t: torch.Tensor, what: str) -> int:
    code = _FLOATS.get(t.dtype)
    if code is None:
        raise UnsupportedError(
            f"{what}: dtype {t.dtype} is not supported; cast to float32, float16 or bfloat16"
        )
    if not t.is_cpu and not t.is_cuda:
        raise UnsupportedError(f"{what}: the tensor is on {t.device}; move it to the CPU or a CUDA GPU")
    if not t.is_contiguous():
        raise MisuseError(f"{what}: the tensor is not contiguous; pass t.contiguous()")
    return code


def _bytes(code: torch.Tensor, values: torch.Tensor, what: str) -> None:
    if code.dtype != torch.uint8 or not code.is_contiguous():
        raise MisuseError(
            f"{what}: the encoded tensor must be contiguous and of dtype uint8, not {code.dtype}"
        )
    if code.device != values.device:
        raise MisuseError(
            f"{what}: the encoded tensor is on {code.device}, the values are on {values.device}; move one of "
            "them"
        )
