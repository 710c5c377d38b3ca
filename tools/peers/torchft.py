"""torchft's own tests, which its wheel ships."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from tools.peers.outcomes import Outcomes, Suite, pytest

FILES = [
    "process_group_test",
    "manager_integ_test",
    "local_sgd_integ_test",
    "lighthouse_test",
    "ddp_test",
    "parameter_server_test",
    "checkpointing.pg_transport_test",
    "fsdp_test",
]


def run(path: Path | None) -> Suite:
    """Runs the tests."""
    del path
    return Suite(
        f"torchft {importlib.metadata.version('torchft')}",
        "The tests of the wheel, with `trigram.integrations.torchft.ProcessGroupTrigram` where they name "
        "`ProcessGroupGloo`. Those of other process groups (NCCL, and those in processes of their own) are "
        "left out. `diloco_regression_test` reads files that the wheel does not have.",
        _all("-p", "tests.support.torchft_over_trigram"),
        _all(),
        "ProcessGroupGloo",
    )


def _all(*options: str) -> Outcomes:
    found: Outcomes = {}
    for file in FILES:
        found |= pytest(
            *options, "-k", "not aby and not ccl", "--timeout", "300", "--pyargs", f"torchft.{file}"
        )
    return found
