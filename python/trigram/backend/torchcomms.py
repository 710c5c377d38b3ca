"""Trigram as a backend of torchcomms.

With ``TORCH_DISTRIBUTED_USE_TORCHCOMMS=1`` torch makes every process group through torchcomms, ours too. This
adapter gives torchcomms the calls of a group; they return None or a handle with ``wait``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trigram import collectives
from trigram.collectives.work import Work
from trigram.errors import UnsupportedError
from trigram.runtime import world
from trigram.runtime.group import Group


def register() -> type:
    """Registers the backend with torchcomms, which calls it through its entry point.

    Returns:
        The class of the communicators.

    Raises:
        UnsupportedError: torchcomms is not installed, or has no backends in Python.
    """
    try:
        import torchcomms  # type: ignore[import-not-found]
    except ImportError as e:
        raise UnsupportedError(f"torchcomms cannot be imported: {e}") from e
    if not hasattr(torchcomms, "register_backend"):
        raise UnsupportedError("this torchcomms has no backends in Python; install a newer one")

    class TrigramComm(Calls, torchcomms.TorchCommBackend):  # type: ignore[misc]
        """A communicator of torchcomms."""

    torchcomms.register_backend("trigram", TrigramComm)
    return TrigramComm


class Calls:
    """The calls of a communicator, with the names and arguments of torchcomms' contract."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: Group | None = None
        self._name = ""

    def init(self, device: Any, name: str, options: Any = None) -> None:
        """Joins the job, of ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``."""
        del device, options  # a Python backend of torchcomms is given neither its store nor its ranks
        self._name = name
        if self._group is None:
            self._group = world.current().group

    def _ranks(self) -> Group:
        return self._group if self._group is not None else world.current().group

    def split(self, ranks: Sequence[int], name: str, options: Any = None) -> Any:
        """A communicator of some ranks of this one; None if this rank is not among them."""
        made = world.torch_group([self._world_rank(r) for r in ranks])
        if made.rank < 0:
            return None
        comm = type(self)()
        comm._group = made
        comm.init(None, name, options)
        return comm

    def finalize(self) -> None:
        """Ends the communicator."""
        self._group = None

    def get_rank(self) -> int:
        """This rank."""
        return self._ranks().rank

    def get_size(self) -> int:
        """The number of ranks."""
        return self._ranks().size

    def get_backend_name(self) -> str:
        """The backend's name."""
        return "trigram"

    def get_comm_name(self) -> str:
        """The communicator's name."""
        return self._name

    def _world_rank(self, place: int) -> int:
        return self._ranks().ranks[place]

    def all_reduce(self, t: torch.Tensor, op: Any, async_op: bool = False, *_: Any) -> Work | None:
        """Reduces in place."""
        return collectives.all_reduce(t, _op(op), group=self._ranks(), async_op=async_op)

    def reduce(self, t: torch.Tensor, root: int, op: Any, async_op: bool = False, *_: Any) -> Work | None:
        """Reduces to one rank."""
        return collectives.reduce(t, self._world_rank(root), _op(op), self._ranks(), async_op)

    def broadcast(self, t: torch.Tensor, root: int, async_op: bool = False, *_: Any) -> Work | None:
        """Copies to all ranks."""
        return collectives.broadcast(t, self._world_rank(root), self._ranks(), async_op)

    def all_gather_single(
        self, out: torch.Tensor, t: torch.Tensor, async_op: bool = False, *_: Any
    ) -> Work | None:
        """Collects in one tensor."""
        return collectives.all_gather(out, t, self._ranks(), async_op)

    def all_gather(
        self, outs: Sequence[torch.Tensor], t: torch.Tensor, async_op: bool = False, *_: Any
    ) -> Work | None:
        """Collects in a list; lengths may differ."""
        return collectives.all_gather(list(outs), t, self._ranks(), async_op)

    all_gather_v = all_gather

    def reduce_scatter_single(
        self, out: torch.Tensor, t: torch.Tensor, op: Any, async_op: bool = False, *_: Any
    ) -> Work | None:
        """Reduces, and gives each rank a part."""
        return collectives.reduce_scatter(out, t, _op(op), self._ranks(), async_op)

    def reduce_scatter(
        self, out: torch.Tensor, parts: Sequence[torch.Tensor], op: Any, async_op: bool = False, *_: Any
    ) -> Work | None:
        """Reduces the tensors of a list; rank i gets the i-th."""
        return collectives.reduce_scatter(out, list(parts), _op(op), self._ranks(), async_op)

    reduce_scatter_v = reduce_scatter

    def all_to_all_single(
        self, out: torch.Tensor, t: torch.Tensor, async_op: bool = False, *_: Any
    ) -> Work | None:
        """Sends a part to each rank."""
        return collectives.all_to_all(out, t, group=self._ranks(), async_op=async_op)

    def all_to_all_v_single(
        self,
        out: torch.Tensor,
        t: torch.Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        async_op: bool = False,
        *_: Any,
    ) -> Work | None:
        """The same with parts of different lengths."""
        return collectives.all_to_all(out, t, out_splits, in_splits, self._ranks(), async_op)

    def all_to_all(
        self, outs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], async_op: bool = False, *_: Any
    ) -> Work | None:
        """Sends a tensor to each rank."""
        return collectives.all_to_all(list(outs), list(parts), group=self._ranks(), async_op=async_op)

    def gather(
        self,
        outs: Sequence[torch.Tensor],
        t: torch.Tensor,
        root: int,
        async_op: bool = False,
        *_: Any,
    ) -> Work | None:
        """Collects on one rank."""
        dst = self._world_rank(root)
        return collectives.gather(list(outs) or None, t, dst, self._ranks(), async_op)

    def scatter(
        self,
        out: torch.Tensor,
        parts: Sequence[torch.Tensor],
        root: int,
        async_op: bool = False,
        *_: Any,
    ) -> Work | None:
        """Gives each rank a tensor of one rank."""
        return collectives.scatter(out, list(parts) or None, self._world_rank(root), self._ranks(), async_op)

    def barrier(self, async_op: bool = False, *_: Any) -> Work | None:
        """Waits for all ranks."""
        return collectives.barrier(self._ranks(), async_op)

    def send(self, t: torch.Tensor, dst: int, async_op: bool = False, *_: Any) -> Work | None:
        """Sends a message."""
        return collectives.send(t, self._world_rank(dst), group=self._ranks(), async_op=async_op)

    def recv(self, t: torch.Tensor, src: int, async_op: bool = False, *_: Any) -> Work | None:
        """Receives a message."""
        if async_op:
            return collectives.recv(t, self._world_rank(src), group=self._ranks(), async_op=True)
        collectives.recv(t, self._world_rank(src), group=self._ranks())
        return None


def _op(op: Any) -> Any:
    """An operator of torchcomms as one of ours."""
    name = getattr(op, "name", str(op)).rpartition(".")[2].lower()
    return {"product": "prod"}.get(name, name)
