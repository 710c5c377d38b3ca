"""The buffers of a model, as one rank sends them to the others before a backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trigram.averaging.groups import ModelGroups
from trigram.collectives import coalesced
from trigram.runtime.group import Group
from trigram.steps.model_changes import agree_on_layouts, layouts


class BufferBroadcast:
    """Gives all ranks the buffers of one, as they are when it is called: scripts replace buffers, resize them
    and give them another dtype, and each rank may do so at another step."""

    def __init__(self, groups: ModelGroups) -> None:
        self.groups = groups
        self._found: list[Any] = []
        self._layouts = ""
        self._coalesced: list[coalesced.Coalesced] = []
        self._late: list[coalesced.Coalesced] = []

    @torch.no_grad()
    def send(self, model: nn.Module, src: int, group: Group, in_backward: bool) -> None:
        """Broadcasts the buffers of group rank ``src``; all ranks call it.

        Args:
            model: The module.
            src: The group rank.
            group: The ranks.
            in_backward: Backward may need the buffers as they are: :meth:`write_late` writes them.

        Raises:
            MismatchError: The buffers have other names, shapes or dtypes on some ranks; all raise it.
        """
        self._find(model)
        if not self._layouts:
            return
        agree_on_layouts(self._layouts, group)
        for buffers in self._coalesced:
            buffers.broadcast(src, group, unpack=not in_backward)
        self._late = self._coalesced if in_backward and group.rank != src else []

    def write_late(self) -> None:
        """The backward pass has ended: writes what :meth:`send` has received in it."""
        late, self._late = self._late, []
        for buffers in late:
            # Through `data`: the graph of this pass may be used again, and buffers are constants to it.
            torch._foreach_copy_([t.data for t in buffers.tensors], buffers.views)

    def _find(self, model: nn.Module) -> None:
        named = [(n, b) for n, b in model.named_buffers() if n not in self.groups.ignored]
        found = [(n, id(b), b.shape, b.stride(), b.dtype, b.device) for n, b in named]
        if found != self._found:
            self._found, self._layouts = found, layouts(named)
            filled = [b for _, b in named if b.numel()]
            self._coalesced = [coalesced.Coalesced(same) for same in coalesced.alike(filled)]
