"""``TRIGRAM_REPORT``: the report names who holds a job up, and nobody when nothing is wrong."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import trigram
from tests.support import patience
from tests.support.checks import raises, says
from tests.support.harness import free_port, run, scratch
from tests.support.marks import long
from tests.support.netns import limited
from trigram.cli import app
from trigram.errors import ConfigError
from trigram.observe import figures, rank_report, report, steps, verdict
from trigram.observe.steps import PHASES
from trigram.runtime.live_store import ReconnectingStore

STEPS = 12


def train(rank: int, world: int, plant: str) -> None:
    """Trains a small model; rank 1 is what ``plant`` says."""
    torch.manual_seed(0)
    wide = 160 if plant == "link" else 64  # the rates of links are seen in calls of some size
    layers = [nn.Linear(wide, wide) for _ in range(40)]
    model = nn.Sequential(*layers)
    model = trigram.with_bagua(model, bucket_mb=0.02 if plant == "buckets" else 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3 * STEPS if plant == "link" else STEPS):
        if rank == 1 and (plant == "input" or (plant == "once" and step == 5)):
            time.sleep(0.15 if plant == "input" else 3.0)  # more than busy cores take from a rank
        inputs = torch.randn(8, wide)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        if rank == 1 and plant == "compute":
            loss.register_hook(slowly)
        loss.backward()
        optimizer.step()


def slowly(grad: torch.Tensor) -> None:
    """Takes its time in backward, more than busy cores take from a rank."""
    time.sleep(0.15)


@pytest.mark.parametrize(
    ("plant", "cause", "chronic"),
    [("input", "input", True), ("once", "input", False), ("compute", "compute", True)],
)
def test_the_slow_rank_is_named(plant: str, cause: str, chronic: bool, tmp_path: Path) -> None:
    run(3, train, plant, env={"TRIGRAM_REPORT": str(tmp_path)})
    rows = figures.read(tmp_path)
    found = verdict.judge(rows)
    assert [row.rank for row in rows] == [0, 1, 2]
    assert all(row.steps >= STEPS - 2 for row in rows)
    assert (found.rank, found.cause, found.chronic) == (1, cause, chronic), report.text(rows)
    assert ("DataLoader" in report.text(rows)) == (plant == "input")


def test_small_buckets_are_named(tmp_path: Path) -> None:
    """Forty calls in each step, for 20 KiB each."""
    run(3, train, "buckets", transport="tcp", env={"TRIGRAM_REPORT": str(tmp_path)})
    # Rank 0's figures for all, without the times of single steps: whether a rank is slow, or late by turns,
    # is up to the processors, and said first.
    first, *others = figures.read(tmp_path)
    rows = [dataclasses.replace(first, rank=rank, recent=[]) for rank in range(1 + len(others))]
    found = verdict.judge(rows)
    assert (found.rank, found.cause) == (None, "buckets"), report.text(rows)
    assert "bucket_mb" in report.text(rows)


@pytest.mark.parametrize("slow", [long(None), 2])
def test_a_slow_link_is_named(slow: int | None, tmp_path: Path, several_hosts: None) -> None:
    """A link of a sixth of the others' rate is named; where all are alike, the network is.

    The others are not faster than busy cores carry, however many processes there are beside.
    """
    rates = {host: "30mbit" if slow == host else "180mbit" for host in range(3)}
    if slow is None:
        rates = dict.fromkeys(rates, "60mbit")
    with limited(rates):
        settings = {"TRIGRAM_REPORT": str(tmp_path)}
        run(3, train, "link", hosts=[0, 1, 2], transport="tcp", timeout=200, env=settings)
    rows = figures.read(tmp_path)
    found = verdict.judge(rows)
    assert (found.rank, found.cause) == (slow, "network" if slow is None else "link"), report.text(rows)


def over_torch(rank: int, world: int, kind: str, plant: str) -> list[str]:
    """Trains over the backend; rank 1 is what ``plant`` says. Returns what trains the counted models."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    with process_group():
        if kind == "DistributedDataParallel":
            model = nn.parallel.DistributedDataParallel(model)
        elif kind == "with_bagua":
            model = trigram.with_bagua(model)
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        late = patience.seconds(0.15)
        for _ in range(STEPS):
            if rank == 1 and plant == "input":
                time.sleep(late)
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            if rank == 1 and plant == "compute":
                loss.register_hook(slowly)
            loss.backward()
            optimizer.step()
        if kind != "FSDP2":  # which cannot be copied itself
            copy.deepcopy(model)
        return [times.trained_by for times in steps._present()]


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """torch's default process group, of all ranks, over Trigram."""
    torch.distributed.init_process_group("trigram")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FSDP2", "with_bagua"])
