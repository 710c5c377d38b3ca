"""Operator-level parallelism: each rank holds a part of every matrix of a transformer, through DTensor.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

The layouts, for n ranks, in the notation of MindSpore's strategies (parts along each dimension of an
operator's inputs) and of DTensor:

    operator            strategy              input        weight      output       what moves
    LayerNorm           ((1, n, 1),)          Shard(1)     Replicate   Shard(1)
    query, key, value   ((1, 1), (n, 1))      Replicate    Shard(0)    Shard(-1)    all_gather of the input
    attention           by heads              Shard(2)                 Shard(2)
    output              ((1, n), (1, n))      Shard(-1)    Shard(1)    Shard(1)     reduce_scatter of the sum
    wide                ((1, 1), (n, 1))      Replicate    Shard(0)    Shard(-1)    all_gather of the input
    narrow              ((1, n), (1, n))      Shard(-1)    Shard(1)    Shard(1)     reduce_scatter of the sum
    classes             ((1, 1), (n, 1))      Replicate    Shard(0)    Replicate    all_gather of both
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformer_block import Model, batch, loss_of, train_alone

import trigram  # noqa: F401  # registers the backend

STEPS, SIZE = 5, 4


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    """Shards the weights of a model over a mesh of one dimension, and its activations along the sequence
    between the blocks' matrices."""
    for k, block in enumerate(model.blocks):
        columns = ColwiseParallel(input_layouts=Shard(1))
        rows = RowwiseParallel(output_layouts=Shard(1))
        plan = {
            **{norm: SequenceParallel() for norm in ("attention_norm", "mlp_norm")},
            **dict.fromkeys(("query", "key", "value", "wide"), columns),
            **dict.fromkeys(("output", "narrow"), rows),
        }
        if k == 0:  # the input of the model is whole on every rank
            whole = PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
            )
            parallelize_module(block, mesh, whole)
        parallelize_module(block, mesh, plan)
    ends = {
        "norm": SequenceParallel(),
        "classes": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)


def main() -> float:
    """Trains; returns the largest difference of a loss to that of one process."""
    if not dist.is_initialized():
        dist.init_process_group("trigram")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Model()
    parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alone, worst = train_alone(STEPS, SIZE), 0.0
    for step in range(STEPS):
        x, targets = batch(step, SIZE)
        loss = loss_of(model(x), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        worst = max(worst, abs(loss.item() - alone[step]))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}, one process {alone[step]:.6f}")
    return worst


if __name__ == "__main__":
    assert main() < 1e-5
    dist.destroy_process_group()
