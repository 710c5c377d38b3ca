"""The backend's calls on GPU tensors, over the stand-in for NCCL and the driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.backend import test_calls, test_parallelism
from tests.support import gpu_standin
from tests.support.cases import Cases

CALLS = Cases(test_calls.CASES)
TRAINING = Cases(test_parallelism.CASES)
# NCCL has no bitwise operators and no sums of integers of 16 bits; messages name their sender.
# The first call of a group waits on the host, so ranks cannot begin with two groups in opposite orders, as
# `groups` does.
TAKEN = [
    *(f"all_reduce-torch.{dtype}" for dtype in ("float32", "bfloat16", "int64", "complex64")),
    *(f"moves-torch.{dtype}" for dtype in ("float32", "bfloat16", "int64", "int16", "complex64")),
    *("premultiplied_sum", "coalesced", "older_forms_of_calls", "objects", "tags_and_batches"),
    *("threads", "callbacks_run_in_the_order_asked", "futures_tell_errors", "equal_splits_on_some_ranks"),
]
TRAINED = [
    "ddp-False",
    "ddp_with_hook-powersgd",
    "fsdp2-False",
    "zero",
    "tensor_parallel",
    "functional-eager",
]


@pytest.mark.parametrize("case", TAKEN)
@pytest.mark.parametrize("way", ["nccl", "host"])
def test_call(in_launch: Callable[..., None], way: str, case: str) -> None:
    in_launch("CALLS", case, 3, env=gpu_standin.env(way))


@pytest.mark.parametrize("case", TRAINED)
@pytest.mark.parametrize("way", ["nccl"])
def test_training(in_launch: Callable[..., None], way: str, case: str) -> None:
    in_launch("TRAINING", case, 3, env=gpu_standin.env(way), patience=60.0)
