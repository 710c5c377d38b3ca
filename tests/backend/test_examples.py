"""The examples of parallel training train as one process does."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.support.harness import ROOT, run

EXAMPLES = {
    "tensor_parallel": 2,
    "pipeline_parallel": 4,
    "optimizer_parallel": 3,
    "data_and_tensor_parallel": 4,
}


def _train(rank: int, world: int, name: str) -> float:
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "examples"))
    worst: float = importlib.import_module(name).main()
    assert dist.get_backend() == "trigram"
    dist.destroy_process_group()
    return worst


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_example(name: str) -> None:
    differences = run(EXAMPLES[name], _train, name, timeout=120)
    assert max(differences) < 1e-5, differences
