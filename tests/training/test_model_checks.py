"""Modules that need what the job has not are refused on all ranks, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trigram
from tests.reference.torch_gloo import gloo
from tests.support.checks import raises, says
from tests.support.harness import run


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.SyncBatchNorm(4)), nn.Linear(4, 1))


def _sync_batch_norm(rank: int, world: int, algorithm: str) -> str:
    """Refused without a process group; with one, or alone, it trains."""
    text = raises(trigram.UnsupportedError, trigram.with_bagua, _net(), algorithm)
    with gloo(rank, world):
        model = trigram.with_bagua(_net(), algorithm)
        trigram.switch(model, "gradient_allreduce")
    mine = [trigram.new_group([r]) for r in range(world)][rank]
    alone = trigram.with_bagua(_net(), algorithm, group=mine)
    alone(torch.randn(5, 3)).sum().backward()
    return text


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "async"])
def test_sync_batch_norm_needs_a_process_group(algorithm: str) -> None:
    for text in run(2, _sync_batch_norm, algorithm):
        says(text, "module 1.0", "SyncBatchNorm", "init_process_group")