@pytest.mark.parametrize("plant", ["input", "compute"])
def test_the_slow_rank_is_named_where_torch_trains(kind: str, plant: str, tmp_path: Path) -> None:
    counted = run(2, over_torch, kind, plant, env={"TRIGRAM_REPORT": str(tmp_path)}, timeout=60)
    assert counted == [[kind]] * 2
    rows = figures.read(tmp_path)
    found = verdict.judge(rows)
    assert [(row.model, row.trained_by) for row in rows] == [("Sequential", kind)] * 2
    assert all(STEPS - 3 <= row.steps <= STEPS - 1 for row in rows)
    assert (found.rank, found.cause, found.chronic) == (1, plant, True), report.text(rows)
    assert ("algorithm=" in report.text(rows)) == (kind == "with_bagua")


def without_hooks(rank: int, world: int, kind: str) -> None:
    """Trains with the script's own calls what calls no hooks, or none that may do much."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    if kind == "script":
        model = torch.jit.script(model)
    elif kind == "trace":
        model = torch.jit.trace(model, torch.randn(4, 16))

    def loss(inputs: torch.Tensor) -> Any:
        return model(inputs).square().mean()

    function = torch.compile(loss, backend="eager", fullgraph=True) if kind == "compiled function" else loss
    traced = torch._dynamo.compiled_autograd._enable if kind == "compiled autograd" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with traced(torch.compile(backend="eager")) if traced else contextlib.nullcontext():
            function(torch.randn(4, 16)).backward()
        for p in model.parameters():
            trigram.all_reduce(p.grad, "avg")
        optimizer.step()


@pytest.mark.parametrize("kind", ["script", "trace", "compiled function", "compiled autograd"])
def test_steps_are_counted_where_hooks_are_not_called(kind: str, tmp_path: Path) -> None:
    """And looking ends no training."""
    run(2, without_hooks, kind, env={"TRIGRAM_REPORT": str(tmp_path)}, timeout=120)
    rows = figures.read(tmp_path)
    assert all((row.model, row.steps >= STEPS - 3) == ("Sequential", True) for row in rows), rows
    # The median: one step may have lost its core between two calls.
    assert all(row.median["input"] < 0.2 * row.median["step"] for row in rows), report.text(rows)


class Slow(torch.autograd.Function):
    """Takes its time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


def loop(rank: int, world: int, style: str) -> None:
    """A loop of this style; the input of rank 1 is slow."""
    # Where nobody is late, a step must be long beside what a busy machine takes to wake three ranks.
    slow = 0.06 if style == "late start" else 0.02
    late = patience.seconds(0.04)  # so is this beside what others lose meanwhile
    torch.manual_seed(0)
    nets = [trigram.with_bagua(nn.Linear(64, 64)) for _ in range(2 if style == "two models" else 1)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in nets]
    for step in range(STEPS):
        for k, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            for micro in range(3 if style == "accumulation" else 1):
                if rank == 1 and k == 0 and (style != "late start" or step == 0):
                    time.sleep(0.5 if style == "late start" else late)
                if style == "barrier":
                    trigram.barrier()
                with (
                    trigram.no_sync(net)
                    if style == "accumulation" and micro < 2
                    else contextlib.nullcontext()
                ):
                    loss = Slow.apply(nets[0](torch.randn(8, 64)), slow).square().mean()  # type: ignore[no-untyped-call]
                    if k == 1:
                        loss = net(torch.randn(8, 64)).square().mean() + loss
                    if style == "shown loss":
                        trigram.all_reduce(loss.detach().clone(), "avg")
                    loss.backward()
            optimizer.step()


