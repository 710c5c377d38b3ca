"""topk: the values of largest magnitude, with their indices in Elias-Fano code.

Encoding is a radix select: four kernels find the smallest magnitude that is sent, one digit each (the first
also computes the residual), a fifth counts what each tile sends, a sixth writes the values and the index
bits. Index bits are collected in aligned words, which are then copied behind the values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trigram.codecs.triton.floats import (
    FEEDBACK,
    INFINITE,
    LOSE,
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
from trigram.codecs.triton.sparse import DRAWN, OPTIONS, TILE, Sparse, nan_if, none, tiles
from trigram.codecs.triton.words import load_words, store_words

PASSES = 4  # digits of 8, 8, 8 and 7 bits, the highest first
BINS = tl.constexpr(256)
TURNS = 8  # tiles per program where digits are counted: fewer atomic additions


class TopK(Sparse):
    """Sends the fraction of values with the largest magnitude; among equal ones, the first."""

    __slots__ = ()

    def layout(self, n: int) -> tuple[int, int, int]:
        """The number of values, the low bits per index, and the first byte of the bitmap of the high
        parts."""
        k = self.count(n)
        bits = (n // k).bit_length() - 1
        return k, bits, 4 * k + (k * bits + 7) // 8

    def encode(
        self,
        src: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        """As :meth:`Kernel.encode`; top-k ignores the seed."""
        n = src.numel()
        if n == 0:
            return
        (k, low, high), keep, form = self.layout(n), keep_of(residual, feedback), format_of(src)
        rest = out.numel() - 4 * k
        with torch.cuda.device_of(src):
            scratch = none(src.device, PASSES * BINS.value + rest // 4 + 1)
            bins, words = scratch[: PASSES * BINS.value], scratch[PASSES * BINS.value :]
            values, span = raw(src), TILE * TURNS
            for step in range(PASSES):
                _count_digits[(triton.cdiv(n, span),)](
                    values,
                    residual,
                    bins,
                    n,
                    k,
                    FORMAT=form,
                    KEEP=keep if step == 0 else 0,
                    PASS=step,
                    TILE=TILE,
                    TURNS=TURNS,
                    **OPTIONS,
                )
                if residual is not None:
                    values, form = residual, 0
            counts = torch.empty(2, tiles(n), dtype=torch.int32, device=src.device)
            _count_taken[(tiles(n),)](values, bins, counts, n, k, FORMAT=form, TILE=TILE, **OPTIONS)
            until = counts.cumsum(1, dtype=torch.int32)
            _pack[(tiles(n),)](
                values,
                residual,
                out,
                words,
                bins,
                counts,
                until,
                n,
                k,
                high - 4 * k,
                FORMAT=form,
                KEEP=keep,
                LOW=low,
                TILE=TILE,
                **OPTIONS,
            )
            out[4 * k :].copy_(words.view(torch.uint8)[:rest])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, weight: float | None = None) -> None:
        """As :meth:`Kernel.decode`; all NaN unless there are k ascending indices below n."""
        n = out.numel()
        if n == 0:
            return
        (k, low, high), form, add = self.layout(n), format_of(out), weight is not None
        marks = 8 * (encoded.numel() - high)
        with torch.cuda.device_of(out):
            if not add:
                out.zero_()
            flag, target = none(out.device), raw(out)
            counts = torch.empty(tiles(marks, DRAWN), dtype=torch.int32, device=out.device)
            _count_marks[(tiles(marks, DRAWN),)](encoded, counts, high, marks, TILE=DRAWN, **OPTIONS)
            until = counts.cumsum(0)  # in 64 bits: corrupt bytes may give any count
            _place[(tiles(marks, DRAWN),)](
                encoded,
                target,
                flag,
                counts,
                until,
                weight_of(weight),
                n,
                k,
                high,
                marks,
                FORMAT=form,
                ADD=add,
                LOW=low,
                TILE=DRAWN,
                **OPTIONS,
            )
            nan_if(flag, target, form)


@triton.jit
def _edge(bins, k, PASSES: tl.constexpr):
    """The digits known so far of the k-th largest magnitude, and how many of the k values have these
    digits."""
    known, rank = tl.full((), 0, tl.int32), k.to(tl.int32)
    place = tl.arange(0, BINS)
    for step in tl.static_range(PASSES):
        # From the highest digit down.
        here = tl.load(bins + step * BINS + (BINS - 1 - place))
        above = tl.sum((tl.cumsum(here, 0) < rank).to(tl.int32), axis=0)
        rank -= tl.sum(tl.where(place < above, here, 0), axis=0)
        known = (known << (7 if step == 3 else 8)) | (BINS - 1 - above)
    return known, rank


@triton.jit(do_not_specialize=["k"])
def _count_digits(
    values,
    residual,
    bins,
    n,
    k,
    FORMAT: tl.constexpr,
    KEEP: tl.constexpr,
    PASS: tl.constexpr,
    TILE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Counts the next digit, over the magnitudes that start with the known digits."""
    SHIFT: tl.constexpr = 0 if PASS == 3 else 23 - 8 * PASS
    WIDTH: tl.constexpr = 7 if PASS == 3 else 8
    known, _ = _edge(bins, k, PASS)
    found = tl.zeros((BINS,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * (TILE * TURNS)
    for turn in range(TURNS):
        at = first + turn * TILE + tl.arange(0, TILE)
        there = at < n
        x = fetch(values, residual, at, there, FORMAT, KEEP)
        if KEEP != LOSE:
            tl.store(residual + at, x, mask=there)
        key = size_of(x)
        if PASS > 0:
            there = there & ((key >> (SHIFT + WIDTH)) == known)
        found += tl.histogram((key >> SHIFT) & ((1 << WIDTH) - 1), BINS, mask=there)
    place = tl.arange(0, BINS)
    tl.atomic_add(bins + PASS * BINS + place, found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def _count_taken(values, bins, counts, n, k, FORMAT: tl.constexpr, TILE: tl.constexpr):
    """Counts in each tile the magnitudes above the k-th largest, and those equal to it."""
    edge, _ = _edge(bins, k, 4)
    tile = tl.program_id(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    key = size_of(load(values + at, there, FORMAT))
    tl.store(counts + tile, tl.sum((there & (key > edge)).to(tl.int32), axis=0))
    on_edge = tl.sum((there & (key == edge)).to(tl.int32), axis=0)
    tl.store(counts + tl.num_programs(0) + tile, on_edge)


@triton.jit(do_not_specialize=["k", "bitmap"])
def _pack(
    values,
    residual,
    out,
    words,
    bins,
    counts,
    until,
    n,
    k,
    bitmap,
    FORMAT: tl.constexpr,
    KEEP: tl.constexpr,
    LOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the values and the index bits, and clears the residual where a value is sent.

    `bitmap` is the first byte of the bitmap in `words`.
    """
    edge, equals = _edge(bins, k, 4)
    tile, all_tiles = tl.program_id(0), tl.num_programs(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < n
    x = load(values + at, there, FORMAT)
    key = size_of(x)
    above, on_edge = there & (key > edge), there & (key == edge)
    # Two exclusive running counts in the halves of one int32: a tile has fewer than 2^16 values.
    both = above.to(tl.int32) | (on_edge.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    above_before = tl.load(until + tile) - tl.load(counts + tile) + (before & 0xFFFF)
    place = all_tiles + tile
    on_edge_before = tl.load(until + place) - tl.load(counts + place) + (before >> 16)
    taken = above | (on_edge & (on_edge_before < equals))
    i = (above_before + tl.minimum(on_edge_before, equals)).to(tl.int64)
    store_words(out, 4 * i, bits_of(x), taken)
    if LOW > 0:
        start = i * LOW
        bits = (at & ((1 << LOW) - 1)) << (start & 31)
        tl.atomic_or(words + (start >> 5), bits.to(tl.int32), mask=taken, sem="relaxed")
        over = (bits >> 32).to(tl.int32)
        tl.atomic_or(words + (start >> 5) + 1, over, mask=taken & (over != 0), sem="relaxed")
    mark = 8 * bitmap.to(tl.int64) + (at >> LOW) + i
    one = tl.full((TILE,), 1, tl.int32) << (mark & 31).to(tl.int32)
    tl.atomic_or(words + (mark >> 5), one, mask=taken, sem="relaxed")
    if KEEP == FEEDBACK:
        tl.store(residual + at, 0.0, mask=taken | (there & (key >= INFINITE)))
    elif KEEP != LOSE:
        tl.store(residual + at, x * 0.0, mask=taken)


@triton.jit
def _marks(code, high, at, there):
    """Bits of the bitmap, 0 or 1."""
    return (tl.load(code + high + (at >> 3), mask=there, other=0).to(tl.int32) >> (at & 7).to(tl.int32)) & 1


@triton.jit
def _low_bits(code, i, there, LOW: tl.constexpr):
    """Low bits of the indices `i`."""
    start, value = i * LOW, i * 0
    for k in tl.static_range((LOW + 14) // 8):
        reached = there & (8 * k < (start & 7) + LOW)
        value |= tl.load(code + (start >> 3) + k, mask=reached, other=0).to(tl.int64) << 8 * k
    return (value >> (start & 7)) & ((1 << LOW) - 1)


@triton.jit(do_not_specialize=["high", "marks"])
def _count_marks(code, counts, high, marks, TILE: tl.constexpr):
    """Counts the bits that are set in each tile of the bitmap."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(counts + tl.program_id(0), tl.sum(_marks(code, high, at, at < marks), axis=0))


@triton.jit(do_not_specialize=["n", "k", "high", "marks"])
def _place(
    code,
    out,
    flag,
    counts,
    until,
    weight,
    n,
    k,
    high,
    marks,
    FORMAT: tl.constexpr,
    ADD: tl.constexpr,
    LOW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Stores the values at their indices; sets the flag if the bytes are invalid."""
    tile = tl.program_id(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    there = at < marks
    mark = _marks(code, high, at, there)
    i = tl.load(until + tile) - tl.load(counts + tile) + tl.cumsum(mark, 0) - mark
    marked = (mark == 1) & (i < k)
    low = _low_bits(code + 4 * k.to(tl.int64), i, marked, LOW)
    index = ((at - i) << LOW) | low
    # The bitmap cannot encode descending high parts; equal ones are adjacent bits, so compare their low bits.
    twin = marked & (_marks(code, high, at - 1, marked & (at > 0)) == 1)
    wrong = twin & (_low_bits(code + 4 * k.to(tl.int64), i - 1, twin, LOW) >= low)
    wrong = wrong | (marked & (index >= n))
    x = load_words(code, 4 * i, marked).to(tl.float32, bitcast=True)
    put(out + index, x, weight, marked & (index < n), FORMAT, ADD)
    total = tl.load(until + tl.num_programs(0) - 1)
    if (total != k) | (tl.max(wrong.to(tl.int32), axis=0) != 0):
        tl.store(flag, 1)
