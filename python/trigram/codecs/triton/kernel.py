"""The base class of GPU kernels of codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from trigram.codecs.codec import Codec


class Kernel(ABC):
    """A codec for tensors on a GPU. The caller checks that tensors are contiguous and on one device.

    Attributes:
        name: As :func:`trigram.codecs.find` knows it.
        block: Values per block; None: the default.
    """

    __slots__ = ("_codec", "block", "name")

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.name = codec.name
        self.block = codec.block

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, block={self.block})"

    def size(self, n: int) -> int:
        """The number of bytes that ``n`` values are encoded to."""
        return self._codec.size(n)

    @abstractmethod
    def encode(
        self,
        src: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        """Encodes ``src`` into the ``size(src.numel())`` bytes of ``out``; as :meth:`Codec.encode`."""

    @abstractmethod
    def decode(self, encoded: torch.Tensor, out: torch.Tensor, weight: float | None = None) -> None:
        """Decodes into ``out``, or adds ``weight`` times the values to it; as :meth:`Codec.decode`.

        If the bytes do not encode ``out.numel()`` values, all of ``out`` becomes NaN.
        """