@pytest.mark.parametrize("style", ["plain", "accumulation", "barrier", "shown loss", "two models"])
def test_a_slow_input_is_named_in_other_loops(style: str, tmp_path: Path) -> None:
    """Also where the others wait for it in a call of the script."""
    run(3, loop, style, env={"TRIGRAM_REPORT": str(tmp_path)})
    rows = figures.read(tmp_path)
    found = verdict.judge(rows)
    assert (found.rank, found.cause, found.chronic) == (1, "input", True), report.text(rows)


def test_a_late_start_is_nobodys_fault(tmp_path: Path) -> None:
    run(3, loop, "late start", env={"TRIGRAM_REPORT": str(tmp_path)})
    rows = figures.read(tmp_path)
    found = verdict.judge(rows)
    # On a busy machine another rank may indeed be slow.
    assert found.cause == "none" or found.rank != 1, report.text(rows)


def row(rank: int, **other: object) -> figures.Rank:
    """A rank with a step of 100 ms."""
    values = {
        "input": 0.01,
        "forward": 0.03,
        "backward": 0.05,
        "wait": 0.002,
        "optimizer": 0.008,
        "other": 0.0,
    }
    values |= {k: v for k, v in other.items() if k in PHASES}  # type: ignore[misc]
    values["step"] = sum(values[phase] for phase in PHASES)
    given = {k: v for k, v in other.items() if k not in PHASES}
    return figures.Rank(rank, 4, f"node{rank}", "GPT", 50, values, dict(values), **given)  # type: ignore[arg-type]


def test_nobody_is_named_when_nothing_is_wrong() -> None:
    found = verdict.judge([row(r, input=0.01 + 0.001 * r) for r in range(4)])
    assert (found.cause, found.rank) == ("none", None)


def test_a_slow_link_and_small_buckets_and_a_slow_network() -> None:
    waiting = {"wait": 0.05}
    rates = [1.2e8, 1.2e8, 3e7, 1.2e8]
    found = verdict.judge([row(r, ranks=[0, 1, 2, 3], rates=rates, **waiting) for r in range(4)])
    assert (found.cause, found.rank) == ("link", 2)
    found = verdict.judge([row(r, buckets=[20_000] * 40, **waiting) for r in range(4)])
    assert (found.cause, found.rank) == ("buckets", None)
    rates = [1.2e8] * 4
    rows = [row(r, ranks=[0, 1, 2, 3], buckets=[4 << 20] * 10, rates=rates, **waiting) for r in range(4)]
    found = verdict.judge(rows)
    assert (found.cause, found.rank) == ("network", None)
    assert found.verdict == (
        "communication takes longer than backward can hide: 50 ms of a 148 ms step (34%) are waited for it; "
        "no rank or link stands out, unless ranks are late by turns"
    )
    for one in rows:  # of two links, both ends see the slower one
        one.rates, one.ranks = [1.2e8, 1.2e8], [0, 1]
    assert verdict.judge(rows).verdict.endswith("; no rank stands out, unless ranks are late by turns")


