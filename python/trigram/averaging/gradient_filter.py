"""The base class of what gradients pass on their way to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, SupportsIndex

import torch

from trigram.errors import MisuseError


class Views(tuple[torch.Tensor, ...]):
    """Views into gradients that a script changes in place: another tensor in their place would be averaged
    nowhere. ``views[k] *= 2`` is in place."""

    __slots__ = ()

    def __setitem__(self, k: SupportsIndex, value: torch.Tensor) -> None:
        if self[k] is not value:
            raise MisuseError(
                f"views[{k}] cannot be replaced, for another tensor would not be averaged; change its values "
                f"in place, as in views[{k}].clamp_(-1, 1)"
            )


class GradientBucket(Protocol):
    """Gradients of one dtype that are averaged together. A filter changes their values in place; it cannot
    replace the tensors."""

    @property
    def values(self) -> torch.Tensor:
        """The gradients, one after the other: one-dimensional, with zeros between them."""

    @property
    def views(self) -> Sequence[torch.Tensor]:
        """The gradient of each parameter, as a view into ``values``, of the parameter's shape; zeros where
        this rank has no gradient."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The parameters."""

    @property
    def mean(self) -> torch.Tensor:
        """The averages when they are there, in the place of ``values``; this rank's part of them with
        ``gradients="shards"``."""


class GradientFilter:
    """Looks at this rank's gradients, or changes them in place, before they are averaged:
    ``with_bagua(model, filters=[MyFilter()])``; see docs/extending.md.

    All filters of a model are called in their order, for each bucket as soon as it is complete, in the middle
    of backward. They make no calls of their own to other ranks.
    """

    def pass_begins(self) -> None:
        """A backward pass begins."""

    def before(self, bucket: GradientBucket) -> None:
        """The gradients of a bucket are complete; what this leaves in ``bucket.values`` is averaged."""

    def averaged(self, buckets: Sequence[GradientBucket]) -> None:
        """All averages of the pass are in ``mean`` of the buckets; the last filter is called first.
        Parameters have not got them, except with ``fused=True``. In elastic jobs it may come twice in a pass.
        """

    def after(self, bucket: GradientBucket) -> None:
        """The parameters of a bucket have their averages."""

    def pass_ends(self) -> None:
        """The pass has ended well on this rank."""
