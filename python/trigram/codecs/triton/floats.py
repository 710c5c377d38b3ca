"""Bit patterns of floats, conversion of 16-bit floats, loading and storing values.

Kernels get 16-bit tensors as int16 and convert them as ``rust/core/src/float16.rs`` does, so that all bits
equal the CPU's, including those of a NaN.
"""

from __future__ import annotations

import ctypes

import torch
import triton
import triton.language as tl

F32 = tl.constexpr(0)
F16 = tl.constexpr(1)
BF16 = tl.constexpr(2)

LOSE = tl.constexpr(0)
FEEDBACK = tl.constexpr(1)
REMAINDER = tl.constexpr(2)

INFINITE = tl.constexpr(0x7F800000)  # the bits of infinity; the bits of a NaN are larger
NAN = tl.constexpr(0x7FC00000)
SIZE = tl.constexpr(0x7FFFFFFF)  # all but the sign
MAX = tl.constexpr(3.4028234663852886e38)
BIAS = tl.constexpr(112 << 23)  # the difference of the exponents' biases, where a float32 has its exponent
NORMAL = tl.constexpr(113 << 23)  # the bits of the smallest normal half, 2^-14
LEAST = tl.constexpr(2.0**-14)
HALF = tl.constexpr(0x3F000000)

_FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def format_of(t: torch.Tensor) -> int:
    """The kernels' code of a tensor's dtype."""
    return _FORMATS[t.dtype]


def raw(t: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels take it: 16-bit floats as int16."""
    return t if t.dtype == torch.float32 else t.view(torch.int16)


def keep_of(residual: torch.Tensor | None, feedback: bool) -> int:
    """The kernels' code for what happens to the encoding error: LOSE, FEEDBACK or REMAINDER."""
    return 0 if residual is None else 1 if feedback else 2


def weight_of(weight: float | None) -> float:
    """The weight rounded to float32, infinite if it is too large; 0 for None."""
    return 0.0 if weight is None else ctypes.c_float(weight).value


@triton.jit
def bits_of(x):
    """The bits of a float32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The float32 of the bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def size_of(x):
    """The bits of |x|, which order like magnitudes, with infinity and NaN as the largest."""
    return bits_of(x) & SIZE


@triton.jit
def half_to_float(bits):
    """The value of an IEEE half."""
    shifted = (bits & 0x7FFF) << 13
    normal = shifted + BIAS
    subnormal = bits_of(float_of(normal + (1 << 23)) - LEAST)
    value = tl.where(shifted >> 23 == 0, subnormal, tl.where(shifted >> 23 == 31, normal + BIAS, normal))
    return float_of(value | ((bits & 0x8000) << 16))


@triton.jit
def to_half(x):
    """The bits of the nearest IEEE half; infinite from 65520 on."""
    bits = bits_of(x)
    size = bits & SIZE
    normal = (size - BIAS + 0xFFF + (size >> 13 & 1)) >> 13
    subnormal = bits_of(float_of(size) + 0.5) - HALF
    short = tl.where(size < NORMAL, subnormal, normal)
    short = tl.where(size >= 0x47800000, 0x7C00, short)
    # The payload of a NaN is that of `bits`: a compiler may make a size with an instruction for |x|, which
    # puts another NaN in its place.
    short = tl.where(size > INFINITE, 0x7E00 | (bits >> 13 & 0x3FF), short)
    return short | (bits >> 16 & 0x8000)


@triton.jit
def to_bfloat(x):
    """The bits of the nearest bfloat16; a NaN stays one."""
    bits = bits_of(x)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return tl.where((bits & SIZE) > INFINITE, (bits >> 16) | 0x40, rounded) & 0xFFFF


@triton.jit
def load(at, there, FORMAT: tl.constexpr):
    """Loads values as float32; 0 where `there` is false."""
    if FORMAT == F32:
        x = tl.load(at, mask=there, other=0.0)
    else:
        bits = tl.load(at, mask=there, other=0).to(tl.int32)
        x = half_to_float(bits) if FORMAT == F16 else float_of(bits << 16)
    return x


@triton.jit
def store(at, x, there, FORMAT: tl.constexpr):
    """Stores values, rounded to nearest even."""
    if FORMAT == F32:
        tl.store(at, x, mask=there)
    elif FORMAT == F16:
        tl.store(at, to_half(x).to(tl.int16), mask=there)
    else:
        tl.store(at, to_bfloat(x).to(tl.int16), mask=there)


@triton.jit
def put(at, x, weight, there, FORMAT: tl.constexpr, ADD: tl.constexpr):
    """Stores decoded values, or adds `weight` times the values to the target."""
    if ADD:
        tl.store(at, tl.load(at, mask=there, other=0.0) + weight * x, mask=there)
    else:
        store(at, x, there, FORMAT)


@triton.jit
def plus(x, residual):
    """The sum. A NaN keeps its payload, as on the CPU: a GPU would replace it, and top-k orders by it."""
    total = x + residual
    total = tl.where(size_of(residual) > INFINITE, float_of(bits_of(residual) | 0x400000), total)
    return tl.where(size_of(x) > INFINITE, float_of(bits_of(x) | 0x400000), total)


@triton.jit
def fetch(src, residual, at, there, FORMAT: tl.constexpr, KEEP: tl.constexpr):
    """Loads the values to encode, with the residual added if it is fed back."""
    x = load(src + at, there, FORMAT)
    if KEEP == FEEDBACK:
        x = plus(x, tl.load(residual + at, mask=there, other=0.0))
    return x


@triton.jit
def largest(x):
    """The bits of the largest |x| of each row."""
    return tl.max(size_of(x), axis=1, keep_dims=True)


@triton.jit
def hold(x):
    """Clamps infinities to the largest float; NaN stays."""
    return tl.where(x > MAX, MAX, tl.where(x < -MAX, -MAX, x))
