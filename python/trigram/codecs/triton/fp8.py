"""fp8: the ``e4m3fn`` format with a scale per block, rounded in software to the same bits as on the CPU."""

from __future__ import annotations

import triton
import triton.language as tl

from trigram.codecs.triton.blocks import BlockFormat, Launch
from trigram.codecs.triton.floats import INFINITE, NAN, SIZE, bits_of, float_of, hold, largest

TOP = tl.constexpr(448.0)  # the largest value of the format
LEAST = tl.constexpr(1e-35)  # a block whose largest value is smaller decodes to zeros
NORMAL = tl.constexpr(0x3C800000)  # the bits of 2^-6, the smallest normal number
MAGIC = tl.constexpr(24576.0)  # adding it to a subnormal leaves the code in the low bits
MAGIC_BITS = tl.constexpr(0x46C00000)


@triton.jit
def quantise(x, mean, BITS: tl.constexpr):
    """The scales and codes of blocks."""
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
    """The decoded values; code 0x7f is NaN, with either sign."""
    mantissa = codes & 7
    normal = float_of(((codes & 0x7F) << 20) + (120 << 23))
    size = tl.where((codes >> 3 & 15) == 0, mantissa.to(tl.float32) * (1 / 512), normal)
    number = float_of(bits_of(size) | ((codes & 0x80) << 24))
    number = tl.where((codes & 0x7F) == 0x7F, float_of(tl.full(codes.shape, NAN, tl.int32)), number)
    return hold(number * float_of(headers))


FP8 = BlockFormat(128, 8, True, quantise, values, encode=Launch(512, 1), decode=Launch(2048, 2))
