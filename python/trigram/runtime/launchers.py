"""Launchers other than torchrun, which do not set ``RANK``: MPI, PMI and Slurm.

Without this check each of their processes would be a job of its own, and train alone without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trigram.errors import ConfigError

_FIRST_SPECIAL_STEP = 0xFFFF_FF00
"""Slurm numbers the steps that ``srun`` has not launched, such as batch scripts, from the top."""


@dataclass(frozen=True)
class Launcher:
    """A launcher and its variables.

    Attributes:
        name: The launcher, as a message names it.
        rank: The variable with the process's rank.
        size: The variables with the number of processes; the first that is set counts.
        local: The variable with the rank among the processes of this host.
        host: A Python expression for a host name of rank 0.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local: str
    host: str = "'<host of rank 0>'"


_SLURM = Launcher(
    "srun (Slurm)",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "SLURM_LOCALID",
    "os.popen('scontrol show hostnames').readline().strip()",
)
_LAUNCHERS = [
    Launcher(
        "mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"
    ),
    Launcher("mpiexec (PMI)", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID"),
    Launcher("a PMIx launcher", "PMIX_RANK", ("PMIX_SIZE",), "PMIX_LOCAL_RANK"),
    _SLURM,
]


def refuse_unseen(env: Mapping[str, str]) -> None:
    """Raises if a launcher has started several processes, and ``RANK`` and ``WORLD_SIZE`` do not say so.

    Args:
        env: The environment of a process without ``RANK``.

    Raises:
        ConfigError: It names the launcher, its variables, and the line that sets torchrun's from them.
    """
    for launcher in _LAUNCHERS:
        if launcher.rank not in env or (launcher is _SLURM and not _is_launched_by_srun(env)):
            continue
        size = next((v for v in launcher.size if v in env), None)
        rank, count = _number(env[launcher.rank]), _number(env[size]) if size is not None else 0
        if count > 1 or rank > 0:
            raise ConfigError(_message(launcher, size, env))


def _is_launched_by_srun(env: Mapping[str, str]) -> bool:
    """Whether this process is a task of a step; a batch script, or a shell of ``salloc``, is alone."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "batch"))
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _message(launcher: Launcher, size: str | None, env: Mapping[str, str]) -> str:
    seen = ", ".join(f"{v}={env[v]}" for v in (launcher.rank, size) if v is not None)
    count = f"os.environ['{size}']" if size is not None else "'<number of processes>'"
    local = f", LOCAL_RANK=os.environ['{launcher.local}']" if launcher.local in env else ""
    return (
        f"init: {launcher.name} has started several processes ({seen}), but RANK and WORLD_SIZE are not "
        "set, so each would train alone; begin the script with: import os; os.environ.update("
        f"RANK=os.environ['{launcher.rank}'], WORLD_SIZE={count}{local}, MASTER_ADDR={launcher.host}, "
        "MASTER_PORT='29500'). If each process is a job of its own, set RANK=0 and WORLD_SIZE=1"
    )
