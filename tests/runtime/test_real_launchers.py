"""srun, mpiexec and torchrun themselves start a script; it needs nothing of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import patience, slurm
from tests.support.harness import ROOT
from trigram.runtime.launchers import first_host

pytestmark = pytest.mark.waits

SCRIPT = """
import os, torch, trigram
model = trigram.with_bagua(torch.nn.Linear(2, 1))
model(torch.full((1, 2), trigram.rank() + 1.0)).sum().backward()
print(f"rank {trigram.rank()} of {trigram.world_size()}, local {os.environ['LOCAL_RANK']}: "
      f"{model.weight.grad.tolist()}\\n", end="", flush=True)  # one write, though it may be unbuffered
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (file := tmp_path / "train.py").write_text(SCRIPT)
    return file


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if why := slurm.missing():
        pytest.skip(f"Slurm: {why}")
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as env:
        yield env


def _mpiexecs() -> list[str]:
    """The mpiexec of the virtual environment and the machine's."""
    known = [str(Path(sys.executable).parent / "mpiexec"), shutil.which("mpiexec") or ""]
    return [file for file in dict.fromkeys(known) if file and os.access(file, os.X_OK)]


def _starts(command: list[str], env: dict[str, str] | None = None) -> None:
    """The command starts two ranks of one job."""
    env = {n: v for n, v in (env or os.environ).items() if n not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'python'}:{env.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=patience.seconds(200), check=False
    )
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    expected = [f"rank {r} of 2, local {r}: [[1.5, 1.5]]" for r in (0, 1)]
    assert lines == expected, done.stdout + done.stderr


def test_mpiexec_needs_nothing(script: Path) -> None:
    """Also beside another job of the same mpiexec, as the port is the job's."""
    if not _mpiexecs():
        pytest.skip("mpiexec: not installed")
    for file in _mpiexecs():
        version = subprocess.run([file, "--version"], capture_output=True, text=True, check=False).stdout
        root = (
            ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version or "prte" in version else []
        )
        _starts([file, *root, "-n", "2", sys.executable, str(script)])


def test_srun_needs_nothing(cluster: dict[str, str], script: Path) -> None:
    _starts(["srun", "-n", "2", sys.executable, str(script)], cluster)


@pytest.mark.long
def test_torchrun_inside_srun(cluster: dict[str, str], script: Path) -> None:
    """Its variables count before those of srun, which started one torchrun."""
    _starts(
        ["srun", "-n", "1", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)],
        cluster,
    )


def test_hosts_as_slurm_expands_them(cluster: dict[str, str]) -> None:
    for hosts in ("n1", "n[007-009,12],m1", "rack[2-3]n[01-04,09],login"):
        command = ["scontrol", "show", "hostnames", hosts]
        done = subprocess.run(
            command, env=cluster, capture_output=True, text=True, timeout=patience.seconds(30), check=True
        )
        assert first_host(hosts) == done.stdout.split()[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "arguments", "says"),
    [
        ("slurm.sh", ["--ntasks-per-node=2"], ["--epochs", "1"], "epoch 0: accuracy"),
        ("cpu_cluster.sh", [], ["--steps", "5"], "held-out loss"),
    ],
)
def test_a_batch_script_trains(
    cluster: dict[str, str], tmp_path: Path, name: str, options: list[str], arguments: list[str], says: str
) -> None:
    """Two ranks, of which one prints; the node has two sockets."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "rank $SLURM_PROCID of $SLURM_NTASKS"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    env = cluster | {"PYTHON": str(python), "PYTHONPATH": str(ROOT / "python")}
    command = ["sbatch", "--wait", "--nodes=1", f"--output={tmp_path / 'log'}", *options]
    command += [str(ROOT / "examples/launch" / name), *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=patience.seconds(250), check=False)
    log = (tmp_path / "log").read_text()
    assert done.returncode == 0 and log.count(says) == 1, log
    assert sorted(line for line in log.splitlines() if line.startswith("rank")) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]
