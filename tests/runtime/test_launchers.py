"""Launchers that do not set RANK: no silent jobs of one rank, and the line that the message shows works."""

from __future__ import annotations

import os
import re

import pytest
import torch

import trigram
from tests.support.checks import raises, says
from tests.support.harness import run
from trigram.runtime.launchers import refuse_unseen

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
}
PMI = {"PMI_RANK": "{rank}", "PMI_SIZE": "2", "MPI_LOCALRANKID": "{rank}"}
SLURM = {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "{rank}"}


def _launched(rank: int, world: int, variables: dict[str, str]) -> str:
    """The message without torchrun's variables; then the job that its line makes."""
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        del os.environ[name]
    os.environ |= {name: value.format(rank=rank) for name, value in variables.items()}
    text = raises(trigram.ConfigError, trigram.all_reduce, torch.ones(3))
    line = re.search(r"import os; (os\.environ\.update\(.*\))\. If", text)
    assert line is not None, text
    exec(
        re.sub(r"MASTER_ADDR=.*, MASTER", f"MASTER_ADDR='{address}', MASTER", line[1]).replace("29500", port)
    )
    t = torch.ones(3)
    trigram.all_reduce(t)
    assert t.tolist() == [world] * 3
    assert (trigram.rank(), os.environ["LOCAL_RANK"]) == (rank, str(rank))
    return text


@pytest.mark.parametrize(
    "variables, names",
    [
        (OPEN_MPI, ("Open MPI", "OMPI_COMM_WORLD_SIZE=2")),
        (PMI, ("mpiexec", "PMI_SIZE=2")),
        (SLURM, ("Slurm", "SLURM_NTASKS=2", "scontrol show hostnames")),
    ],
    ids=["Open MPI", "PMI", "Slurm"],
)
def test_a_launcher_is_named_and_its_variables_do(variables: dict[str, str], names: tuple[str, ...]) -> None:
    for text in run(2, _launched, variables):
        says(text, *names, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _refused(**env: str) -> bool:
    try:
        refuse_unseen(env)
    except trigram.ConfigError:
        return True
    return False


def test_who_is_started_alone_is_alone() -> None:
    assert not _refused()
    assert not _refused(OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0", PMIX_RANK="0")
    assert not _refused(PMI_SIZE="1", PMI_RANK="0")
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert not _refused(**batch), "a batch script"
    assert not _refused(**batch, SLURM_STEP_ID="batch")
    assert not _refused(**batch, SLURM_STEPID="4294967291"), "the number of batch scripts"
    assert not _refused(**batch, SLURM_STEP_ID="4294967290", SLURM_STEP_NUM_TASKS="1"), "a shell of salloc"
    assert not _refused(**batch, SLURM_STEP_ID="3", SLURM_STEP_NUM_TASKS="1"), "srun -n 1 in a larger job"
    assert not _refused(SLURM_NTASKS="8", SLURM_JOB_ID="17"), "salloc without a step"


def test_who_is_one_of_several_is_not() -> None:
    assert _refused(SLURM_PROCID="0", SLURM_NTASKS="8", SLURM_STEP_ID="0")
    assert _refused(SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_STEPID="0")
    assert _refused(PMIX_RANK="1")
    assert _refused(PMIX_RANK="0", PMIX_SIZE="4")
    assert _refused(PMI_RANK="0", PMI_SIZE="4")


def _each_alone(rank: int, world: int) -> int:
    """Independent runs that a launcher starts, such as a search over parameters, say so."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
    }
    return trigram.init().size


def test_a_world_of_one_may_be_asked_for() -> None:
    assert run(2, _each_alone) == [1, 1]
