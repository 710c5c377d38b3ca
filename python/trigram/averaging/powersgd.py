"""PowerSGD (arXiv 1905.13727): approximates each matrix by a product of two thin ones, which an all-reduce
can sum.

Every rank multiplies its matrix M by the same Q; an all-reduce averages the products, and every rank
orthonormalizes them (P). The averaged ``M'P`` is the next Q: one step of the power method, which starts from
the Q of the step before. The part of M outside the span of P is kept as the residual and added in the next
step: ``e = M - P P'M``, with this rank's M. Subtracting the averaged result instead makes e grow a
hundredfold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trigram import collectives
from trigram.averaging.average import Average
from trigram.averaging.exchange import Phases
from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced


def arithmetic(m: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What one matrix costs a rank in a step of :class:`PowerAverage`, without communication; for
    :mod:`trigram.plan.costs`, which measures it. ``m``: rows by columns, ``q``: columns by rank."""
    residual = torch.zeros_like(m)
    residual += m
    p = torch.linalg.qr(_product(residual, q))[0]
    local_q = _product(residual.T, p)
    residual -= _product(p, local_q.T)
    return m.copy_(_product(p, local_q.T))


class _Matrix:
    """The gradient of one parameter as a matrix whose rows are the first dimension."""

    def __init__(self, values: torch.Tensor, rows: int, rank: int) -> None:
        self.values = values.view(rows, -1)
        self.residual = torch.zeros(self.values.shape, dtype=torch.float32, device=values.device)
        self.rank = rank
        # The same Q on all ranks.
        generator = torch.Generator().manual_seed(0)
        self.q = torch.randn(
            self.values.shape[1], rank, generator=generator, dtype=torch.float32, device="cpu"
        ).to(values.device)
        self.local_q = self.q.clone()
        self.before: tuple[torch.Tensor, torch.Tensor] | None = None

    def hold(self) -> None:
        """Copies the state, to restore it if no rank used the parameter; sends 0 in this step."""
        self.before = self.residual, self.q.clone()
        self.residual = torch.zeros_like(self.residual)

    def settle(self, nobody: bool) -> None:
        """Ends a step that began with :meth:`hold`; ``nobody``: no rank used the parameter."""
        assert self.before is not None
        (residual, q), self.before = self.before, None
        if nobody:
            self.residual = residual
            self.q.copy_(q)
        else:
            self.residual += residual


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in float32, also in a backward pass inside ``torch.autocast``, which leaves ``out=`` alone."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
    return torch.matmul(a, b, out=out)


class PowerAverage(Average):
    """An :class:`~trigram.averaging.average.Average` by PowerSGD; what is no large matrix is averaged in
    full.

    Args:
        memory: One-dimensional, float32, float16 or bfloat16.
        views: Views into ``memory`` with the shapes of the parameters.
        groups: The model's process groups.
        rank: Columns of P and Q.
    """

    def __init__(
        self, memory: torch.Tensor, views: list[torch.Tensor], groups: ModelGroups, rank: int
    ) -> None:
        self.memory, self.groups = memory, groups
        self.matrices: list[_Matrix] = []
        self.rest: list[torch.Tensor] = []
        base = memory.storage_offset()
        for view in views:
            rows = view.shape[0] if view.dim() > 1 else 1
            columns = view.numel() // max(rows, 1)
            at = view.storage_offset() - base
            part = memory[at : at + view.numel()]
            if view.dim() > 1 and rank * (rows + columns) < rows * columns:
                self.matrices.append(_Matrix(part, rows, rank))
            else:
                self.rest.append(part)
        rest = [torch.empty_like(t, dtype=torch.float32) for t in self.rest]
        p = [
            torch.empty(m.values.shape[0], rank, dtype=torch.float32, device=memory.device)
            for m in self.matrices
        ]
        self.p = coalesced.Coalesced([*p, *rest])
        self.q = coalesced.Coalesced([m.q for m in self.matrices]) if self.matrices else None
        n = groups.size
        nbytes = self.p.memory.nbytes + (self.q.memory.nbytes if self.q else 0)
        self.sent = 2 * (n - 1) * nbytes // n
        self.held: list[_Matrix | None] = []
        self.calls = 1 if self.matrices else 0

    def hold(self, views: Sequence[torch.Tensor]) -> None:
        """See :class:`trigram.averaging.average.Average`."""
        found = {m.values.data_ptr(): m for m in self.matrices}
        self.held = [found.get(v.data_ptr()) for v in views]
        for m in self.held:
            if m is not None:
                m.hold()

    def settle(self, unused: Sequence[bool]) -> None:
        """See :class:`trigram.averaging.average.Average`."""
        held, self.held = self.held, []
        for m, nobody in zip(held, unused, strict=True):
            if m is not None:
                m.settle(nobody)

    def phases(self, step: int) -> Phases:
        """See :class:`Exchange`."""
        k = len(self.matrices)
        for m, p in zip(self.matrices, self.p.views, strict=False):
            m.residual += m.values
            torch.matmul(m.residual, m.q, out=p)
        if self.rest:
            torch._foreach_copy_(self.p.views[k:], self.rest)
        yield collectives.all_reduce(self.p.memory, "avg", None, self.groups.main, async_op=True)
        if self.q is not None:
            for m, p, q in zip(self.matrices, self.p.views, self.q.views, strict=False):
                if bool(p.isfinite().all()):
                    p.copy_(torch.linalg.qr(p)[0])
                m.local_q = _product(m.residual.T, p)
                q.copy_(m.local_q)
            yield collectives.all_reduce(self.q.memory, "avg", None, self.groups.second_phase, async_op=True)
        if self.rest:
            torch._foreach_copy_(self.rest, self.p.views[k:])
        for m, p, q in zip(self.matrices, self.p.views, self.q.views if self.q else [], strict=False):
            m.residual -= _product(p, m.local_q.T)
            m.values.copy_(_product(p, q.T))
            if bool(q.isfinite().all()):
                m.q.copy_(q)
            else:  # all ranks got the NaN once; the next step starts without it
                m.residual.nan_to_num_(0.0, 0.0, 0.0)

    def await_end(self) -> None:
        """See :class:`Exchange`."""
        self.settle([True] * len(self.held))
        super().await_end()

    def parts(self, views: Sequence[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Residual and Q of each view that is compressed."""
        found = {m.values.data_ptr(): m for m in self.matrices}
        return [
            {"residual": m.residual, "q": m.q} if (m := found.get(v.data_ptr())) is not None else {}
            for v in views
        ]

    def state(self) -> dict[str, torch.Tensor]:
        """Residual and Q of each matrix."""
        kept = {f"residual {k}": m.residual.clone() for k, m in enumerate(self.matrices)}
        return kept | {f"q {k}": m.q.clone() for k, m in enumerate(self.matrices)}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See :meth:`state`."""
        for k, m in enumerate(self.matrices):
            m.residual.copy_(state[f"residual {k}"])
            m.q.copy_(state[f"q {k}"])
