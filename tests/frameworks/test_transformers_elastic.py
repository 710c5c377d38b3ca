"""The Trainer of transformers in elastic jobs: ``TrigramElasticTrainer``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.support.checks import raises, says
from tests.support.elastic_samples import epochs_of
from tests.support.harness import Died, Ranks, run, say, scratch, until
from tests.support.marks import long
from trigram.data import ElasticLoader

transformers = pytest.importorskip("transformers", reason="make test-integrations installs it")

pytestmark = pytest.mark.waits

SAMPLES, BATCH, EPOCHS = 120, 4, 4


class Net(nn.Module):
    """It notes which samples it is trained on, and dies where the test has asked for it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.had: list[int] = []
        self.epoch = 0

    def forward(self, x: Tensor, labels: Tensor, sample: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.had += sample.tolist()
            if len(self.had) > 7:
                dies("step", self.epoch)
        elif len(sample) != SAMPLES // 2:  # evaluation has larger batches
            raise AssertionError(len(sample))
        else:
            dies("evaluation", self.epoch)
        return {"loss": nn.functional.mse_loss(self.net(x), labels)}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if any("save_pretrained" in f or "_save" in f for f in _callers()):
            dies("save", self.epoch)
        return super().state_dict(*args, **kwargs)


def _callers() -> list[str]:
    import traceback  # here: only this needs it

    return [frame.name for frame in traceback.extract_stack(limit=8)]


def dies(where: str, epoch: int) -> None:
    file = scratch() / f"dies-{os.environ['RANK']}-{where}-{epoch}"
    if file.exists():
        file.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def rows() -> list[dict[str, Any]]:
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(7))
    y = x.sum(1, keepdim=True).sin()
    return [{"x": x[i], "labels": y[i], "sample": i} for i in range(SAMPLES)]


class Says(transformers.TrainerCallback):  # type: ignore[misc]
    """Tells the test which samples have counted, and when."""

    def __init__(self, pause: float) -> None:
        self.pause = pause

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step:  # this rank has joined
            (scratch() / "waits-for-a-rank").unlink(missing_ok=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.had, model.epoch = [], int(state.epoch or 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        whole = state.epoch == int(state.epoch)
        say((int(state.epoch) - whole, state.global_step, model.had))
        time.sleep(self.pause)
        if state.epoch > EPOCHS / 2 and (scratch() / "waits-for-a-rank").exists():
            time.sleep(2)  # a step later it may be there
        if whole:
            dies("last", int(state.epoch) - 1)


def trainer(pause: float = 0.0, **more: Any) -> Any:
    from trigram.integrations import transformers_elastic  # in the ranks, which have a job

    transformers_elastic.start()
    settings: dict[str, Any] = {
        "output_dir": str(scratch() / "out"), "per_device_train_batch_size": BATCH,
        "num_train_epochs": EPOCHS,
        "per_device_eval_batch_size": SAMPLES // 2, "learning_rate": 0.05, "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "save_strategy": "epoch", "eval_strategy": "epoch", "logging_steps": 3,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2,
        "warmup_steps": 3,
    }  # fmt: skip
    own = {name: more.pop(name) for name in ("algorithm", "options", "optimizers") if name in more}
    return transformers_elastic.TrigramElasticTrainer(
        Net(),
        transformers.TrainingArguments(**{**settings, **more}),
        train_dataset=rows(),
        eval_dataset=rows(),
        callbacks=[Says(pause), transformers.EarlyStoppingCallback(100)],
        **own,
    )


def _trained(
    rank: int, world: int, pause: float = 0.0, checkpoint: str | None = None, more: Any = None
) -> dict[str, Any]:
    torch.set_num_threads(1)
    t = trainer(pause, **(more or {}))
    try:
        t.train(resume_from_checkpoint=checkpoint)
    except SystemExit as asked:
        return {"left": asked.code}
    stops = next(c for c in t.callback_handler.callbacks if isinstance(c, transformers.EarlyStoppingCallback))
    return {
        "weights": torch.cat([p.detach().flatten() for p in t.model.parameters()]),
        "at": (t.state.epoch, t.state.global_step, t.state.max_steps),
        "best": (t.state.best_metric, t.state.best_global_step, t.state.best_model_checkpoint),
        "waited": stops.early_stopping_patience_counter,
        "rate": t.lr_scheduler.get_last_lr(),
        "logs": [(e["step"], e.get("loss"), e.get("learning_rate")) for e in t.state.log_history[:-1]],
        "eval": t.evaluate()["eval_loss"],
    }


def _same(results: list[Any]) -> dict[str, Any]:
    """All ranks that have finished are in the same place with the same weights and decisions."""
    first, *others = [r for r in results if not isinstance(r, Died)]
    for other in others:
        torch.testing.assert_close(other.pop("weights"), first["weights"], rtol=0, atol=0)
        assert other == {k: v for k, v in first.items() if k != "weights"}
    found: dict[str, Any] = first
    return found


def _plainly(rank: int, world: int, accumulated: int) -> Tensor:
    """The same training in a loop of its own."""
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    net, data = Net(), rows()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.0, fused=True)
    steps = EPOCHS * SAMPLES // BATCH // world // accumulated
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 3, steps)
    loader = ElasticLoader(data, BATCH * accumulated, seed=42, collate_fn=lambda samples: samples)  # type: ignore[arg-type]
    trigram.with_bagua(net, optimizer=optimizer, elastic=[loader, scheduler])
    for _ in range(EPOCHS):
        for samples in loader:
            for begin in range(0, len(samples), BATCH):
                batch = torch.utils.data.default_collate(samples[begin : begin + BATCH])
                last = begin + BATCH >= len(samples)
                with trigram.no_sync(net) if not last else torch.enable_grad():
                    (net(**batch)["loss"] / accumulated).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("accumulated", [1, 2])
