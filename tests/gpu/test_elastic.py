"""An elastic job goes on with a communicator of the ranks that are left; over the stand-in
(tests/support/gpu_standin.py)."""

from __future__ import annotations

from tests.support import elastic_run, gpu_standin
from tests.support.harness import Ranks

STEPS = 30
TIMEOUT = 60.0


def test_the_ranks_that_are_left_go_on() -> None:
    args = (STEPS, "gradient_allreduce", {1: 8}, 0.02)
    with Ranks(3, elastic_run.train, *args, env=gpu_standin.env("nccl")) as ranks:
        results = ranks.results(TIMEOUT, dies=[1])
    first = elastic_run.the_same(results, [0, 2])
    assert first["history"][0] == (0, 1, 2) and first["history"][-1] == (0, 2)
    want = elastic_run.reference(first["history"])
    assert float((first["weights"] - want).norm() / want.norm()) < 1e-9
