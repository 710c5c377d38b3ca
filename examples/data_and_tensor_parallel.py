"""A mesh of 2 x 2 ranks: tensor parallel inside a row; data parallel with sharded weights (FSDP2) across
rows.

torchrun --nproc-per-node 4 examples/data_and_tensor_parallel.py
"""

import torch
import torch.distributed as dist
from tensor_parallel import parallelize
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer_block import Model, batch, loss_of, train_alone

import trigram  # noqa: F401  # registers the backend

STEPS, SIZE = 5, 4


def main() -> float:
    """Trains; returns the largest difference of a loss to that of one process."""
    if not dist.is_initialized():
        dist.init_process_group("trigram")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Model()
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    row, rows = mesh["dp"].get_local_rank(), mesh["dp"].size()
    alone, worst = train_alone(STEPS, SIZE), 0.0
    for step in range(STEPS):
        x, targets = (t.chunk(rows)[row] for t in batch(step, SIZE))
        loss = loss_of(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh["dp"].get_group())
        worst = max(worst, abs(mean.item() - alone[step]))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.6f}, one process {alone[step]:.6f}")
    return worst


if __name__ == "__main__":
    assert main() < 1e-5
    dist.destroy_process_group()
