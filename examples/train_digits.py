"""Trains a small CNN on handwritten digits, on several ranks.

torchrun --nproc-per-node 2 examples/train_digits.py          with trigram
torchrun --nproc-per-node 2 examples/train_digits.py --ddp    with DistributedDataParallel, on gloo
trigram run -n 2 examples/train_digits.py                       the same, without torchrun
srun -n 2 python examples/train_digits.py                       under Slurm; mpiexec works too
python examples/train_digits.py                               alone

Another algorithm without touching the script: TRIGRAM_ALGORITHM=bytegrad torchrun ...
"""

import argparse
from contextlib import nullcontext

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

rank, world = trigram.rank(), trigram.world_size()  # joins the job, under any launcher
if args.ddp:
    dist.init_process_group("gloo")

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
    # Where an algorithm leaves different weights on the ranks, all evaluate their mean.
    with nullcontext() if args.ddp else trigram.consensus(model):
        right = digits.accuracy(model, held)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {right:.3f}")

trigram.shutdown()
if args.ddp:
    dist.destroy_process_group()
