"""The calls of c10d that reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from trigram.backend.calls import profiling, sparse, tensors
from trigram.backend.calls.arguments import is_async, listed, only, options, reduce_op
from trigram.backend.calls.starting import Starting
from trigram.backend.handles.callbacks import _threads as callback_threads
from trigram.backend.handles.timeouts import seconds
from trigram.backend.handles.work import Work
from trigram.errors import MisuseError
from trigram.runtime import engine_codes

_SUM = hash(dist.ReduceOp.SUM)
_SUM_CODE = engine_codes.OPS["sum"]
_DTYPES = engine_codes.DTYPES
_STRIDED = torch.strided


class Reductions(Starting):
    """The part of a process group that reduces."""

    def allreduce(self, given: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Work:
        """Reduces a tensor over all ranks, in place."""
        # The way of most calls, and of those where every microsecond counts: one contiguous tensor on the
        # CPU whose dtype the engine knows, a sum, and a caller that waits.
        try:
            (t,) = given
            if (
                not opts.asyncOp
                and hash(opts.reduceOp) == _SUM
                and t.is_cpu
                and t.layout is _STRIDED
                and t.is_contiguous()
                and not t.requires_grad
                and not callback_threads
                and self._aborted is None
                and not profiling.enabled()
            ):
                group = self.trigram_group
                memory = (t.data_ptr(), t.nbytes)
                asked = (engine_codes.ALL_REDUCE, _DTYPES[t.dtype], t.numel(), _SUM_CODE, 0, 0)
                limit = seconds(opts.timeout) or group.timeout
                self._run(group, asked, memory + memory, limit, None)
                return self._done
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            if isinstance(e, MisuseError):
                raise
        opts = options(c10d.AllreduceOptions, opts, timeout, reduceOp=op)
        t = only(listed(given), "all_reduce")
        if t.layout != torch.strided:
            return sparse.all_reduce(self, t, opts)
        return self._reduce_in_place("all_reduce", [t], opts, engine_codes.ALL_REDUCE, 0, True)

    def allreduce_coalesced(self, given: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduces several tensors over all ranks, in place, in one call."""
        opts = options(c10d.AllreduceCoalescedOptions, opts, timeout, reduceOp=None)
        given = listed(given)
        for t in given:
            if t.layout != torch.strided:
                raise MisuseError("all_reduce_coalesced: sparse tensors cannot be coalesced; reduce each")
        return self._reduce_in_place("all_reduce_coalesced", given, opts, engine_codes.ALL_REDUCE, 0, True)

    def reduce(
        self, given: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Work:
        """Reduces a tensor over all ranks into that of one; the others keep theirs."""
        opts = options(
            c10d.ReduceOptions, opts if opts is not None else root, timeout, rootRank=None, reduceOp=op
        )
        t = only(listed(given), "reduce")
        here = self.trigram_group.rank == opts.rootRank
        return self._reduce_in_place("reduce", [t], opts, engine_codes.REDUCE, opts.rootRank, here)

    def _reduce_in_place(
        self, what: str, given: list[torch.Tensor], opts: Any, call: int, root: int, gets: bool
    ) -> Work:
        for t in given:
            tensors.check(t, what)
        if not given:
            raise MisuseError(f"{what}: the list of tensors is empty")
        tensors.same(given[0], given, what)
        code, factor = reduce_op(opts.reduceOp, what)
        memory = tensors.in_place(given[0]) if len(given) == 1 else None
        target = None
        if memory is None:
            target = tensors.Target(given, filled=True)
            memory = target.flat
        finish = target.finish if target is not None and gets else None
        sent, wider = tensors.reduced(
            memory if factor is None else tensors.scaled(memory, factor), code, what
        )
        received = sent
        if factor is not None and gets and not wider:
            received = tensors.reduced(memory, code, what)[0]
        if wider and gets:
            copy = finish

            def finish() -> None:
                memory.copy_(sent)
                if copy is not None:
                    copy()

        for t in given:
            if gets and t.requires_grad:
                torch.autograd.graph.increment_version(t)
        asked = (call, _DTYPES[sent.dtype], sent.numel(), code, 0, root)
        return self._start(
            what, asked, sent, received if gets else None, is_async(opts), seconds(opts.timeout),
            finish, given, inputs=given,
        )  # fmt: skip

    def reduce_scatter_single(self, out: Any, given: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduces a tensor over all ranks; rank i gets the i-th part."""
        opts = options(c10d.ReduceScatterOptions, opts, timeout, reduceOp=None)
        return self._scatter_sums("reduce_scatter_single", [out], [[given]], opts)

    def reduce_scatter_single_coalesced(
        self, outs: Any, given: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """The same for several tensors."""
        opts = options(c10d.ReduceScatterOptions, opts, timeout, reduceOp=None)
        if len(outs) == 1:
            return self._scatter_sums("reduce_scatter_single_coalesced", outs, [given], opts)
        return self._together(
            [
                self._scatter_sums("reduce_scatter_single_coalesced", [out], [[t]], opts)
                for out, t in zip(outs, given, strict=True)
            ]
        )

    def reduce_scatter(
        self, outs: Any, given: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        """Reduces a list of tensors over all ranks; rank i gets the i-th, which may differ in length."""
        opts = options(c10d.ReduceScatterOptions, opts, timeout, reduceOp=op)
        lists = given if isinstance(given[0], list | tuple) else [given]
        return self._scatter_sums("reduce_scatter", listed(outs), [list(only(lists, "reduce_scatter"))], opts)

    def _scatter_sums(self, what: str, outs: list[Any], lists: list[list[Any]], opts: Any) -> Work:
        group = self.trigram_group
        out, given = only(outs, what), only(lists, what)
        for t in (out, *given):
            tensors.check(t, what)
        tensors.same(out, given, what)
        code, factor = reduce_op(opts.reduceOp, what)
        target = tensors.Target([out])
        flat = torch.cat([tensors.source(t) for t in given]) if len(given) > 1 else tensors.source(given[0])
        if factor is not None:
            flat = tensors.scaled(flat, factor)
        lengths = [t.numel() for t in given]
        if len(given) > 1 and len(given) != group.size:
            raise MisuseError(f"{what}: {len(given)} tensors for {group.size} ranks; pass one for each rank")
        equal = len(given) == 1 or len(set(lengths)) == 1
        if not equal and out.numel() != lengths[group.rank]:
            raise MisuseError(
                f"{what}: the output has {out.numel()} elements, and the input for this rank "
                f"{lengths[group.rank]}; make them equal"
            )
        if equal and flat.numel() != group.size * out.numel():
            raise MisuseError(
                f"{what}: the input has {flat.numel()} elements and the output {out.numel()}; with "
                f"{group.size} ranks the input must have {group.size * out.numel()}"
            )
        sent, wider = tensors.reduced(flat, code, what)
        if out.requires_grad:
            torch.autograd.graph.increment_version(out)
        limit = seconds(opts.timeout)
        if not equal:
            return self._scatter_uneven(what, out, sent, lengths, flat, code, opts)
        finish = target.finish
        if wider:
            part = torch.empty(target.flat.numel(), dtype=sent.dtype, device=sent.device)

            def finish() -> None:
                out.detach().copy_(part.view(out.shape))

            received = part
        else:
            received = tensors.reduced(target.flat, code, what)[0]
        asked = (engine_codes.REDUCE_SCATTER, _DTYPES[sent.dtype], received.numel(), code, 0, 0)
        return self._start(what, asked, sent, received, is_async(opts), limit, finish, [out], inputs=given)

    def _scatter_uneven(
        self,
        what: str,
        out: torch.Tensor,
        sent: torch.Tensor,
        lengths: list[int],
        flat: torch.Tensor,
        code: int,
        opts: Any,
    ) -> Work:
        """Parts of different lengths: all ranks reduce everything, and keep theirs."""
        if sent.data_ptr() == flat.data_ptr():
            sent = sent.clone()
        per = sent.numel() // max(flat.numel(), 1)
        begin = sum(lengths[: self.trigram_group.rank]) * per
        mine = sent[begin : begin + lengths[self.trigram_group.rank] * per]

        def finish() -> None:
            values = torch.view_as_complex(mine.view(-1, 2)) if out.is_complex() else mine
            out.detach().copy_(values.view(out.shape))

        asked = (engine_codes.ALL_REDUCE, _DTYPES[sent.dtype], sent.numel(), code, 0, 0)
        return self._start(what, asked, sent, sent, is_async(opts), seconds(opts.timeout), finish, [out])

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
