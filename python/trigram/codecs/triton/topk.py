"""topk: the values of largest magnitude, with their indices in Elias-Fano code.

Encoding is a radix select, and reads the values twice. The first kernel counts exponents, and computes the
residual. The second knows the exponent of the smallest magnitude that is sent; each of its programs lists
the places of its values with this exponent or a larger one, few of all, and counts the next digit of those.
From then on the kernels go through these lists: two count the other digits, one counts what each program
sends, the last writes the values and the index bits. Index bits are collected in aligned words, which are
then copied behind the values. The lists take half as much memory as float32 values.

Digits have 8 bits, because Triton counts with an instruction per value for every 32 bins.
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
from trigram.codecs.triton.sparse import DRAWN, OPTIONS, TILE, Sparse, fill_if, none, tiles
from trigram.codecs.triton.words import load_words, store_words

DIGITS = 4  # of 8, 8, 8 and 7 bits, the highest first: the first is the exponent
BINS = tl.constexpr(256)
MANTISSA = tl.constexpr(23)
NEAR = tl.constexpr(32)  # bins for exponents near a program's largest; the last is for exponent 0
ROOM = tl.constexpr(4)


def _turns(n: int) -> int:
    """Tiles per program. Places in a program's values have 16 bits; each program adds the counts of all
    programs before it, of which there should not be too many."""
    return 8 if n < 1 << 25 else 32


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
        turns = _turns(n)
        programs = triton.cdiv(n, TILE * turns)
        grid, shape = (programs,), {"TILE": TILE, "TURNS": turns, **OPTIONS}
        with torch.cuda.device_of(src):
            scratch = none(src.device, DIGITS * BINS.value + rest // 4 + 1)
            bins, words = scratch[: DIGITS * BINS.value], scratch[DIGITS * BINS.value :]
            # Of each program: how many places it lists, and what it sends above and on the edge.
            counts = torch.empty(3 * programs, dtype=torch.int32, device=src.device)
            places = torch.empty(n, dtype=torch.int16, device=src.device)
            values = raw(src)
            _count_exponents[grid](values, residual, bins, n, FORMAT=form, KEEP=keep, **shape)
            if residual is not None:
                values, form = residual, 0
            _select[grid](values, places, counts, bins, n, k, FORMAT=form, **shape)
            for digit in range(2, DIGITS):
                _count_digit[grid](values, places, counts, bins, k, FORMAT=form, DIGIT=digit, **shape)
            _count_sent[grid](values, places, counts, bins, k, FORMAT=form, **shape)
            _pack[grid](
                values,
                residual,
                out,
                words,
                places,
                counts,
                bins,
                k,
                high - 4 * k,
                FORMAT=form,
                KEEP=keep,
                LOW=low,
                **shape,
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
            fill_if(flag, target, form)


@triton.jit
def _edge(bins, k, DIGITS: tl.constexpr):
    """The digits known so far of the k-th largest magnitude, and how many of the k values have these
    digits."""
    known, rank = tl.full((), 0, tl.int32), k.to(tl.int32)
    place = tl.arange(0, BINS)
    for digit in tl.static_range(DIGITS):
        # From the largest down.
        here = tl.load(bins + digit * BINS + (BINS - 1 - place))
        above = tl.sum((tl.cumsum(here, 0) < rank).to(tl.int32), axis=0)
        rank -= tl.sum(tl.where(place < above, here, 0), axis=0)
        known = (known << (7 if digit == 3 else 8)) | (BINS - 1 - above)
    return known, rank


@triton.jit
def _add(bins, found):
    """Adds a program's counts to those of all."""
    tl.atomic_add(bins + tl.arange(0, BINS), found, mask=found > 0, sem="relaxed")


