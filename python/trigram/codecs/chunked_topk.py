"""The codec ``chunktopk:FRACTION``: of each chunk the largest values, in two bits each (SparseLoCo, arXiv
2508.15706).

It is made of torch's operations, on any device: it encodes weight differences every few steps, where they
cost little beside the steps between.
"""

from __future__ import annotations

import math

import torch

from trigram.codecs.codec import Codec, check_bytes, check_dtype
from trigram.errors import CorruptError, MisuseError, UnsupportedError

CHUNK = 4096
"""Values of a chunk; the last one may be shorter."""
_HEADER = 8


class ChunkedTopK(Codec):
    """Keeps of each chunk of 4096 values the ``ceil(fraction * 4096)`` largest: their places, their signs,
    and one of two magnitudes, the means of those above and up to their mean.

    docs/algorithms.md has the format.

    Args:
        name: ``chunktopk:FRACTION``.
        block: Must be None.
    """

    __slots__ = ("fraction",)

    def __init__(self, name: str, block: int | None = None) -> None:
        self.name, self.block, self._kernel = name, block, None
        try:
            self.fraction = float(name.partition(":")[2])
        except ValueError:
            self.fraction = 0.0
        if not 0 < self.fraction <= 1:
            raise UnsupportedError(
                f"codec {name!r}: the fraction must be above 0 and up to 1, as in chunktopk:0.02"
            )
        if block is not None:
            raise UnsupportedError(f"codec {name!r} has chunks of {CHUNK} values; remove block={block}")

    def size(self, n: int) -> int:
        """See :class:`Codec`."""
        whole, rest = divmod(n, CHUNK)
        return whole * self._chunk(CHUNK).nbytes + (self._chunk(rest).nbytes if rest else 0)

    def encode(
        self,
        src: torch.Tensor,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> torch.Tensor:
        """See :class:`Codec`."""
        n = src.numel()
        check_dtype(src, "encode")
        if out is None:
            out = torch.empty(self.size(n), dtype=torch.uint8, device=src.device)
        check_bytes(out, src, residual, "encode")
        if out.numel() != self.size(n):
            raise MisuseError(f"encode: out has {out.numel()} bytes; {n} values need {self.size(n)}")
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
            residual.nan_to_num_(0.0, 0.0, 0.0)
        return out

    def decode(
        self, encoded: torch.Tensor, out: torch.Tensor, weight: float | None = None, sender: int = 0
    ) -> None:
        """See :class:`Codec`; invalid bytes raise on a GPU too."""
        check_dtype(out, "decode")
        check_bytes(encoded, out, None, "decode")
        if weight is not None and out.dtype != torch.float32:
            raise UnsupportedError(f"decode: with weight, out must be float32, not {out.dtype}")
        if encoded.numel() != self.size(out.numel()):
            raise CorruptError(
                f"{self.name}: {encoded.numel()} bytes do not encode {out.numel()} values "
                f"({self.size(out.numel())} bytes do)",
                sender,
            )
        if weight is None:
            out.zero_()
        at = 0
        for chunk, rows in self._rows(out):
            code = encoded[at : at + len(rows) * chunk.nbytes].view(len(rows), chunk.nbytes)
            at += code.numel()
            places, values = chunk.decode(code, sender)
            rows.scatter_add_(1, places, values.mul_(1.0 if weight is None else weight).to(rows.dtype))
            # Such a chunk is not a number in all of its values.
            rows[values[:, 0].isnan()] = math.nan

    def _chunk(self, length: int) -> _Chunk:
        return _Chunk(length, max(1, math.ceil(self.fraction * length)))

    def _rows(self, values: torch.Tensor) -> list[tuple[_Chunk, torch.Tensor]]:
        """The whole chunks as rows, and the rest as one row."""
        whole = values.numel() // CHUNK * CHUNK
        parts = [values[:whole].view(-1, CHUNK), values[whole:].view(1, -1)]
        return [(self._chunk(part.shape[1]), part) for part in parts if part.numel()]


class _Chunk:
    """The code of chunks of one length.

    Per chunk: two magnitudes (float32), two bits per value (1: negative; 2: the larger magnitude), and the
    places as Elias-Fano.

    Attributes:
        nbytes: Bytes of a chunk's code.
    """

    def __init__(self, length: int, kept: int) -> None:
        self.length, self.kept = length, kept
        self.low = (length // kept).bit_length() - 1
        self.bitmap = kept + ((length - 1) >> self.low) + 1
        self.parts = [_HEADER, _bytes(2 * kept), _bytes(kept * self.low), _bytes(self.bitmap)]
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

    def decode(self, code: torch.Tensor, sender: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The places and the values of each row of codes; checks all of it."""
        header, kinds, lows, bitmap = code.split(self.parts, 1)
        magnitudes = header.clone(memory_format=torch.contiguous_format).view(torch.float32)
        bits = _unpack(bitmap, self.bitmap)
        if not bool((bits.sum(1) == self.kept).all()):
            raise CorruptError(f"chunktopk: a chunk has another number of values than {self.kept}", sender)
        ones = bits.nonzero()[:, 1].view(len(code), self.kept)
        highs = ones - torch.arange(self.kept, device=code.device)
        shifts = torch.arange(self.low, device=code.device)
        low = _unpack(lows, self.kept * self.low).view(len(code), self.kept, self.low).long() << shifts
        places = (highs << self.low) + low.sum(2)
        if bool((places[:, 1:] <= places[:, :-1]).any()) or bool((places[:, -1] >= self.length).any()):
            raise CorruptError(f"chunktopk: places that are not in order, or not below {self.length}", sender)
        if bool(magnitudes.isinf().any()) or bool((magnitudes < 0).any()):
            raise CorruptError("chunktopk: a magnitude is negative or infinite", sender)
        negative, large = _unpack(kinds, 2 * self.kept).view(len(code), self.kept, 2).unbind(2)
        values = torch.where(large, magnitudes[:, 1:], magnitudes[:, :1])
        return places, torch.where(negative, -values, values)


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
