"""Horovod's own tests (``test/parallel/test_torch.py``), from a clone of github.com/horovod/horovod."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tools.peers.outcomes import FAILED, PASSED, SKIPPED, Outcomes, Suite, python, unpack

IN_PLACE = """
from trigram.compat.horovod import *
import trigram.compat.horovod as _here
def __getattr__(name): return getattr(_here, name)
"""
"""The module that the suite imports as ``horovod.torch``."""
COMMON = """
import contextlib, os, tempfile
def mpi_env_rank_and_size(): return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def skip_or_fail_gpu_test(test, message): test.skipTest(message)
@contextlib.contextmanager
def temppath():
    with tempfile.TemporaryDirectory() as folder:
        yield os.path.join(folder, "file")
"""
"""What the suite imports of Horovod's own ``test/utils/common.py``."""
CONFTEST = """
import json, os
os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"] = os.environ["RANK"], os.environ["WORLD_SIZE"]
_found = {}
def pytest_runtest_logreport(report):
    if report.failed or report.when == "call" or report.skipped:
        _found[report.nodeid.rpartition("::")[2]] = report.outcome
def pytest_collection_modifyitems(items):
    _found["all"] = [item.name for item in items]
def pytest_sessionfinish():
    with open(f"found{os.environ['RANK']}.json", "w") as file:
        json.dump(_found, file)
"""
LEFT_OUT = "not join and not duplicate_name_error"
"""Tests in which ranks make different calls, after which no later test would find them together."""
_MUON = (
    "the suite gives matrices and vectors to each optimizer of torch; `torch.optim.Muon`, which is newer "
    "than the suite, takes matrices only"
)
REASONS = {
    "test_broadcast_state": _MUON,
    "test_force_allreduce": _MUON,
    "test_horovod_allreduce_error": "its second half wants an error for tensors of as many values in another "
    "shape; Trigram compares numbers of values and dtypes",
    "test_horovod_join": "`hvd.join` is not supported; `trigram.join` is. Not run",
    "test_horovod": "ranks make a call and a barrier in different orders; Horovod brings calls together by "
    "their names, Trigram by their order, and raises `MismatchError`. Two calls under way with one name "
    "raise the `ValueError` that the test wants. Not run",
}


def run(path: Path | None) -> Suite:
    """Runs the tests on two ranks."""
    with tempfile.TemporaryDirectory() as name:
        unpack(path, name, "test/parallel/test_torch.py", "horovod/horovod")
        folder = Path(name)
        suite = (folder / "test/parallel/test_torch.py").read_text()
        package = folder / "horovod" / "torch"
        package.mkdir(parents=True)
        (folder / "horovod" / "__init__.py").touch()
        (package / "__init__.py").write_text(IN_PLACE)
        for file, text in (("common.py", COMMON), ("conftest.py", CONFTEST), ("test_torch.py", suite)):
            (folder / file).write_text(text)
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "--timeout", "100"]
        launch = ["-m", "trigram", "run", "-n", "2", *pytest, "test_torch.py"]
        python(*launch, "-k", LEFT_OUT, cwd=folder, limit=1800, PYTHONPATH=name)
        ranks = [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(2)]
    return Suite(
        "Horovod 0.28.1",
        "`test/parallel/test_torch.py` of Horovod's last commit, with `trigram.compat.horovod` in the place "
        "of `horovod.torch`, on two ranks on CPUs. Horovod itself was not run beside it.",
        _together(ranks, suite),
        reasons=REASONS,
    )


def _together(ranks: list[dict[str, str]], suite: str) -> Outcomes:
    """What has come of a test on all ranks; those that are left out do not pass."""
    names = [
        line.partition("def ")[2].partition("(")[0] for line in suite.splitlines() if "    def test_" in line
    ]
    found: Outcomes = {}
    for name in dict.fromkeys(names):
        hows = {rank.get(name, FAILED) for rank in ranks}
        found[name] = FAILED if FAILED in hows else SKIPPED if SKIPPED in hows else PASSED
    return found