def test_a_rank_that_is_a_little_slower_is_not_blamed_for_communication() -> None:
    """Where all wait for longer than it is late. What it costs is said."""
    rows = [row(r, wait=0.05, backward=0.065 if r == 2 else 0.05) for r in range(4)]
    found = verdict.judge(rows)
    assert (found.cause, found.rank) == ("network", None)
    assert found.verdict.endswith("; rank 2 is late by less")
    assert "rank 2 computes 15 ms longer" in report.text(rows)
    rows = [row(r, wait=0.01 if r == 2 else 0.025, backward=0.065 if r == 2 else 0.05) for r in range(4)]
    found = verdict.judge(rows)
    assert (found.cause, found.rank) == ("compute", 2)


def test_rates_of_helpers_are_no_links_of_ranks() -> None:
    rates = [1.2e8, 1.2e8, 1.2e8, 1e7]
    found = verdict.judge([row(r, ranks=[0, 1, 2], rates=rates, wait=0.5) for r in range(3)])
    assert (found.cause, found.rank) == ("network", None)


def test_a_rank_that_fails_prints_no_report(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, trigram\ntrigram.init()\nprint('begins')\nraise RuntimeError('planned')\n"
    )
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        env=os.environ | job | {"TRIGRAM_REPORT": str(tmp_path / "figures")},
        check=False,
    )
    assert done.returncode == 1 and "planned" in done.stderr
    assert done.stdout == "begins\n"
    assert len(figures.read(tmp_path / "figures")) == 1


def leave_first(rank: int, world: int) -> str:
    """Rank 1 leaves when rank 0 has left, which waits for its file as long as it takes."""
    rank_report._PATIENCE = 1e6
    train(rank, world, "none")
    if rank == 1:
        raises(trigram.PeerLostError, trigram.barrier)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        trigram.shutdown()
    return out.getvalue()


def test_rank_0_leaves_before_it_waits_for_files(tmp_path: Path) -> None:
    printed, nothing = run(2, leave_first, env={"TRIGRAM_REPORT": str(tmp_path)}, timeout=60)
    assert "trigram report: 2 ranks" in printed and "no file of" not in printed and nothing == ""


def leave(rank: int, world: int) -> str:
    """Each host has a disk of its own."""
    rank_report._PATIENCE = 1e6
    os.environ["TRIGRAM_REPORT"] = str(scratch() / f"host{rank // 2}")
    train(rank, world, "none")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        trigram.shutdown()
    return out.getvalue()


def test_rank_0_gets_the_figures_of_other_hosts(several_hosts: None) -> None:
    """Through the job's store."""
    printed, *_ = run(4, leave, hosts=[0, 0, 1, 1], transport="auto", timeout=60)
    assert "4 ranks" in printed and "no file of" not in printed
    assert [line.split()[0] for line in printed.splitlines()[-4:]] == ["0", "1", "2", "3"]


def test_figures_in_the_store_are_not_believed() -> None:
    """Any process may write there."""
    mine, key = row(2), b"the job's"
    value = rank_report.sealed(mine, key)
    assert rank_report.unsealed(value, 2, key) == mine
    assert rank_report.unsealed(value, 2, b"another's") is None
    assert rank_report.unsealed(value, 1, key) is None
    assert rank_report.unsealed(value[:-1] + b" ", 2, key) is None
    assert rank_report.unsealed(rank_report.sealed(mine, None), 2, None) == mine
    assert rank_report.unsealed(b"0" * 64 + b"[" * 100_000, 2, None) is None
    mine.host = "\x1b[2Jhost"
    assert rank_report.unsealed(rank_report.sealed(mine, None), 2, None) is None


def test_missing_figures_may_be_those_of_the_late_rank() -> None:
    found = verdict.judge([row(r, wait=0.1) for r in range(3)])
    assert found.cause == "network" and "figures are missing" in found.verdict


@pytest.mark.parametrize(("trained_by", "hosts"), [("with_bagua", 1), ("with_bagua", 2), ("FSDP2", 2)])
def test_advice_fits_the_job(trained_by: str, hosts: int) -> None:
    """A codec is no advice inside a host, nor an algorithm of with_bagua for FSDP2."""
    found = verdict.judge([row(r, wait=0.1, hosts=hosts, trained_by=trained_by) for r in range(4)])
    then = " ".join(found.then)
    assert ("bytegrad" in then) == (trained_by == "with_bagua" and hosts > 1)
    assert ("codec='int8'" in then) == (trained_by == "FSDP2")


