"""The codecs of docs/algorithms.md: what a receiver sees of a vector, and how many bytes it took.

Plain torch; nothing here knows trigram. Arithmetic is f32 in the order that the document gives, so that a
codec rounds as in the real thing wherever nothing but the order of two roundings is left open.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HUGE = torch.finfo(torch.float32).max
TINY = 1e-36


def _affine(x: Tensor, largest: int, bits: int) -> Tensor:
    """One block of int8 or int4."""
    low, high = x.min().clamp(max=0.0), x.max().clamp(min=0.0)
    if float(high - low) < TINY:
        return torch.zeros_like(x)
    below = (1 << bits) - 1
    step = ((high / largest - low / largest).view(torch.int32) + below) & ~below
    step = step.view(torch.float32)
    inverse = 1.0 / step
    zero = (-low * inverse).round().clamp(0, largest)
    code = ((x * inverse).round() + zero).clamp(0, largest)
    return ((code - zero) * step).clamp(-HUGE, HUGE)


def _fp8(x: Tensor) -> Tensor:
    top = x.abs().max()
    if float(top) < TINY:
        return torch.zeros_like(x)
    scale = top / 448
    return (x * (1.0 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def _sign(x: Tensor) -> Tensor:
    mean = x.double().abs().mean().float()
    return torch.where(x.signbit(), -mean, mean)


def _topk(x: Tensor, fraction: float) -> Tensor:
    kept = torch.zeros_like(x)
    index = x.abs().sort(descending=True, stable=True).indices[: how_many(fraction, len(x))]
    kept[index] = x[index]
    return kept


def _chunktopk(x: Tensor, fraction: float) -> Tensor:
    """One chunk: the largest values, each as the mean of the larger or of the smaller of them."""
    kept = torch.zeros_like(x)
    index = x.abs().sort(descending=True, stable=True).indices[: how_many(fraction, len(x))]
    sizes = x[index].abs().double()
    large = sizes > sizes.mean()
    for part in (large, ~large):
        if bool(part.any()):
            size = sizes[part].mean().float()
            kept[index[part]] = torch.where(x[index[part]] < 0, -size, size)
    return kept


def how_many(fraction: float, n: int) -> int:
    return max(1, math.ceil(fraction * n))


BLOCKS = {"int8": 512, "int4": 32, "fp8": 128, "sign": 256, "chunktopk": 4096}


def decoded(codec: str, x: Tensor, block: int | None = None) -> Tensor:
    """decode(encode(x))."""
    name, _, argument = codec.partition(":")
    if name == "full" or not len(x):
        return x.clone()
    if name in ("bf16", "f16"):
        return x.to(torch.bfloat16 if name == "bf16" else torch.float16).float()
    if name == "topk":
        return _topk(x, float(argument))
    one = {
        "int8": lambda b: _affine(b, 255, 8),
        "int4": lambda b: _affine(b, 15, 4),
        "fp8": _fp8,
        "sign": _sign,
        "chunktopk": lambda b: _chunktopk(b, float(argument)),
    }[name]
    whole = [one(b) if bool(b.isfinite().all()) else b * math.nan for b in x.split(block or BLOCKS[name])]
    return torch.cat(whole)


def encoded_size(codec: str, n: int, block: int | None = None) -> int:
    """Bytes of n elements."""
    name, _, argument = codec.partition(":")
    if name in ("full", "bf16", "f16"):
        return (4 if name == "full" else 2) * n
    if name == "topk":
        k = how_many(float(argument), n)
        low = int(math.log2(n // k))
        return 4 * k + (k * low + 7) // 8 + (k + ((n - 1) >> low) + 1 + 7) // 8
    if name == "randomk":
        return 12 + 4 * how_many(float(argument), n)
    if name == "chunktopk":
        total = 0
        for start in range(0, n, 4096):
            length = min(4096, n - start)
            k = how_many(float(argument), length)
            low = int(math.log2(length // k))
            places = (k * low + 7) // 8 + (k + ((length - 1) >> low) + 1 + 7) // 8
            total += 8 + (2 * k + 7) // 8 + places
        return total
    size = block or BLOCKS[name]
    headers = 4 * math.ceil(n / size)
    return headers + {"int8": n, "fp8": n, "int4": (n + 1) // 2, "sign": (n + 7) // 8}[name]


def keeps_residual(codec: str) -> bool:
    return codec.partition(":")[0] in ("sign", "topk", "randomk")


def finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, torch.zeros_like(x))
