"""A forked child of a rank that ends as scripts do: it has no part in what its parent shows of the job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import patience
from tests.support.harness import free_port

_SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch, trigram
model = trigram.with_bagua(torch.nn.Linear(8, 8))
pid = os.fork()
if pid == 0:
    signal.alarm(30)  # it hangs: this ends it, with another status
    sys.exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
left = sorted(p.name for p in Path("figures").glob("*"))
print("child:", status, left)
"""


@pytest.mark.parametrize("variable", ["TRIGRAM_REPORT", "TRIGRAM_METRICS", "TRIGRAM_TOP"])
def test_a_forked_child_ends_and_leaves_nothing(variable: str, tmp_path: Path) -> None:
    if variable == "TRIGRAM_METRICS":
        pytest.importorskip("prometheus_client")
    value = {"TRIGRAM_REPORT": "figures", "TRIGRAM_METRICS": f"127.0.0.1:{free_port()}", "TRIGRAM_TOP": "1"}
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        capture_output=True,
        text=True,
        timeout=patience.seconds(90),
        cwd=tmp_path,
        env=os.environ | job | {variable: value[variable]},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "child: 0 []" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("trigram report") == (variable == "TRIGRAM_REPORT")
