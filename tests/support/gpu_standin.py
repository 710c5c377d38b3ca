"""The GPU path on a machine without one: CPU tensors take the way of GPU tensors, over a stand-in for
NCCL and the driver (rust/nccl/tests/standin), which is stricter than they are. Everything is ours and
real but the device: agreement, communicators, witnesses, streams' order, staging, hierarchy."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import trigram
from trigram.backend.calls import reductions, tensors
from trigram.collectives import calls, dispatch, messages
from trigram.collectives.arguments import check, seconds
from trigram.gpu import device, nccl
from trigram.runtime import engine_codes, memory, world

SOURCE = Path(__file__).resolve().parents[2] / "rust/nccl/tests/standin"


@functools.cache
def library() -> Path:
    """Compiles the stand-in, once per test process."""
    file = Path(tempfile.mkdtemp(prefix="trigram-standin-")) / "libstandin.so"
    sources = [str(SOURCE / name) for name in ("cuda.c", "nccl.c")]
    command = ["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(file), *sources, "-lrt"]
    subprocess.run(command, check=True)
    return file


def env(way: str = "nccl") -> dict[str, str]:
    """What a rank needs in its environment; the harness calls `use` then."""
    return {"TRIGRAM_TEST_STANDIN": way, "TRIGRAM_GPU_TRANSPORT": way, **libraries()}


def libraries() -> dict[str, str]:
    """Where NCCL and the driver are, for a process that handles CPU tensors as ever."""
    return {"TRIGRAM_NCCL_LIB": str(library()), "TRIGRAM_CUDA_LIB": str(library())}


class StandIn:
    """A device whose memory is the host's, and whose default stream is always empty."""

    def __init__(self, _: torch.device) -> None:
        self.index = int(os.environ.get("LOCAL_RANK", "0"))

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        return False

    def keep(self, t: torch.Tensor, stream: int) -> None:
        assert stream != 0

    def pinned(self, nbytes: int) -> torch.Tensor:
        return _empty(nbytes, dtype=torch.uint8)

    def fetch(self, host: torch.Tensor, t: torch.Tensor) -> Callable[[], None]:
        host.copy_(t)
        return lambda: None

    def behind(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def here(self) -> Callable[[], None]:
        return lambda: None

    def mark(self) -> Callable[[], bool]:
        return lambda: True


_empty = memory.empty
COUNT = {"calls": 0}


def _is_on_device(_: torch.Tensor, asked: engine_codes.Asked) -> bool:
    """All but what the engine alone does: schedules by name, and operators that NCCL lacks."""
    bitwise = asked[3] >= engine_codes.OPS["band"] and (
        asked[1] != engine_codes.DTYPES[torch.bool] or asked[3] == engine_codes.OPS["bxor"]
    )
    if asked[4] or (bitwise and os.environ["TRIGRAM_GPU_TRANSPORT"] == "nccl"):
        return False
    COUNT["calls"] += 1
    return True


def _message(
    sends: bool, t: torch.Tensor, peer: int, tag: int, group: Any, async_op: bool, timeout: Any
) -> Any:
    what = "send" if sends else "recv"
    g = world.resolve(group)
    code, limit = check(t, what), g.timeout if timeout is None else seconds(timeout, what)
    work = messages._on_device(g, sends, g.group_rank(peer, what), tag, t, code, limit)
    COUNT["calls"] += 1
    if async_op:
        return work, None
    work.wait()
    return None, peer


def _order(call: nccl._OnStream) -> None:
    """As `wait` on the host, whatever TRIGRAM_GPU_WAIT says."""
    try:
        call._call.wait(None)
    except trigram.TrigramError:
        call._route.broken = True
        raise


def use() -> None:
    """From now on, in this process."""
    device.kinds["cpu"] = StandIn
    # The host reads and writes at once what a stream would put in order.
    nccl._OnStream.order = _order  # type: ignore[method-assign]
    dispatch.is_on_device = _is_on_device
    calls.all_reduce_at_once = lambda group, t, op: False  # type: ignore[assignment]
    messages._message = _message
    tensors.are_pieces = lambda pieces: False  # lists are for the engine alone
    reductions._SUM = -1  # no call takes the short way of tensors on the host
