"""Launchers other than torchrun: what srun, mpiexec, Kubernetes and multiprocessing say about a process.

``set_variables`` turns that into torchrun's variables. A process that a launcher started as one of several
never becomes a job of its own without a word: where the variables do not suffice, there is an error.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import struct
import zlib
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FIRST_SPECIAL_STEP = 0xFFFF_FF00
"""Slurm numbers the steps that ``srun`` has not launched, such as batch scripts, from the top."""
MEMBER = "TRIGRAM_MEMBER_FILE"
"""A file that a rank makes once it is a member of an elastic job, for the launcher that has started it."""
_FIRST_PORT, _PORTS = 15_000, 15_000
"""Ports that jobs are given by their names: below those that systems give to clients."""


@dataclass(frozen=True)
class Process:
    """What a launcher says about this process.

    Attributes:
        launcher: Its name, for messages.
        seen: The variables that say so.
        rank: The rank.
        size: The number of ranks; None: the launcher does not say.
        local_rank: The rank among those of this host; None: the launcher does not say.
        local_size: The number of ranks of this host; None: the launcher does not say.
        host: A name of rank 0's host; None: the launcher does not say.
        job: What all ranks of the job have in common, and no other job; None: the launcher does not say.
        port: The port of rank 0's store; None: ``job`` chooses one.
        advice: What to do where this does not suffice.
    """

    launcher: str
    seen: tuple[str, ...]
    rank: int
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    host: str | None = None
    job: str | None = None
    port: int | None = None
    advice: str = "set WORLD_SIZE, and MASTER_ADDR to the host of rank 0, the same for all ranks"


def tell_launcher() -> None:
    """This rank has entered its elastic job."""
    if name := os.environ.get(MEMBER):
        with suppress(OSError):  # the launcher has ended
            Path(name).touch()


def set_variables(env: MutableMapping[str, str], rank: int | None = None, size: int | None = None) -> str:
    """Sets those of torchrun's variables that are absent, as the launcher of this process implies them.

    Args:
        env: The environment, ``os.environ``.
        rank: The rank, if the caller gives it.
        size: The world size, if the caller gives it.

    Returns:
        The name of the job, if it chose the port; "" otherwise. Two jobs may meet at one port.

    Raises:
        ConfigError: A launcher has started several processes and its variables do not say enough, or
            contradict those that are set.
    """
    rank = number(env, "RANK") if rank is None else rank
    size = number(env, "WORLD_SIZE") if size is None else size
    known = rank is not None and size is not None
    if known and "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return ""
    process = find(env)
    if process is None or (known and (rank, size) != (process.rank, process.size or size)):
        return ""
    _check(process, env, rank, size)
    size = process.size if size is None else size
    if size == 1 and process.rank == 0:
        return ""  # alone, as without a launcher
    if size is None:
        raise config_error(_message(process, env, "the number of ranks is not known"))
    port = process.port or (_port(process.job) if process.job is not None else None)
    found = {
        "RANK": process.rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": process.local_rank,
        "LOCAL_WORLD_SIZE": process.local_size,
        "MASTER_ADDR": process.host,
        "MASTER_PORT": port,
    }
    if "MASTER_ADDR" not in env and (process.host is None or port is None):
        found |= _address_through_mpi(process, env, size)
    elif "MASTER_PORT" not in env and port is None:
        raise config_error(_message(process, env, "MASTER_PORT is not set"))
    named = process.job if "MASTER_PORT" not in env and found["MASTER_PORT"] == port else None
    for name, value in found.items():
        if value is not None:
            env.setdefault(name, str(value))
    return named or ""


def find(env: Mapping[str, str]) -> Process | None:
    """What started this process as one of several, or as one of possibly several; None: nothing did."""
    srun, mpi = _slurm(env), _open_mpi(env) or _pmi(env) or _pmix(env)
    # srun --mpi=pmi2 or pmix sets the variables of both, and Slurm's say more. An mpiexec that starts its
    # daemons by srun has the daemon's variables of Slurm beside its own of the rank.
    if srun and mpi and (srun.rank, srun.size) != (mpi.rank, mpi.size or srun.size):
        srun = None
    return srun or mpi or _kubeflow(env) or _indexed_job(env) or _spawned()


def number(env: Mapping[str, str], name: str) -> int | None:
    """The number in one of torchrun's variables; None: it is absent.

    Raises:
        ConfigError: It is no integer.
    """
    if name not in env:
        return None
    try:
        return int(env[name])
    except ValueError:
        raise config_error(f"init: {name}={env[name]!r} is not an integer; correct it") from None


def config_error(text: str) -> Exception:
    """A :class:`trigram.ConfigError`, whose import loads torch: who starts ranks does without, mostly."""
    from trigram.errors import ConfigError  # see above

    return ConfigError(text)


def free_port() -> int:
    """A TCP port of the loopback interface that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it: ``rack[2-3]n[01-04,09],login`` begins with rack2n01."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else hosts)


