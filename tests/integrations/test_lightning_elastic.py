"""Lightning's Trainer in elastic jobs: the strategy "trigram_elastic"."""

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
from tests.support.harness import Died, Ranks, run, say, scratch, until
from tests.support.marks import long
from trigram.data import ElasticLoader

lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.waits

SAMPLES, BATCH, EPOCHS = 120, 4, 4


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(SAMPLES))


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


class Dies:
    """Its process dies when it is saved, if the test has asked for it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        self.file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Module(lightning.LightningModule):
    """It says which samples it has had in which step, and dies when the test has asked for it."""

    def __init__(self, pause: float = 0.0) -> None:
        super().__init__()
        self.net, self.pause, self.had = _net(), pause, list[int]()

    def _dies(self, where: str) -> None:
        file = scratch() / f"dies-{os.environ['RANK']}-{where}-{self.current_epoch}"
        if file.exists():
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        x, y, samples = batch
        self.had = samples.tolist()
        if number == 3:
            self._dies("step")
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        self.log("most", float(trigram.rank()), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        at, last = (self.current_epoch, self.global_step), self.trainer.fit_loop.epoch_loop.batch_progress
        say((*at, self.had))
        awaited = scratch() / "waits-for-a-rank"
        if awaited.exists() and awaited.read_text() == os.environ["RANK"]:
            awaited.unlink()  # it is here
        # Importing takes longer on a busy machine, and these pauses do not.
        time.sleep(2 if awaited.exists() and self.current_epoch > 1 else self.pause)
        if last.is_last_batch:
            self._dies("last")

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self._dies("validation")
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        file = scratch() / f"dies-{os.environ['RANK']}-save-{self.current_epoch}"
        if file.exists():
            checkpoint["dies"] = Dies(file)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def _trainer(**more: Any) -> Any:
    import trigram.integrations.lightning_elastic  # noqa: F401  # in the ranks: it registers the name

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    folder = scratch() / "checkpoints"
    more_often = {"every_n_train_steps": 7, "save_on_train_epoch_end": False}
    often = lightning.pytorch.callbacks.ModelCheckpoint(folder / "often", "{step}", "val", **more_often)
    kept = lightning.pytorch.callbacks.ModelCheckpoint(folder, monitor="val", save_last=True)
    stops = lightning.pytorch.callbacks.EarlyStopping("val", patience=100)
    given: dict[str, Any] = {
        "strategy": "trigram_elastic",
        "max_epochs": EPOCHS,
        "callbacks": [kept, stops, often],
    }
    return lightning.Trainer(accelerator="cpu", default_root_dir=scratch(), **{**quiet, **given, **more})


def _fitted(rank: int, world: int, pause: float = 0.0, checkpoint: str | None = None) -> dict[str, Any]:
    torch.set_num_threads(1)
    trainer, module = _trainer(), Module(pause)
    try:
        trainer.fit(module, ElasticLoader(_data(), BATCH), DataLoader(_data(), 60), ckpt_path=checkpoint)
    except SystemExit as asked:
        return {"left": asked.code}
    assert list((scratch() / "checkpoints").glob("*.ckpt"))
    return {
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]),
        "at": (trainer.current_epoch, trainer.global_step),
        "val": float(trainer.callback_metrics["val"]),
        "most": float(trainer.callback_metrics["most"]),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "waited": trainer.early_stopping_callback.wait_count,
        "best": float(trainer.checkpoint_callback.best_model_score),
    }


def _same(results: list[Any]) -> dict[str, Any]:
    """All ranks that have finished are in the same place with the same weights and decisions."""
    first, *others = [r for r in results if not isinstance(r, Died)]
    for other in others:
        torch.testing.assert_close(other.pop("weights"), first["weights"], rtol=0, atol=0)
        assert other == {k: v for k, v in first.items() if k != "weights"}
    found: dict[str, Any] = first
    return found


def _plainly(rank: int, world: int) -> Tensor:
    """The same training in a loop of its own."""
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    net = _net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader = ElasticLoader(_data(), BATCH)
    net = trigram.with_bagua(net, optimizer=optimizer, elastic=[loader, scheduler])
    for _ in range(EPOCHS):
        for x, y, _samples in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        scheduler.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_it_trains_as_a_loop_does() -> None:
    with Ranks(3, _fitted) as ranks:
        found = _same(ranks.results(120))
    assert found["at"] == (EPOCHS, EPOCHS * SAMPLES // BATCH // 3) and found["most"] == 2
    torch.testing.assert_close(found["weights"], run(3, _plainly)[0], rtol=0, atol=0)


@pytest.mark.parametrize("victim", [1, long(0), long(2)])
@pytest.mark.parametrize("where", ["step", "validation", "last", "save"])
def test_a_rank_is_lost_and_comes_back(victim: int, where: str) -> None:
    """In a step, while all validate or save, or after the last one of an epoch; each sample counts once."""
    writes = where == "save"
    victim = 0 if writes else victim
    with Ranks(3, _fitted, 0.3) as ranks:
        (ranks.dir / f"dies-{victim}-{where}-0").touch()
        # Not when its process has ended: its last words may be on their way.
        until(lambda: not ranks.hear(0.1) or ranks.ranks[victim].ended, 60, "a loss")
        (ranks.dir / "waits-for-a-rank").write_text(str(victim))
        before = list(ranks.ranks[victim].said)
        ranks.restart(victim, _fitted, 0.3)
        joined = ranks.ranks[victim]
        found = _same(ranks.results(120))
        if writes:
            for file in (ranks.dir / "checkpoints").rglob("*.ckpt"):
                assert torch.load(file, weights_only=False)["loops"], "what was lost was written again"
            assert (ranks.dir / "checkpoints" / "last.ckpt").exists()
        said = {rank: [s for s in each.said if isinstance(s, tuple)] for rank, each in ranks.ranks.items()}
    came = joined.said
    assert came and came[0][:2] > (0, 1), "it has gone on where the others were"
    said[victim] = [*before, *came[1:]]  # its first step, as a rank that joins, does not count
    epochs = epochs_of((each for entries in said.values() for each in entries), SAMPLES, 3)
    assert found["at"][0] == EPOCHS and epochs == list(range(EPOCHS))


def test_a_rank_is_asked_to_leave_and_a_checkpoint_is_resumed() -> None:
    with Ranks(3, _fitted, 0.05) as ranks:
        until(lambda: ranks.hear(0.1) and len(ranks.ranks[1].said) > 3, 60)
        ranks.signal(1, signal.SIGTERM)
        results = ranks.results(120)
        assert results.pop(1) == {"left": 0}
        left = _same(results)
        checkpoint = Path(ranks.dir) / "checkpoints" / "last.ckpt"
        again = run(2, _resumed, str(checkpoint))
    assert left["at"][0] == EPOCHS
    assert again[0] == again[1] == (EPOCHS + 1, left["at"][1] + SAMPLES // BATCH // 2)


def _resumed(rank: int, world: int, checkpoint: str) -> tuple[int, int]:
    trainer = _trainer(max_epochs=EPOCHS + 1)
    trainer.fit(Module(), ElasticLoader(_data(), BATCH), DataLoader(_data(), 60), ckpt_path=checkpoint)
    return trainer.current_epoch, trainer.global_step


def _refused(rank: int, world: int) -> None:
    loader = ElasticLoader(_data(), BATCH)
    error = raises(trigram.MisuseError, _trainer().fit, Module(), DataLoader(_data(), BATCH))
    says(error, "DataLoader", "ElasticLoader(dataset")
    for more in (
        {"accumulate_grad_batches": 2},
        {"limit_train_batches": 3},
        {"limit_train_batches": 1},
        {"overfit_batches": 0.5},
    ):
        says(raises(trigram.MisuseError, _trainer(**more).fit, Module(), loader), *more)
    averages = lightning.pytorch.callbacks.StochasticWeightAveraging(0.1)
    says(raises(trigram.MisuseError, _trainer(callbacks=[averages]).fit, Module(), loader), "Stochastic")
    two = {"a": loader, "b": ElasticLoader(_data(), BATCH)}
    trainer = _trainer()
    trigram.shutdown()
    says(raises(trigram.MisuseError, trainer.fit, Module(), two), "2 training loaders")


def test_what_divides_a_step_or_an_epoch_is_refused() -> None:
    run(1, _refused)
