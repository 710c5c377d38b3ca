"""FSDP2 through our collectives on a GPT and real text: with a codec the loss is that without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import trigram
from tests.reference.torch_gloo import gloo
from tests.support.harness import run
from trigram.cli import workloads
from trigram.integrations import fsdp

pytestmark = pytest.mark.long

STEPS = 300
WAYS: dict[str, dict[str, Any] | None] = {"gloo": None, "full": {}, "int8": {"codec": "int8"}}


def trains(rank: int, world: int) -> list[tuple[float, list[torch.Tensor]]]:
    """The mean loss of the last steps on all ranks' batches, and the weights, by each way."""
    trigram.init()
    torch.set_num_threads(1)
    found = []
    for options in WAYS.values():
        with gloo(rank, world):
            torch.manual_seed(0)
            model: Any = workloads.TinyGPT()
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            if options is not None:
                fsdp.use(model, **options)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
            stream, last = workloads.batches("gpt", rank, world, 0), torch.zeros(())
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = workloads.loss_of(model, *next(stream))
                loss.backward()
                optimizer.step()
                if step >= STEPS - 100:
                    last += loss.detach() / 100
            trigram.all_reduce(last, "avg")
            found.append((float(last), [p.full_tensor().detach().clone() for p in model.parameters()]))
    return found if rank == 0 else []


@pytest.mark.parametrize("world", [2, 4])
def test_int8_has_the_loss_of_full_gradients(world: int) -> None:
    (gloo_loss, gloo_weights), (loss, weights), (coded, coded_weights) = run(world, trains, timeout=850)[0]
    assert loss < 2.8
    if world == 2:
        assert loss == gloo_loss
        assert all(torch.equal(a, b) for a, b in zip(weights, gloo_weights, strict=True))
    assert abs(loss / gloo_loss - 1) < 0.01, (loss, gloo_loss)
    assert any(not torch.equal(a, b) for a, b in zip(weights, coded_weights, strict=True))
    assert abs(coded / loss - 1) < 0.01, (coded, loss)