@triton.jit
def _count_exponents(
    values,
    residual,
    bins,
    n,
    FORMAT: tl.constexpr,
    KEEP: tl.constexpr,
    TILE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Counts exponents; stores the values to encode in the residual, if there is one.

    The exponents of a program's values are mostly within a factor of 2^26 of the largest, or 0: 32 bins are
    enough for these, and cost a fraction of 256.
    """
    near, every = tl.zeros((NEAR,), tl.int32), tl.zeros((BINS,), tl.int32)
    top = tl.full((), 0, tl.int32)
    first = tl.program_id(0).to(tl.int64) * (TILE * TURNS)
    for turn in range(TURNS):
        at = first + turn * TILE + tl.arange(0, TILE)
        there = at < n
        x = fetch(values, residual, at, there, FORMAT, KEEP)
        if KEEP != LOSE:
            tl.store(residual + at, x, mask=there)
        exponent = tl.where(there, size_of(x) >> MANTISSA, 0)
        if turn == 0:
            top = tl.max(exponent, axis=0) + ROOM  # a later tile may have larger ones
        below = top - exponent
        far = (exponent > 0) & ((below < 0) | (below >= NEAR - 1))
        if tl.max(far.to(tl.int32), axis=0) == 0:
            near += tl.histogram(tl.where(exponent == 0, NEAR - 1, below), NEAR, mask=there)
        else:
            every += tl.histogram(exponent, BINS, mask=there)
    _add(bins, every)
    place = tl.arange(0, NEAR)
    place = tl.where(place == NEAR - 1, 0, top - place)
    tl.atomic_add(bins + place, near, mask=near > 0, sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def _select(
    values,
    places,
    counts,
    bins,
    n,
    k,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Lists the places, within those of this program, of the values that may be sent, and of infinities and
    NaN; counts the second digit."""
    exponent, _ = _edge(bins, k, 1)
    least = tl.minimum(exponent << MANTISSA, INFINITE)
    program = tl.program_id(0)
    first = program.to(tl.int64) * (TILE * TURNS)
    listed = tl.full((), 0, tl.int32)
    for turn in range(TURNS):
        place = turn * TILE + tl.arange(0, TILE)
        there = first + place < n
        key = size_of(load(values + first + place, there, FORMAT))
        chosen = there & (key >= least)
        one = chosen.to(tl.int32)
        tl.store(places + first + listed + tl.cumsum(one, 0) - one, place.to(tl.int16), mask=chosen)
        listed += tl.sum(one, axis=0)
    tl.store(counts + program, listed)
    tl.debug_barrier()  # other threads have written what this one reads
    _count_listed(values, places, bins, first, listed, exponent, FORMAT, 1, TILE)


@triton.jit
def _listed(places, first, start, listed, TILE: tl.constexpr):
    """A tile of a program's list: the indices of the values, and which there are."""
    turn = start + tl.arange(0, TILE)
    there = turn < listed
    place = tl.load(places + first + turn, mask=there, other=0).to(tl.int32) & 0xFFFF
    return first + place, there


@triton.jit
def _count_listed(
    values,
    places,
    bins,
    first,
    listed,
    known,
    FORMAT: tl.constexpr,
    DIGIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Counts a digit, over the listed magnitudes that start with the known digits."""
    SHIFT: tl.constexpr = 0 if DIGIT == 3 else 23 - 8 * DIGIT
    WIDTH: tl.constexpr = 7 if DIGIT == 3 else 8
    found = tl.zeros((BINS,), tl.int32)
    for start in range(0, listed, TILE):
        at, there = _listed(places, first, start, listed, TILE)
        key = size_of(load(values + at, there, FORMAT))
        there = there & ((key >> (SHIFT + WIDTH)) == known)
        found += tl.histogram((key >> SHIFT) & ((1 << WIDTH) - 1), BINS, mask=there)
    _add(bins + DIGIT * BINS, found)


@triton.jit(do_not_specialize=["k"])
def _count_digit(
    values,
    places,
    counts,
    bins,
    k,
    FORMAT: tl.constexpr,
    DIGIT: tl.constexpr,
    TILE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Counts a digit."""
    known, _ = _edge(bins, k, DIGIT)
    program = tl.program_id(0)
    first = program.to(tl.int64) * (TILE * TURNS)
    _count_listed(values, places, bins, first, tl.load(counts + program), known, FORMAT, DIGIT, TILE)


@triton.jit(do_not_specialize=["k"])
def _count_sent(
    values,
    places,
    counts,
    bins,
    k,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Counts a program's magnitudes above the k-th largest, and those equal to it."""
    edge, _ = _edge(bins, k, 4)
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program.to(tl.int64) * (TILE * TURNS)
    listed = tl.load(counts + program)
    above, on_edge = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, listed, TILE):
        at, there = _listed(places, first, start, listed, TILE)
        key = size_of(load(values + at, there, FORMAT))
        above += tl.sum((there & (key > edge)).to(tl.int32), axis=0)
        on_edge += tl.sum((there & (key == edge)).to(tl.int32), axis=0)
    tl.store(counts + programs + program, above)
    tl.store(counts + 2 * programs + program, on_edge)


@triton.jit
def _before(counts, program, TILE: tl.constexpr):
    """The sum of the counts of all programs before this one."""
    total = tl.full((), 0, tl.int32)
    for start in range(0, program, TILE):
        other = start + tl.arange(0, TILE)
        total += tl.sum(tl.load(counts + other, mask=other < program, other=0), axis=0)
    return total


@triton.jit(do_not_specialize=["k", "bitmap"])
def _pack(
    values,
    residual,
    out,
    words,
    places,
    counts,
    bins,
    k,
    bitmap,
    FORMAT: tl.constexpr,
    KEEP: tl.constexpr,
    LOW: tl.constexpr,
    TILE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Writes the values and the index bits, and clears the residual where a value is sent.

    `bitmap` is the first byte of the bitmap in `words`.
    """
    edge, equals = _edge(bins, k, 4)
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program.to(tl.int64) * (TILE * TURNS)
    listed = tl.load(counts + program)
    above_before = _before(counts + programs, program, TILE)
    on_edge_before = _before(counts + 2 * programs, program, TILE)
    for start in range(0, listed, TILE):
        at, there = _listed(places, first, start, listed, TILE)
        x = load(values + at, there, FORMAT)
        key = size_of(x)
        above, on_edge = there & (key > edge), there & (key == edge)
        # Two running counts in the halves of one int32: a tile has fewer than 2^16 values.
        both = above.to(tl.int32) | (on_edge.to(tl.int32) << 16)
        before = tl.cumsum(both, 0) - both
        above_here, on_edge_here = above_before + (before & 0xFFFF), on_edge_before + (before >> 16)
        taken = above | (on_edge & (on_edge_here < equals))
        i = (above_here + tl.minimum(on_edge_here, equals)).to(tl.int64)
        _write(out, words, at, i, x, taken, bitmap, LOW)
        if KEEP == FEEDBACK:
            tl.store(residual + at, 0.0, mask=taken | (there & (key >= INFINITE)))
        elif KEEP != LOSE:
            tl.store(residual + at, x - x, mask=taken)
        all_of_both = tl.sum(both, axis=0)
        above_before += all_of_both & 0xFFFF
        on_edge_before += all_of_both >> 16


@triton.jit
def _write(out, words, at, i, x, taken, bitmap, LOW: tl.constexpr):
    """Writes the `i`-th values `x`, and the bits of their indices `at`."""
    store_words(out, 4 * i, bits_of(x), taken)
    if LOW > 0:
        start = i * LOW
        bits = (at & ((1 << LOW) - 1)) << (start & 31)
        tl.atomic_or(words + (start >> 5), bits.to(tl.int32), mask=taken, sem="relaxed")
        over = (bits >> 32).to(tl.int32)
        tl.atomic_or(words + (start >> 5) + 1, over, mask=taken & (over != 0), sem="relaxed")
    mark = 8 * bitmap.to(tl.int64) + (at >> LOW) + i
    one = tl.full(at.shape, 1, tl.int32) << (mark & 31).to(tl.int32)
    tl.atomic_or(words + (mark >> 5), one, mask=taken, sem="relaxed")


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
