"""Accelerate in elastic jobs: ``ElasticAccelerator``."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trigram
from tests.support.checks import raises, says
from tests.support.harness import Died, Ranks, run, say, scratch, until
from tests.support.marks import long
from trigram.data import ElasticLoader

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.waits

SAMPLES, BATCH, EPOCHS = 120, 8, 4


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(7))
    return TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def dies(where: str, epoch: int) -> None:
    file = scratch() / f"dies-{os.environ['RANK']}-{where}-{epoch}"
    if file.exists():
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class Saves:
    """Something of the script's own in a checkpoint, in whose writing the rank may die."""

    epoch = 0

    def state_dict(self) -> dict[str, Any]:
        dies("save", self.epoch)
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]


def _trained(
    rank: int, world: int, pause: float = 0.0, checkpoint: str | None = None, epochs: int = EPOCHS
) -> dict[str, Any]:
    from trigram.integrations.accelerate_elastic import ElasticAccelerator

    torch.set_num_threads(1)
    accelerator = ElasticAccelerator(cpu=True)
    model, saves, loader, left = net(), Saves(), ElasticLoader(data(), BATCH), scratch() / "waits-for-a-rank"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    prepared = accelerator.prepare(model, optimizer, loader, schedule, DataLoader(data(), 60))
    model, optimizer, loader, schedule, held = prepared
    accelerator.register_for_checkpointing(saves)
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
    losses: list[float] = []
    try:
        while loader.epoch < epochs:
            for place, (x, y, samples) in enumerate(loader):
                if place == 1:
                    dies("step", loader.epoch)
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if checkpoint is not None:  # this rank is back
                    left.unlink(missing_ok=True)
                say((loader.epoch, place, samples.tolist()))
                time.sleep(2 if loader.epoch > 1 and left.exists() else pause)
            saves.epoch = loader.epoch - 1
            schedule.step()
            with torch.no_grad():
                means = [nn.functional.mse_loss(model(x), y) for x, y, _ in held]
            dies("gather", saves.epoch)
            losses.append(float(accelerator.reduce(torch.stack(means).mean(), "mean")))
            assert len(accelerator.gather(loss)) == trigram.world_size()
            accelerator.save_state(str(scratch() / f"epoch-{saves.epoch}"))
    except SystemExit as asked:
        return {"left": asked.code}
    return {
        "weights": torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()]),
        "at": (loader.epoch, schedule.get_last_lr(), losses[-1] if losses else None),
        "first": accelerator.is_main_process,
    }


def _same(results: list[Any]) -> dict[str, Any]:
    """All ranks that have finished are in the same place with the same weights, and one is the first."""
    first, *others = [r for r in results if not isinstance(r, Died)]
    for other in others:
        torch.testing.assert_close(other["weights"], first["weights"], rtol=0, atol=0)
        assert other["at"] == first["at"]
    assert sum(r["first"] for r in [first, *others]) == 1
    found: dict[str, Any] = first
    return found


def _plainly(rank: int, world: int) -> Tensor:
    """The same training in a loop of its own."""
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader = ElasticLoader(data(), BATCH)
    trigram.with_bagua(model, optimizer=optimizer, elastic=[loader, schedule])
    while loader.epoch < EPOCHS:
        for x, y, _samples in loader:
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_it_trains_as_a_loop_does_and_goes_on_from_a_checkpoint() -> None:
    with Ranks(3, _trained) as ranks:
        found = _same(ranks.results(120))
        torch.testing.assert_close(found["weights"], run(3, _plainly)[0], rtol=0, atol=0)
        resumed = run(3, _trained, 0.0, str(ranks.dir / "epoch-1"))
        torch.testing.assert_close(_same(resumed)["weights"], found["weights"], rtol=0, atol=0)
        others = _same(run(2, _trained, 0.0, str(ranks.dir / "epoch-1")))
    assert others["at"][:2] == found["at"][:2] == (EPOCHS, [pytest.approx(0.02 * 0.7**EPOCHS)])


@pytest.mark.parametrize("victim", [0, long(1), long(2)])
@pytest.mark.parametrize("where", ["step", "gather", "save"])
def test_a_rank_is_lost_and_comes_back(victim: int, where: str) -> None:
    """In a step, before a call of all ranks, or while it writes a checkpoint; each sample counts once."""
    if where == "save" and victim != 0:
        pytest.skip("rank 0 writes")
    with Ranks(3, _trained, 0.2) as ranks:
        (ranks.dir / f"dies-{victim}-{where}-0").touch()
        (ranks.dir / "waits-for-a-rank").touch()
        process = ranks.ranks[victim].process
        until(lambda: not ranks.hear(0.1) or not process.is_alive(), 60, "a loss")
        before = list(ranks.ranks[victim].said)
        # With a checkpoint to load: what the others have is newer.
        ranks.restart(victim, _trained, 0.2, str(ranks.dir / "epoch-0"))
        _same(ranks.results(120))
        said = {rank: [s for s in each.said if isinstance(s, tuple)] for rank, each in ranks.ranks.items()}
        for epoch in range(EPOCHS):
            names = {file.name for file in Path(ranks.dir, f"epoch-{epoch}").iterdir()}
            assert {"model.safetensors", "optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"} <= names
            assert {"custom_checkpoint_1.pkl"} <= names, "what is written last"
    came = said[victim]
    assert came and len(came) < len(said[2 - victim // 2]), "it has gone on where the others were"
    used: dict[int, Counter[int]] = {}
    for rank, entries in said.items():
        for epoch, _, samples in [*before, *came[1:]] if rank == victim else entries:
            used.setdefault(epoch, Counter()).update(samples)
    for epoch, counts in used.items():
        assert max(counts.values()) == 1 and len(counts) > SAMPLES - 3, (epoch, counts)


def _refused(rank: int, world: int) -> None:
    from trigram.integrations.accelerate_elastic import ElasticAccelerator

    says(
        raises(trigram.UnsupportedError, ElasticAccelerator, cpu=True, gradient_accumulation_steps=2),
        "gradient_accumulation_steps=2",
        "no_sync",
    )
    accelerator = ElasticAccelerator(cpu=True)
    model, loader = net(), ElasticLoader(data(), BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shuffled = DataLoader(data(), BATCH, shuffle=True)
    says(raises(trigram.MisuseError, accelerator.prepare, model, optimizer, shuffled), "ElasticLoader")
    says(raises(trigram.MisuseError, accelerator.prepare, loader), "ElasticLoader without a model")
    says(raises(trigram.MisuseError, accelerator.prepare, model, loader), "Sequential has 0 optimizers")
    says(raises(trigram.MisuseError, accelerator.reduce, torch.ones(1), "product"), "reduction='product'")


def test_what_would_train_wrongly_is_refused() -> None:
    run(1, _refused)


def _too_late(rank: int, world: int) -> None:
    from trigram.integrations.accelerate_elastic import ElasticAccelerator

    accelerate.Accelerator(cpu=True)
    says(raises(trigram.MisuseError, ElasticAccelerator), "process group")


def test_another_accelerator_came_first() -> None:
    run(2, _too_late)
