"""An all-to-all of rows that gradients pass through: backward sends each gradient the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trigram.codecs import Codec
from trigram.collectives import all_to_all
from trigram.runtime.group import Group


@dataclass(frozen=True)
class Route:
    """How many rows go to each rank of a group and come from it.

    Attributes:
        group: The ranks.
        sent: Rows for each of them.
        received: Rows from each of them.
        codec: What encodes each rank's rows; None: they travel as they are.
    """

    group: Group
    sent: list[int]
    received: list[int]
    codec: Codec | None

    def back(self) -> Route:
        """The opposite way."""
        return Route(self.group, self.received, self.sent, self.codec)


class _Travel(torch.autograd.Function):
    """Rows to rows; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: Route) -> torch.Tensor:
        """Sends the rows."""
        ctx.route = route
        return _send(rows, route)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Sends the gradients of the rows that came to where these were from."""
        return travel(gradient, ctx.route.back()), None


def travel(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """Sends rows to the ranks of a route, and returns those that they send here, in rank order.

    Args:
        rows: ``(sum(route.sent), width)``, in rank order.
        route: Who gets how many. All ranks of its group call this.
    """
    moved: torch.Tensor = _Travel.apply(rows, route)  # type: ignore[no-untyped-call]
    return moved


def _send(rows: torch.Tensor, route: Route) -> torch.Tensor:
    rows = rows.detach().contiguous()
    width = rows.shape[1]
    received = rows.new_empty((sum(route.received), width))
    codec = route.codec
    if codec is None:
        all_to_all(received, rows, route.received, route.sent, route.group)
        return received
    out_bytes = [codec.size(count * width) if count else 0 for count in route.received]
    in_bytes = [codec.size(count * width) if count else 0 for count in route.sent]
    encoded = torch.empty(sum(in_bytes), dtype=torch.uint8, device=rows.device)
    coming = torch.empty(sum(out_bytes), dtype=torch.uint8, device=rows.device)
    for part, values in zip(encoded.split(in_bytes), rows.split(route.sent), strict=True):
        if part.numel():
            codec.encode(values, part)
    all_to_all(coming, encoded, out_bytes, in_bytes, route.group)
    parts = zip(coming.split(out_bytes), received.split(route.received), route.group.ranks, strict=True)
    for part, values, sender in parts:
        if part.numel():
            codec.decode(part, values, sender=sender)
    return received
