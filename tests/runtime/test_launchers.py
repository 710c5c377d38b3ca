"""Launchers that do not set RANK: their variables make the job, or an error says what is missing."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import trigram
from tests.support.checks import raises, says
from tests.support.harness import await_flag, flag, run, scratch
from trigram.runtime.launchers import find, first_host, set_variables

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "{world}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "{world}",
    "PMIX_RANK": "{rank}",
    "PMIX_NAMESPACE": "prterun-n1-{job}@1",
}
SLURM = {
    "SLURM_JOB_ID": "{job}",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "{rank}",
    "SLURM_NTASKS": "{world}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n1",
}
SLURM_NODES = SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost,n[02-09]"}
# srun starts mpiexec's daemons, which leave their own SLURM_PROCID and SLURM_NTASKS to all ranks.
UNDER_SRUN = OPEN_MPI | SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
BOTH = SLURM | {"PMI_RANK": "{rank}", "PMI_SIZE": "{world}"}  # srun --mpi=pmi2
TRAINJOB = {
    "PET_NNODES": "{world}",
    "PET_NODE_RANK": "{rank}",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "127.0.0.1",
    "PET_MASTER_PORT": "{port}",
}
INDEXED = {
    "JOB_COMPLETION_INDEX": "{rank}",
    "WORLD_SIZE": "{world}",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "{port}",
}
PARTLY = SLURM | {"WORLD_SIZE": "{world}", "MASTER_ADDR": "127.0.0.1"}  # as batch scripts often do


def _set_only(rank: int, world: int, variables: dict[str, str], job: int) -> None:
    port, address = os.environ["MASTER_PORT"], os.environ["MASTER_ADDR"]
    for name in TORCHRUN:
        os.environ.pop(name, None)
    values = {"rank": rank, "world": world, "job": job, "port": port, "address": address}
    os.environ |= {name: value.format(**values) for name, value in variables.items()}


def _launched(rank: int, world: int, variables: dict[str, str], job: int) -> None:
    """A job by a launcher's variables; init sets torchrun's, for what follows in the process."""
    _set_only(rank, world, variables, job)
    t = torch.ones(3)
    trigram.all_reduce(t)
    assert t.tolist() == [world] * 3
    assert (trigram.rank(), trigram.world_size()) == (rank, world)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == (
        *(str(rank), str(world)),
        "0" if variables in (TRAINJOB, INDEXED) else str(rank),
    )
    trigram.shutdown()
    assert trigram.init().size == world, "again"
    torch.distributed.init_process_group("trigram")
    torch.distributed.all_reduce(t)
    assert t.tolist() == [world**2] * 3
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "variables",
    [OPEN_MPI, SLURM, SLURM_NODES, UNDER_SRUN, BOTH, TRAINJOB, INDEXED, PARTLY],
    ids=[
        "Open MPI",
        "Slurm",
        "nodes",
        "MPI under srun",
        "srun with PMI",
        "TrainJob",
        "Indexed Job",
        "partly",
    ],
)
def test_a_launcher_makes_the_job(variables: dict[str, str]) -> None:
    run(3, _launched, variables, os.getpid() + id(variables) % 1000)


def test_srun_on_two_hosts(several_hosts: None) -> None:
    """The store is on the first host of the step."""
    variables = SLURM_NODES | {"SLURM_STEP_NODELIST": "{address},other"}
    run(3, _launched, variables, os.getpid(), transport="auto", hosts=[0, 1, 1])


def _given(rank: int, world: int) -> None:
    """What init is given counts, then RANK and WORLD_SIZE, then the launcher's."""
    address = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    _set_only(rank, world, SLURM | {"SLURM_NTASKS": "9"}, 1)
    os.environ |= address | {"RANK": "7", "WORLD_SIZE": "9"}
    assert trigram.init(rank=world - 1 - rank, world_size=world, init_timeout=20).size == world
    assert trigram.rank() == world - 1 - rank
    trigram.shutdown()
    os.environ |= {"RANK": str(world - 1 - rank), "WORLD_SIZE": str(world)}
    assert trigram.init(init_timeout=20).size == world and trigram.rank() == world - 1 - rank


def test_arguments_count_before_variables_and_these_before_a_launchers() -> None:
    run(2, _given)


def _two_jobs_at_a_port(rank: int, world: int, jobs: list[int]) -> None:
    _set_only(rank, world, SLURM, jobs[rank])
    text = raises(trigram.TimeoutError, trigram.init, init_timeout=1.5)
    says(text, f"rank(s) {1 - rank} of 2")


