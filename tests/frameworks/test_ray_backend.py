"""Ray Train's TorchTrainer with `TorchConfig(backend="trigram")`, on two workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def test_torch_trainer(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'ray[train]'")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    told = str(tmp_path / "weights")

    def train(_: Any) -> None:  # in a function: Ray sends it to its workers by value
        import torch
        import torch.distributed as dist
        from ray.train.torch import prepare_model

        assert dist.get_backend() == "trigram"
        torch.manual_seed(0)
        model = prepare_model(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.full((8, 4), float(step + dist.get_rank()))).square().mean().backward()
            optimizer.step()
        torch.save([p.detach() for p in model.parameters()], f"{told}{dist.get_rank()}")

    # Ray makes the process group before it loads the script, so the name must be known there.
    hook = {"worker_process_setup_hook": "trigram.backend.register"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=hook)
    try:
        TorchTrainer(
            train,
            torch_config=TorchConfig(backend="trigram"),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=str(tmp_path)),
        ).fit()
    finally:
        ray.shutdown()
    import torch

    ours, theirs = torch.load(f"{told}0"), torch.load(f"{told}1")
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    torch.manual_seed(0)
    assert not torch.equal(ours[0], torch.nn.Linear(4, 2).weight)
