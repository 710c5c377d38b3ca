"""Messages between two ranks; for what the calls have in common, see ``calls.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from trigram.collectives.arguments import check, seconds
from trigram.collectives.work import Work
from trigram.errors import MisuseError, UnsupportedError
from trigram.gpu import routes
from trigram.runtime import dynamo
from trigram.runtime.group import Group
from trigram.runtime.world import AnyGroup, resolve


def send(
    t: torch.Tensor,
    dst: int,
    tag: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | None:
    """Sends ``t`` to rank ``dst``. Messages with the same tag arrive in order.

    A message of up to 1 MiB may return before it is received; a larger one returns when the receiver takes
    it.
    """
    work, _ = _message(True, t, dst, tag, group, async_op, timeout)
    return work


@overload
def recv(
    t: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    group: AnyGroup = None,
    async_op: Literal[False] = False,
    timeout: float | None = None,
) -> int: ...


@overload
def recv(
    t: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    group: AnyGroup = None,
    *,
    async_op: Literal[True],
    timeout: float | None = None,
) -> Work: ...


@overload
def recv(
    t: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | int: ...


def recv(
    t: torch.Tensor,
    src: int | None = None,
    tag: int = 0,
    group: AnyGroup = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Work | int:
    """Receives the next message of rank ``src`` with this tag into ``t``, of the same size and dtype.

    Args:
        t: The message, of the sender's size and dtype.
        src: The sender; None: whichever rank's message comes first. A message goes to the receive that was
            made first, of those that fit.
        tag: Only messages that were sent with it.
        group: The ranks that may send.
        async_op: Return at once, with a :class:`Work`; its ``source_rank()`` is the sender.
        timeout: Seconds; None: the group's.

    Returns:
        The sender's world rank; with ``async_op`` a :class:`Work`.

    Raises:
        PeerLostError: The sender is lost. From any source: a rank of the group has died, whose message it may
            have been, or all others have left. A message that has come before is received all the same.
    """
    work, sender = _message(False, t, src, tag, group, async_op, timeout)
    if work is not None:
        return work
    assert sender is not None
    return sender


@dynamo.disable
def _message(
    sends: bool,
    t: torch.Tensor,
    peer: int | None,
    tag: int,
    group: AnyGroup,
    async_op: bool,
    timeout: float | None,
) -> tuple[Work | None, int | None]:
    what = "send" if sends else "recv"
    g = resolve(group)
    dtype = check(t, what)
    if not 0 <= tag < 1 << 31:
        raise MisuseError(f"{what}: tag {tag} is invalid; it must be from 0 to 2**31 - 1")
    place = None if peer is None else g.group_rank(peer, what)
    if not sends and t.requires_grad:
        torch.autograd.graph.increment_version(t)
    limit = g.timeout if timeout is None else seconds(timeout, what)
    if not t.is_cpu:
        work = _on_device(g, sends, place, tag, t, dtype, limit)
        if async_op:
            return work, None
        work.wait()
        return None, peer
    core, sender = g.core.message(sends, place, tag, dtype, t.numel(), t.data_ptr(), async_op, False, limit)
    return None if core is None else Work(core, (t,), what, g.describe), sender


def _on_device(
    group: Group, sends: bool, place: int | None, tag: int, t: torch.Tensor, dtype: int, limit: float | None
) -> Work:
    """Starts a message of a GPU tensor; ``place`` is the other's group rank."""
    if place is None:
        raise UnsupportedError(
            "recv: src=None works on CPU tensors only; name the sender, or receive into a CPU tensor"
        )
    call = routes.message(group, sends, place, tag, t, dtype, limit)
    return Work(call, (t,), "send" if sends else "recv", group.describe)


def batch_send_recv(messages: Sequence[tuple[bool, int, torch.Tensor]], group: Group) -> Work:
    """Sends and receives several messages at once, with tensors on one GPU. All ranks of the group call it.

    Args:
        messages: Whether this rank sends the message, the other's group rank, and the tensor.
        group: The ranks.
    """
    coded = [(sends, place, t, check(t, "batch_send_recv")) for sends, place, t in messages]
    call = routes.batch_send_recv(group, coded)
    return Work(call, tuple(t for _, _, t in messages), "batch_send_recv")
