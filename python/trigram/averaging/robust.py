"""The average of a tensor by a robust aggregation (median, trimmed mean, centred clipping).

The communication is that of :class:`trigram.averaging.coded.CodedAverage`, with or without codecs. An owner
leaves out a rank whose shard contains NaN or infinity or cannot be decoded, and tells all ranks which rank
that was. Centred clipping needs distances over the whole tensor, so it has a small all-gather between the two
phases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.algorithms import robust
from trigram.algorithms.robust import RobustAggregation
from trigram.averaging.coded import CodedAverage, Owner
from trigram.averaging.exchange import Phases
from trigram.averaging.groups import ModelGroups
from trigram.codecs.codec import Codec
from trigram.errors import CorruptError
from trigram.runtime.memory import empty

_LINE = 64


class Plain(Codec):
    """A codec that copies: uncompressed values."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.name, self.block, self.dtype = "full", None, dtype

    def size(self, n: int) -> int:
        """See :class:`Codec`."""
        return n * self.dtype.itemsize

    def encode(
        self,
        src: torch.Tensor,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        feedback: bool = True,
        seed: int = 0,
    ) -> torch.Tensor:
        """Copies."""
        if out is None:
            out = torch.empty(self.size(src.numel()), dtype=torch.uint8, device=src.device)
        out.view(self.dtype).copy_(src)
        return out

    def decode(
        self, encoded: torch.Tensor, out: torch.Tensor, weight: float | None = None, sender: int = 0
    ) -> None:
        """Copies."""
        out.copy_(encoded.view(self.dtype))


