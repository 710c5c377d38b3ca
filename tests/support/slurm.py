"""A Slurm cluster of this machine: munged, slurmctld and slurmd of Debian's slurm-wlm, run as root."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support import patience
from tests.support.harness import free_port

DAEMONS = {"munged": "munged.pid", "slurmctld": "ctld.pid", "slurmd": "slurmd.pid"}

_CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.sock
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool
SlurmctldPidFile={dir}/ctld.pid
SlurmdPidFile={dir}/slurmd.pid
SlurmctldLogFile={dir}/ctld.log
SlurmdLogFile={dir}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 Sockets=2 CoresPerSocket=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
"""


def missing() -> str:
    """Why there can be no cluster here; "" if there can."""
    absent = [name for name in (*DAEMONS, "srun") if shutil.which(name, path=_path()) is None]
    return f"{', '.join(absent)} not installed" if absent else "" if os.getuid() == 0 else "needs root"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin"


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Starts the cluster; yields the environment for srun, and ends the daemons."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    values = {"host": socket.gethostname(), "dir": folder, "control": free_port(), "daemon": free_port()}
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(**values))
    env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
    files = {
        "key-file": "munge.key",
        "socket": "munge.sock",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
    }
    options = [f"--{name}={folder / file}" for name, file in (files | {"seed-file": "munge.seed"}).items()]
    try:
        for command in (["munged", "--force", *options], ["slurmctld"], ["slurmd"]):
            subprocess.run(command, env=env, check=True, timeout=patience.seconds(30), capture_output=True)
        yield env
    finally:
        for file in reversed(DAEMONS.values()):
            _end(folder / file)


def _end(file: Path) -> None:
    """Ends the daemon whose process id is in a file, and waits for it."""
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):
        pid, until = int(file.read_text()), time.monotonic() + 10
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < until:
            os.kill(pid, 0)
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
