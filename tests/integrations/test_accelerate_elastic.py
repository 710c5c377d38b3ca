"""Accelerate in elastic jobs: ``ElasticAccelerator``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trigram
from tests.support.checks import raises, says
from tests.support.elastic_samples import epochs_of
from tests.support.harness import Died, Ranks, RanksFailed, flag, run, say, scratch, until
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

    epoch = -1
    steps = 0

    def state_dict(self) -> dict[str, Any]:
        dies("save", self.epoch)
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Notes(accelerate.tracking.GeneralTracker):  # type: ignore[misc]
    """A tracker that is started where it writes."""

    name, requires_logging_directory, tracker = "notes", False, None
    started = False

    def __init__(self) -> None:
        super().__init__()

    def start(self) -> None:
        self.started = True

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert self.started

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        assert self.started
        with (scratch() / "notes").open("a") as file:
            file.write(f"{step} {trigram.rank()}\n")


def _trained(
    rank: int, world: int, pause: float = 0.0, checkpoint: str | None = None, epochs: int = EPOCHS
) -> dict[str, Any]:
    from trigram.integrations.accelerate_elastic import ElasticAccelerator

    torch.set_num_threads(1)
    accelerator = ElasticAccelerator(cpu=True, log_with=Notes())
    accelerator.init_trackers("job", config={"batch": BATCH})
    model, saves, loader, left = net(), Saves(), ElasticLoader(data(), BATCH), scratch() / "waits-for-a-rank"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    prepared = accelerator.prepare(model, optimizer, loader, schedule, DataLoader(data(), 60))
    model, optimizer, loader, schedule, held = prepared
    accelerator.register_for_checkpointing(saves)
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
    accelerator.save_state(str(scratch() / "begin"))  # a rank that joins has no part in it
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
                saves.steps += 1
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
            accelerator.log({"loss": losses[-1]}, step=accelerator.steps)
            assert saves.steps == accelerator.steps
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
        # Not when its process has ended: its last words may be on their way.
        until(lambda: not ranks.hear(0.1) or ranks.ranks[victim].ended, 60, "a loss")
        before = list(ranks.ranks[victim].said)
        begin = (ranks.dir / "begin" / "model.safetensors").stat().st_mtime_ns
        # With a checkpoint to load: what the others have is newer.
        ranks.restart(victim, _trained, 0.2, str(ranks.dir / "epoch-0"))
        _same(ranks.results(120))
        assert (ranks.dir / "begin" / "model.safetensors").stat().st_mtime_ns == begin
        notes = [int(line.split()[0]) for line in (ranks.dir / "notes").read_text().splitlines()]
        assert len(notes) == EPOCHS and notes == sorted(notes), "each epoch once, by whoever was the first"
        said = {rank: [s for s in each.said if isinstance(s, tuple)] for rank, each in ranks.ranks.items()}
        for epoch in range(EPOCHS):
            names = {file.name for file in Path(ranks.dir, f"epoch-{epoch}").iterdir()}
            assert {"model.safetensors", "optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"} <= names
            assert "custom_checkpoint_2.pkl" in names, "what is written last"
    came = said[victim]
    assert came and len(came) < len(said[2 - victim // 2]), "it has gone on where the others were"
    said[victim] = [*before, *came[1:]]  # its first step, as a rank that joins, does not count
    epochs = epochs_of((each for entries in said.values() for each in entries), SAMPLES, 3)
    assert epochs == list(range(EPOCHS))


def _refused(rank: int, world: int) -> None:
    from trigram.integrations.accelerate_elastic import ElasticAccelerator

    accumulates = {"cpu": True, "gradient_accumulation_steps": 2}
    says(raises(trigram.UnsupportedError, ElasticAccelerator, **accumulates), "_steps=2", "no_sync")
    accelerator = ElasticAccelerator(cpu=True)
    with pytest.raises(trigram.UnsupportedError, match="gradient_accumulation_steps=4"):
        accelerator.gradient_accumulation_steps = 4
    model, loader = net(), ElasticLoader(data(), BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)
    for shuffled in (DataLoader(data(), BATCH, shuffle=True), DataLoader(data(), BATCH, sampler=weighted)):
        says(raises(trigram.MisuseError, accelerator.prepare, model, optimizer, shuffled), "ElasticLoader")
    says(raises(trigram.MisuseError, accelerator.prepare, loader), "ElasticLoader without a model")
    says(raises(trigram.MisuseError, accelerator.prepare, model, loader), "Sequential has 0 optimizers")
    says(raises(trigram.MisuseError, accelerator.reduce, torch.ones(1), "product"), "reduction='product'")
    says(raises(trigram.MisuseError, accelerator.skip_first_batches, loader, 3), "load_state")
    assert not accelerator._models, "what was refused has left nothing"
    prepared = accelerator.prepare(model, optimizer, loader)
    assert accelerator.prepare(*prepared) == prepared and len(accelerator._custom_objects) == 2


def test_what_would_train_wrongly_is_refused() -> None:
    run(1, _refused)


def _too_late(rank: int, world: int) -> None:
    from trigram.integrations.accelerate_elastic import ElasticAccelerator

    accelerate.Accelerator(cpu=True)
    says(raises(trigram.MisuseError, ElasticAccelerator), "process group")


def test_another_accelerator_came_first() -> None:
    run(2, _too_late)


def _calls(rank: int, world: int) -> None:
    """What Accelerate does for several processes is of the ranks of the job."""
    from trigram.integrations.accelerate_elastic import ElasticAccelerator

    accelerator = ElasticAccelerator(cpu=True)
    padded = accelerator.pad_across_processes({"t": torch.ones(1, 2 + rank)}, dim=1, pad_index=7)["t"]
    assert padded.tolist() == [[1.0] * (2 + rank) + [7.0] * (world - 1 - rank)]
    gathered = accelerator.gather({"t": padded, "scalar": torch.tensor(rank)})
    assert gathered["t"].shape == (world, world + 1) and gathered["scalar"].tolist() == list(range(world))
    assert accelerator.reduce(torch.tensor([rank + 1.0]), "mean").tolist() == [(world + 1) / 2]
    ran = [
        accelerator.on_main_process(lambda: "main")(),
        accelerator.on_local_main_process(lambda: "main")(),
        accelerator.on_last_process(lambda: "last")(),
        accelerator.on_process(lambda: "second", process_index=1)(),
    ]
    main, last, second = (
        [None, "main"][rank == 0],
        [None, "last"][rank == world - 1],
        [None, "second"][rank == 1],
    )
    assert ran == [main, main, last, second]
    with accelerator.main_process_first():
        if rank == 0:
            time.sleep(0.5)
            (scratch() / "made").touch()
        assert (scratch() / "made").exists()
    if rank == 1:
        accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()
    # A write that fails is an error on all ranks.
    (scratch() / "file").touch()
    accelerator.wait_for_everyone()
    error = raises((OSError, trigram.TrigramError), accelerator.save_state, str(scratch() / "file"))
    says(error, "file" if rank == 0 else "save_state", "" if rank == 0 else "rank 0: FileExistsError")
    # Two ranks that plan for other lengths: their rates differ after a step.
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (10 + rank))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    def steps() -> None:
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 6)).sum())
            optimizer.step()
            schedule.step()

    says(raises(trigram.MismatchError, steps), f"rank {rank} has", "prepare the scheduler", "len(loader)")


def test_calls_are_of_the_ranks_of_the_job() -> None:
    run(3, _calls)


def _names(rank: int, world: int) -> list[str]:
    from trigram.integrations.accelerate_elastic import ElasticAccelerator

    folder = accelerate.utils.ProjectConfiguration(str(scratch() / "p"), automatic_checkpoint_naming=True)
    accelerator, model, saves = ElasticAccelerator(cpu=True, project_config=folder), net(), Saves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(saves)
    for epoch in range(3):
        accelerator.backward(model(torch.ones(2, 6)).sum())
        optimizer.step()
        saves.epoch = epoch
        accelerator.save_state()
    return sorted(file.name for file in (scratch() / "p" / "checkpoints").glob("*/custom_checkpoint_1.pkl"))


def test_a_checkpoint_with_a_number_is_written_again() -> None:
    with Ranks(3, _names) as ranks:
        (ranks.dir / "dies-0-save-1").touch()
        lost, *others = ranks.results(120, dies=[0])
    assert isinstance(lost, Died) and others == [["custom_checkpoint_1.pkl"] * 3] * 2


def _plans_by_itself(rank: int, world: int, length: int) -> float:
    from trigram.integrations.accelerate_elastic import ElasticAccelerator

    accelerator, model = ElasticAccelerator(cpu=True), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / length))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    while accelerator.steps < 40:
        accelerator.backward(model(torch.ones(2, 6)).sum())
        optimizer.step()
        schedule.step()
        if rank == 2 and accelerator.steps == 5 and length == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        say(accelerator.steps)
        time.sleep(2 if accelerator.steps > 30 and not (scratch() / "flag-told").exists() else 0.1)
    return float(sum(p.detach().double().sum() for p in model.parameters()))


def _joins(rank: int, world: int, length: int) -> float:
    try:
        return _plans_by_itself(rank, world, length)
    finally:
        flag("told")  # the others need wait no longer


def test_a_rank_that_joins_with_another_schedule_is_told_and_the_others_go_on() -> None:
    with Ranks(3, _plans_by_itself, 100) as ranks:
        until(lambda: not ranks.hear(0.1) or not ranks.ranks[2].process.is_alive(), 60, "a loss")
        ranks.restart(2, _joins, 50)
        with pytest.raises(RanksFailed, match=r"rank 2 has learning rates .*prepare the scheduler") as told:
            ranks.results(60)
    assert "rank 0: Traceback" not in str(told.value), "the others go on"
