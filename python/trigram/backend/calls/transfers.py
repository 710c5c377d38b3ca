"""The calls of c10d that move tensors between all ranks of a group, and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from trigram.backend.calls import tensors
from trigram.backend.calls.arguments import is_async, listed, only, options
from trigram.backend.calls.starting import Starting
from trigram.backend.handles.timeouts import seconds
from trigram.backend.handles.work import Work
from trigram.collectives.dispatch import Memory
from trigram.errors import MisuseError
from trigram.runtime import engine_codes

_DTYPES = engine_codes.DTYPES


class Transfers(Starting):
    """The part of a process group that moves tensors."""

    def broadcast(self, given: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> Work:
        """Copies the tensor of one rank to all."""
        opts = options(c10d.BroadcastOptions, opts if opts is not None else root, timeout, rootRank=None)
        given = [tensors.check(t, "broadcast") for t in listed(given)]
        tensors.same(given[0], given, "broadcast")
        target = tensors.Target(given, filled=True)
        finish = None if opts.rootRank == self.trigram_group.rank else target.finish
        for t in given:
            if t.requires_grad:
                torch.autograd.graph.increment_version(t)
        sent = tensors.moved(target.flat)
        asked = (engine_codes.BROADCAST, _DTYPES[sent.dtype], sent.numel(), 0, 0, opts.rootRank)
        return self._start(
            "broadcast", asked, sent, sent, is_async(opts), seconds(opts.timeout), finish, given, inputs=given
        )

    def all_gather_single(self, out: Any, given: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Collects the tensors of all ranks in one, in rank order."""
        opts = options(c10d.AllgatherOptions, opts, timeout)
        return self._all_gather("all_gather_single", [out], given, opts)

    def all_gather_single_coalesced(
        self, outs: Any, given: Any, opts: Any = None, timeout: Any = None
    ) -> Work:
        """The same for several tensors."""
        opts = options(c10d.AllgatherOptions, opts, timeout)
        outs, given = listed(outs), listed(given)
        size = self.trigram_group.size
        for out, t in zip(outs, given, strict=True):
            if out.numel() != size * t.numel():
                raise MisuseError(
                    f"all_gather_single_coalesced: an output has {out.numel()} elements and its input "
                    f"{t.numel()}; with {size} ranks the output must have {size * t.numel()}"
                )
        if len(given) == 1:
            return self._all_gather("all_gather_single_coalesced", outs, given[0], opts)
        parts = [list(out.detach().view(size, -1).unbind()) for out in outs]
        by_rank = [[part[r] for part in parts] for r in range(size)]
        return self._all_gather_packed("all_gather_single_coalesced", by_rank, given, opts)

    def allgather(self, outs: Any, given: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Collects the tensors of all ranks in a list, in rank order; their lengths may differ."""
        opts = options(c10d.AllgatherOptions, opts, timeout)
        lists = outs if isinstance(outs[0], list | tuple) else [outs]
        mine = only(listed(given), "all_gather")
        return self._all_gather("all_gather", list(only(lists, "all_gather")), mine, opts, True)

    def allgather_coalesced(self, outs: Any, given: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Collects lists of tensors of all ranks; ``outs[i]`` is the list of rank i."""
        opts = options(c10d.AllgatherOptions, opts, timeout)
        if len(outs) != self.trigram_group.size or any(len(one) != len(given) for one in outs):
            raise MisuseError(
                f"all_gather_coalesced: pass {self.trigram_group.size} lists of {len(given)} tensors, one "
                "list for each rank"
            )
        return self._all_gather_packed("all_gather_coalesced", outs, given, opts)

    def _all_gather_packed(
        self, what: str, by_rank: Sequence[Sequence[Any]], given: Sequence[Any], opts: Any
    ) -> Work:
        """Gathers several tensors of each rank as the bytes of one."""
        given = [tensors.check(t, what) for t in given]
        by_rank = [[tensors.check(t, what) for t in one] for one in by_rank]
        for one in by_rank:
            for out, t in zip(one, given, strict=True):
                tensors.same(t, [out], what)
                if out.numel() != t.numel():
                    raise MisuseError(
                        f"{what}: an output has {out.numel()} elements and its input {t.numel()}; make "
                        "them equal"
                    )
        outputs = [t for one in by_rank for t in one]
        lengths = [t.nbytes for t in given]
        sent: Memory
        received: Memory
        finish = None
        if tensors.are_pieces(given) and tensors.are_pieces(outputs):
            sent, received = list(given), outputs
        else:
            sent = torch.cat([tensors.source(t).view(-1).view(torch.uint8) for t in given])
            buffer = sent.new_empty(self.trigram_group.size, sent.numel())
            received = buffer

            def finish() -> None:
                with torch.no_grad():
                    for memory, one in zip(buffer.unbind(), by_rank, strict=True):
                        for part, out in zip(memory.split(lengths), one, strict=True):
                            out.copy_(part.clone().view(out.dtype).view(out.shape))

        asked = (engine_codes.ALL_GATHER, _DTYPES[torch.uint8], sum(lengths), 0, 0, 0)
        return self._start(
            what, asked, sent, received, is_async(opts), seconds(opts.timeout), finish, outputs, inputs=given
        )

    def _all_gather(
        self, what: str, outs: list[Any], mine: torch.Tensor, opts: Any, by_rank: bool = False
    ) -> Work:
        group = self.trigram_group
        mine, *outs = (tensors.check(t, what) for t in (mine, *outs))
        tensors.same(mine, outs, what)
        if by_rank and len(outs) != group.size:
            raise MisuseError(f"{what}: {len(outs)} tensors for {group.size} ranks; pass one for each rank")
        lengths = [t.numel() for t in outs]
        uneven = by_rank and len(set(lengths)) > 1
        expected = lengths[group.rank] * group.size if uneven else sum(lengths)
        if mine.numel() * group.size != expected:
            raise MisuseError(
                f"{what}: the output has {sum(lengths)} elements and the input {mine.numel()}; with "
                f"{group.size} ranks the output must have {mine.numel() * group.size}"
            )
        for t in outs:
            if t.requires_grad:
                torch.autograd.graph.increment_version(t)
        flat, finish = tensors.target(outs)
        sent, received = tensors.moved(tensors.source(mine)), tensors.moved(flat)
        background, limit = is_async(opts), seconds(opts.timeout)
        if uneven:
            parts = tensors.lengths(outs)
            if not sent.is_cpu:  # NCCL has no uneven gather
                repeated, splits = sent.view(-1).repeat(group.size), ([sent.numel()] * group.size, parts)
                asked = (engine_codes.ALL_TO_ALL, _DTYPES[sent.dtype], 0, 0, 0, 0)
                return self._start(
                    what, asked, repeated, received, background, limit, finish, outs, splits, [mine]
                )
            asked = (engine_codes.ALL_GATHER, _DTYPES[sent.dtype], 0, 0, 0, 0)
            return self._start(
                what, asked, sent, received, background, limit, finish, outs, (parts, parts), [mine]
            )
        asked = (engine_codes.ALL_GATHER, _DTYPES[sent.dtype], sent.numel(), 0, 0, 0)
        return self._start(what, asked, sent, received, background, limit, finish, outs, inputs=[mine])

    def gather(
        self,
        outs: Any,
        given: Any,
        opts: Any = None,
        timeout: Any = None,
        *,
        root: Any = None,
    ) -> Work:
        """Collects the tensors of all ranks in a list of one rank."""
        opts = options(c10d.GatherOptions, opts if opts is not None else root, timeout, rootRank=None)
        group = self.trigram_group
        mine = tensors.check(only(listed(given), "gather"), "gather")
        here = group.rank == opts.rootRank
        lists = outs if outs and isinstance(outs[0], list | tuple) else [outs] if outs else []
        if not here and lists:
            raise MisuseError(
                f"gather: requires empty output on rank {group.ranks[group.rank]}, which is not the root"
            )
        wanted = [tensors.check(t, "gather") for t in only(lists, "gather")] if here else []
        received, finish = None, None
        if here:
            self._check_each(wanted, mine, "gather")
            flat, finish = tensors.target(wanted)
            received = tensors.moved(flat)
        sent = tensors.moved(tensors.source(mine))
        asked = (engine_codes.GATHER, _DTYPES[sent.dtype], sent.numel(), 0, 0, opts.rootRank)
        return self._start(
            "gather",
            asked,
            sent,
            received,
            is_async(opts),
            seconds(opts.timeout),
            finish,
            wanted,
            inputs=[mine],
        )

    def scatter(
        self, outs: Any, given: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> Work:
        """Gives rank i the i-th tensor of a list of one rank."""
        opts = options(c10d.ScatterOptions, opts if opts is not None else root, timeout, rootRank=None)
        group = self.trigram_group
        out = tensors.check(only(listed(outs), "scatter"), "scatter")
        here = group.rank == opts.rootRank
        lists = given if given and isinstance(given[0], list | tuple) else [given] if given else []
        if not here and lists:
            raise MisuseError(
                f"scatter: requires empty input on rank {group.ranks[group.rank]}, which is not the root"
            )
        parts = [tensors.check(t, "scatter") for t in only(lists, "scatter")] if here else []
        source = None
        if here:
            self._check_each(parts, out, "scatter")
            source = tensors.moved(tensors.sources(parts))
        if out.requires_grad:
            torch.autograd.graph.increment_version(out)
        target = tensors.Target([out])
        received = tensors.moved(target.flat)
        asked = (engine_codes.SCATTER, _DTYPES[received.dtype], received.numel(), 0, 0, opts.rootRank)
        return self._start(
            "scatter", asked, source, received, is_async(opts), seconds(opts.timeout), target.finish, [out],
            inputs=parts,
        )  # fmt: skip

    def _check_each(self, parts: list[torch.Tensor], one: torch.Tensor, what: str) -> None:
        """Checks a list of the root: a tensor for each rank, of the size of ``one``."""
        size = self.trigram_group.size
        if len(parts) != size:
            raise MisuseError(f"{what}: {len(parts)} tensors for {size} ranks; pass one for each rank")
        for t in parts:
            if t.numel() != one.numel():
                raise MisuseError(
                    f"{what}: the tensors have {t.numel()} and {one.numel()} elements; make them equal"
                )
        tensors.same(one, parts, what)

    def all_to_all_single(
        self,
        out: Any,
        given: Any,
        out_splits: Sequence[int] = (),
        in_splits: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """Sends the j-th part of a tensor to rank j, and collects the parts for this rank."""
        what = "all_to_all_single"
        opts = options(c10d.AllToAllOptions, opts, timeout)
        out, given = tensors.check(out, what), tensors.check(given, what)
        tensors.same(out, [given], what)
        if out.requires_grad:
            torch.autograd.graph.increment_version(out)
        target = tensors.Target([out])
        sent, received = tensors.moved(tensors.source(given)), tensors.moved(target.flat)
        lengths = (
            self._lengths(given, sent, in_splits, "input"),
            self._lengths(out, received, out_splits, "output"),
        )
        return self._all_to_all(what, sent, received, lengths, opts, target.finish, [out], [given])

    def alltoall(self, outs: Any, given: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Sends the j-th tensor of a list to rank j, and collects those for this rank in a list."""
        what, size = "all_to_all", self.trigram_group.size
        opts = options(c10d.AllToAllOptions, opts, timeout)
        outs, given = [tensors.check(t, what) for t in outs], [tensors.check(t, what) for t in given]
        if len(outs) != size or len(given) != size:
            raise MisuseError(
                f"{what}: {len(given)} tensors in and {len(outs)} out for {size} ranks; pass one for "
                "each rank"
            )
        tensors.same(outs[0], [*outs, *given], what)
        for t in outs:
            if t.requires_grad:
                torch.autograd.graph.increment_version(t)
        flat, finish = tensors.target(outs)
        sent, received = tensors.moved(tensors.sources(given)), tensors.moved(flat)
        lengths = (tensors.lengths(given), tensors.lengths(outs))
        return self._all_to_all(what, sent, received, lengths, opts, finish, outs, given)

    def _all_to_all(
        self,
        what: str,
        sent: Memory,
        received: Memory,
        lengths: tuple[list[int], list[int]],
        opts: Any,
        finish: Callable[[], None] | None,
        outs: list[torch.Tensor],
        given: list[torch.Tensor],
    ) -> Work:
        group = self.trigram_group
        if lengths[0][group.rank] != lengths[1][group.rank]:
            raise MisuseError(
                f"{what}: the part that rank {group.rank} sends to itself has {lengths[0][group.rank]} "
                f"elements, and the part that it receives from itself {lengths[1][group.rank]}; make them "
                "equal"
            )
        # Always with lengths: ranks with equal parts and ranks with others take part in the same call.
        dtype = _DTYPES.get(outs[0].dtype, _DTYPES[torch.uint8])  # as `moved` has it
        asked = (engine_codes.ALL_TO_ALL, dtype, 0, 0, 0, 0)
        return self._start(
            what, asked, sent, received, is_async(opts), seconds(opts.timeout), finish, outs, lengths, given
        )

    def _lengths(self, t: torch.Tensor, flat: torch.Tensor, splits: Sequence[int], which: str) -> list[int]:
        """Elements of ``flat`` for each rank, from splits along the first dimension of ``t``."""
        size = self.trigram_group.size
        rows = t.shape[0] if t.dim() else 1
        if not splits:
            if rows % size:
                raise MisuseError(
                    f"all_to_all_single: the {which} tensor's dim 0 does not divide equally across the group "
                    f"size: {rows} rows for {size} ranks; pass splits"
                )
            return [flat.numel() // size] * size
        if len(splits) != size or min(splits) < 0 or sum(splits) != rows:
            raise MisuseError(
                f"all_to_all_single: split sizes doesn't match total dim 0 size: {which} splits "
                f"{list(splits)} must be {size} lengths that add up to {rows}"
            )
        row = flat.numel() // rows if rows else 0
        return [int(n) * row for n in splits]

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
