"""Ray Train with `TrigramConfig`, beside Ray's own DistributedDataParallel over gloo, on one node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.harness import ROOT

pytest.importorskip("ray", reason="make test-integrations installs it")

import ray
import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model

OTHERS: dict[str, dict[str, Any]] = {
    "bytegrad": {},
    "decentralized": {},
    "local_sgd": {"every": 3},
    "async": {},
}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    path = os.pathsep.join([str(ROOT), str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


def fit(
    train: Any, folder: Path, torch_config: Any, workers: int = 2, failures: int = 0, **config: Any
) -> Any:
    """Runs a training function; what the workers have written to the folder, by rank."""
    folder.mkdir(exist_ok=True)
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ScalingConfig(num_workers=workers),
        torch_config=torch_config,
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=failures)),
    ).fit()
    return [torch.load(folder / f"{rank}.pt") for rank in range(workers)]


def tell(config: dict[str, Any], value: Any) -> None:
    torch.save(value, Path(config["folder"]) / f"{get_context().get_world_rank()}.pt")


def steps(model: Any, first: int = 0, last: int = 12, accumulate: int = 1) -> list[float]:
    """Trains on random numbers; the losses on the same ones."""
    net = getattr(model, "module", model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fixed = torch.randn(64, 6, generator=torch.Generator().manual_seed(9))
    losses = []
    for step in range(first, last):
        draw = torch.Generator().manual_seed(100 * step + get_context().get_world_rank())
        for part in range(accumulate):
            x = torch.randn(8, 6, generator=draw)
            if part < accumulate - 1:
                with model.no_sync():
                    (model(x) - x[:, :2]).square().mean().backward()
            else:
                (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(float((net(fixed) - fixed[:, :2]).square().mean()))
    return losses


def net() -> nn.Sequential:
    torch.manual_seed(3 + get_context().get_world_rank())
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def weights(model: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def by_ray(config: dict[str, Any]) -> None:
    found = []
    for accumulate in (1, 3):
        model = prepare_model(net())
        steps(model, accumulate=accumulate)
        found.append(weights(model))
    assert torch.distributed.get_backend() == "gloo"
    tell(config, found)


def by_trigram(config: dict[str, Any]) -> None:
    assert torch.distributed.get_backend() == "trigram"
    found = []
    for accumulate in (1, 3):
        model = trigram.with_bagua(prepare_model(net(), parallel_strategy=None))
        steps(model, accumulate=accumulate)
        found.append(weights(model))
    tell(config, found)
    for algorithm, options in OTHERS.items():
        model = trigram.with_bagua(net(), algorithm, **options)
        losses = steps(model, last=40, accumulate=2)
        assert losses[-1] < 0.8 * losses[0], (algorithm, losses)


def test_the_default_algorithm_trains_like_ddp_and_others_train(tmp_path: Path) -> None:
    from trigram.integrations.ray import TrigramConfig

    expected = fit(by_ray, tmp_path / "ray", None)
    ours = fit(by_trigram, tmp_path / "trigram", TrigramConfig())
    for before, found in zip(expected, ours, strict=True):
        for a, b in zip(before, found, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def resumes(config: dict[str, Any]) -> None:
    rank, first = get_context().get_world_rank(), 0
    model = trigram.with_bagua(net(), "topk", fraction=0.2)
    if (saved := ray.train.get_checkpoint()) is not None:
        with saved.as_directory() as folder:
            state = torch.load(Path(folder) / f"{rank}.pt")
        model.load_state_dict(state["model"])
        trigram.load_algorithm_state(model, state["algorithm"])
        first = 8
    steps(model, first, 8)
    if saved is None:
        folder = Path(config["folder"]) / "checkpoint"
        folder.mkdir(exist_ok=True)
        state = {"algorithm": trigram.algorithm_state(model), "model": model.state_dict()}
        torch.save(state, folder / f"{rank}.pt")
        trigram.barrier()
        ray.train.report({"step": 8}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
        if config["fails"]:
            steps(model, 8, 10)
            raise RuntimeError("as the test wants")
    steps(model, 8, 12)
    tell(config, weights(model))


def test_training_is_resumed_from_a_checkpoint(tmp_path: Path) -> None:
    from trigram.integrations.ray import TrigramConfig

    whole = fit(resumes, tmp_path / "whole", TrigramConfig(), fails=False)
    again = fit(resumes, tmp_path / "again", TrigramConfig(), failures=1, fails=True)
    for before, found in zip(whole, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(before, found, strict=True))


def elastic(config: dict[str, Any]) -> None:
    from trigram.integrations.ray import await_workers

    rank = get_context().get_world_rank()
    trigram.init(elastic=True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trigram.with_bagua(model, optimizer=optimizer, elastic=True)
    first = trigram.stats(model)["steps"]
    sizes = []
    for step in range(first, 40):
        if step == 10:
            fails = rank == 1 and first == 0
            if fails and config["how"] == "raises":
                raise RuntimeError("as the test wants")
            if config["how"] == "in a report":  # of the others
                await_workers()
            if fails:
                os._exit(1)
            if config["how"] == "in a report":
                ray.train.report({"step": step})  # skipped, as Ray replaces the worker
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(64 * step + trigram.rank()))
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(trigram.world_size())
    await_workers()
    momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    tell(config, (os.getpid(), first, sizes, [*weights(model), *momentum]))


@pytest.mark.parametrize("how", ["killed", "raises", "in a report"])
def test_only_the_failed_worker_is_replaced(tmp_path: Path, how: str) -> None:
    from trigram.integrations.ray import TrigramConfig

    found = fit(elastic, tmp_path / "runs", TrigramConfig(elastic=True), 3, failures=1, how=how)
    assert [first == 0 for _, first, _, _ in found] == [True, False, True], "rank 1 has joined the others"
    for _, _, sizes, tensors in (found[0], found[2]):
        assert sizes[:10] == [3] * 10 and sizes[10] == 2 and len(sizes) == 40
        assert all(torch.equal(a, b) for a, b in zip(tensors, found[1][3], strict=True))
