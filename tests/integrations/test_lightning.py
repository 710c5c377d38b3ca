"""Lightning's Trainer and Fabric with the strategy "trigram", beside "ddp"."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.support.checks import raises
from tests.support.harness import await_flag, flag, free_port, run, scratch
from tests.support.marks import long

lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.waits

WEIGHTS = {"decentralized": {}, "local_sgd": {"every": 3}, "async": {}}
"""Algorithms under which the ranks' weights differ in training."""
CLOSE = {"bytegrad": {}, "qadam": {"warmup_steps": 2}}


class Module(lightning.LightningModule):
    """A small net with a BatchNorm, which trains through a submodule as many scripts do."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
        self.name = optimizer
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        if self.name == "qadam":
            return trigram.QAdam(self.parameters(), lr=0.01)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Manual(Module):
    """Manual optimization with two optimizers, as a GAN has them."""

    def __init__(self) -> None:
        super().__init__()
        # Not a BatchNorm: with manual optimization Lightning keeps DDP from broadcasting buffers.
        self.net[1] = nn.LayerNorm(16)
        self.critic = nn.Linear(2, 1)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], number: int) -> None:
        first, second = self.optimizers()
        fake = self.net(batch[0])
        self.toggle_optimizer(second)
        loss = self.critic(fake.detach()).square().mean() - self.critic(batch[1]).mean().tanh()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        self.toggle_optimizer(first)
        loss = -self.critic(self.net(batch[0])).tanh().mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.05), torch.optim.SGD(
            self.critic.parameters(), lr=0.05
        )


def batches(count: int) -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 6, generator=generator)
    y = torch.stack([x.sum(1).sin(), x.prod(1).tanh()], 1)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)


def trainer(strategy: Any, epochs: int = 2, ranks: int = 2, **more: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    more.setdefault("enable_checkpointing", False)
    return lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=epochs,
        default_root_dir=scratch(), **quiet, **more,
    )  # fmt: skip


SETTINGS: dict[str, tuple[Callable[[], Module], dict[str, Any]]] = {
    "plain": (Module, {}),
    "accumulation": (Module, {"accumulate_grad_batches": 3}),
    "clipping": (Module, {"gradient_clip_val": 0.1}),
    "bf16": (Module, {"precision": "bf16-mixed"}),
    "manual": (Manual, {}),
}


def fitted(strategy: Any, setting: str, ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """The state and the validation losses after two epochs of 15 steps."""
    make, more = SETTINGS[setting]
    module = make()
    trainer(strategy, ranks=ranks, **more).fit(module, batches(120), batches(24))
    assert not trigram.is_wrapped(module)
    return {k: v.clone() for k, v in module.state_dict().items()}, module.losses


def new_group(rank: int) -> None:
    """The next strategy makes a process group of its own backend."""
    torch.distributed.destroy_process_group()
    if rank == 0:
        (scratch() / "port").write_text(str(free_port()))
        flag("port")
    await_flag("port")
    os.environ["MASTER_PORT"] = (scratch() / "port").read_text()


def _trained_like_ddp(rank: int, world: int) -> None:
    ddp = {"manual": "ddp_find_unused_parameters_true"}
    expected = {name: fitted(ddp.get(name, "ddp"), name, world) for name in SETTINGS}
    new_group(rank)
    from trigram.integrations.lightning import TrigramStrategy

    for name, (state, losses) in expected.items():
        ours, our_losses = fitted("trigram" if name == "plain" else TrigramStrategy(), name, world)
        assert torch.distributed.get_backend() == "trigram"
        for key, value in state.items():
            if world == 2:
                assert torch.equal(ours[key], value), f"{name}: {key}"
            else:
                torch.testing.assert_close(ours[key], value, msg=lambda m, n=name, k=key: f"{n}: {k}: {m}")
        assert losses == pytest.approx(our_losses, rel=0 if world == 2 else 1e-5), name


@pytest.mark.parametrize("world", [2, long(3)])
def test_the_default_algorithm_trains_like_ddp(world: int) -> None:
    run(world, _trained_like_ddp, timeout=120)


def _backend_only(rank: int, world: int, backend: str) -> dict[str, Tensor]:
    strategy = lightning.pytorch.strategies.DDPStrategy(process_group_backend=backend)
    state, _ = fitted(strategy, "plain", world)
    assert torch.distributed.get_backend() == backend
    return state


@pytest.mark.long
def test_ddp_over_the_backend() -> None:
    """Lightning's own strategy, with our backend under DistributedDataParallel."""
    theirs, ours = (run(2, _backend_only, backend, timeout=60) for backend in ("gloo", "trigram"))
    for expected, state in zip(theirs, ours, strict=True):
        assert all(torch.equal(state[k], v) for k, v in expected.items())


