"""The base of codecs that send some of the values and drop the others."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from trigram.codecs.codec import Codec
from trigram.codecs.triton.floats import F16, F32, NAN, float_of
from trigram.codecs.triton.kernel import Kernel
from trigram.errors import UnsupportedError

TILE = 2048  # values per program: 16 for each of its threads
DRAWN = 1024  # indices per program, which are computed in 64 bits
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class Sparse(Kernel):
    """The kernels of a codec that sends a fraction of the values."""

    __slots__ = ("fraction",)

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self.fraction = float(codec.name.partition(":")[2])

    def count(self, n: int) -> int:
        """How many of `n` values are sent: at least one.

        Raises:
            UnsupportedError: There are 2^31 values or more.
        """
        if n >= 1 << 31:
            raise UnsupportedError(
                f"codec {self.name!r} on a GPU is limited to tensors of fewer than 2^31 values, and this one "
                f"has {n}"
            )
        return min(max(math.ceil(self.fraction * n), 1), n)


def tiles(n: int, tile: int = TILE) -> int:
    """The number of programs for `n` values."""
    return triton.cdiv(n, tile)


def none(device: torch.device, n: int = 1) -> torch.Tensor:
    """A tensor of `n` int32 zeros, for flags and counters."""
    return torch.zeros(n, dtype=torch.int32, device=device)


@triton.jit
def _fill_if(flag, out, n, BITS: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr):
    if tl.load(flag) != 0:
        first = tl.program_id(0).to(tl.int64) * (TILE * TURNS)
        for turn in range(TURNS):
            at = first + turn * TILE + tl.arange(0, TILE)
            there = at < n
            if FORMAT == F32:
                tl.store(out + at, float_of(tl.full([TILE], BITS, tl.int32)), mask=there)
            else:
                short: tl.constexpr = 0 if BITS == 0 else 0x7E00 if FORMAT == F16 else 0x7FC0
                tl.store(out + at, tl.full([TILE], short, tl.int16), mask=there)


def fill_if(flag: torch.Tensor, out: torch.Tensor, form: int, bits: int = NAN.value) -> None:
    """Fills `out` with the float32 whose bits are `bits` (NaN or 0) if the flag is set; otherwise a few
    programs read the flag, and nothing else happens."""
    n, turns = out.numel(), 16
    grid = (tiles(n, TILE * turns),)
    _fill_if[grid](flag, out, n, BITS=bits, FORMAT=form, TILE=TILE, TURNS=turns, **OPTIONS)
