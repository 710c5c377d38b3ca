"""int8 and int4: affine quantisation by block, with the integer zero point in the low bits of the step."""

from __future__ import annotations

import triton
import triton.language as tl

from trigram.codecs.triton.blocks import BlockFormat
from trigram.codecs.triton.floats import INFINITE, NAN, bits_of, float_of, hold, largest

LEAST = tl.constexpr(1e-36)  # a block with a smaller range decodes to zeros
MAGIC = tl.constexpr(12582912.0)  # adding it rounds a moderate float to nearest even, into the low bits
MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def quantise(x, mean, BITS: tl.constexpr):
    """The headers and codes of blocks."""
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
    """The decoded values. The step is rounded up, so the ends of a huge range may exceed the largest
    float."""
    TOP: tl.constexpr = (1 << BITS) - 1
    return hold((codes - (headers & TOP)).to(tl.float32) * float_of(headers & ~TOP))


INT8 = BlockFormat(512, 8, True, quantise, values)
INT4 = BlockFormat(32, 4, True, quantise, values)
