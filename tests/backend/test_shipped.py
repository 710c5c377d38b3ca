"""torch's own tests of c10d pass over our backend, in gloo's place and under our own name.

`left_out.txt` lists the tests that do not run: a line has the name that the tests ask for, the numbers of
ranks, the test and the reason. A test that is skipped and not listed fails here, and one that is listed and
passes too. Without lines for a number of ranks, the reasons of what is skipped are checked alone. Real gloo
skips or fails the same ones, except for those whose reason says `posing`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import patience
from tests.support.harness import ROOT
from tests.support.marks import long

DOOMED = ("gloo fails too", "posing", "gloo only")
LEFT_OUT = Path(__file__).with_name("left_out.txt")
QUICK = [
    "test_all_gather",
    "test_all_gather_coalesced_simple",
    "test_all_gather_object_default_pg",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_product",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all_single_equal_split_complex",
    "test_all_to_all_single_unequal_split_full_group",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_ddp_create_graph",
    "test_gather",
    "test_gather_object",
    "test_isend_autograd_profiler",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_reduce_full_group_max",
    "test_reduce_sum",
    "test_scatter",
    "test_send_recv",
    "test_send_recv_any_source",
    "test_send_recv_any_source_autograd_profiler",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


REASONS = re.compile(
    "CUDA is not available|Need at least . CUDA device|Skipped due to (small|odd) world size|NCCL|Nccl|nccl"
    "|https://github.com/pytorch/pytorch/|[Oo]nly gloo|GLOO|Test requires (backend|world size|an exact world)"
    "|does not support creating subgroups on CUDA|MPI"
)
"""For what torch's tests may be skipped: there is no GPU, they want another number of ranks, torch skips them
everywhere, or, under our own name, they are for a backend that they name."""


def left_out(posing_as: str, world: int) -> dict[str, str]:
    """The tests that do not run, with their reasons."""
    lines = [line.split(" | ") for line in LEFT_OUT.read_text().splitlines() if line[:1] != "#"]
    return {name: why for who, worlds, name, why in lines if who == posing_as and str(world) in worlds}


def outcomes(posing_as: str, world: int, names: list[str], out: Path) -> dict[str, tuple[str, str]]:
    """What became of each test."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.backend.shipped", "--world", str(world)]
    command += ["--as", posing_as, "--out", str(out), *names]
    with out.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=patience.seconds(1700), check=False)
    assert out.exists(), out.with_suffix(".log").read_text()[-4000:]
    found: dict[str, tuple[str, str]] = json.loads(out.read_text())
    return found


def check(found: dict[str, tuple[str, str]], listed: dict[str, str], exactly: bool = True) -> None:
    """Fails for a test that has failed, one that is skipped without a line, one that passes with one."""
    failed = {name: why for name, (how, why) in found.items() if how == "failed"}
    assert not failed, "\n".join(f"{name}\n{why[-3000:]}" for name, why in failed.items())
    skipped = {name: why for name, (how, why) in found.items() if how == "skipped"}
    assert not [why for why in skipped.values() if not REASONS.search(why)], skipped
    if exactly:
        assert not (skipped.keys() - listed.keys()), skipped
    ran = [name for name in listed if found.get(name, ("skipped", ""))[0] == "passed"]
    assert not ran, f"left_out.txt lists tests that pass: {ran}"


@pytest.mark.waits
def test_some(tmp_path: Path) -> None:
    """A choice of them; the rest is in `make test-backend`."""
    listed = left_out("gloo", 2)
    names = [name for name in QUICK if name not in listed]
    found = outcomes("gloo", 2, names, tmp_path / "outcomes.json")
    assert len(found) == len(names)
    check(found, listed)


@pytest.mark.parametrize("posing_as", [long("gloo"), long("trigram")])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_all(tmp_path: Path, posing_as: str, world: int) -> None:
    """All of them, but those that cannot run without GPUs or torchvision and would only wait."""
    from tests.backend import shipped

    listed = left_out(posing_as, world)
    every = shipped.all_names(posing_as, world)
    exactly = bool(listed)
    if not exactly:  # those that cannot pass are the same
        others = left_out(posing_as, 2) | left_out(posing_as, 4)
        listed = {n: why for n, why in others.items() if why.startswith(DOOMED)}
    doomed = {name for name, why in listed.items() if why.startswith(DOOMED)}
    found = outcomes(posing_as, world, [n for n in every if n not in doomed], tmp_path / "outcomes.json")
    assert len(found) + len(doomed) == len(every)
    check(found, listed, exactly)


@pytest.mark.parametrize("posing_as", [long("gloo")])
def test_groups_of_eight(tmp_path: Path, posing_as: str) -> None:
    """Those on a part of the ranks, which torch skips with fewer than eight."""
    names = [
        name
        for name, why in left_out(posing_as, 2).items()
        if why.endswith("small world size.") and "cuda" not in name
    ]
    assert len(names) > 20
    check(outcomes(posing_as, 8, names, tmp_path / "outcomes.json"), {})
