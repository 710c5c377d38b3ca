"""Optimizer parallelism: every rank has the whole model, and the optimizer's state of a part of it (ZeRO).

torchrun --nproc-per-node 2 examples/optimizer_parallel.py
"""

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from transformer_block import Model, batch, loss_of, train_alone

import trigram  # noqa: F401  # registers the backend

STEPS, SIZE = 5, 12


def main() -> float:
    """Trains; returns the largest difference of a loss to that of one process."""
    if not dist.is_initialized():
        dist.init_process_group("trigram")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    alone, worst = train_alone(STEPS, SIZE), 0.0
    for step in range(STEPS):
        x, targets = (t.chunk(ranks)[rank] for t in batch(step, SIZE))
        loss = loss_of(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        worst = max(worst, abs(mean.item() - alone[step]))
        if rank == 0:
            print(f"step {step}: loss {mean.item():.6f}, one process {alone[step]:.6f}")
    held = sum(t.numel() for state in optimizer.optim.state.values() for t in state.values() if t.dim())
    print(f"rank {rank} holds {held} of {2 * sum(p.numel() for p in model.parameters())} values of state")
    return worst


if __name__ == "__main__":
    assert main() < 1e-5
    dist.destroy_process_group()