def test_a_late_rank_is_named_beside_slow_communication() -> None:
    rows = [row(r, wait=0.05 if r == 2 else 0.09, input=0.05 if r == 2 else 0.01) for r in range(4)]
    found = verdict.judge(rows)
    assert (found.cause, found.rank) == ("input", 2)


def test_ranks_that_are_late_by_turns_are_nobodys_fault() -> None:
    """One waits for hardly anything, so it is no communication; who is late differs."""
    rows = [row(r, wait=0.004 if r == 1 else 0.02, backward=0.054 if r == 1 else 0.05) for r in range(4)]
    found = verdict.judge(rows)
    assert (found.cause, found.rank) == ("none", None)
    assert "by turns" in report.text(rows)


def by_turns(alike: int = 20) -> list[figures.Rank]:
    """Four ranks, each 60 ms late in one of four steps, so that each waits 45 ms; own times are alike."""
    rows = [row(r, wait=0.045) for r in range(4)]
    for one in rows:
        one.recent = [0.098 + 0.06 * (step % 4 == one.rank) for step in range(alike)]
    return rows


def test_ranks_that_are_late_by_turns_are_told_from_a_slow_network() -> None:
    rows = by_turns()
    rows[3].steps, rows[3].recent = 51, [*rows[3].recent, 9.0]  # it has written its figures one step later
    found = verdict.judge(rows)
    assert (found.cause, found.rank) == ("turns", None), found
    assert "45 ms of a 143 ms step (31%)" in found.verdict
    assert "the longest of a step takes 158 ms, half of the ranks 98 ms at most" in found.why[0]
    assert "rank 0 was the longest most often, in 25% of them" in found.why[1]
    for one in rows:  # they wait much longer than that explains
        one.mean["wait"] = 0.2
    assert verdict.judge(rows).cause == "network"
    assert verdict.judge(rows).verdict.endswith("no rank stands out")
    assert verdict.judge(by_turns(7)).cause == "network"


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_ranks_late_by_turns_at_random(world: int) -> None:
    """One rank in each step sleeps 30 ms: whichever is late more often by chance is not blamed; a rank that
    always is, or is in every tenth step, and two that always are, are."""
    random = Random(world)
    for kind in ("turns", "slow", "once in ten", *(["two"] if world > 2 else [])):
        for _ in range(20):
            steps_of = [
                [
                    2 + random.random() + 30 * is_late(kind, r, step, random.randrange(world))
                    for r in range(world)
                ]
                for step in range(60)
            ]
            if kind == "turns":
                for own in steps_of:
                    own[random.randrange(world)] += 30
            rows = []
            for r in range(world):
                own = statistics.fmean(of[r] for of in steps_of) / 1e3
                late = statistics.fmean(max(of) - of[r] for of in steps_of) / 1e3
                rows.append(row(r, input=own, forward=0, backward=0, optimizer=0, wait=late + 0.0005))
                rows[-1].recent = [of[r] / 1e3 for of in steps_of]
                rows[-1].world_size = world
            found = verdict.judge(rows)
            if kind == "turns":
                assert found.cause == "turns", found
            else:
                expected = [1, 2] if kind == "two" else [1]
                assert (found.cause, sorted(found.ranks)) == ("input", expected), (kind, found)


def is_late(kind: str, rank: int, step: int, chosen: int) -> bool:
    return (
        (kind == "slow" and rank == 1)
        or (kind == "once in ten" and rank == 1 and step % 10 == 0)
        or (kind == "two" and rank in (1, 2))
    )


