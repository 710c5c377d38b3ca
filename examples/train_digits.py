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

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
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

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
held, kept = order[:360], order[360:]

torch.manual_seed(7)
model: nn.Module = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
    *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
)
model = DDP(model) if args.ddp else trigram.with_bagua(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(args.epochs):
    # All ranks draw the same permutation; each takes its shard of it, with the same number of batches.
    shard = kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(epoch))][rank::world]
    for batch in shard[: len(kept) // world].split(args.batch):
        loss = F.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # Where an algorithm leaves different weights on the ranks, all evaluate their mean.
    with torch.no_grad(), nullcontext() if args.ddp else trigram.consensus(model):
        logits = model(x[held])
    right = (logits.argmax(1) == y[held]).float().mean()
    if rank == 0:
        print(f"epoch {epoch}: held-out loss {F.cross_entropy(logits, y[held]):.4f}, accuracy {right:.3f}")

trigram.shutdown()
if args.ddp:
    dist.destroy_process_group()
