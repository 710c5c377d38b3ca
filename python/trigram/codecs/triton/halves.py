"""bf16 and f16: two bytes per value."""

from __future__ import annotations

import triton
import triton.language as tl

from trigram.codecs.triton.blocks import BlockFormat
from trigram.codecs.triton.floats import float_of, half_to_float, to_bfloat, to_half


@triton.jit
def _to_bfloats(x, mean, BITS: tl.constexpr):
    return tl.zeros((x.shape[0], 1), tl.int32), to_bfloat(x)


@triton.jit
def _bfloats(headers, codes, BITS: tl.constexpr):
    return float_of(codes << 16)


@triton.jit
def _to_halves(x, mean, BITS: tl.constexpr):
    return tl.zeros((x.shape[0], 1), tl.int32), to_half(x)


@triton.jit
def _halves(headers, codes, BITS: tl.constexpr):
    return half_to_float(codes)


BF16 = BlockFormat(1024, 16, False, _to_bfloats, _bfloats)
F16 = BlockFormat(1024, 16, False, _to_halves, _halves)
