"""The average of a flat tensor by a robust rule: shares to their owners, who combine all ranks' values
by the rule, results to all.

The way is :class:`trigram.average.CodedAverage`'s, with or without codecs. An owner leaves out a rank
whose values in its share are not finite, or whose code is none, and tells all ranks who that was.
Centred clipping needs distances over the whole, so it has a small message between the two legs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.algorithms import robust
from trigram.algorithms.robust import RobustAggregation
from trigram.averaging.coded import CodedAverage
from trigram.averaging.groups import ModelGroups
from trigram.codecs.codec import Codec
from trigram.errors import CorruptError
from trigram.runtime.memory import empty

_LINE = 64
_SHARES, _RESULTS, _PRODUCTS = 1, 2, 3
"""What is under way: legs 1 and 2 of a coded average, and clipping's own between them."""


class Plain(Codec):
    """The numbers themselves, where a codec stands."""

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
    """An :class:`trigram.average.Average` that is not the mean.

    Args:
        memory: ``padded`` many values; float64 only without codecs.
        groups: Where to talk.
        rule: What stands in the place of the mean.
        codecs: Of the two legs; None: the numbers themselves.
        feedback: See :class:`CodedAverage`.
        remainder: See :class:`CodedAverage`.
        centre: Where clipping starts; None: at 0. All ranks give the same.
    """

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
        self.memory, self.aggregation = memory, rule
        # 16-bit numbers are combined in float32 and rounded once.
        wide = torch.float64 if memory.dtype == torch.float64 else torch.float32
        self.mean = self.mean.to(wide)
        self.direct = codecs is None and memory.dtype == wide
        self.rows = self.inp.view(wide) if self.direct else memory.new_empty(n, shard, dtype=wide)
        # With an owner's result go n bytes, 1 where it left a rank out.
        self.two = second.size(shard)
        line = self.two + _LINE * -(-n // _LINE)
        self.mine = empty(line, dtype=torch.uint8, device=memory.device)
        self.mine.zero_()
        self.all = empty(n, line, dtype=torch.uint8, device=memory.device)
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

    def advance(self) -> bool:
        """See :class:`trigram.average.Average`."""
        if self.phase == _SHARES and self.work is not None and self.work.is_completed():
            self._reduce()
        if self.phase == _PRODUCTS and self.work is not None and self.work.is_completed():
            self._clip()
        return self.phase not in (_SHARES, _PRODUCTS)

    def _reduce(self) -> None:
        """The shares are here."""
        assert self.work is not None
        self.work.wait()
        for j, code in enumerate(self.inp if not self.direct else ()):
            try:
                self.first.decode(code, self.rows[j], None, self.groups.main.ranks[j])
            except CorruptError:
                self.rows[j].fill_(torch.nan)  # left out, and named
        if self.centre is None:
            # The largest magnitude is NaN or infinite if anything is.
            fine = torch.linalg.vector_norm(self.rows, torch.inf, dim=1).isfinite()
            kept = [row for row, keep in zip(self.rows, fine.tolist(), strict=True) if keep]
            if kept:
                self.aggregation.combine(kept, self.mean)
            self._answer(fine)
            return
        self.products.copy_(robust.products(self.rows, self._mine(self.centre)))
        self.phase = _PRODUCTS
        self.work = collectives.all_gather(
            self.all_products, self.products, self.groups.second_phase, async_op=True
        )

    def _mine(self, whole: torch.Tensor) -> torch.Tensor:
        """The share that this rank owns."""
        return whole.view(self.groups.size, -1)[self.groups.rank]

    def _clip(self) -> None:
        """Everybody's inner products are here: they add up to those of the whole."""
        assert self.work is not None and self.centre is not None
        self.work.wait()
        gram = self.all_products.sum(0).cpu()
        fine = gram.diagonal().isfinite()
        kept = fine.nonzero().flatten().tolist()
        centre = self._mine(self.centre)
        self.mean.copy_(centre)
        parts = robust.clipped(gram[kept][:, kept], self.aggregation.parameter, self.aggregation.iterations)
        for j, part in zip(kept, parts, strict=True):
            # Not (row - centre) * part: what is far away would overflow, or swallow the centre.
            self.mean.add_(self.rows[j], alpha=part).sub_(centre, alpha=part)
        self._answer(fine)

    def _answer(self, fine: torch.Tensor) -> None:
        """The result of this rank's share, to all; NaN, as a mean would be, where nobody's was finite."""
        if not bool(fine.any()):
            self.mean.fill_(torch.nan)
        seed = self._seed(self.groups.size)
        self.second.encode(self.mean, self.mine[: self.two], self.owned, True, seed)
        self.mine[self.two : self.two + len(fine)] = ~fine
        self.phase = _RESULTS
        self.work = collectives.all_gather(self.all, self.mine, self.groups.second_phase, async_op=True)

    def wait(self) -> None:
        """See :class:`trigram.average.Average`."""
        if self.phase == _SHARES:
            self._reduce()
        if self.phase == _PRODUCTS:
            self._clip()
        if self.phase != _RESULTS or self.work is None:
            return
        self.work.wait()
        self.phase, self.work = 0, None
        ranks = self.groups.main.ranks
        for j, (line, shard) in enumerate(zip(self.all, self.shards, strict=True)):
            self.second.decode(line[: self.two], shard, None, ranks[j])
        if self.centre is not None and bool(self.memory.isfinite().all()):
            self.centre.copy_(self.memory)
        left_out = self.all[:, self.two : self.two + len(ranks)].amax(0)
        self.groups.non_finite_senders.note(
            [r for r, out in zip(ranks, left_out.tolist(), strict=True) if out],
            self.round,
            str(self.aggregation),
        )

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """This rank's residual, and where clipping starts."""
        found = super().parts(views)
        if self.centre is not None:
            base = self.memory.storage_offset()
            for view, part in zip(views, found, strict=True):
                at = view.storage_offset() - base
                part["centre"] = self.centre[at : at + view.numel()]
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """What the codecs' legs keep, and where clipping starts."""
        kept = super().state()
        return kept if self.centre is None else kept | {"centre": self.centre.clone()}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See :meth:`state`."""
        super().load(state)
        if self.centre is not None:
            self.centre.copy_(state["centre"])