def test_it_trains_as_a_loop_does(accumulated: int) -> None:
    settings = {"gradient_accumulation_steps": accumulated, "load_best_model_at_end": False}
    with Ranks(3, _trained, 0.0, None, settings) as ranks:
        found = _same(ranks.results(120))
    steps = EPOCHS * SAMPLES // BATCH // 3 // accumulated
    assert found["at"] == (EPOCHS, steps, steps) and set(found["rate"]) == {0.0}
    torch.testing.assert_close(found["weights"], run(3, _plainly, accumulated)[0], rtol=0, atol=0)


@pytest.mark.parametrize("victim", [0, long(1), long(2)])
@pytest.mark.parametrize("where", ["step", "evaluation", "save", "last"])
@pytest.mark.parametrize("accumulated", [2, long(1)])
def test_a_rank_is_lost_and_comes_back(victim: int, where: str, accumulated: int) -> None:
    """In a step, while all evaluate or save, or after the last step of an epoch; each sample counts once."""
    if where == "save" and victim != 0:
        pytest.skip("rank 0 writes")
    settings = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 8 // accumulated}
    arguments = (0.3, None, settings)
    with Ranks(3, _trained, *arguments) as ranks:
        (ranks.dir / f"dies-{victim}-{where}-0").touch()
        (ranks.dir / "waits-for-a-rank").touch()
        process = ranks.ranks[victim].process
        until(lambda: not ranks.hear(0.1) or not process.is_alive(), 60, "a loss")
        before = list(ranks.ranks[victim].said)
        ranks.restart(victim, _trained, *arguments)
        joined = ranks.ranks[victim]
        found = _same(ranks.results(120))
        said = {rank: [s for s in each.said if isinstance(s, tuple)] for rank, each in ranks.ranks.items()}
        for checkpoint in Path(ranks.dir, "out").glob("checkpoint-*"):
            assert {"trainer_state.json", "optimizer.pt", "trigram_elastic.pt"} <= {
                file.name for file in checkpoint.iterdir()
            }
    came = joined.said
    assert came and came[0][:2] > (0, 1), "it has gone on where the others were"
    said[victim] = [*before, *came[1:]]  # its first step, as a rank that joins, does not count
    epochs = epochs_of((each for entries in said.values() for each in entries), SAMPLES, 3)
    assert found["at"][0] == EPOCHS and found["at"][1] == found["at"][2] and epochs == list(range(EPOCHS))
    assert set(found["rate"]) == {0.0}


