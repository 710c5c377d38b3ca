"""What measurements of codecs share: the values, the check of a round trip, and the times next to a copy."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from paired import in_turns
from torch import Tensor

from trigram import codecs

OPERATIONS = ("encode", "encode with feedback", "decode", "decode-add")
BLOCKS = {"int8": 512, "int4": 32, "fp8": 128, "sign": 256, "chunktopk": 4096}
ULP = 2.0**-23


def values(n: int) -> Tensor:
    """Values distributed like gradients: of many magnitudes, a few of them large."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=generator) * torch.randn(n, generator=generator).exp() * 1e-3


def bound(name: str, x: Tensor) -> Tensor:
    """The error bound of each value of `x` (whole blocks), for codecs that send all values."""
    if name in ("bf16", "f16"):
        relative, least = (2.0**-8, 0.0) if name == "bf16" else (2.0**-11, 2.0**-25)
        return (x.abs() * relative).clamp(min=least)
    blocks = x.view(-1, BLOCKS[name])
    if name == "fp8":
        scale = blocks.abs().amax(1, keepdim=True) / 448
        # Three mantissa bits; below 2^-6 of the scale the step is 2^-9.
        limit = torch.maximum(blocks.abs() / 16, scale * 2.0**-10) * (1 + 4 * ULP)
    else:
        codes, spare = (255, 2.0**-15) if name == "int8" else (15, 2.0**-19)
        low, high = blocks.amin(1, keepdim=True).clamp(max=0), blocks.amax(1, keepdim=True).clamp(min=0)
        limit = ((high - low) / codes * (1 + spare) + blocks.abs() * ULP).expand_as(blocks)
    return limit.reshape(-1)


def wrong(name: str, x: Tensor) -> str:
    """What is wrong after encoding and decoding `x`; an empty string if nothing is."""
    codec, back, residual = codecs.find(name), torch.empty_like(x), torch.zeros_like(x)
    encoded = codec.encode(x, residual=residual, seed=1)
    codec.decode(encoded, back)
    if encoded.numel() != codec.size(len(x)):
        return f"{encoded.numel()} bytes, not {codec.size(len(x))}"
    if not torch.equal(residual, x - back):
        return "the residual is not the encoding error"
    added = x.clone()
    codec.decode(encoded, added, weight=0.5)
    if not torch.allclose(added, x + 0.5 * back, rtol=1e-6, atol=0):
        return "decode-add does not add the decoded values"
    if name == "sign":
        mean = (
            x.view(-1, BLOCKS[name]).double().abs().mean(1, keepdim=True).expand(-1, BLOCKS[name]).reshape(-1)
        )
        good = torch.allclose(back.double(), torch.where(x < 0, -mean, mean), rtol=1e-6)
        return "" if good else "a decoded value is not the mean with the value's sign"
    if name.partition(":")[0] in ("topk", "randomk"):
        kept = back != 0
        count = max(1, -int(-float(name.partition(":")[2]) * len(x) // 1))
        if not torch.equal(back[kept], x[kept]) or abs(int(kept.sum()) - count) > 0:
            return f"not {count} unchanged values"
        smaller = name.startswith("randomk") or x[kept].abs().min() >= x[~kept].abs().max()
        return "" if smaller else "the values sent are not the largest"
    if name.startswith("chunktopk"):
        return _wrong_chunks(float(name.partition(":")[2]), x, back)
    excess = float(((back - x).abs() / bound(name, x).clamp(min=1e-45)).max())
    return "" if excess <= 1 else f"an error {excess:.4f} times its bound"


def _wrong_chunks(fraction: float, x: Tensor, back: Tensor) -> str:
    """As :func:`wrong`, of chunktopk. Single values have no bound: two sizes stand for all of a chunk."""
    for part, read in zip(x.split(BLOCKS["chunktopk"]), back.split(BLOCKS["chunktopk"]), strict=True):
        kept = read != 0
        if int(kept.sum()) != max(1, math.ceil(fraction * len(part))):
            return "another number of values in a chunk"
        if not torch.equal(read[kept].sign(), part[kept].sign()) or len(read[kept].abs().unique()) > 2:
            return "other signs, or more than two sizes in a chunk"
        if not bool(kept.all()) and part[kept].abs().min() < part[~kept].abs().max():
            return "the values sent are not the largest"
    return ""


def seconds(name: str, n: int, repeats: int) -> dict[str, list[float]]:
    """Of each operation on `n` values and of the copy, in turns."""
    codec, x = codecs.find(name), values(n)
    out, residual, added = torch.empty_like(x), torch.zeros_like(x), torch.zeros_like(x)
    encoded = codec.encode(x)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(x),
        "encode": lambda: codec.encode(x, encoded),
        "encode with feedback": lambda: codec.encode(x, encoded, residual),
        "decode": lambda: codec.decode(encoded, out),
        "decode-add": lambda: codec.decode(encoded, added, 0.25),
    }
    return in_turns(calls, repeats)
