"""Ray Train: a CNN on handwritten digits in an elastic job. If a worker fails, only that one is replaced.

python examples/ray_digits.py --workers 2
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from trigram.integrations.ray import TrigramConfig


def train(config: dict[str, Any]) -> None:
    """The training function, in each worker."""
    import digits
    import torch
    from torch.nn import functional as F

    import trigram
    from trigram.integrations.ray import await_workers

    kept, held = digits.load()
    x, y = kept.tensors
    torch.manual_seed(7)
    model = digits.cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trigram.init(elastic=True)
    trigram.with_bagua(model, optimizer=optimizer, elastic=True)
    first = trigram.stats(model)["steps"]  # of a worker that joins: the step of the others
    for step in range(first, config["steps"]):
        if step == config["fails_at"] and first == 0 and trigram.rank() == 1:
            os._exit(1)
        draw = torch.Generator().manual_seed(step * 64 + trigram.rank())
        batch = torch.randint(len(x), (32,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    await_workers()  # before calls of Ray that wait for all workers
    metrics = {"accuracy": digits.accuracy(model, held), "workers": trigram.world_size()}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "model.pt")
        ray.train.report(
            metrics, checkpoint=Checkpoint.from_directory(folder) if trigram.rank() == 0 else None
        )


def main() -> dict[str, Any]:
    """Trains, and returns the accuracy and the number of workers at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fails-at", type=int, default=50, help="the step in which worker 1 dies; -1: none")
    args = parser.parse_args()

    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join([here, *filter(None, sys.path)])
    ray.init(num_cpus=args.workers, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    result = TorchTrainer(
        train,
        train_loop_config={"steps": args.steps, "fails_at": args.fails_at},
        scaling_config=ScalingConfig(num_workers=args.workers),
        torch_config=TrigramConfig(elastic=True),
        run_config=RunConfig(storage_path=tempfile.mkdtemp(), failure_config=FailureConfig(max_failures=3)),
    ).fit()
    ray.shutdown()
    print(result.metrics)
    return result.metrics


if __name__ == "__main__":
    main()