def test_jobs_whose_names_give_one_port_stay_apart() -> None:
    """Rank 1 finds the store of another job's rank 0."""

    def port(job: int) -> str:
        set_variables(env := {name: value.format(rank=0, world=2, job=job) for name, value in SLURM.items()})
        return env["MASTER_PORT"]

    run(2, _two_jobs_at_a_port, [1, next(job for job in range(2, 200_000) if port(job) == port(1))])


def _refused(**env: str) -> str:
    try:
        set_variables(env)
    except trigram.ConfigError as error:
        return str(error)
    return ""


def test_who_is_started_alone_is_alone() -> None:
    assert find({}) is None
    assert not _refused(OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0", PMIX_RANK="0")
    assert not _refused(PMI_SIZE="1", PMI_RANK="0")
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "9"}
    for env in (
        batch,
        batch | {"SLURM_STEP_ID": "batch"},
        batch | {"SLURM_STEPID": "4294967291"},  # the number of batch scripts
        batch | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # a shell of salloc
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "17"},  # salloc without a step
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "a"},
    ):
        assert find(env) is None, env
    alone = batch | {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "1"}  # srun -n 1 in a larger job
    assert set_variables(alone) == "" and "RANK" not in alone
    apart = {"RANK": "0", "WORLD_SIZE": "1", "PMI_RANK": "3", "PMI_SIZE": "4"}  # a search over parameters
    assert set_variables(apart) == "" and apart["RANK"] == "0" and "MASTER_ADDR" not in apart


HOST_UNKNOWN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    "env, words",
    [
        ({"PMIX_RANK": "0"}, ("PMIx", "PMIX_RANK=0", "the number of ranks is not known")),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, ("PMI_SIZE=4", "-genv MASTER_ADDR", "trigram[mpi]")),
        (HOST_UNKNOWN, ("OMPI_COMM_WORLD_SIZE=4", "-x MASTER_ADDR", "trigram[mpi]")),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, ("srun", "host of rank 0")),
        ({"JOB_COMPLETION_INDEX": "0"}, ("Indexed Job", "WORLD_SIZE", "elastic_job.yaml")),
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}, ("TrainJob", "torchrun train.py")),
        ({"PET_NNODES": "1:4"}, ("TrainJob", "torchrun train.py")),
        (
            SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "0"},
            ("RANK is 0", "rank 1 of 2", "both"),
        ),
        (SLURM | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "WORLD_SIZE": "1"}, ("WORLD_SIZE is 1", "both")),
        ({"WORLD_SIZE": "two"}, ("WORLD_SIZE='two'", "integer")),
    ],
)
def test_who_is_one_of_several_is_not_alone(
    env: dict[str, str], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    says(_refused(**env), *words)


def _half(rank: int, world: int, name: str) -> str:
    kept = os.environ[name]
    for each in TORCHRUN:
        os.environ.pop(each, None)
    os.environ[name] = kept
    return raises(trigram.ConfigError, trigram.init)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "WORLD_SIZE"])
def test_one_variable_of_torchrun_makes_no_world_of_one(name: str) -> None:
    for text in run(2, _half, name):
        says(text, "not set")


def _each_alone(rank: int, world: int) -> int:
    """Independent runs that a launcher starts, such as a search over parameters, say so."""
    _set_only(rank, world, OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "1"}, 1)
    return trigram.init().size


def test_a_world_of_one_may_be_asked_for() -> None:
    assert run(2, _each_alone) == [1, 1]


@pytest.mark.parametrize(
    "hosts, first",
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3]", "n1"),
        ("n[007-009,12],m1", "n007"),
        ("rack[2-3]n[01-04,09],login", "rack2n01"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def _spawned(index: int, given: bool) -> None:
    try:
        size = (trigram.init(rank=index, world_size=2) if given else trigram.init()).size
        t = torch.full((2,), index + 1.0)
        trigram.all_reduce(t)
        flag(f"{index} of {size}: {t.tolist()}")
    except trigram.ConfigError as error:
        (scratch() / f"error{index}").write_text(str(error))


def _spawns(rank: int, world: int) -> None:
    for name in TORCHRUN:
        os.environ.pop(name, None)
    for given in (True, False):
        torch.multiprocessing.start_processes(_spawned, args=(given,), nprocs=2, start_method="fork")
    for index in (0, 1):
        await_flag(f"{index} of 2: [3.0, 3.0]", 1)
        text = (scratch() / f"error{index}").read_text()
        says(text, "torch.multiprocessing.spawn", "world_size=NPROCS", f"INDEX is {index} here")


def test_children_of_torch_spawn() -> None:
    """With rank and world size the store needs no address; without, nobody trains alone."""
    run(1, _spawns)
