"""sign: one bit per value, and the mean of |x| per block."""

from __future__ import annotations

import triton
import triton.language as tl

from trigram.codecs.triton.blocks import BlockFormat, Launch
from trigram.codecs.triton.floats import INFINITE, NAN, bits_of, float_of, largest


@triton.jit
def quantise(x, mean, BITS: tl.constexpr):
    """The means and signs of blocks."""
    broken = largest(x) >= INFINITE
    return tl.where(broken, NAN, bits_of(mean)), tl.where(broken, 0, bits_of(x) >> 31 & 1)


@triton.jit
def values(headers, codes, BITS: tl.constexpr):
    """The decoded values: the mean of the block with the sign of each value."""
    return float_of(headers ^ (codes << 31))


SIGN = BlockFormat(256, 1, True, quantise, values, mean=True, encode=Launch(512, 1))
