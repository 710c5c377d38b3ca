"""Pipeline parallelism: four ranks hold one stage each, and work on several micro-batches at a time (1F1B).

torchrun --nproc-per-node 4 examples/pipeline_parallel.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformer_block import Model, batch, loss_of

import trigram  # noqa: F401  # registers the backend

STEPS, SIZE, MICRO_BATCHES = 5, 8, 8


def stages(model: Model, count: int) -> list[nn.Module]:
    """The model cut into stages of as many blocks; the last one projects to classes too."""
    blocks, per = list(model.blocks), len(model.blocks) // count
    parts = [nn.Sequential(*blocks[k * per : (k + 1) * per]) for k in range(count)]
    parts[-1] = nn.Sequential(parts[-1], model.norm, model.classes)
    return parts


def train_alone(ranks: int) -> list[float]:
    """The losses of one process."""
    torch.manual_seed(0)
    model = Model(blocks=ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        x, targets = batch(step, SIZE)
        loss = loss_of(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> float:
    """Trains; returns the largest difference of a loss to that of one process (0 where there is no loss)."""
    if not dist.is_initialized():
        dist.init_process_group("trigram")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    part = stages(Model(blocks=ranks), ranks)[rank]
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    alone, worst = train_alone(ranks), 0.0
    for step in range(STEPS):
        x, targets = batch(step, SIZE)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        if losses:
            loss = torch.stack(losses).mean().item()
            worst = max(worst, abs(loss - alone[step]))
            print(f"step {step}: loss {loss:.6f}, one process {alone[step]:.6f}")
    return worst


if __name__ == "__main__":
    assert main() < 1e-5
    dist.destroy_process_group()
