"""The Trainer of transformers on Trigram's algorithms, beside the Trainer on DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import trigram
from tests.support.checks import equal, raises, same_on_all_ranks, says
from tests.support.harness import run, scratch

transformers = pytest.importorskip("transformers", reason="make test-integrations installs it")

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},  # which does not divide the steps of an epoch
    "clipping": {"max_grad_norm": 0.05},
    "bf16": {"bf16": True},
    "activation checkpointing": {"activation_checkpointing": True},
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "scheduler": {"lr_scheduler_type": "cosine", "warmup_steps": 3, "optim": "adamw_torch_fused"},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "small buckets": {"ddp_bucket_cap_mb": 1, "weight_decay": 0.1},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "bytegrad": {},
    "decentralized": {},
    "local_sgd": {"every": 3},
    "async": {},
}


def gpt2() -> Any:
    torch.manual_seed(3 + dist.get_rank() if dist.is_initialized() else 3)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))


def rows(count: int) -> list[dict[str, Tensor]]:
    """Sequences that count upwards, so that there is something to learn."""
    first = torch.randint(64, (count, 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in (first + torch.arange(16)) % 64]


def trainer(algorithm: str | None = "ddp", options: Any = None, callbacks: Any = None, **more: Any) -> Any:
    """A Trainer of 50 samples, whose last batch is short; on DDP if the algorithm is "ddp"."""
    from trigram.integrations.transformers import TrigramTrainer

    settings: dict[str, Any] = {
        "output_dir": str(scratch() / "out"), "per_device_train_batch_size": 4, "num_train_epochs": 2,
        "learning_rate": 5e-3, "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "logging_steps": 5,
    }  # fmt: skip
    kind = transformers.Trainer if algorithm == "ddp" else TrigramTrainer
    own = {} if algorithm == "ddp" else {"algorithm": algorithm, "options": options}
    return kind(
        gpt2(),
        transformers.TrainingArguments(**{**settings, **more}),
        train_dataset=rows(50),
        eval_dataset=rows(13),
        callbacks=callbacks,
        **own,
    )


def state(t: Any) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in t.model.state_dict().items()}


def _like_ddp(rank: int, world: int) -> None:
    for name, setting in SETTINGS.items():
        results = []
        for algorithm in ("ddp", None):
            t = trainer(algorithm, **setting)
            loss = t.train().training_loss
            results.append((state(t), t.evaluate()["eval_loss"], loss))
            assert not trigram.is_wrapped(t.model)
        for key, value in results[0][0].items():
            equal(results[1][0][key], value, f"{name}: {key}")
        assert results[0][1:] == results[1][1:], name


def test_the_default_algorithm_trains_like_ddp() -> None:
    run(2, _like_ddp, timeout=240)


def _others(rank: int, world: int) -> None:
    for algorithm, options in ALGORITHMS.items():
        t = trainer(algorithm, options, num_train_epochs=4, gradient_accumulation_steps=2)
        before = t.evaluate()["eval_loss"]
        t.train()
        assert t.evaluate()["eval_loss"] < 0.9 * before, algorithm
        same_on_all_ranks(rank, world, algorithm, t.model.parameters())


def test_other_algorithms_train() -> None:
    run(2, _others, timeout=240)


class Stop(transformers.TrainerCallback):
    """Ends training after some steps, as a job that is killed."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.after


def _resumed(rank: int, world: int) -> None:
    for algorithm, options in {None: {}, "topk": {"fraction": 0.1}, "decentralized": {}}.items():
        saves = {"save_strategy": "steps", "save_steps": 5, "output_dir": str(scratch() / str(algorithm))}
        whole = trainer(algorithm, options, num_train_epochs=2)
        whole.train()
        first = trainer(algorithm, options, callbacks=[Stop(5)], **saves)
        first.train()
        again = trainer(algorithm, options, **saves)
        again.train(resume_from_checkpoint=True)
        if algorithm == "decentralized":  # resumed from the average of the weights
            saved = transformers.GPT2LMHeadModel.from_pretrained(f"{saves['output_dir']}/checkpoint-5")
            for key, value in state(first).items():
                torch.testing.assert_close(saved.state_dict()[key], value)
            assert again.evaluate()["eval_loss"] < first.evaluate()["eval_loss"]
            continue
        for key, value in state(whole).items():
            equal(state(again)[key], value, f"{algorithm}: {key}")


def test_training_is_resumed_from_a_checkpoint() -> None:
    run(2, _resumed, timeout=240)


def _best(rank: int, world: int) -> None:
    """Without early stopping averages are under way when the best model is loaded."""
    every = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    for early in (True, False):
        t = trainer(
            "async",
            callbacks=[transformers.EarlyStoppingCallback(2)] * early,
            learning_rate=0.5,
            load_best_model_at_end=True,
            num_train_epochs=4,
            output_dir=str(scratch() / f"best-{early}"),
            **every,
        )
        t.train()
        assert (t.state.global_step == 28) != early
        assert t.evaluate()["eval_loss"] == pytest.approx(t.state.best_metric, rel=1e-5)
        saved = transformers.GPT2LMHeadModel.from_pretrained(t.state.best_model_checkpoint)
        for name, p in t.model.named_parameters():
            equal(p.detach(), saved.get_parameter(name).detach(), name)
    t.args.max_steps = 3
    t.train()  # the same trainer again
    same_on_all_ranks(rank, world, "again", t.model.parameters())


def test_the_best_model_is_the_average_that_was_evaluated() -> None:
    run(2, _best, timeout=120)


def _refused(rank: int, world: int) -> None:
    t = trainer(None, {"momentum": 1})
    says(raises(trigram.UnsupportedError, t.train), "momentum")


def test_options_are_checked() -> None:
    run(2, _refused, timeout=60)
