"""torchft's own tests, as its wheel ships them, on our process group in the place of its Gloo one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import patience
from tests.support.harness import ROOT, run

SUITES = {
    # by suite: how many of its tests pass on CPUs, and what is left out
    "process_group_test": (28, "not aby and not ccl"),  # those are other process groups
    "manager_integ_test": (7, ""),
    "local_sgd_integ_test": (28, ""),
    "lighthouse_test": (4, ""),
    "ddp_test": (2, ""),
    "parameter_server_test": (1, ""),
    "checkpointing.pg_transport_test": (1, ""),
}


@pytest.mark.parametrize("suite", SUITES)
def test_suite(suite: str, tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="pip install torchft")
    count, chosen = SUITES[suite]
    plugin = ["-p", "tests.support.torchft_over_trigram", "-p", "no:cacheprovider", "-o", "addopts="]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, "-k", chosen, "--pyargs", f"torchft.{suite}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience.seconds(500),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) == count, done.stdout[-2000:]


def _reconfigured(rank: int, world: int) -> dict[str, Any]:
    """Three threads are ranks; one of them stops, and the others go on without it."""
    from torch.distributed import ReduceOp

    from trigram.integrations.torchft import ProcessGroupTrigram

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: dict[str, Any] = {}

    def train(rank: int) -> None:
        group = ProcessGroupTrigram(timeout=timedelta(seconds=5))
        group.configure(f"127.0.0.1:{store.port}/one", "0", rank, 3)
        value = torch.ones(8)
        group.allreduce([value], ReduceOp.SUM).wait()
        assert value[0] == 3
        if rank == 2:
            group.shutdown()
            return
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"Connection closed by peer.*rank 2"):
            group.allreduce([value], ReduceOp.SUM).wait()
        found[f"noticed {rank}"] = time.monotonic() - began
        group.configure(f"127.0.0.1:{store.port}/two", "0", rank, 2)
        value = torch.ones(8)
        work = group.allreduce([value], ReduceOp.SUM)
        found[f"sum {rank}"] = work.get_future().then(lambda f: f.value()[0][0].item()).wait()
        group.abort()
        with pytest.raises(AssertionError, match="process group not initialized"):
            group.allreduce([value], ReduceOp.SUM)

    def noting(rank: int) -> None:
        try:
            train(rank)
        except BaseException as e:
            found[f"error {rank}"] = repr(e)

    threads = [threading.Thread(target=noting, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_a_lost_rank_is_left_out() -> None:
    pytest.importorskip("torchft", reason="pip install torchft")
    [found] = run(1, _reconfigured)
    assert not [v for k, v in found.items() if k.startswith("error")], found
    assert found["sum 0"] == found["sum 1"] == 2
    assert max(found["noticed 0"], found["noticed 1"]) < 5
