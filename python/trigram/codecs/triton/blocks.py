"""The kernels of block codecs: tiles, the incomplete last tile, residuals, outputs of each dtype.

A program processes a tile of several blocks, one row each. In full tiles no address depends on the number of
values, so the compiler merges memory accesses; in the last tile each value has a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from trigram.codecs.codec import Codec
from trigram.codecs.triton.floats import (
    FEEDBACK,
    INFINITE,
    LOSE,
    fetch,
    float_of,
    format_of,
    keep_of,
    put,
    raw,
    size_of,
    weight_of,
)
from trigram.codecs.triton.kernel import Kernel
from trigram.codecs.triton.words import aligned, load_words, pack, store_words, unpack

REGISTERS = 64  # per thread at most; only the last, incomplete tile would need more


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched, as measured on an H200 (docs/gpu.md): small programs, of which more are under
    way at a time, come nearest to the memory's bandwidth.

    Attributes:
        tile: Values per program.
        warps: Warps per program, of 32 threads each.
    """

    tile: int = 1024
    warps: int = 2


@dataclass(frozen=True)
class BlockFormat:
    """The format of a block codec: its sizes, and two functions that are compiled into the kernels.

    Attributes:
        block: Values per block by default.
        bits: Bits per value.
        header: Whether a header of 4 bytes precedes the codes of each block.
        quantise: From ``(x, mean, BITS)``, x of shape (blocks, values), to headers (blocks, 1) and codes
            (blocks, values), both int32.
        values: From ``(headers, codes, BITS)`` to float32 values (blocks, values).
        mean: Whether ``quantise`` needs the mean of |x|, summed in the CPU's order.
        encode: How encoding is launched.
        decode: How decoding is launched.
    """

    block: int
    bits: int
    header: bool
    quantise: Any
    values: Any
    mean: bool = False
    encode: Launch = Launch()
    decode: Launch = Launch()


