"""Trains a small CNN on handwritten digits, on several ranks.

torchrun --nproc-per-node 2 examples/train_digits.py          with trigram
torchrun --nproc-per-node 2 examples/train_digits.py --ddp    with DistributedDataParallel, on gloo
python examples/train_digits.py                               alone

Another algorithm without touching the script: TRIGRAM_ALGORITHM=bytegrad torchrun ...
"""

import argparse
import os

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import trigram

parser = argparse.ArgumentParser()
parser.add_argument(
    "--ddp", action="store_true", help="train with DistributedDataParallel in place of trigram"
)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=32, help="samples that a rank takes in a step")
args = parser.parse_args()

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
where = "env://" if "RANK" in os.environ else "tcp://127.0.0.1:0"
dist.init_process_group("gloo", where, rank=rank, world_size=world)

kept, held = digits.load()
x, y = kept.tensors

torch.manual_seed(7)
model: nn.Module = digits.cnn()
model = DDP(model) if args.ddp else trigram.with_bagua(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(args.epochs):
    # All ranks draw the same permutation; each takes its shard of it, with the same number of batches.
    shard = torch.randperm(len(kept), generator=torch.Generator().manual_seed(epoch))[rank::world]
    for batch in shard[: len(kept) // world].split(args.batch):
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # With gossip or an asynchronous algorithm, evaluate inside `with trigram.consensus(model):` on all ranks.
    right = digits.accuracy(model, held)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {right:.3f}")

trigram.shutdown()
dist.destroy_process_group()