def test_a_rank_is_asked_to_leave_and_a_checkpoint_is_resumed() -> None:
    with Ranks(3, _trained, 0.05) as ranks:
        until(lambda: ranks.hear(0.1) and len(ranks.ranks[1].said) > 3, 60)
        ranks.signal(1, signal.SIGTERM)
        results = ranks.results(120)
        assert results.pop(1) == {"left": 0}
        left = _same(results)
        more = {"num_train_epochs": EPOCHS + 1}
        last = str(ranks.dir / "out" / f"checkpoint-{left['at'][1]}")
        again = run(2, _trained, 0.0, last, more)
    assert left["at"][0] == EPOCHS
    _same(again)
    steps = SAMPLES // BATCH // 2
    assert again[0]["at"][:2] == (EPOCHS + 1, left["at"][1] + steps)
    rates = [rate for step, _, rate in again[0]["logs"] if rate is not None and step > left["at"][1]]
    assert rates == sorted(rates, reverse=True) and 0.05 / (EPOCHS + 1) > rates[0] > rates[-1] > 0


class Changes(transformers.TrainerCallback):  # type: ignore[misc]
    """It ends epochs early, and says what it is told at the beginnings."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        say(("train", state.global_step))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        say(("epoch", int(state.epoch or 0)))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.log_history.append({"step": state.global_step, "tensor": torch.ones(2)})
        if state.global_step == 2:
            dies("after two", 0)
        control.should_epoch_stop = state.global_step in (4, 14, 20)
        control.should_log = state.global_step % 2 == 0


def _changes(rank: int, world: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    t = trainer(0.3, load_best_model_at_end=False, save_strategy="no", eval_on_start=True)
    own = torch.optim.SGD(t.model.parameters(), lr=0.1)
    planned = EPOCHS * SAMPLES // BATCH // world
    t.optimizer, t.lr_scheduler = own, torch.optim.lr_scheduler.OneCycleLR(own, 0.1, planned + 1)
    t.add_callback(Changes())
    t.train()
    return {
        "weights": torch.cat([p.detach().flatten() for p in t.model.parameters()]),
        "at": (t.state.epoch, t.state.global_step),
        "rate": t.lr_scheduler.get_last_lr(),
        "loss": [entry["loss"] for entry in t.state.log_history if "loss" in entry],
    }


def test_callbacks_of_a_rank_that_joins() -> None:
    """It begins where the others are; they end epochs early, and a scheduler counts steps."""
    with Ranks(3, _changes) as ranks:
        (ranks.dir / "dies-1-after two-0").touch()
        (ranks.dir / "waits-for-a-rank").touch()
        process = ranks.ranks[1].process
        until(lambda: not ranks.hear(0.1) or not process.is_alive(), 60, "a loss")
        ranks.restart(1, _changes)
        found = _same(ranks.results(120))
        began = [s for s in ranks.ranks[1].said if isinstance(s, tuple) and isinstance(s[0], str)]
    (train, step), *epochs = began
    assert train == "train" and step > 0 and 1 <= len(epochs) <= EPOCHS and epochs == sorted(epochs), began
    assert found["at"][0] == EPOCHS


def _twice(rank: int, world: int) -> None:
    from trigram.integrations import transformers_elastic

    t = trainer(num_train_epochs=1)
    t.train()
    says(raises(trigram.MisuseError, t.train), "train has been called before", "start()")
    trigram.shutdown()
    transformers_elastic.start()
    t = trainer(num_train_epochs=1, gradient_accumulation_steps=2)
    seen = []
    theirs = t.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        seen.append(t.args.gradient_accumulation_steps)
        return theirs(*args, **kwargs)

    t.compute_loss = compute_loss
    t.train()
    assert t.lr_scheduler.get_last_lr()[0] == 0 and set(seen) == {2}
    # A checkpoint of a training that is over, and one that does not say which samples were used.
    last = scratch() / "out" / f"checkpoint-{t.state.global_step}"
    for file, steps in (("trigram_elastic.pt", t.state.global_step), ("scheduler.pt", t.state.global_step)):
        trigram.shutdown()
        again = trainer(max_steps=t.state.global_step)
        again.train(resume_from_checkpoint=str(last))
        assert again.state.global_step == steps
        trigram.barrier()
        (last / file).unlink(missing_ok=True)
        trigram.barrier()


def test_one_training_after_another() -> None:
    run(2, _twice)


def _tokens(rank: int, world: int) -> Tensor:
    """A language model whose sequences have fewer labels the later they come."""
    from trigram.integrations import transformers_elastic

    torch.set_num_threads(1)
    transformers_elastic.start()
    torch.manual_seed(3)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 64, "n_positions": 16}
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    settings = transformers.GPT2Config(**shape, **no_dropout, bos_token_id=0, eos_token_id=0)
    first = torch.randint(64, (48, 1), generator=torch.Generator().manual_seed(0))
    data = []
    for place, row in enumerate((first + torch.arange(16)) % 64):
        labels = row.clone()
        labels[: 15 * (place % 24) // 24] = -100
        data.append({"input_ids": row, "labels": labels})
    args = transformers.TrainingArguments(
        output_dir=str(scratch() / "out"), per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True,
        learning_rate=0.01, gradient_accumulation_steps=6 // world, report_to=[], disable_tqdm=True,
        save_strategy="no", train_sampling_strategy="sequential", optim="sgd",
    )  # fmt: skip
    t = transformers_elastic.TrigramElasticTrainer(
        transformers.GPT2LMHeadModel(settings), args, train_dataset=data
    )
    loss = t.train().training_loss
    return torch.cat([*(p.detach().flatten() for p in t.model.parameters()), torch.tensor([loss])])


def test_each_token_counts_alike_on_whichever_rank() -> None:
    """As the Trainer's average_tokens_across_devices asks for; in gradients, and in the logs."""
    alone = run(1, _tokens)[0]
    for world in (2, 3):
        torch.testing.assert_close(run(world, _tokens)[0], alone, rtol=1e-5, atol=1e-6)


