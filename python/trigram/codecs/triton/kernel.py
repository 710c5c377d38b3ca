"""What every kernel offers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from trigram.codecs.codec import Codec


class Kernel(ABC):
    """A codec for tensors on a GPU. Tensors are contiguous, on one device, and checked by the caller.

    Attributes:
        name: As :func:`trigram.codecs.find` knows it.
        block: Values per block, where that was asked for.
    """

    __slots__ = ("_codec", "block", "name")

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.name = codec.name
        self.block = codec.block

    def __repr__(self) -> str:
        return f"Kernel({self.name!r}, block={self.block})"

    def size(self, n: int) -> int:
        """Bytes of the code of ``n`` values."""
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

        Where the bytes are no code of ``out.numel()`` values all of ``out`` becomes NaN.
        """
