"""Codecs: lossy compression of float tensors.

docs/algorithms.md specifies the formats, their error bounds and how they treat NaN and infinity. The CPU's
loops are in ``rust/core/src/codec``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from trigram import _core
from trigram.errors import MisuseError, UnsupportedError

_FLOATS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}


class GpuKernel(Protocol):
    """A codec for tensors on a GPU: it produces the same bytes and values as the CPU's."""

    def encode(
        self,
        src: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        """As :meth:`Codec.encode`, which has checked the arguments."""

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, weight: float | None = None) -> None:
        """As :meth:`Codec.decode`, but invalid bytes decode to NaN."""


_make_kernel: Callable[[Codec], GpuKernel] | None = None


def use_kernels(make: Callable[[Codec], GpuKernel]) -> None:
    """Sets what creates the GPU kernel of a codec, when a GPU tensor is first encoded or decoded."""
    global _make_kernel
    _make_kernel = make


class Codec:
    """Encodes n floats as exactly ``size(n)`` bytes, and decodes them.

    Args:
        name: A name of :func:`trigram.codecs.find`, such as ``topk:0.01``.
        block: Values per block; None: the codec's default.

    Attributes:
        name: As given.
        block: As given.
    """

    __slots__ = ("_core", "_kernel", "block", "name")

    def __init__(self, name: str, block: int | None = None) -> None:
        self.name = name
        self.block = block
        self._core = _core.Codec(name, block)
        self._kernel: GpuKernel | None = None

    def __repr__(self) -> str:
        return f"Codec({self.name!r}, block={self.block})"

    def size(self, n: int) -> int:
        """The number of bytes that ``n`` values are encoded to."""
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
            out: uint8, ``size(src.numel())`` bytes; None: a new tensor.
            residual: float32, ``src.numel()`` values, for the encoding error (the values minus the decoded
                values); None: the error is dropped.
            feedback: True: the residual is added to ``src`` before encoding, and replaced by the error of the
                sum (0 where that is NaN or infinite). False: the residual is overwritten with the error of
                ``src``.
            seed: For ``randomk``; ranks may use different seeds.

        Returns:
            ``out``.

        Raises:
            UnsupportedError: The dtype or the device is not supported.
            MisuseError: A tensor is not contiguous, or ``out`` or ``residual`` does not fit ``src``.
        """
        n = src.numel()
        dtype = check_dtype(src, "encode")
        if out is None:
            out = torch.empty(self.size(n), dtype=torch.uint8, device=src.device)
        check_bytes(out, src, residual, "encode")
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
            encoded: uint8, the bytes from :meth:`encode`; bytes from the network may be invalid.
            out: Contiguous; float32, float16 or bfloat16; float32 with ``weight``.
            weight: The factor; None: ``out`` is overwritten.
            sender: The rank that a ``CorruptError`` names.

        Raises:
            CorruptError: The bytes do not encode ``out.numel()`` values (CPU; on a GPU ``out`` becomes NaN).
            UnsupportedError: The dtype or the device is not supported.
        """
        dtype = check_dtype(out, "decode")
        check_bytes(encoded, out, None, "decode")
        if weight is not None and out.dtype != torch.float32:
            raise UnsupportedError(f"decode: with weight, out must be float32, not {out.dtype}")
        if not out.is_cpu:
            return self._on_gpu().decode(encoded, out, weight)
        self._core.decode(
            encoded.data_ptr(), encoded.numel(), out.data_ptr(), out.numel(), dtype, weight, sender
        )

    def _on_gpu(self) -> GpuKernel:
        """The codec's GPU kernel, created at the first use."""
        if self._kernel is None:
            if _make_kernel is None:
                raise UnsupportedError(f"codec {self.name!r} has no GPU kernel; move the tensor to the CPU")
            self._kernel = _make_kernel(self)
        return self._kernel


def check_dtype(t: torch.Tensor, what: str) -> int:
    """The engine's number of a tensor's dtype; raises if a codec does not support the tensor."""
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


def check_bytes(code: torch.Tensor, values: torch.Tensor, residual: torch.Tensor | None, what: str) -> None:
    """Raises if the encoded tensor, or the residual, does not fit the values."""
    if code.dtype != torch.uint8 or not code.is_contiguous():
        raise MisuseError(
            f"{what}: the encoded tensor must be contiguous and of dtype uint8, not {code.dtype}"
        )
    if code.device != values.device:
        raise MisuseError(
            f"{what}: the encoded tensor is on {code.device}, the values are on {values.device}; move one of "
            "them"
        )
    n = values.numel()
    if residual is not None and (
        residual.dtype != torch.float32
        or residual.numel() != n
        or not residual.is_contiguous()
        or residual.device != values.device
    ):
        raise MisuseError(
            f"{what}: the residual is {residual.numel()} values of {residual.dtype} on "
            f"{residual.device}; it must be {n} contiguous values of float32 on {values.device}"
        )
