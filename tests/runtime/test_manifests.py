"""The manifests of examples/launch have the APIs' fields, and their commands run with what is injected.

So does the script that joins two sites.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import patience
from tests.support.harness import ROOT, free_port, until

pytestmark = pytest.mark.waits

MODELS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "Job": "IoK8sApiBatchV1Job",
    "Service": "IoK8sApiCoreV1Service",
}


def _documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "examples/launch" / name).read_text()))


@pytest.mark.parametrize("name", ["trainjob.yaml", "elastic_job.yaml"])
def test_fields_are_those_of_the_api(name: str) -> None:
    """The models are generated from the API's schema: they drop fields that it does not have."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for document in _documents(name):
        model = getattr(models, MODELS[document["kind"]])
        assert model.from_dict(document).to_dict() == document
        wrong = document | {"spec": document["spec"] | {"nodes": 1}}
        assert model.from_dict(wrong).to_dict() != wrong


def _command(words: list[str]) -> list[str]:
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    return [*programs[words[0]], *(word.replace("/workspace", str(ROOT)) for word in words[1:])]


@contextmanager
def _started(
    command: list[str], env: dict[str, str], log: Path, folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    base = {name: value for name, value in os.environ.items() if name not in names}
    with (
        log.open("ab") as out,
        subprocess.Popen(command, env=base | env, stdout=out, stderr=out, cwd=folder) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.long
def test_the_trainjob_trains(tmp_path: Path) -> None:
    """Two nodes, with the variables that Trainer's runtime torch-distributed sets."""
    (document,) = _documents("trainjob.yaml")
    trainer, log = document["spec"]["trainer"], tmp_path / "log"
    env = {each["name"]: each["value"] for each in trainer["env"]}
    env |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    env |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    command = _command([*trainer["command"], "--epochs", "1"])
    with (
        _started(command, env | {"PET_NODE_RANK": "0"}, log) as first,
        _started(command, env | {"PET_NODE_RANK": "1"}, log) as second,
    ):
        assert (first.wait(patience.seconds(250)), second.wait(patience.seconds(20))) == (0, 0), (
            log.read_text()
        )
    assert log.read_text().count("epoch 0: accuracy") == 1


@pytest.mark.long
def test_the_elastic_job_survives_a_lost_pod(tmp_path: Path) -> None:
    """Pods with the variables that Kubernetes sets; one is lost, and another comes with its index."""
    service, job = _documents("elastic_job.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {each["name"]: each.get("value", "a secret of this test") for each in container["env"]}
    name = job["metadata"]["name"]
    assert (
        given["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
        and pod["subdomain"] == service["metadata"]["name"]
    )
    assert given["WORLD_SIZE"] == str(job["spec"]["completions"]) == str(job["spec"]["parallelism"])
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = _command([*container["command"], "--steps", "3000", "--pause", "0.01"])
    logs = [tmp_path / str(index) for index in range(4)]

    def started(index: int) -> Any:
        return _started(command, given | {"JOB_COMPLETION_INDEX": str(index)}, logs[index])

    with started(0) as zero, started(1) as one, started(2) as two, started(3) as three:
        until(lambda: all("has made step" in log.read_text() for log in logs), 120, "the first step")
        two.send_signal(signal.SIGKILL)
        two.wait(10)
        time.sleep(0.2)
        with started(2) as again:
            assert [p.wait(patience.seconds(200)) for p in (zero, one, again, three)] == [0] * 4, [
                log.read_text() for log in logs
            ]
    assert len({log.read_text().split(": loss")[1] for log in logs}) == 1
    assert "4 ranks" in logs[2].read_text()


@pytest.mark.long
def test_two_sites_train(tmp_path: Path) -> None:
    """DiLoCo over TLS; one site waits for the other."""
    command = ["sh", str(ROOT / "examples/launch/two_sites.sh")]
    env = {"PYTHON": sys.executable, "PORT": str(free_port()), "TRIGRAM_SECRET": "a secret of this test"}
    env |= {"PYTHONPATH": str(ROOT / "python"), "TRIGRAM_TRANSPORT": "tcp"}
    log = tmp_path / "log"
    with (
        _started([*command, "0", "127.0.0.1", "--steps", "33"], env, log, ROOT) as first,
        _started([*command, "1", "127.0.0.1", "--steps", "33"], env, log, ROOT) as second,
    ):
        assert (first.wait(patience.seconds(250)), second.wait(patience.seconds(20))) == (0, 0), (
            log.read_text()
        )
    assert log.read_text().count("held-out loss") == 1
