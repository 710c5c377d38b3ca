"""8 or 4 bits per value: an affine code per block, with an integer zero point in the step's low bits."""

from __future__ import annotations

import triton
import triton.language as tl

from trigram.codecs.triton.blocks import Plan
from trigram.codecs.triton.floats import INFINITE, NAN, bits_of, float_of, hold, largest

LEAST = tl.constexpr(1e-36)  # blocks of a smaller range are zero
MAGIC = tl.constexpr(12582912.0)  # a float of moderate size added to it is in the low bits, to nearest even
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def quantise(x, mean, BITS: tl.constexpr):
    """Headers and codes of rows."""
    TOP: tl.constexpr = (1 << BITS) - 1
    broken = largest(x) >= INFINITE
    low = tl.minimum(tl.min(x, axis=1, keep_dims=True), 0.0)
    high = tl.maximum(tl.max(x, axis=1, keep_dims=True), 0.0)
    top = tl.full(low.shape, TOP, tl.float32)
    exact = tl.math.div_rn(high, top) - tl.math.div_rn(low, top)
    step = (bits_of(exact) + TOP) & ~TOP
    inverse = tl.math.div_rn(tl.full(low.shape, 1.0, tl.float32), float_of(step))
    zero = bits_of(-low * inverse + MAGIC) - MAGIC_BITS
    zero = tl.minimum(tl.maximum(zero, 0), TOP)
    empty = high - low < LEAST
    codes = bits_of(x * inverse + MAGIC) - MAGIC_BITS + zero
    codes = tl.where(broken | empty, 0, tl.minimum(tl.maximum(codes, 0), TOP))
    return tl.where(broken, NAN, tl.where(empty, 0, step | zero)), codes


@triton.jit
def values(headers, codes, BITS: tl.constexpr):
    """The numbers. The step is rounded up, so the ends of a huge range may lie above the largest float."""
    TOP: tl.constexpr = (1 << BITS) - 1
    return hold((codes - (headers & TOP)).to(tl.float32) * float_of(headers & ~TOP))


INT8 = Plan(512, 8, True, quantise, values)
INT4 = Plan(32, 4, True, quantise, values)
