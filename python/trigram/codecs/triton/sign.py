"""One bit per value, and the mean of |x| per block."""

from __future__ import annotations

import triton
import triton.language as tl

from trigram.codecs.triton.blocks import Plan
from trigram.codecs.triton.floats import INFINITE, NAN, bits_of, float_of, largest


@triton.jit
def quantise(x, mean, BITS: tl.constexpr):
    """Means and signs of rows."""
    broken = largest(x) >= INFINITE
    return tl.where(broken, NAN, bits_of(mean)), tl.where(broken, 0, bits_of(x) >> 31 & 1)


@triton.jit
def values(headers, codes, BITS: tl.constexpr):
    """The means with the signs."""
    return float_of(headers ^ (codes << 31))


SIGN = Plan(256, 1, True, quantise, values, mean=True)
