"""fp8, the ``e4m3fn`` of current accelerators, with a scale per block; rounded here, not by the GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from trigram.codecs.triton.blocks import Plan
from trigram.codecs.triton.floats import INFINITE, NAN, SIZE, bits_of, float_of, hold, largest

TOP = tl.constexpr(448.0)  # the largest number of the format
LEAST = tl.constexpr(1e-35)  # blocks whose largest value is below are zero
NORMAL = tl.constexpr(0x3C800000)  # the bits of 2^-6, the smallest normal number
MAGIC = tl.constexpr(24576.0)  # added to a smaller one, it leaves its code in the low bits
MAGIC_BITS = tl.constexpr(0x46C00000)


@triton.jit
def quantise(x, mean, BITS: tl.constexpr):
    """Scales and codes of rows."""
    top = largest(x)
    broken = top >= INFINITE
    empty = float_of(top) < LEAST
    scale = tl.math.div_rn(float_of(top), tl.full(top.shape, TOP, tl.float32))
    inverse = tl.math.div_rn(tl.full(top.shape, 1.0, tl.float32), scale)
    scaled = x * inverse
    bits = bits_of(tl.where(scaled > TOP, TOP, tl.where(scaled < -TOP, -TOP, scaled)))
    size = bits & SIZE
    normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3)
    small = bits_of(float_of(size) + MAGIC) - MAGIC_BITS
    codes = tl.where(size < NORMAL, small, normal) | (bits >> 24 & 0x80)
    header = tl.where(broken, NAN, tl.where(empty, 0, bits_of(scale)))
    return header, tl.where(broken | empty, 0, codes)


@triton.jit
def values(headers, codes, BITS: tl.constexpr):
    """The numbers; 0x7f is NaN, and with a sign also."""
    mantissa = codes & 7
    normal = float_of(((codes & 0x7F) << 20) + (120 << 23))
    size = tl.where((codes >> 3 & 15) == 0, mantissa.to(tl.float32) * (1 / 512), normal)
    number = float_of(bits_of(size) | ((codes & 0x80) << 24))
    number = tl.where((codes & 0x7F) == 0x7F, float_of(tl.full(codes.shape, NAN, tl.int32)), number)
    return hold(number * float_of(headers))


FP8 = Plan(128, 8, True, quantise, values)