def _trained(rank: int, world: int) -> None:
    from trigram.integrations.lightning import TrigramStrategy

    untrained = Module()
    reference = untrained.state_dict()
    for algorithm, options in {**CLOSE, **WEIGHTS}.items():
        module = Module("qadam" if algorithm == "qadam" else "sgd")
        trainer(TrigramStrategy(algorithm, options), 4).fit(module, batches(120), batches(24))
        assert module.losses[-1] < 0.9 * module.losses[0], (algorithm, module.losses)
        assert not trigram.is_wrapped(module)
        mine = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
        others = [torch.empty_like(mine) for _ in range(world)]
        torch.distributed.all_gather(others, mine)
        assert all(torch.equal(o, mine) for o in others), (
            f"{algorithm}: the weights after fit are the average"
        )
    assert any(not torch.equal(v, reference[k]) for k, v in module.state_dict().items())


def test_other_algorithms_train() -> None:
    run(2, _trained, timeout=120)


class OfAll(Module):
    """Notes the buffers that each rank validates."""

    def on_fit_start(self) -> None:
        self.validated: list[Tensor] = []

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        super().validation_step(batch, number)
        self.validated.append(self.net[1].running_mean.clone())


def _averaged_weights(rank: int, world: int) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    from trigram.integrations.lightning import TrigramStrategy

    seen = {}
    for strategy in ("ddp", TrigramStrategy()):
        module = OfAll()
        more = {"callbacks": [EMAWeightAveraging(decay=0.5)], "num_sanity_val_steps": 0}
        trainer(strategy, ranks=world, **more).fit(module, batches(120), batches(24))
        mine = torch.stack(module.validated)
        first = mine.clone()
        torch.distributed.broadcast(first, 0)
        assert torch.equal(mine, first), f"{strategy}: the buffers that ranks validate differ"
        seen[strategy] = mine
        if strategy == "ddp":
            new_group(rank)
    ddp, ours = seen.values()
    assert torch.allclose(ddp, ours, atol=1e-6)


def test_averaged_weights_are_validated_with_the_buffers_of_rank_0() -> None:
    run(2, _averaged_weights, timeout=120)


def _resumed(rank: int, world: int) -> None:
    from trigram.integrations.lightning import TrigramStrategy

    for algorithm, options in {"gradient_allreduce": {}, "bytegrad": {}, "decentralized": {}}.items():
        path = scratch() / f"{algorithm}.ckpt"
        whole = Module()
        trainer(TrigramStrategy(algorithm, options), 4).fit(whole, batches(120), batches(24))
        half = trainer(TrigramStrategy(algorithm, options), 2)
        first = Module()
        saves = lightning.pytorch.callbacks.LambdaCallback(
            on_train_epoch_end=lambda t, m, path=path: t.save_checkpoint(path)
        )
        half.callbacks.append(saves)
        half.fit(first, batches(120), batches(24))
        saved = torch.load(path, weights_only=False)
        assert len(saved["trigram"]) == world
        second = Module()
        trainer(TrigramStrategy(algorithm, options), 4).fit(second, batches(120), batches(24), ckpt_path=path)
        if algorithm == "decentralized":  # resumed from the average of the weights
            assert second.losses[-1] < 0.9 * first.losses[0]
            for key, value in first.state_dict().items():
                torch.testing.assert_close(saved["state_dict"][key], value)
            continue
        for key, value in whole.state_dict().items():
            assert torch.equal(second.state_dict()[key], value), f"{algorithm}: {key}"


def test_training_is_resumed_from_a_checkpoint() -> None:
    run(2, _resumed, timeout=120)


def fabric_trained(strategy: str, ranks: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's state after an epoch, and what `fabric.save` has written."""
    fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    assert torch.distributed.get_backend() == ("trigram" if strategy == "trigram" else "gloo")
    model = Module().net
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = fabric.setup(model, optimizer)
    for number, (x, y) in enumerate(fabric.setup_dataloaders(batches(120))):
        with fabric.no_backward_sync(model, enabled=number % 3 != 2):
            fabric.backward(nn.functional.mse_loss(model(x), y))
        if number % 3 == 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(scratch() / strategy, {"model": model})
    fabric.barrier()
    saved = torch.load(scratch() / strategy, weights_only=True)["model"]
    return {k: v.clone() for k, v in model.state_dict().items()}, saved


def _fabric(rank: int, world: int) -> None:
    expected = fabric_trained("ddp", world)
    new_group(rank)
    import trigram.integrations.lightning  # noqa: F401  # registers the name

    for before, ours in zip(expected, fabric_trained("trigram", world), strict=True):
        assert ours.keys() == before.keys()
        assert all(torch.equal(ours[k], v) for k, v in before.items())


def test_fabric() -> None:
    run(2, _fabric, timeout=60)


def test_arguments_of_ddp_are_refused() -> None:
    from trigram.integrations.lightning import TrigramStrategy

    said = raises(trigram.MisuseError, lambda: TrigramStrategy(find_unused_parameters=True))
    assert "find_unused_parameters" in said and "options" in said
    raises(trigram.UnsupportedError, lambda: TrigramStrategy(options={"elastic": True}))
    assert "Fabric" in raises(trigram.MisuseError, lambda: TrigramStrategy(options={"group": [0]}))