class Blocks(Kernel):
    """The GPU kernels of a block codec, one to encode a tensor and one to decode it."""

    __slots__ = ("_decode", "_encode")

    def __init__(self, codec: Codec, format: BlockFormat) -> None:
        super().__init__(codec)
        quantise = {"QUANTISE": format.quantise, "MEAN": format.mean}
        self._encode = self._launch(format, format.encode) | quantise
        self._decode = self._launch(format, format.decode)

    def _launch(self, format: BlockFormat, launch: Launch) -> dict[str, Any]:
        """The arguments of a kernel that do not depend on the tensor."""
        block = self.block or format.block
        cols = triton.next_power_of_2(block)
        arguments = {
            "VALUES": format.values,
            "BITS": format.bits,
            "HEADER": 4 if format.header else 0,
            "BLOCK": block,
            "COLS": cols,
            "ROWS": max(1, launch.tile // cols),
            "num_warps": launch.warps * max(1, cols // launch.tile),
            "enable_fp_fusion": False,
        }
        return arguments if torch.version.hip else arguments | {"maxnreg": REGISTERS}

    def encode(
        self,
        src: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        """As :meth:`Kernel.encode`; block codecs ignore the seed."""
        n = src.numel()
        if n == 0:
            return
        keep = keep_of(residual, feedback)
        code, words = aligned(out)
        with torch.cuda.device_of(src):
            _encode[(_programs(n, self._encode),)](
                raw(src),
                residual,
                code,
                words,
                n,
                FORMAT=format_of(src),
                KEEP=keep,
                **self._encode,
            )

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, weight: float | None = None) -> None:
        """As :meth:`Kernel.decode`; all bytes are valid."""
        n = out.numel()
        if n == 0:
            return
        add = weight is not None
        code, words = aligned(encoded)
        with torch.cuda.device_of(out):
            _decode[(_programs(n, self._decode),)](
                code, words, raw(out), weight_of(weight), n, FORMAT=format_of(out), ADD=add, **self._decode
            )


def _programs(n: int, arguments: dict[str, Any]) -> int:
    return int(triton.cdiv(n, arguments["ROWS"] * arguments["BLOCK"]))


@triton.jit
def _any_order(x, COLS: tl.constexpr):
    """Whether sums of |x| of a row are exact in f64, whatever their order; so they nearly always are.

    All values of a row are multiples of the last place of its smallest, and the sum is less than COLS times
    the power of two above its largest: it needs 24 bits, those of COLS, and the distance of the exponents.
    """
    size = size_of(x)
    exponent = tl.maximum(size >> 23, 1)
    least = tl.min(tl.where(size == 0, 255, exponent), axis=1)
    distance = tl.maximum(tl.max(exponent, axis=1) - least, 0)
    return tl.max(COLS << tl.minimum(distance, 30).to(tl.int64), axis=0) <= 1 << 29


@triton.jit
def _mean_in_order(
    src,
    residual,
    left,
    FORMAT: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """The mean of |x| of each row, summed in the CPU's order: eight partial sums in f64, each over every
    eighth value; values beyond the last multiple of eight go first, into partial sum 0; then the sums are
    added in turn.

    This reads the values again, eight columns at a time; they are in the cache.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 8)[None, :]
    sums = tl.zeros((ROWS, 8), tl.float64)
    count = tl.full((ROWS, 1), BLOCK, tl.int32)
    if TAIL:
        count = tl.maximum(tl.minimum(left - row * BLOCK, BLOCK), 0)
    whole = count // 8 * 8
    if TAIL:
        for k in range(7):
            there = (column == 0) & (whole + k < count)
            x = fetch(src, residual, row * BLOCK + whole + k + column, there, FORMAT, KEEP)
            sums += float_of(size_of(x)).to(tl.float64)
    for start in tl.range(0, BLOCK, 8, loop_unroll_factor=4):
        there = (start < whole) & (column < 8)
        x = fetch(src, residual, row * BLOCK + start + column, there, FORMAT, KEEP)
        sums += float_of(size_of(x)).to(tl.float64)
    total = tl.zeros((ROWS, 1), tl.float64)
    for k in tl.static_range(8):
        total += tl.sum(tl.where(column == k, sums, 0.0), axis=1, keep_dims=True)
    return (total / tl.maximum(count, 1).to(tl.float64)).to(tl.float32)


@triton.jit
def _encode_tile(
    src,
    residual,
    out,
    left,
    QUANTISE: tl.constexpr,
    VALUES: tl.constexpr,
    MEAN: tl.constexpr,
    FORMAT: tl.constexpr,
    KEEP: tl.constexpr,
    BITS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Encodes the blocks of a tile, whose first `left` values exist."""
    STEP: tl.constexpr = HEADER + BLOCK * BITS // 8
    WIDTH: tl.constexpr = COLS * BITS // 8
    rows = tl.arange(0, ROWS)
    row, col, byte = rows[:, None], tl.arange(0, COLS)[None, :], tl.arange(0, WIDTH)[None, :]
    at = row * BLOCK + col
    there = (row < ROWS) & (col < BLOCK)
    filled = (row < ROWS) & (byte < BLOCK * BITS // 8)
    begun = rows < ROWS
    if TAIL:
        there = there & (at < left)
        filled = filled & (row * BLOCK + byte * 8 // BITS < left)
        begun = rows * BLOCK < left
    x = fetch(src, residual, at, there, FORMAT, KEEP)
    mean = 0.0
    if MEAN:
        mean = tl.zeros((ROWS, 1), tl.float32)
        if TAIL:
            mean = _mean_in_order(src, residual, left, FORMAT, KEEP, BLOCK, ROWS, TAIL)
        elif _any_order(x, COLS):
            total = tl.sum(float_of(size_of(x)).to(tl.float64), axis=1, keep_dims=True)
            mean = (total / BLOCK).to(tl.float32)
        else:
            mean = _mean_in_order(src, residual, left, FORMAT, KEEP, BLOCK, ROWS, TAIL)
    headers, codes = QUANTISE(x, mean, BITS)
    codes = tl.where(there, codes, 0)
    if HEADER:
        store_words(out, rows * STEP, tl.reshape(headers, (ROWS,)), begun)
    tl.store(out + row * STEP + HEADER + byte, pack(codes, ROWS, COLS, BITS), mask=filled)
    if KEEP != LOSE:
        lost = x - VALUES(headers, codes, BITS)
        if KEEP == FEEDBACK:
            # NaN and infinity are sent once; in the residual they would come back in every step.
            lost = tl.where(size_of(lost) < INFINITE, lost, 0.0)
        tl.store(residual + at, lost, mask=there)


@triton.jit(do_not_specialize=["n"])
def _encode(
    src,
    residual,
    out,
    words,
    n,
    QUANTISE: tl.constexpr,
    VALUES: tl.constexpr,
    MEAN: tl.constexpr,
    FORMAT: tl.constexpr,
    KEEP: tl.constexpr,
    BITS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    STEP: tl.constexpr = HEADER + BLOCK * BITS // 8
    tile = tl.program_id(0).to(tl.int64)
    done = tile * (ROWS * BLOCK)
    left = tl.minimum(n - done, ROWS * BLOCK).to(tl.int32)
    src += done
    out += 4 * words + tile * (ROWS * STEP)
    if KEEP != LOSE:
        residual += done
    if left == ROWS * BLOCK:
        _encode_tile(
            src,
            residual,
            out,
            left,
            QUANTISE,
            VALUES,
            MEAN,
            FORMAT,
            KEEP,
            BITS,
            HEADER,
            BLOCK,
            COLS,
            ROWS,
            False,
        )
    else:
        _encode_tile(
            src,
            residual,
            out,
            left,
            QUANTISE,
            VALUES,
            MEAN,
            FORMAT,
            KEEP,
            BITS,
            HEADER,
            BLOCK,
            COLS,
            ROWS,
            True,
        )


@triton.jit
def _decode_tile(
    code,
    out,
    weight,
    left,
    VALUES: tl.constexpr,
    FORMAT: tl.constexpr,
    ADD: tl.constexpr,
    BITS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Decodes the blocks of a tile, whose first `left` values exist."""
    STEP: tl.constexpr = HEADER + BLOCK * BITS // 8
    WIDTH: tl.constexpr = COLS * BITS // 8
    rows = tl.arange(0, ROWS)
    row, col, byte = rows[:, None], tl.arange(0, COLS)[None, :], tl.arange(0, WIDTH)[None, :]
    at = row * BLOCK + col
    there = (row < ROWS) & (col < BLOCK)
    filled = (row < ROWS) & (byte < BLOCK * BITS // 8)
    begun = rows < ROWS
    if TAIL:
        there = there & (at < left)
        filled = filled & (row * BLOCK + byte * 8 // BITS < left)
        begun = rows * BLOCK < left
    headers = tl.zeros((ROWS, 1), tl.int32)
    if HEADER:
        headers = tl.reshape(load_words(code, rows * STEP, begun), (ROWS, 1))
    packed = tl.load(code + row * STEP + HEADER + byte, mask=filled, other=0)
    x = VALUES(headers, unpack(packed, ROWS, COLS, BITS), BITS)
    put(out + at, x, weight, there, FORMAT, ADD)


@triton.jit(do_not_specialize=["n"])
def _decode(
    code,
    words,
    out,
    weight,
    n,
    VALUES: tl.constexpr,
    FORMAT: tl.constexpr,
    ADD: tl.constexpr,
    BITS: tl.constexpr,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    STEP: tl.constexpr = HEADER + BLOCK * BITS // 8
    tile = tl.program_id(0).to(tl.int64)
    done = tile * (ROWS * BLOCK)
    left = tl.minimum(n - done, ROWS * BLOCK).to(tl.int32)
    code += 4 * words + tile * (ROWS * STEP)
    out += done
    if left == ROWS * BLOCK:
        _decode_tile(code, out, weight, left, VALUES, FORMAT, ADD, BITS, HEADER, BLOCK, COLS, ROWS, False)
    else:
        _decode_tile(code, out, weight, left, VALUES, FORMAT, ADD, BITS, HEADER, BLOCK, COLS, ROWS, True)