class RobustOwner(Owner):
    """Aggregates the shards of all ranks robustly, in float32 or float64.

    Args:
        memory: The whole tensor; see :func:`robust_average`.
        groups: The model's process groups.
        rule: The robust aggregation.
        direct: The shards are not encoded, and have the dtype in which it computes.
        centre: Where centred clipping starts; None: at 0.
    """

    leaves_out_silent = True

    def __init__(
        self,
        memory: torch.Tensor,
        groups: ModelGroups,
        rule: RobustAggregation,
        direct: bool,
        centre: torch.Tensor | None = None,
    ) -> None:
        n = groups.size
        self.aggregation, self.groups = rule, groups
        self.dtype = wider(memory.dtype)
        self.rows = None if direct else memory.new_empty(n, memory.numel() // n, dtype=self.dtype)
        self.tail = _LINE * -(-n // _LINE)  # a byte for each rank: 1 if this owner left it out
        self.centre: torch.Tensor | None = None
        if rule.kind == "clip":
            self.calls = 1
            if centre is None:
                self.centre = torch.zeros_like(memory, dtype=self.dtype)
            else:
                self.centre = centre.to(self.dtype, copy=True)
            self.products = empty(n, n, dtype=torch.float64, device=memory.device)
            self.all_products = empty(n, n, n, dtype=torch.float64, device=memory.device)

    def bytes_sent(self, ranks: int) -> int:
        """See :class:`Owner`."""
        return 0 if self.centre is None else (ranks - 1) * self.products.nbytes

    def reduce(self, average: CodedAverage) -> Phases:
        """See :class:`Owner`."""
        rows, result = self._decoded(average), average.result
        counts = torch.ones(len(rows), dtype=torch.bool, device="cpu")
        counts[list(self.groups.silent())] = False  # their zeros are no gradients
        if self.centre is None:
            # The largest magnitude is NaN or infinite if any value is.
            finite = torch.linalg.vector_norm(rows, torch.inf, dim=1).isfinite()
            keep = (finite.cpu() & counts).tolist()
            kept = [row for row, is_kept in zip(rows, keep, strict=True) if is_kept]
            if kept:
                self.aggregation.combine(kept, result)
        else:
            centre = self.centre.view(self.groups.size, -1)[self.groups.rank]
            self.products.copy_(robust.products(rows, centre))
            yield collectives.all_gather(
                self.all_products, self.products, self.groups.second_phase, async_op=True
            )
            finite = self._clip(rows, centre, result, counts)
        if not bool((finite.cpu() & counts).any()):  # NaN, as a mean would be, if every rank is left out
            result.fill_(torch.nan)
        average.tail[: len(finite)] = ~finite

    def _decoded(self, average: CodedAverage) -> torch.Tensor:
        """The shards of all ranks, one in each row."""
        if self.rows is None:
            return average.received.view(self.dtype)
        for j, code in enumerate(average.received):
            try:
                average.first.decode(code, self.rows[j], None, self.groups.main.ranks[j])
            except CorruptError:
                self.rows[j].fill_(torch.nan)  # so that this rank is left out and reported
        return self.rows

    def _clip(
        self, rows: torch.Tensor, centre: torch.Tensor, result: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Clips: the inner products of all shards add up to those of the whole tensor. Returns which ranks'
        values are finite; ``centre``: this rank's shard of it; ``counts``: which ranks do."""
        gram = self.all_products.sum(0).cpu()
        finite = gram.diagonal().isfinite()
        kept = (finite & counts).nonzero().flatten().tolist()
        result.copy_(centre)
        parts = robust.clipped(gram[kept][:, kept], self.aggregation.parameter, self.aggregation.iterations)
        for j, part in zip(kept, parts, strict=True):
            # Not (row - centre) * part: a distant row would overflow, or round the centre away.
            result.add_(rows[j], alpha=part).sub_(centre, alpha=part)
        return finite

    def finish(self, average: CodedAverage) -> None:
        """See :class:`Owner`."""
        if self.centre is not None and bool(average.memory.isfinite().all()):
            self.centre.copy_(average.memory)
        ranks = self.groups.main.ranks
        left_out = average.tails[:, : len(ranks)].amax(0)
        self.groups.non_finite_senders.note(
            [r for r, out in zip(ranks, left_out.tolist(), strict=True) if out],
            average.step,
            str(self.aggregation),
        )

    def parts(self, views: Sequence[torch.Tensor], base: int) -> list[dict[str, torch.Tensor]]:
        """The centre of clipping."""
        if self.centre is None:
            return [{} for _ in views]
        at = [view.storage_offset() - base for view in views]
        return [{"centre": self.centre[a : a + v.numel()]} for a, v in zip(at, views, strict=True)]

    def state(self) -> dict[str, torch.Tensor]:
        """The centre of clipping."""
        return {} if self.centre is None else {"centre": self.centre.clone()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See :meth:`state`."""
        if self.centre is not None:
            self.centre.copy_(state["centre"])


def wider(dtype: torch.dtype) -> torch.dtype:
    """In which values of a dtype are aggregated: 16-bit values in float32, and rounded once."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def robust_average(
    memory: torch.Tensor,
    groups: ModelGroups,
    rule: RobustAggregation,
    codecs: tuple[Codec, Codec] | None = None,
    feedback: tuple[bool, bool] = (False, False),
    remainder: torch.Tensor | None = None,
    centre: torch.Tensor | None = None,
) -> CodedAverage:
    """An average with a robust aggregation instead of the mean.

    Args:
        memory: One-dimensional; its length is a result of ``padded``. float64 only without codecs.
        groups: The model's process groups.
        rule: The robust aggregation.
        codecs: Of the first and second phase; None: uncompressed.
        feedback: See :class:`CodedAverage`.
        remainder: See :class:`CodedAverage`.
        centre: Where centred clipping starts, the same values on all ranks; None: at 0.
    """
    plain = Plain(memory.dtype)
    first, second = codecs or (plain, plain)
    direct = codecs is None and memory.dtype == wider(memory.dtype)
    owner = RobustOwner(memory, groups, rule, direct, centre)
    return CodedAverage(memory, groups, first, second, feedback, remainder, owner)
