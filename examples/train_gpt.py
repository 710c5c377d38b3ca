"""Trains a small byte-level GPT on the text of Python's standard library, on several ranks.

torchrun --nproc-per-node 2 examples/train_gpt.py          with trigram
torchrun --nproc-per-node 2 examples/train_gpt.py --ddp    with DistributedDataParallel, on gloo
trigram run -n 2 examples/train_gpt.py                       the same, without torchrun
srun -n 2 python examples/train_gpt.py                       under Slurm; mpiexec works too
python examples/train_gpt.py                               alone

Another algorithm without touching the script: TRIGRAM_ALGORITHM=bytegrad torchrun ...
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

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
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=16, help="samples that a rank takes in a step")
args = parser.parse_args()
CONTEXT = 64

rank, world = trigram.rank(), trigram.world_size()  # joins the job, under any launcher
if args.ddp:
    dist.init_process_group("gloo")


class GPT(nn.Module):
    """Bytes to logits of the next byte: (batch, CONTEXT) to (batch, CONTEXT, 256)."""

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeds, applies the blocks, and scores the bytes."""
        x = self.token(ids) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        return self.head(self.blocks(x, mask, is_causal=True))


files = sorted(Path(os.__file__).parent.glob("*.py"))[:100]
text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
kept, held = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
draw = torch.Generator().manual_seed(rank)


def loss_on(part: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """The mean loss of `count` windows drawn from a part of the text, in nats a byte."""
    start = torch.randint(len(part) - CONTEXT, (count, 1), generator=generator)
    window = part[start + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


torch.manual_seed(7)
model: nn.Module = GPT()
model = DDP(model) if args.ddp else trigram.with_bagua(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(1, args.steps + 1):
    loss = loss_on(kept, args.batch, draw)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

# Where an algorithm leaves different weights on the ranks, all evaluate their mean.
with torch.no_grad(), nullcontext() if args.ddp else trigram.consensus(model):
    held_out = loss_on(held, 256, torch.Generator().manual_seed(0))
if rank == 0:
    print(f"held-out loss {held_out.item():.4f} nats a byte")

trigram.shutdown()
if args.ddp:
    dist.destroy_process_group()
