"""The calls of c10d that reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from trigram.backend.calls import sparse, tensors
from trigram.backend.calls.arguments import AVG, SUM, is_async, listed, only, options, reduce_op
from trigram.backend.calls.starting import Starting, failed
from trigram.backend.handles.callbacks import _threads as callback_threads
from trigram.backend.handles.timeouts import seconds
from trigram.backend.handles.work import Work
from trigram.errors import MisuseError, TrigramError
from trigram.observe import profiling
from trigram.runtime import engine_codes

_SUM = hash(dist.ReduceOp.SUM)
_SUM_CODE = engine_codes.OPS["sum"]
_DTYPES = engine_codes.DTYPES
_UNSET = c10d.AllreduceOptions().timeout
_profiled = profiling.enabled


class Reductions(Starting):
    """The part of a process group that reduces."""

    def allreduce(self, given: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> Work:
        """Reduces a tensor over all ranks, in place."""
        # The way of most calls, and of those where every microsecond counts: the sum of a plain tensor, which
        # the engine reads itself. What is asked of the options costs most.
        try:
            (t,) = given
            short = hash(opts.reduceOp) == _SUM and not _profiled()
            background, asks = opts.asyncOp, opts.timeout
        except (AttributeError, TypeError, ValueError):
            short = False  # an older form of the call
        if short:
            group = self.trigram_group if self._aborted is None and not callback_threads else self._group()
            limit = group.timeout if asks == _UNSET else seconds(asks) or group.timeout
            try:
                if background:
                    call = group.core.start_all_reduce(t, _SUM_CODE, limit)
                    if call is not None:
                        return self._handle("all_reduce", call, t, given, None, None, limit)
                elif group.core.all_reduce(t, _SUM_CODE, limit):
                    return self._done
            except TrigramError as e:
                raise failed(group, e, limit) from None
        opts = options(c10d.AllreduceOptions, opts, timeout, reduceOp=op)
        t = only(listed(given), "all_reduce")
        if t.layout != torch.strided:
            return sparse.all_reduce(self, t, opts)
        return self._reduce_in_place("all_reduce", [t], opts, engine_codes.ALL_REDUCE, 0, True)

    def allreduce_coalesced(self, given: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduces several tensors over all ranks, in place, in one call."""
        opts = options(c10d.AllreduceCoalescedOptions, opts, timeout, reduceOp=None)
        given = listed(given)
        if len(given) == 1 and not _profiled():
            return self.allreduce(given, opts)
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
        if not given:
            raise MisuseError(f"{what}: the list of tensors is empty")
        given = [tensors.check(t, what) for t in given]
        tensors.same(given[0], given, what)
        code, factor = reduce_op(opts.reduceOp, what)
        for t in given:
            if gets and t.requires_grad:
                torch.autograd.graph.increment_version(t)
        divides = code == AVG and _is_integer(given[0])
        if len(given) > 1 and factor is None and not divides:
            pieces = tensors.together(given, True)
            if isinstance(pieces, list):
                asked = (call, _DTYPES[given[0].dtype], sum(t.numel() for t in given), code, 0, root)
                return self._start(
                    what, asked, pieces, pieces if gets else None, is_async(opts), seconds(opts.timeout),
                    None, given, inputs=given,
                )  # fmt: skip
        target = tensors.Target(given, filled=True)
        memory, finish = target.flat, target.finish if gets else None
        if factor is not None:
            scaled = tensors.scaled(memory, factor)
            memory = memory.copy_(scaled) if gets else scaled  # in place where the sum replaces it
        sent, wider = tensors.reduced(memory, SUM if divides else code, what)
        received = sent
        if wider and gets:
            copy = finish

            def finish() -> None:
                memory.copy_(sent)
                if copy is not None:
                    copy()

        if divides:
            code, finish = SUM, self._divides(sent, finish) if gets else None
        asked = (call, _DTYPES[sent.dtype], sent.numel(), code, 0, root)
        return self._start(
            what, asked, sent, received if gets else None, is_async(opts), seconds(opts.timeout),
            finish, given, inputs=given,
        )  # fmt: skip

    def _divides(self, memory: torch.Tensor, then: Callable[[], None] | None = None) -> Callable[[], None]:
        """Ends an average of integers, which the engine does not divide: rounded towards 0, as by NCCL."""

        def finish() -> None:
            memory.copy_(memory.div(self.trigram_group.size, rounding_mode="trunc"))
            if then is not None:
                then()

        return finish

    def reduce_scatter_single(self, out: Any, given: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduces a tensor over all ranks; rank i gets the i-th part."""
        opts = options(c10d.ReduceScatterOptions, opts, timeout, reduceOp=None)
        return self._scatter_sums("reduce_scatter_single", [out], [[given]], opts)

    def reduce_scatter_single_coalesced(
        self, outs: Any, given: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """The same for several tensors."""
        opts = options(c10d.ReduceScatterOptions, opts, timeout, reduceOp=None)
        what, size = "reduce_scatter_single_coalesced", self.trigram_group.size
        if len(outs) == 1:
            return self._scatter_sums(what, outs, [given], opts)
        outs, given = [tensors.check(t, what) for t in outs], [tensors.check(t, what) for t in given]
        for out, t in zip(outs, given, strict=True):
            if t.numel() != size * out.numel():
                raise MisuseError(
                    f"{what}: an input has {t.numel()} elements and its output {out.numel()}; with {size} "
                    f"ranks the input must have {size * out.numel()}"
                )
        tensors.same(given[0], [*given, *outs], what)
        code, factor = reduce_op(opts.reduceOp, what)
        if factor is None and not (code == AVG and _is_integer(given[0])) and tensors.are_pieces(given):
            rows = [t.detach().view(size, -1).unbind() for t in given]
            sent = tensors.together([row[r] for r in range(size) for row in rows], True)
            received = tensors.together(outs, True)
            if sent is not None and received is not None:
                count = sum(out.numel() for out in outs)
                asked = (engine_codes.REDUCE_SCATTER, _DTYPES[given[0].dtype], count, code, 0, 0)
                return self._start(
                    what,
                    asked,
                    sent,
                    received,
                    is_async(opts),
                    seconds(opts.timeout),
                    None,
                    outs,
                    None,
                    given,
                )
        packed = torch.cat([tensors.source(t).view(size, -1) for t in given], dim=1)
        target = tensors.Target(outs)
        return self._scatter_sums(what, [target.flat], [[packed]], opts, target.finish, outs)

    def reduce_scatter(
        self, outs: Any, given: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> Work:
        """Reduces a list of tensors over all ranks; rank i gets the i-th, which may differ in length."""
        opts = options(c10d.ReduceScatterOptions, opts, timeout, reduceOp=op)
        lists = given if isinstance(given[0], list | tuple) else [given]
        return self._scatter_sums("reduce_scatter", listed(outs), [list(only(lists, "reduce_scatter"))], opts)

    def _scatter_sums(
        self,
        what: str,
        outs: list[Any],
        lists: list[list[Any]],
        opts: Any,
        then: Callable[[], None] | None = None,
        outputs: list[Any] | None = None,
    ) -> Work:
        """Reduces and scatters; ``then`` gives what has arrived to ``outputs``, if these are not ``outs``."""
        group = self.trigram_group
        out, *given = (tensors.check(t, what) for t in (only(outs, what), *only(lists, what)))
        tensors.same(out, given, what)
        code, factor = reduce_op(opts.reduceOp, what)
        divides = code == AVG and _is_integer(out)
        code = SUM if divides else code
        target = tensors.Target([out])
        lengths = [t.numel() for t in given]
        if len(given) > 1 and len(given) != group.size:
            raise MisuseError(f"{what}: {len(given)} tensors for {group.size} ranks; pass one for each rank")
        equal = len(given) == 1 or len(set(lengths)) == 1
        if not equal and out.numel() != lengths[group.rank]:
            raise MisuseError(
                f"{what}: the output has {out.numel()} elements, and the input for this rank "
                f"{lengths[group.rank]}; make them equal"
            )
        if equal and sum(lengths) != group.size * out.numel():
            raise MisuseError(
                f"{what}: the input has {sum(lengths)} elements and the output {out.numel()}; with "
                f"{group.size} ranks the input must have {group.size * out.numel()}"
            )
        if out.requires_grad:
            torch.autograd.graph.increment_version(out)
        limit = seconds(opts.timeout)
        if len(given) > 1 and factor is None and not divides:
            pieces = tensors.together(given, True)
            if isinstance(pieces, list):
                asked = (engine_codes.REDUCE_SCATTER, _DTYPES[out.dtype], out.numel(), code, 0, 0)
                splits = None if equal else (lengths, lengths)
                return self._start(
                    what,
                    asked,
                    pieces,
                    target.flat,
                    is_async(opts),
                    limit,
                    target.finish,
                    [out],
                    splits,
                    given,
                )
        flat = (
            torch.cat([tensors.source(t).view(-1) for t in given])
            if len(given) > 1
            else tensors.source(given[0])
        )
        if factor is not None:
            flat = tensors.scaled(flat, factor)
        sent, wider = tensors.reduced(flat, code, what)
        if not equal and not out.is_cpu:
            return self._scatter_uneven(what, out, sent, lengths, flat, code, opts, divides)
        finish = target.finish
        if wider:
            part = torch.empty(target.flat.numel(), dtype=sent.dtype, device=sent.device)

            def finish() -> None:
                out.detach().copy_(part.view(out.shape))

            received = part
        else:
            received = tensors.reduced(target.flat, code, what)[0]
        if divides:
            finish = self._divides(received, finish)
        if then is not None:
            arrived = finish

            def finish() -> None:
                if arrived is not None:
                    arrived()
                then()

        per = sent.numel() // max(flat.numel(), 1)
        parts = [n * per for n in lengths]
        splits = None if equal else (parts, parts)
        asked = (engine_codes.REDUCE_SCATTER, _DTYPES[sent.dtype], received.numel(), code, 0, 0)
        return self._start(
            what, asked, sent, received, is_async(opts), limit, finish, outputs or [out], splits, given
        )

    def _scatter_uneven(
        self,
        what: str,
        out: torch.Tensor,
        sent: torch.Tensor,
        lengths: list[int],
        flat: torch.Tensor,
        code: int,
        opts: Any,
        divides: bool,
    ) -> Work:
        """Parts of different lengths on a GPU, which NCCL cannot scatter: all ranks reduce everything."""
        if sent.data_ptr() == flat.data_ptr():
            sent = sent.clone()
        per = sent.numel() // max(flat.numel(), 1)
        begin = sum(lengths[: self.trigram_group.rank]) * per
        mine = sent[begin : begin + lengths[self.trigram_group.rank] * per]

        def finish() -> None:
            if divides:
                self._divides(mine)()
            values = torch.view_as_complex(mine.view(-1, 2)) if out.is_complex() else mine
            out.detach().copy_(values.view(out.shape))

        asked = (engine_codes.ALL_REDUCE, _DTYPES[sent.dtype], sent.numel(), code, 0, 0)
        return self._start(what, asked, sent, sent, is_async(opts), seconds(opts.timeout), finish, [out])

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _is_integer(t: torch.Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex()