def test_all_slow_ranks_are_named() -> None:
    """Two of three, by as much; and two of four for different reasons."""
    rows = [row(r, wait=0.0 if r else 0.08, forward=0.1 if r else 0.02) for r in range(3)]
    found = verdict.judge(rows)
    assert (found.cause, found.rank, sorted(found.ranks)) == ("compute", found.ranks[0], [1, 2])
    assert found.verdict.startswith(
        "rank 1 on node1 and rank 2 on node2 are slow in their computation (most in: forward)"
    )
    rows = [row(r, wait=0.1) for r in range(4)]
    rows[1] = row(1, wait=0.01, input=0.09)
    rows[2] = row(2, wait=0.0, backward=0.15)
    found = verdict.judge(rows)
    assert (found.cause, found.rank, found.ranks) == ("compute", 2, [2, 1])
    assert "; rank 1 on node1 is slow in its input, in most steps" in found.verdict
    assert "DataLoader" in report.text(rows)


def test_most_ranks_are_not_called_slow() -> None:
    """Three of four take as long; the fourth is faster, and nobody is late."""
    rows = [row(r, forward=0.03 if r else 0.02) for r in range(4)]
    assert verdict.judge(rows).cause == "none"


def test_the_commands(tmp_path: Path) -> None:
    for r in range(4):
        figures.write(tmp_path / "a", row(r))
        figures.write(tmp_path / "b", row(r, forward=0.06))
    out = tmp_path / "all.json"
    said = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "--json", str(out)])
    assert said.exit_code == 0
    assert "Verdict: nothing stands out" in said.output
    assert json.loads(out.read_text())["finding"]["cause"] == "none"
    said = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "2.00" in said.output


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no report-rankN"):
        figures.read(tmp_path)
    (tmp_path / "report-rank3.json").write_text("{}")
    with pytest.raises(ConfigError, match="report-rank3"):
        figures.read(tmp_path)


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, "0.1", None, float("inf")])
def test_a_time_that_is_none_is_refused(wrong: object, tmp_path: Path) -> None:
    broken = row(0)
    broken.mean["input"] = wrong  # type: ignore[assignment]
    figures.write(tmp_path, broken)
    with pytest.raises(ConfigError, match=r"report-rank0.*is no report"):
        figures.read(tmp_path)


def test_ranks_of_an_earlier_job_are_left_out(tmp_path: Path) -> None:
    for r in range(7):  # row() says that the job has four
        figures.write(tmp_path, row(r))
    assert [found.rank for found in figures.read(tmp_path)] == [0, 1, 2, 3]


