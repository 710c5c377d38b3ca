"""torch.distributed on gloo: what trigram is compared with. Nothing here knows trigram."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import torch.distributed as dist

from tests.support.harness import scratch
from tests.support.netns import NETWORK

_number = count()


@contextmanager
def gloo(rank: int, world: int) -> Iterator[None]:
    """A default process group on gloo, met through a new file each time, in the same order on all ranks."""
    os.environ.setdefault(
        "GLOO_SOCKET_IFNAME", "eth0" if os.environ["MASTER_ADDR"].startswith(NETWORK) else "lo"
    )
    store = dist.FileStore(str(scratch() / f"gloo-{next(_number)}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
