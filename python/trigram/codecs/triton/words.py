"""Loading and storing words and fields of a few bits.

Encoded data may start at any address, so the kernels read and write bytes; the compiler merges the accesses
where it knows that addresses are aligned (:func:`aligned`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def aligned(code: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Bytes from a multiple of 16 on, and how many words (of 4 bytes) later the bytes of ``code`` begin.

    Triton merges accesses if an address is a multiple of 16 when it compiles, and else accesses single bytes.
    A shard's bytes, one row of several, rarely start at such an address, but mostly at a multiple of 4. The
    tensor itself and 0, if the address is no multiple of 4 or nothing precedes it in its storage.
    """
    bytes = code.data_ptr() % 16
    if bytes == 0 or bytes % 4 or bytes > code.storage_offset():
        return code, 0
    return code.as_strided((code.numel() + bytes,), (1,), code.storage_offset() - bytes), bytes // 4


@triton.jit
def load_words(code, at, there):
    """Loads words (int32) at the byte offsets `at`; 0 where `there` is false."""
    k = tl.arange(0, 4)[None, :]
    each = tl.load(code + at[:, None] + k, mask=there[:, None] & (k < 4), other=0)
    return tl.sum(each.to(tl.int32) << 8 * k, axis=1)


@triton.jit
def store_words(code, at, words, there):
    """Stores words (int32) at the byte offsets `at`, where `there` is true."""
    k = tl.arange(0, 4)[None, :]
    each = (words[:, None] >> 8 * k) & 255
    tl.store(code + at[:, None] + k, each.to(tl.uint8), mask=there[:, None] & (k < 4))


@triton.jit
def pack(codes, ROWS: tl.constexpr, COLS: tl.constexpr, BITS: tl.constexpr):
    """Packs rows of codes of 16, 8, 4 or 1 bits into rows of bytes, the first code in the lowest bits."""
    if BITS == 16:
        joined = tl.join((codes & 255).to(tl.uint8), (codes >> 8 & 255).to(tl.uint8))
        packed = tl.reshape(joined, (ROWS, COLS * 2))
    elif BITS == 8:
        packed = codes.to(tl.uint8)
    elif BITS == 4:
        low, high = tl.split(tl.reshape(codes, (ROWS, COLS // 2, 2)))
        packed = (low | (high << 4)).to(tl.uint8)
    else:
        eight = tl.reshape(codes, (ROWS, COLS // 8, 8))
        packed = tl.sum(eight << tl.arange(0, 8)[None, None, :], axis=2).to(tl.uint8)
    return packed


@triton.jit
def unpack(packed, ROWS: tl.constexpr, COLS: tl.constexpr, BITS: tl.constexpr):
    """The inverse of :func:`pack`: the codes, as int32."""
    each = packed.to(tl.int32)
    if BITS == 16:
        low, high = tl.split(tl.reshape(each, (ROWS, COLS, 2)))
        codes = low | (high << 8)
    elif BITS == 8:
        codes = each
    elif BITS == 4:
        codes = tl.reshape(tl.join(each & 15, each >> 4), (ROWS, COLS))
    else:
        eight = (each[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        codes = tl.reshape(eight, (ROWS, COLS))
    return codes
