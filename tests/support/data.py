"""Each rank's numbers, known to every rank, and what a collective makes of them, in plain torch."""

from __future__ import annotations

from functools import reduce

import torch

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
HALVES = [torch.float16, torch.bfloat16]
INTS = [torch.int8, torch.uint8, torch.int32, torch.int64]
DTYPES = [*FLOATS, *INTS, torch.bool]
BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}


def ops(dtype: torch.dtype) -> list[str]:
    """The operations that make sense on a type."""
    if dtype == torch.bool:
        return ["min", "max", *BITWISE]
    arithmetic = ["sum", "min", "max", "prod"]
    return [*arithmetic, "avg"] if dtype.is_floating_point else [*arithmetic, *BITWISE]


def numbers(
    rank: int, n: int, dtype: torch.dtype = torch.float32, salt: int = 0, op: str = "sum"
) -> torch.Tensor:
    """Rank r's n numbers; small enough that no sum or product of them overflows."""
    g = torch.Generator().manual_seed(1_000_003 * salt + 17 * rank + n)
    if dtype == torch.bool:
        return torch.randint(0, 2, (n,), generator=g).bool()
    if dtype.is_floating_point:
        return (torch.rand(n, generator=g) + 0.5 if op == "prod" else torch.randn(n, generator=g)).to(dtype)
    low, high = (1, 3) if op == "prod" else (0, 10) if dtype == torch.uint8 else (-10, 11)
    if op in BITWISE:
        low, high = 0, 120
    return torch.randint(low, high, (n,), generator=g).to(dtype)


def reduced(op: str, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The reduction of the parts, and how far from it a result may be, element by element.

    Half types: summed in float32 in rank order and rounded once; no tolerance.
    """
    dtype = parts[0].dtype
    if op in BITWISE:
        return reduce(BITWISE[op], parts), 0.0
    if op in ("min", "max"):
        return reduce(torch.minimum if op == "min" else torch.maximum, parts), 0.0
    if not dtype.is_floating_point:
        return reduce(torch.mul if op == "prod" else torch.add, parts), 0.0
    wide = [p.float() if dtype in HALVES else p.double() for p in parts]
    exact = reduce(torch.mul if op == "prod" else torch.add, wide)
    size = reduce(torch.add, [w.abs() for w in wide]) if op != "prod" else exact.abs()
    if op == "avg":
        exact, size = exact / len(parts), size / len(parts)
    if dtype in HALVES:
        return exact.to(dtype), 0.0
    return exact.to(dtype), size.double() * torch.finfo(dtype).eps * (len(parts) + 1)


def each_hop_rounds(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """How far a sum of half types may be that is rounded to the half type at every hop."""
    size = reduce(torch.mul if op == "prod" else torch.add, [p.double().abs() for p in parts])
    return size * torch.finfo(parts[0].dtype).eps * len(parts)