WRONG = [
    {"rates": ["1"]},
    {"fidelity": []},
    {"buckets": ["a"]},
    {"buckets": None},
    {"steps": 0.5},
    {"rank": True},
    {"world_size": 10**9},
    {"recent": [-1.0]},
    {"job": 3},
    {"sent": -1},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_values_that_no_rank_writes_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    values = {**json.loads(figures.line(row(0))), **wrong}
    (tmp_path / "report-rank0.json").write_text(json.dumps(values))
    says(raises(ConfigError, figures.read, tmp_path), "report-rank0.json")


def test_of_several_jobs_one_is_shown(tmp_path: Path) -> None:
    """Files of an earlier job, and those that no rank has written, are left out."""
    for r in range(4):
        one = row(r)
        one.job = "now" if r < 2 else "earlier"
        figures.write(tmp_path, one)
    late = row(1)  # it came late into an elastic job, and does not know its name
    figures.write(tmp_path, late)
    (tmp_path / "report-rankx.json").write_text("{}")
    (tmp_path / "report-rank01.json").write_text(figures.line(row(1)))
    assert [one.rank for one in figures.read(tmp_path)] == [0, 1]
    mine = row(0)
    mine.job, mine.steps = "earlier", 7
    assert [(one.rank, one.steps) for one in figures.read(tmp_path, mine)] == [
        (0, 7),
        (1, 50),
        (2, 50),
        (3, 50),
    ]
    assert [one.rank for one in figures.read(tmp_path / "none", mine)] == [0]


def test_a_codec_is_no_advice_where_there_is_one() -> None:
    rows = [row(r, wait=0.1, hosts=2, coded=True) for r in range(4)]
    assert "bytegrad" not in " ".join(verdict.judge(rows).then)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    figures.write(tmp_path, row(0))
    argv = [
        sys.executable,
        "-m",
        "trigram",
        "report",
        str(tmp_path),
        "--json",
        str(tmp_path / "none" / "a.json"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patience.seconds(60), check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "a.json" in done.stderr


def test_a_folder_that_cannot_be_used_ends_no_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run(2, train, "none", env={"TRIGRAM_REPORT": str(tmp_path / "file")})
    (tmp_path / "report-rank7.json").write_text("{}")
    run(2, train, "none", env={"TRIGRAM_REPORT": str(tmp_path)})


class Store:
    """A store that knows nothing, or is gone."""

    def __init__(self, gone: bool) -> None:
        self.gone, self.asked = gone, 0

    def check(self, _: list[str]) -> bool:
        """Whether it has these keys."""
        self.asked += 1
        if self.gone:
            raise OSError("planned: no route")
        return False


@pytest.mark.parametrize(("gone", "left", "tries"), [(False, 60.0, 50), (False, -1.0, 0), (True, 60.0, 1)])
def test_figures_of_other_hosts_are_awaited_until_the_deadline(
    gone: bool, left: float, tries: int, tmp_path: Path
) -> None:
    """A store that cannot be reached is tried once, not for each rank."""
    store = Store(gone)
    far = set(range(1, 51))
    reconnecting = ReconnectingStore(store, lambda: store)
    awaited = rank_report._Awaited(tmp_path, {0}, far, reconnecting, "job", row(0))
    awaited.fetch(None, time.monotonic() + left)
    assert store.asked == tries and len(awaited.far) == 50


def test_on_gpus_only_hosts_are_judged() -> None:
    """What the GPU computes is in the waiting of its host, so neither network nor launches are to blame."""
    rows = [row(r, on_gpu=True, wait=0.1, backward=0.12 if r == 2 else 0.05) for r in range(4)]
    found = verdict.judge(rows)
    assert (found.cause, found.rank) == ("none", None)
    assert "not known" in found.verdict and "what the GPU still has to do" in report.text(rows)
    found = verdict.judge([row(r, on_gpu=True, wait=0.1, input=0.08 if r == 2 else 0.01) for r in range(4)])
    assert (found.cause, found.rank) == ("input", 2)
    # Its GPU is done before its host comes to wait for it.
    rows = [
        row(r, on_gpu=True, wait=0.01 if r == 2 else 0.1, other=0.09 if r == 2 else 0.0) for r in range(4)
    ]
    found = verdict.judge(rows)
    assert (found.cause, found.rank) == ("compute", 2) and "what its host does" in found.verdict


def test_asynchronous_ranks_are_not_told_to_wait_less() -> None:
    waiting = {"asynchronous": True, "wait": 0.02}
    found = verdict.judge([row(r, **waiting) for r in range(3)])
    assert found.cause == "none" and "background" in found.verdict and not found.then
    assert "20 ms of a 118 ms step" in found.why[0]
    rows = [row(r, backward=0.2 if r == 1 else 0.05, **waiting) for r in range(3)]
    found = verdict.judge(rows)
    assert (found.cause, found.rank) == ("compute", 1)
    assert not any("async" in line for line in found.then) and "do not wait" in found.why[1]


def test_steps_know_where_the_model_is() -> None:
    times = steps.StepTimes("GPT", nn.Linear(2, 2).parameters())
    times.close()
    assert not times.on_gpu

    class OnGpu:
        device = torch.device("cuda", 0)

    on_gpu: Any = [OnGpu()]
    times = steps.StepTimes("GPT", on_gpu)
    times.close()
    assert times.on_gpu
