"""An elastic job goes on with a communicator of the ranks that are left; over the stand-in
(tests/support/gpu_standin.py)."""

from __future__ import annotations

import pytest

from tests.support import elastic_run, gpu_standin
from tests.support.harness import Ranks

STEPS = 30
TIMEOUT = 60.0


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_the_ranks_that_are_left_go_on(way: str) -> None:
    dies = {1: 8, 2: 16}
    args = (STEPS, "gradient_allreduce", dies, 0.02)
    with Ranks(4, elastic_run.train, *args, env=gpu_standin.env(way)) as ranks:
        results = ranks.results(TIMEOUT, dies=dies)
    first = elastic_run.the_same(results, [0, 3])
    assert first["history"][0] == (0, 1, 2, 3) and first["history"][-1] == (0, 3)
    want = elastic_run.reference(first["history"])
    assert float((first["weights"] - want).norm() / want.norm()) < 1e-9
