"""Accelerate's own scripts (``accelerate/test_utils/scripts``), which its wheel ships."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from tools.peers.outcomes import FAILED, PASSED, Outcomes, Suite, python

SCRIPTS = ["test_script", "test_sync", "test_ops", "test_distributed_data_loop", "test_ddp_comm_hook"]
RANK = Path(__file__).parent / "scripts" / "accelerate_rank.py"
REASONS = {
    "test_distributed_data_loop": "ranks have different numbers of batches, and Accelerate joins them on "
    "GPUs only: gloo waits without end, Trigram raises `MismatchError`",
    "test_ddp_comm_hook": "needs GPUs",
    "test_ddp_comm_hook (prepare)": "it asks for hooks of DistributedDataParallel, which the model is not; "
    "`prepare` says so",
}


def run(path: Path | None) -> Suite:
    """Runs the scripts on two ranks."""
    del path  # they are where Accelerate is
    found = importlib.util.find_spec("accelerate")
    assert found is not None and found.origin is not None
    folder = Path(found.origin).parent / "test_utils" / "scripts"
    ours, theirs = _all(folder, "trigram", "ddp"), _all(folder, "gloo", "ddp")
    prepared = _all(folder, "trigram", "prepare")
    ours |= {f"{script} (prepare)": how for script, how in prepared.items()}
    theirs |= {f"{script} (prepare)": how for script, how in theirs.items()}
    return Suite(
        f"Accelerate {importlib.metadata.version('accelerate')}",
        "The scripts of `accelerate/test_utils/scripts`, as the wheel has them, on two ranks on CPUs, over a "
        "process group that `init_process_group` has made. They run again (`prepare`) with "
        "`trigram.integrations.accelerate.prepare` in the place of `Accelerator.prepare`, beside "
        "DistributedDataParallel over gloo. Those of `external_deps` need weights and data from a network, "
        "and were not run.",
        ours,
        theirs,
        reasons=REASONS,
    )


def _all(folder: Path, backend: str, how: str) -> Outcomes:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29511"]
    found: Outcomes = {}
    for script in SCRIPTS:
        rank = [str(RANK), backend, how, str(folder / f"{script}.py")]
        status = python(*torchrun, *rank, limit=200, ACCELERATE_USE_CPU="true")
        found[script] = FAILED if status else PASSED
    return found
