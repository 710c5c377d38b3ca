"""The codec ``chunktopk:FRACTION`` for GPU tensors: of each chunk the largest values, in two bits each
(SparseLoCo, arXiv 2508.15706).

It is made of torch's operations, not of Triton's: it encodes weight differences every few steps, where it
costs little beside the steps between. It waits for the GPU. The CPU's code is
``rust/core/src/codec/chunktopk.rs``.
"""

from __future__ import annotations

import math

import torch

from trigram.codecs.codec import Codec
from trigram.errors import MisuseError

CHUNK = 4096
"""Values of a chunk; the last one may be shorter."""
_HEADER = 8


class ChunkedTopK:
    """Keeps of each chunk of 4096 values the ``ceil(fraction * 4096)`` largest: their places, their signs,
    and one of two magnitudes, the means of those above and up to their mean.

    docs/algorithms.md has the format. The bytes are those of the CPU's code, except that a sum of float64 may
    be rounded in another order.

    Args:
        codec: The codec ``chunktopk:FRACTION``.
    """

    __slots__ = ("codec", "fraction")

    def __init__(self, codec: Codec) -> None:
        self.codec, self.fraction = codec, float(codec.name.partition(":")[2])

    def encode(
        self,
        src: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> None:
        """See :class:`~trigram.codecs.codec.GpuKernel`."""
        size = self.codec.size(src.numel())
        if out.numel() != size:
            raise MisuseError(f"encode: out has {out.numel()} bytes; {src.numel()} values need {size}")
        values = src.float()
        if residual is not None and feedback:
            values = values + residual
        at = 0
        for chunk, rows in self._rows(values):
            code = chunk.encode(rows)
            out[at : at + code.numel()] = code.view(-1)
            at += code.numel()
        if residual is not None:
            decoded = torch.empty_like(values)
            self.decode(out, decoded)
            torch.sub(values, decoded, out=residual)
            if feedback:
                residual.nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, weight: float | None = None) -> None:
        """See :class:`~trigram.codecs.codec.GpuKernel`: if the bytes are no code of ``out.numel()`` values,
        all of ``out`` becomes NaN."""
        if encoded.numel() != self.codec.size(out.numel()):
            out.fill_(math.nan)
            return
        if weight is None:
            out.zero_()
        at = 0
        for chunk, rows in self._rows(out):
            code = encoded[at : at + len(rows) * chunk.nbytes].view(len(rows), chunk.nbytes)
            at += code.numel()
            found = chunk.decode(code)
            if found is None:
                out.fill_(math.nan)
                return
            places, values = found
            spoilt = values[:, 0].isnan()  # a chunk is not a number in all of its values, or in none
            if weight is None:
                rows.scatter_(1, places, values.to(rows.dtype))
            else:
                rows.scatter_add_(1, places, values.mul_(weight))
            rows[spoilt] = math.nan

    def _rows(self, values: torch.Tensor) -> list[tuple[_Chunk, torch.Tensor]]:
        """The whole chunks as rows, and the rest as one row."""
        whole = values.numel() // CHUNK * CHUNK
        parts = [values[:whole].view(-1, CHUNK), values[whole:].view(1, -1)]
        return [(_Chunk(part.shape[1], self.fraction), part) for part in parts if part.numel()]


class _Chunk:
    """The code of chunks of one length.

    Per chunk: two magnitudes (float32), two bits per value (1: negative; 2: the larger magnitude), and the
    places as Elias-Fano.

    Attributes:
        nbytes: Bytes of a chunk's code.
    """

    def __init__(self, length: int, fraction: float) -> None:
        self.length, self.kept = length, max(1, math.ceil(fraction * length))
        self.low = (length // self.kept).bit_length() - 1
        self.bitmap = self.kept + ((length - 1) >> self.low) + 1
        self.parts = [_HEADER, _bytes(2 * self.kept), _bytes(self.kept * self.low), _bytes(self.bitmap)]
        self.nbytes = sum(self.parts)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """The codes, a row each, of rows of ``length`` values."""
        finite = rows.isfinite().all(1, keepdim=True)
        if not bool(finite.all()):
            rows = torch.where(finite, rows, torch.zeros_like(rows))
        places = _largest(rows.abs(), self.kept)
        values = rows.gather(1, places)
        sizes = values.abs().double()
        large = sizes > sizes.mean(1, keepdim=True)
        count = large.sum(1)
        low = (sizes * ~large).sum(1) / (self.kept - count)
        high = torch.where(count > 0, (sizes * large).sum(1) / count, low)
        header = torch.stack([low, high], 1).float().masked_fill_(~finite, math.nan)
        kinds = torch.stack([values < 0, large], 2).flatten(1)
        shifts = torch.arange(self.low, device=rows.device)
        lows = (places[:, :, None] >> shifts & 1).bool().flatten(1)
        ones = (places >> self.low) + torch.arange(self.kept, device=rows.device)
        bitmap = torch.zeros(len(rows), self.bitmap, dtype=torch.bool, device=rows.device)
        bitmap.scatter_(1, ones, True)
        return torch.cat([header.view(torch.uint8), _pack(kinds), _pack(lows), _pack(bitmap)], 1)

    def decode(self, code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The places and the values of each row of codes; None if a row is no code."""
        header, kinds, lows, bitmap = code.split(self.parts, 1)
        magnitudes = header.clone(memory_format=torch.contiguous_format).view(torch.float32)
        bits = _unpack(bitmap, 8 * bitmap.shape[1])
        if not bool((bits.sum(1) == self.kept).all()):
            return None
        ones = bits.nonzero()[:, 1].view(len(code), self.kept)
        highs = ones - torch.arange(self.kept, device=code.device)
        shifts = torch.arange(self.low, device=code.device)
        low = _unpack(lows, self.kept * self.low).view(len(code), self.kept, self.low).long() << shifts
        places = (highs << self.low) + low.sum(2)
        in_order = (places[:, 1:] > places[:, :-1]).all() & (places[:, -1] < self.length).all()
        numbers = ((magnitudes >= 0) & magnitudes.isfinite()).all(1) | magnitudes.isnan().all(1)
        if not bool(in_order & numbers.all()):
            return None
        negative, large = _unpack(kinds, 2 * self.kept).view(len(code), self.kept, 2).unbind(2)
        values = torch.where(large, magnitudes[:, 1:], magnitudes[:, :1])
        return places, torch.where(negative, 0.0 - values, values)  # no negative zero


def _largest(sizes: torch.Tensor, kept: int) -> torch.Tensor:
    """The places of the ``kept`` largest values of each row, in order; of equal values the first."""
    least = sizes.topk(kept, 1, sorted=False).values.amin(1, keepdim=True)
    chosen = sizes >= least
    tied = (chosen.sum(1) > kept).nonzero()[:, 0]
    if len(tied):
        above, equal = sizes[tied] > least[tied], sizes[tied] == least[tied]
        chosen[tied] = above | (equal & (equal.cumsum(1) <= kept - above.sum(1, keepdim=True)))
    return chosen.nonzero()[:, 1].view(len(sizes), kept)


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _pack(bits: torch.Tensor) -> torch.Tensor:
    """Rows of bits as bytes, the lowest bit first."""
    padded = torch.nn.functional.pad(bits.byte(), (0, -bits.shape[1] % 8)).view(len(bits), -1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(2, dtype=torch.uint8)


def _unpack(code: torch.Tensor, bits: int) -> torch.Tensor:
    """The reverse of :func:`_pack`, for so many bits."""
    places = torch.arange(8, dtype=torch.uint8, device=code.device)
    return (code[:, :, None] >> places & 1).flatten(1)[:, :bits].bool()