def _slurm(env: Mapping[str, str]) -> Process | None:
    """A task that srun has launched. A batch script, or a shell of ``salloc``, is alone."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "batch"))
    if "SLURM_PROCID" not in env or not step.isdecimal() or int(step) >= _FIRST_SPECIAL_STEP:
        return None
    size = _first(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    alone = env.get("SLURM_STEP_NUM_NODES") == "1"
    nodes = _first(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job = _first(env, "SLURM_JOB_ID", "SLURM_JOBID")
    count = _integer(env, size)
    return Process(
        "srun (Slurm)",
        _present(env, "SLURM_PROCID", size),
        _integer(env, "SLURM_PROCID") or 0,
        count,
        _integer(env, "SLURM_LOCALID"),
        count if alone else None,
        "127.0.0.1" if alone else first_host(env[nodes]) if nodes else None,
        f"slurm {env[job]}.{step}" if job else None,
        advice="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port, before srun",
    )


def _open_mpi(env: Mapping[str, str]) -> Process | None:
    return _mpi(
        env,
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        _value(env, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"),
    )


def _pmi(env: Mapping[str, str]) -> Process | None:
    return _mpi(env, "mpiexec (PMI)", "PMI", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", _pmi_server(env))


def _pmix(env: Mapping[str, str]) -> Process | None:
    job = _value(env, "PMIX_NAMESPACE")
    return _mpi(env, "a PMIx launcher", "PMIX", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE", job)


def _mpi(
    env: Mapping[str, str], launcher: str, prefix: str, local: str, local_size: str, job: str | None
) -> Process | None:
    """A process of an MPI launcher. On one host its variables suffice; they do not name other hosts."""
    rank, size = _integer(env, f"{prefix}_RANK"), _integer(env, f"{prefix}_SIZE")
    if rank is None:
        return None
    alone = size is not None and _integer(env, local_size) == size
    return Process(
        launcher,
        _present(env, f"{prefix}_RANK", f"{prefix}_SIZE"),
        rank,
        size,
        _integer(env, local),
        _integer(env, local_size),
        "127.0.0.1" if alone else None,
        f"{launcher} {job}" if alone and job else None,
        advice="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port for all ranks "
        "(mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, or mpiexec -genv MASTER_ADDR HOST -genv "
        "MASTER_PORT 29500), or install mpi4py for this MPI: pip install 'trigram[mpi]'",
    )


def _pmi_server(env: Mapping[str, str]) -> str | None:
    """The process id of this host's PMI server, which a rank reaches over the socket PMI_FD."""
    with suppress(OSError, ValueError), socket.socket(fileno=os.dup(int(env.get("PMI_FD", "-1")))) as server:
        size = struct.calcsize("3i")
        pid = struct.unpack("3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]
        return str(pid) if pid else None
    return None


def _kubeflow(env: Mapping[str, str]) -> Process | None:
    """A pod of a TrainJob, whose variables torchrun reads; with one rank per pod they suffice."""
    nodes, per_node = env.get("PET_NNODES", "1"), env.get("PET_NPROC_PER_NODE", "1")
    if (nodes, per_node) == ("1", "1"):
        return None
    seen = _present(env, "PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")
    advice = "start the script with torchrun, which reads these variables: torchrun train.py"
    rank, size = _integer(env, "PET_NODE_RANK") or 0, _integer(env, "PET_NNODES")
    if per_node != "1" or size is None:
        return Process("a TrainJob (Kubeflow)", seen, rank, advice=advice)
    host, port = env.get("PET_MASTER_ADDR"), _integer(env, "PET_MASTER_PORT")
    return Process("a TrainJob (Kubeflow)", seen, rank, size, 0, 1, host, None, port, advice=advice)


def _indexed_job(env: Mapping[str, str]) -> Process | None:
    index = _integer(env, "JOB_COMPLETION_INDEX")
    if index is None:
        return None
    advice = "set WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as examples/launch/elastic_job.yaml does"
    return Process("an Indexed Job (Kubernetes)", ("JOB_COMPLETION_INDEX",), index, None, 0, advice=advice)


def _spawned() -> Process | None:
    """A child of ``torch.multiprocessing.spawn``, which knows its index, and not the number of processes."""
    child: Any = multiprocessing.current_process()
    parent = multiprocessing.parent_process()
    module = getattr(getattr(child, "_target", None), "__module__", "")
    if parent is None or module != "torch.multiprocessing.spawn":
        return None
    index = int(child._args[1])  # of (function, index, ...), since torch 1.0
    advice = f"call trigram.init(rank=INDEX, world_size=NPROCS) first; INDEX is {index} here"
    host, job = "127.0.0.1", f"spawn {parent.pid}"
    return Process("torch.multiprocessing.spawn", (), index, None, index, None, host, job, advice=advice)


def _check(process: Process, env: Mapping[str, str], rank: int | None, size: int | None) -> None:
    """Raises if a rank or a world size that is given alone is not the launcher's."""
    pairs = (("RANK", rank, process.rank), ("WORLD_SIZE", size, process.size))
    for name, given, launched in pairs:
        if given is not None and launched is not None and given != launched:
            raise config_error(
                f"init: {name} is {given}, but {process.launcher} has started this process as rank "
                f"{process.rank} of {process.size} ({_seen(process, env)}); set both RANK and WORLD_SIZE, or "
                "neither"
            )


def _message(process: Process, env: Mapping[str, str], what: str) -> str:
    seen = _seen(process, env)
    return (
        f"init: {process.launcher} has started this process{f' ({seen})' if seen else ''}, but {what}, so it "
        f"would train alone; {process.advice}. If it is a job of its own, set RANK=0 and WORLD_SIZE=1"
    )


def _address_through_mpi(process: Process, env: Mapping[str, str], size: int) -> dict[str, Any]:
    """Rank 0's address, which all ranks of an MPI launcher learn from MPI itself."""
    if not process.launcher.startswith("mpi"):
        raise config_error(_message(process, env, "the host of rank 0 is not known"))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        what = "MASTER_ADDR is not set, and mpi4py, which finds it between hosts, does not work"
        raise config_error(_message(process, env, f"{what} ({error})")) from error
    world = MPI.COMM_WORLD
    if world.size != size:
        what = f"mpi4py sees {world.size} of {size} ranks: it was built for another MPI"
        raise config_error(_message(process, env, what))
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    address, port = world.bcast((socket.gethostname(), free_port()) if world.rank == 0 else None)
    return {
        "LOCAL_RANK": local.rank,
        "LOCAL_WORLD_SIZE": local.size,
        "MASTER_ADDR": "127.0.0.1" if local.size == size else address,  # there the name need not resolve
        "MASTER_PORT": port,
    }


def _port(job: str) -> int:
    """The port of a job's store: the same on all its ranks, and rarely that of another job."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _seen(process: Process, env: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={env[name]}" for name in process.seen)


def _present(env: Mapping[str, str], *names: str | None) -> tuple[str, ...]:
    return tuple(name for name in names if name is not None and name in env)


def _first(env: Mapping[str, str], *names: str) -> str | None:
    """The first of these variables that is set."""
    return next((name for name in names if env.get(name)), None)


def _value(env: Mapping[str, str], *names: str) -> str | None:
    name = _first(env, *names)
    return env[name] if name else None


def _integer(env: Mapping[str, str], name: str | None) -> int | None:
    """The number in a launcher's variable; None: it is absent, or no number."""
    text = env.get(name, "") if name else ""
    return int(text) if text.isdecimal() else None
