"""A model that does not fit beside DDP's state in the memory that there is, and trains sharded."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from tests.support import cgroups
from tests.support.harness import Ranks, RanksFailed, await_flag, free_port, say

WORLD = 4
LAYERS, WIDTH = 16, 1024
WEIGHTS = LAYERS * WIDTH * WIDTH * 4
LIMITS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


def trains(rank: int, world: int, way: str, port: int) -> list[float]:
    """A few steps of AdamW; the losses of the first step and of the last."""
    torch.manual_seed(0)
    if way == "ddp":
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    else:
        trigram.init()
    torch.ones(8, 8).matmul(torch.ones(8, 8))  # what torch takes once
    say("ready")
    await_flag("limited")
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    if way == "ddp":
        model: nn.Module = DistributedDataParallel(net, gradient_as_bucket_view=True)
    else:
        model = trigram.with_bagua(net, "sharded", optimizer=optimizer, gradients="shards")
    losses = []
    for step in range(4):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank + world * (step % 2)))
        optimizer.zero_grad()
        loss = model(x).sub(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return [losses[0], losses[-1]]


@pytest.mark.parametrize("way", ["sharded", "ddp"])
def test_what_fits_in_little_memory(way: str) -> None:
    """DDP and AdamW take weights, gradients and two moments per rank: 4 x 4 times the weights. Sharded with
    gradients in shards it is 4 x 1.75 times, and buckets. With what torch takes in four processes 20 and 12
    times were measured; the limit is 14."""
    root, file = next((each for each in LIMITS if Path(each[0]).is_dir()), LIMITS[0])
    with cgroups.new(root, file) as folder, Ranks(WORLD, trains, way, free_port()) as ranks:
        for rank in range(WORLD):
            (folder / "cgroup.procs").write_text(str(ranks.pid(rank)))
        for rank in range(WORLD):
            ranks.await_said(rank, "ready", 60)
        (folder / file).write_text(str(14 * WEIGHTS))
        (ranks.dir / "flag-limited").touch()
        if way == "sharded":
            for first, last in ranks.results(120):
                assert last < first
        else:
            with pytest.raises(RanksFailed, match=f"{signal.SIGKILL:d}|SIGKILL|allocat"):
                ranks.results(120)
