"""randomk: one value drawn at random from each of k equal segments. The seed determines the indices.

Encoding takes two kernels: the first checks all values for NaN and infinity, which the header reports, and
computes the residual; the second draws. With a residual, a third sets it to 0 or NaN if the check failed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trigram.codecs.triton.floats import (
    FEEDBACK,
    INFINITE,
    LOSE,
    NAN,
    bits_of,
    fetch,
    format_of,
    keep_of,
    load,
    put,
    raw,
    size_of,
    weight_of,
)
from trigram.codecs.triton.sparse import DRAWN, OPTIONS, TILE, Sparse, fill_if, none, tiles
from trigram.codecs.triton.words import load_words, store_words

HEADER = tl.constexpr(12)  # the seed (8 bytes), and NaN (4 bytes) if a value is NaN or infinite


class RandomK(Sparse):
    """Sends a fraction of the values, drawn with the seed."""

    __slots__ = ()

    def encode(
        self,
        src: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        """As :meth:`Kernel.encode`."""
        n = src.numel()
        if n == 0:
            return
        k, keep, form = self.count(n), keep_of(residual, feedback), format_of(src)
        low, high = _signed(seed), _signed(seed >> 32)
        with torch.cuda.device_of(src):
            values, flag = raw(src), none(src.device)
            _absorb[(tiles(n),)](values, residual, flag, n, FORMAT=form, KEEP=keep, TILE=TILE, **OPTIONS)
            if residual is not None:
                values, form = residual, 0
            _draw[(tiles(k, DRAWN),)](
                values, residual, out, flag, low, high, n, k, FORMAT=form, KEEP=keep, TILE=DRAWN, **OPTIONS
            )
            if residual is not None:
                fill_if(flag, residual, 0, 0 if feedback else NAN.value)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, weight: float | None = None) -> None:
        """As :meth:`Kernel.decode`; all bytes are valid."""
        n = out.numel()
        if n == 0:
            return
        k, form, add = self.count(n), format_of(out), weight is not None
        with torch.cuda.device_of(out):
            if not add:
                out.zero_()
            flag = torch.empty(1, dtype=torch.int32, device=out.device)
            target = raw(out)
            _place[(tiles(k, DRAWN),)](
                encoded, target, flag, weight_of(weight), n, k, FORMAT=form, ADD=add, TILE=DRAWN, **OPTIONS
            )
            fill_if(flag, target, form)


def _signed(word: int) -> int:
    """The lowest 32 bits as an int32; otherwise Triton would choose the argument's type by its value."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


@triton.jit
def _indices(low, high, i, n, k):
    """The `i`-th of `k` indices below `n` (splitmix64 as a hash); `i n` fits in 64 bits."""
    seed = ((high.to(tl.uint64) & 0xFFFFFFFF) << 32) | (low.to(tl.uint64) & 0xFFFFFFFF)
    u, size = i.to(tl.uint64), n.to(tl.uint64)
    z = seed + (u + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    start = u * size // k.to(tl.uint64)
    end = (u + 1) * size // k.to(tl.uint64)
    return (start + (((z >> 32) * (end - start)) >> 32)).to(tl.int64)


@triton.jit
def _absorb(src, residual, flag, n, FORMAT: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr):
    """Stores the values to encode in the residual, if there is one; sets the flag if one is NaN or
    infinite."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    x = fetch(src, residual, at, there, FORMAT, KEEP)
    if KEEP != LOSE:
        tl.store(residual + at, x, mask=there)
    if tl.max(size_of(x), axis=0) >= INFINITE:
        tl.store(flag, 1)


@triton.jit(do_not_specialize=["low", "high", "n", "k"])
def _draw(
    values,
    residual,
    out,
    flag,
    low,
    high,
    n,
    k,
    FORMAT: tl.constexpr,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the header and the values drawn, and clears the residual at their indices."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = i < k
    index = _indices(low, high, i, n, k)
    x = load(values + index, there, FORMAT)
    store_words(out + HEADER, 4 * i, bits_of(x), there)
    if KEEP != LOSE:
        tl.debug_barrier()  # another thread may still have to read what this one clears
    if KEEP == FEEDBACK:
        tl.store(residual + index, 0.0, mask=there)
    elif KEEP != LOSE:
        tl.store(residual + index, x - x, mask=there)
    if tl.program_id(0) == 0:
        word = tl.arange(0, 4)
        poison = tl.where(tl.load(flag) != 0, NAN, 0)
        header = tl.where(word == 0, low, tl.where(word == 1, high, poison))
        store_words(out, 4 * word, header, word < 3)


@triton.jit(do_not_specialize=["n", "k"])
def _place(
    code,
    out,
    flag,
    weight,
    n,
    k,
    FORMAT: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Stores the values at their indices, or sets the flag if the header says NaN."""
    word = tl.arange(0, 4)
    header = load_words(code, 4 * word, word < 3)
    poison = tl.sum(tl.where(word == 2, header, 0), axis=0)
    whole = (poison & 0x7FFFFFFF) == 0
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = i < tl.where(whole, k, 0)
    low = tl.sum(tl.where(word == 0, header, 0), axis=0)
    high = tl.sum(tl.where(word == 1, header, 0), axis=0)
    index = _indices(low, high, i, n, k)
    x = load_words(code + HEADER, 4 * i, there).to(tl.float32, bitcast=True)
    put(out + index, x, weight, there, FORMAT, ADD)
    if tl.program_id(0) == 0:
        tl.store(flag, 1 - whole.to(tl.int32))
