"""Accelerate's own loop: over the backend, and with `prepare` of the integration beside Accelerate's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trigram
from tests.support.checks import equal, raises, same_on_all_ranks, says
from tests.support.harness import run, scratch

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.waits

Prepare = Callable[..., Any]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 2},
    "clipping": {"clip": 0.05},
    "bf16": {"mixed_precision": "bf16"},
    "all": {"accumulate": 3, "clip": 0.05, "mixed_precision": "bf16"},
}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "bytegrad": {},
    "qadam": {"warmup_steps": 2},
    "decentralized": {},
    "local_sgd": {"every": 3},
    "async": {},
}


def theirs(accelerator: Any, *objects: Any) -> Any:
    return accelerator.prepare(*objects)


def with_algorithm(algorithm: str | None = None, **options: Any) -> Prepare:
    from trigram.integrations.accelerate import prepare

    return lambda accelerator, *objects: prepare(accelerator, *objects, algorithm=algorithm, **options)


def net() -> nn.Sequential:
    torch.manual_seed(3 + dist.get_rank())  # rank 0's weights are to reach everybody
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))


def batches(count: int = 90) -> Any:
    """Of 90 samples the last batch of each rank is short, and is completed by Accelerate."""
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(7))
    y = torch.stack([x.sum(1).sin(), x.prod(1).tanh()], 1)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


class Script:
    """A script that trains with Accelerate.

    Attributes:
        losses: The loss over all data, before the first epoch and after each.
    """

    def __init__(
        self, prepare: Prepare, accumulate: int = 1, clip: float = 0.0, optimizer: str = "sgd", **more: Any
    ) -> None:
        accelerate.state.AcceleratorState._reset_state()
        accelerate.utils.set_seed(5)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **more)
        model, self.clip = net(), clip
        if optimizer == "qadam":
            rule: Any = trigram.QAdam(model.parameters(), lr=0.01)
        else:
            rule = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(rule, 20, 0.7)
        self.model, self.optimizer, self.data, self.schedule = prepare(
            self.accelerator, model, rule, batches(), schedule
        )
        self.losses = [self.evaluate()]

    def train(self, epochs: int = 2) -> Script:
        for _ in range(epochs):
            self.model.train()
            for x, y in self.data:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(nn.functional.mse_loss(self.model(x), y))
                    if self.clip and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
            self.losses.append(self.evaluate())
        return self

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        for buffer in self.model.buffers():  # DistributedDataParallel does it in each forward pass
            dist.broadcast(buffer, 0)
        parts = [
            self.accelerator.gather_for_metrics((self.model(x) - y).square().mean(1)) for x, y in self.data
        ]
        errors = torch.cat(parts)
        assert len(errors) == 90
        return float(errors.mean())

    def state(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in self.accelerator.unwrap_model(self.model).state_dict().items()}


def _like_ddp(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    for name, setting in SETTINGS.items():
        expected, ours = (Script(p, **setting).train() for p in (theirs, with_algorithm()))
        for key, value in expected.state().items():
            equal(ours.state()[key], value, f"{name}: {key}")
        assert ours.losses == expected.losses, name
        steps = -(-12 // setting.get("accumulate", 1)) * 2
        assert trigram.stats(ours.model)["steps"] == steps, name


def test_the_default_algorithm_trains_like_ddp() -> None:
    run(2, _like_ddp, timeout=120)


class Game:
    """A generator and a critic with an optimizer each, prepared in two calls."""

    def __init__(self, prepare: Prepare) -> None:
        accelerate.state.AcceleratorState._reset_state()
        accelerate.utils.set_seed(3 + dist.get_rank())
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        maker, critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)), nn.Linear(2, 1)
        first, second = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (maker, critic))
        self.maker, self.first, self.data = prepare(self.accelerator, maker, first, batches())
        self.critic, self.second = prepare(self.accelerator, critic, second)

    def train(self) -> list[Tensor]:
        """One epoch; the weights after it."""
        backward = self.accelerator.backward
        for x, y in self.data:
            with self.accelerator.accumulate(self.maker, self.critic):
                fake = self.maker(x)
                backward(self.critic(fake.detach()).square().mean() - self.critic(y).mean().tanh())
                self.second.step()
                self.second.zero_grad()
                with self.accelerator.no_sync(self.critic):
                    backward(-self.critic(fake).tanh().mean())
                self.first.step()
                self.first.zero_grad()
        self.critic.zero_grad()  # what the generator's last pass has left
        return [p.detach().clone() for m in (self.maker, self.critic) for p in m.parameters()]


def _two_models(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    ddp = Game(theirs)
    ddp.train()
    expected = ddp.train()
    for algorithm, options in {"gradient_allreduce": {}, "topk": {"fraction": 0.2}}.items():
        ours, folder = Game(with_algorithm(algorithm, **options)), scratch() / algorithm
        ours.train()
        ours.accelerator.save_state(folder)
        found = ours.train()
        ours.accelerator.load_state(folder)
        for again, weights, ddp_weights in zip(ours.train(), found, expected, strict=True):
            equal(again, weights, f"{algorithm}, resumed")
            if algorithm == "gradient_allreduce":
                equal(weights, ddp_weights, "two models")


def test_two_models_with_two_optimizers() -> None:
    run(2, _two_models, timeout=60)


def _others(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    for algorithm, options in ALGORITHMS.items():
        script = Script(with_algorithm(algorithm, **options), accumulate=2, clip=1.0, optimizer=algorithm)
        script.train(4)
        assert script.losses[-1] < 0.8 * script.losses[0], (algorithm, script.losses)
        saved = script.accelerator.get_state_dict(script.model)
        same_on_all_ranks(rank, world, algorithm, [v for k, v in saved.items() if "weight" in k])
        script.accelerator.save_model(script.model, scratch() / algorithm, safe_serialization=False)
        dist.barrier()
        written = torch.load(scratch() / algorithm / "pytorch_model.bin")
        for key, value in saved.items():
            equal(written[key], value, f"{algorithm}: {key}")


def test_other_algorithms_train_and_save_the_average() -> None:
    run(2, _others, timeout=120)


def _resumed(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    for algorithm, options in {
        "gradient_allreduce": {},
        "topk": {"fraction": 0.1},
        "decentralized": {},
    }.items():
        prepare, folder = with_algorithm(algorithm, **options), scratch() / algorithm
        script = Script(prepare).train(2)
        script.accelerator.save_state(folder)
        script.train(1)
        again = Script(prepare)
        again.accelerator.load_state(folder)
        average = again.state()
        again.train(1)
        if algorithm == "decentralized":  # resumed from the average of the weights
            same_on_all_ranks(rank, world, algorithm, average.values())
            assert again.losses[-1] < script.losses[0]
            continue
        for key, value in script.state().items():
            equal(again.state()[key], value, f"{algorithm}: {key}")


def test_training_is_resumed_from_a_checkpoint() -> None:
    run(2, _resumed, timeout=120)


def _refused(rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    kwargs = accelerate.DistributedDataParallelKwargs(comm_hook=accelerate.DDPCommunicationHookType.FP16)
    accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[kwargs])
    says(raises(trigram.UnsupportedError, with_algorithm(), accelerator, net()), "comm_hook", "algorithm=")
    accelerate.state.AcceleratorState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True)
    elastic = with_algorithm(elastic=True)
    says(raises(trigram.UnsupportedError, elastic, accelerator, net()), "Accelerate", "TrigramConfig")
    trigram.shutdown()
    accelerate.state.AcceleratorState._reset_state(True)
    alone = accelerate.Accelerator(cpu=False)
    says(raises(trigram.MisuseError, with_algorithm(), alone, net()), "1 process", "Trigram 2", "cpu=True")


def test_what_cannot_work_is_refused() -> None:
    run(2, _refused, timeout=60)


def _over(rank: int, world: int, backend: str) -> dict[str, Tensor]:
    dist.init_process_group(backend)
    state = Script(theirs, accumulate=2, clip=0.5).train(1).state()
    assert dist.get_backend() == backend
    return state


def test_accelerate_over_the_backend(tmp_path: Path) -> None:
    expected, ours = (run(2, _over, backend, timeout=60) for backend in ("gloo", "trigram"))
    for before, state in zip(expected, ours, strict=True):
        for key, value in before.items():
            equal(state[key], value, key)
