"""What gradients are compressed with, by Horovod's names."""

from __future__ import annotations

from typing import Any

import torch


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor, and what :meth:`decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor."""
        return tensor


class FP16Compressor:
    """Floats travel as 16-bit floats."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor in 16 bits if it has floats, and its dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in its dtype."""
        return tensor.to(ctx)


class Compression:
    """The choices."""

    none = NoneCompressor
    fp16 = FP16Compressor
