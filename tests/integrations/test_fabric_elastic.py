"""Lightning's Fabric in elastic jobs: the strategy "trigram_elastic"."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.integrations.test_lightning_elastic import BATCH, EPOCHS, SAMPLES, _data, _net, _plainly, _same
from tests.support.checks import raises, says
from tests.support.elastic_samples import epochs_of
from tests.support.harness import Ranks, run, say, scratch, until
from trigram.data import ElasticLoader

lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.waits


def _fabric(*algorithm: Any) -> Any:
    from trigram.integrations.fabric_elastic import TrigramElasticFabricStrategy

    strategy = TrigramElasticFabricStrategy(*algorithm) if algorithm else "trigram_elastic"
    fabric = lightning.Fabric(accelerator="cpu", strategy=strategy)
    fabric.launch()
    return fabric


def _trains(rank: int, world: int, pause: float = 0.0) -> dict[str, Any]:
    """A loop as Fabric's users write it; rank 1 dies in its second epoch, if the test has asked for it."""
    torch.set_num_threads(1)
    fabric = _fabric()
    net = _net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader = ElasticLoader(_data(), BATCH)
    fabric.strategy.states += [loader, scheduler]
    net, optimizer = fabric.setup(net, optimizer)
    steps, loss = 0, torch.zeros(())
    while loader.epoch < EPOCHS:
        for x, y, samples in loader:
            dies, awaited = scratch() / "dies", scratch() / "waits"
            if loader.epoch == 1 and rank == 1 and dies.exists():
                dies.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            fabric.backward(loss)
            epoch = loader.epoch
            optimizer.step()
            steps += 1
            say((epoch, steps, samples.tolist()))
            if rank == 1:
                awaited.unlink(missing_ok=True)  # it is here
            time.sleep(2 if awaited.exists() and epoch > 1 else pause)
        scheduler.step()
        loss = fabric.all_reduce(loss.detach(), reduce_op="mean")
        fabric.save(scratch() / f"after-{loader.epoch}.ckpt", {"net": net, "optimizer": optimizer})
    assert fabric.global_rank == trigram.rank() and fabric.world_size == trigram.world_size() == 3
    assert fabric.is_global_zero == (trigram.rank() == 0)
    assert fabric.broadcast(trigram.rank()) == 0
    assert fabric.all_gather(torch.tensor(trigram.rank())).tolist() == [0, 1, 2]
    return {
        "weights": torch.cat([p.detach().flatten() for p in net.parameters()]),
        "lr": optimizer.param_groups[0]["lr"],
        "loss": float(loss),
    }


def test_fabric_trains_as_a_loop_does() -> None:
    with Ranks(3, _trains) as ranks:
        found = _same(ranks.results(120))
        kept = torch.load(ranks.dir / f"after-{EPOCHS}.ckpt")
    plain: Tensor = run(3, _plainly)[0]
    torch.testing.assert_close(found["weights"], plain, rtol=0, atol=0)
    saved = torch.cat([t.flatten() for t in kept["net"].values()])
    torch.testing.assert_close(saved, plain, rtol=0, atol=0)
    assert len(kept["optimizer"]["state"]) == 4


def test_a_rank_of_fabric_is_lost_and_comes_back() -> None:
    with Ranks(3, _trains, 0.2) as ranks:
        (ranks.dir / "dies").touch()
        until(lambda: not ranks.hear(0.1) or ranks.ranks[1].ended, 60, "a loss")
        (ranks.dir / "waits").touch()
        before = list(ranks.ranks[1].said)
        ranks.restart(1, _trains, 0.2)
        joined = ranks.ranks[1]
        _same(ranks.results(120))
        said = {rank: [s for s in each.said if isinstance(s, tuple)] for rank, each in ranks.ranks.items()}
    assert joined.said, "it came in time"
    said[1] = [*before, *joined.said[1:]]  # its first step, as a rank that joins, does not count
    epochs = epochs_of((each for entries in said.values() for each in entries), SAMPLES, 3)
    assert epochs == list(range(EPOCHS))


def _refused(rank: int, world: int) -> None:
    fabric, net = _fabric("bytegrad"), _net()
    says(raises(trigram.MisuseError, fabric.setup, net), "fabric.setup(model, optimizer)")
    two = [torch.optim.SGD(part.parameters(), 0.1) for part in (net[0], net[2])]
    says(raises(trigram.MisuseError, fabric.setup, net, *two), "2 optimizers")
    frozen = _net().requires_grad_(False)
    assert fabric.setup(frozen)(torch.ones(1, 6)).shape == (1, 1)


def test_what_fabric_cannot_give_a_rank_that_joins_is_refused() -> None:
    run(1, _refused)