def _too_late(rank: int, world: int) -> None:
    from trigram.integrations import transformers_elastic

    args = transformers.TrainingArguments(output_dir=str(scratch() / "out"), use_cpu=True, report_to=[])
    kind = transformers_elastic.TrigramElasticTrainer
    says(raises(trigram.MisuseError, kind, Net(), args, train_dataset=rows()), "start()", "TrainingArguments")
    says(raises(trigram.MisuseError, transformers_elastic.start), "process group", "before TrainingArguments")


def test_start_comes_before_the_arguments() -> None:
    run(2, _too_late)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


class Sampled(transformers.Trainer):  # type: ignore[misc]
    def _get_train_sampler(self, *_: Any) -> Any:
        return None


def _refused(rank: int, world: int) -> None:
    from trigram.integrations import transformers_elastic

    transformers_elastic.start(op_timeout=100)
    says(raises(trigram.MisuseError, transformers_elastic.start, op_timeout=7), "has begun; pass op_timeout")
    kind = type("Mixed", (transformers_elastic.TrigramElasticTrainerMixin, Sampled), {})
    args = transformers.TrainingArguments(output_dir=str(scratch() / "out"), use_cpu=True, report_to=[])
    says(raises(trigram.UnsupportedError, kind, Net(), args, train_dataset=rows()), "Sampled._get_train_sam")
    for more in (
        {"auto_find_batch_size": True},
        {"dataloader_drop_last": True},
        {"save_on_each_node": True},
        {"train_sampling_strategy": "group_by_length"},
    ):
        says(raises(trigram.UnsupportedError, trainer, **more), *more)
    t = trainer(max_steps=3)
    t.train_dataset = Stream()
    says(raises(trigram.MisuseError, t.train), "ElasticLoader", "map-style")
    t = trainer(algorithm="decentralized")
    says(raises(trigram.UnsupportedError, t.train), "average")


def test_what_needs_a_process_group_or_divides_an_epoch_is_refused() -> None:
    run(1, _refused)
