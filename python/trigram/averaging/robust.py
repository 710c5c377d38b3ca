"""The average of a tensor by a robust aggregation (median, trimmed mean, centred clipping).

The communication is that of :class:`trigram.averaging.coded.CodedAverage`, with or without codecs: every rank
sends each shard to the rank that owns it, the owner aggregates the shards of all ranks, and sends the result
to all. An owner leaves out a rank whose shard contains NaN or infinity or cannot be decoded, and tells all
ranks which rank that was. Centred clipping needs distances over the whole tensor, so it has a small
all-gather between the two phases.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.algorithms import robust
from trigram.algorithms.robust import RobustAggregation
from trigram.averaging.coded import CodedAverage
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


class RobustAverage(CodedAverage):
    """An :class:`~trigram.averaging.average.Average` with a robust aggregation instead of the mean.

    Args:
        memory: One-dimensional; its length is a result of ``padded``. float64 only without codecs.
        groups: The model's process groups.
        rule: The robust aggregation.
        codecs: Of the first and second phase; None: uncompressed.
        feedback: See :class:`CodedAverage`.
        remainder: See :class:`CodedAverage`.
        centre: Where centred clipping starts, the same values on all ranks; None: at 0.
    """

    leaves_out_silent = True

    def __init__(
        self,
        memory: torch.Tensor,
        groups: ModelGroups,
        rule: RobustAggregation,
        codecs: tuple[Codec, Codec] | None = None,
        feedback: tuple[bool, bool] = (False, False),
        remainder: torch.Tensor | None = None,
        centre: torch.Tensor | None = None,
    ) -> None:
        plain = Plain(memory.dtype)
        first, second = codecs or (plain, plain)
        super().__init__(memory, groups, first, second, feedback, remainder)
        n, shard = groups.size, memory.numel() // groups.size
        self.aggregation = rule
        # 16-bit values are aggregated in float32 and rounded once.
        wide = torch.float64 if memory.dtype == torch.float64 else torch.float32
        self.mean = self.mean.to(wide)
        self.direct = codecs is None and memory.dtype == wide
        self.rows = self.received.view(wide) if self.direct else memory.new_empty(n, shard, dtype=wide)
        # After the owner's result come n bytes, one per rank: 1 if the owner left that rank out.
        self.mean_bytes = second.size(shard)
        line = self.mean_bytes + _LINE * -(-n // _LINE)
        self.encoded_mean = empty(line, dtype=torch.uint8, device=memory.device)
        self.encoded_mean.zero_()
        self.encoded_means = empty(n, line, dtype=torch.uint8, device=memory.device)
        self.sent = (n - 1) * (first.size(shard) + line)
        self.centre: torch.Tensor | None = None
        if rule.kind == "clip":
            self.calls = 2
            self.centre = (
                torch.zeros_like(memory, dtype=wide) if centre is None else centre.to(wide, copy=True)
            )
            self.products = empty(n, n, dtype=torch.float64, device=memory.device)
            self.all_products = empty(n, n, n, dtype=torch.float64, device=memory.device)
            self.sent += (n - 1) * self.products.nbytes

    def phases(self, step: int) -> Phases:
        """See :class:`trigram.averaging.exchange.Exchange`."""
        ranks = self.groups.main.ranks
        yield self._send_shards(step)
        for j, code in enumerate(self.received if not self.direct else ()):
            try:
                self.first.decode(code, self.rows[j], None, ranks[j])
            except CorruptError:
                self.rows[j].fill_(torch.nan)  # so that this rank is left out and reported
        counts = torch.ones(len(ranks), dtype=torch.bool, device="cpu")
        counts[list(self.groups.silent())] = False  # their zeros are no gradients
        if self.centre is None:
            # The largest magnitude is NaN or infinite if any value is.
            finite = torch.linalg.vector_norm(self.rows, torch.inf, dim=1).isfinite()
            keep = (finite.cpu() & counts).tolist()
            kept = [row for row, is_kept in zip(self.rows, keep, strict=True) if is_kept]
            if kept:
                self.aggregation.combine(kept, self.mean)
        else:
            self.products.copy_(robust.products(self.rows, self._owned_shard(self.centre)))
            yield collectives.all_gather(
                self.all_products, self.products, self.groups.second_phase, async_op=True
            )
            finite = self._clip(self._owned_shard(self.centre), counts)
        if not bool((finite.cpu() & counts).any()):  # NaN, as a mean would be, if every rank is left out
            self.mean.fill_(torch.nan)
        self._encode_mean(self.encoded_mean[: self.mean_bytes])
        self.encoded_mean[self.mean_bytes : self.mean_bytes + len(finite)] = ~finite
        yield self._gather_means()
        for j, (line, shard) in enumerate(zip(self.encoded_means, self.shards, strict=True)):
            self.second.decode(line[: self.mean_bytes], shard, None, ranks[j])
        if self.centre is not None and bool(self.memory.isfinite().all()):
            self.centre.copy_(self.memory)
        left_out = self.encoded_means[:, self.mean_bytes : self.mean_bytes + len(ranks)].amax(0)
        self.groups.non_finite_senders.note(
            [r for r, out in zip(ranks, left_out.tolist(), strict=True) if out],
            self.step,
            str(self.aggregation),
        )

    def _owned_shard(self, whole: torch.Tensor) -> torch.Tensor:
        """The shard of ``whole`` that this rank owns."""
        return whole.view(self.groups.size, -1)[self.groups.rank]

    def _clip(self, centre: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Clips: the inner products of all shards add up to those of the whole tensor. Returns which ranks'
        values are finite; ``centre``: this rank's shard of it; ``counts``: which ranks do."""
        gram = self.all_products.sum(0).cpu()
        finite = gram.diagonal().isfinite()
        kept = (finite & counts).nonzero().flatten().tolist()
        self.mean.copy_(centre)
        parts = robust.clipped(gram[kept][:, kept], self.aggregation.parameter, self.aggregation.iterations)
        for j, part in zip(kept, parts, strict=True):
            # Not (row - centre) * part: a distant row would overflow, or round the centre away.
            self.mean.add_(self.rows[j], alpha=part).sub_(centre, alpha=part)
        return finite

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """This rank's residual, and the centre of clipping."""
        found = super().parts(views)
        if self.centre is not None:
            base = self.memory.storage_offset()
            for view, part in zip(views, found, strict=True):
                at = view.storage_offset() - base
                part["centre"] = self.centre[at : at + view.numel()]
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """The residuals of both phases, and the centre of clipping."""
        kept = super().state()
        return kept if self.centre is None else kept | {"centre": self.centre.clone()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See :meth:`state`."""
        super().load(state)
        if self.centre is not None:
            self.centre.copy_(state["centre"])
