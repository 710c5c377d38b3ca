"""Replicas of several ranks in an elastic job: FSDP2 inside of each, DiLoCo between them. Handwritten digits.

One torchrun for each replica, which starts all of its ranks again when one of them dies; the job's store is
at the first. On one machine, with two replicas of two ranks:

    for i in 0 1; do
        REPLICA=$i REPLICAS=2 JOB_STORE=127.0.0.1:29400 torchrun --standalone --nproc-per-node 2 \\
            --max-restarts 10 examples/elastic_replicas.py &
    done; wait

Kill a rank: its replica starts again and joins, and the other goes on meanwhile.
"""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import trigram


def main() -> None:
    """Trains on one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to sleep in each step")
    args = parser.parse_args()

    # Inside the replica: torchrun's ranks, which FSDP uses. Of a life each, or gloo finds what an earlier one
    # has left in torchrun's store (torch 2.13).
    env = os.environ
    size, place = int(env["WORLD_SIZE"]), int(env["RANK"])
    inner = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    inner = dist.PrefixStore(f"life {env['TORCHELASTIC_RESTART_COUNT']}", inner)
    dist.init_process_group("gloo", store=inner, rank=place, world_size=size, timeout=timedelta(minutes=1))
    # Between the replicas: all ranks of all of them.
    replica, replicas = int(env["REPLICA"]), int(env["REPLICAS"])
    host, port = env["JOB_STORE"].split(":")
    store = dist.TCPStore(host, int(port), is_master=replica == place == 0, wait_for_workers=False)
    trigram.init(store, replica * size + place, replicas * size, elastic=True, replica_size=size)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    shards = trigram.with_bagua(
        trigram.local_shards(model), "diloco", every=10, optimizer=optimizer, elastic=True
    )

    first = trigram.stats(shards)["steps"]
    for step in range(first, args.steps):
        draw = torch.Generator().manual_seed(step * 64 + trigram.rank())
        batch = torch.randint(len(x), (64,), generator=draw)
        loss = functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trigram.step(shards)
        if step == first:
            print(f"has made step {step}", flush=True)
        time.sleep(args.pause)

    with torch.no_grad(), trigram.consensus(shards):
        logits = model(x)
    loss, right = functional.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()
    print(f"rank {trigram.rank()}: loss {loss:.5f}, {100 * right:.1f} % right, {trigram.world_size()} ranks")


if __name__ == "__main__":
    main()
