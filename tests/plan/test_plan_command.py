"""`trigram plan`: offline, with a script that real ranks run, and what ``with_bagua`` takes from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import trigram
from tests.support import patience
from tests.support.checks import raises, says
from tests.support.harness import run
from trigram.cli import app
from trigram.plan import choice, costs, file, measuring
from trigram.plan.inputs import CodecCost, Compute, Job, Machines
from trigram.runtime.memory import empty

OFFLINE = ["plan", "--params", "11M", "--compute", "220ms"]
SCRIPT = """
import torch, trigram
torch.manual_seed(0)
model = trigram.with_bagua(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]), "bytegrad")
optimizer = torch.optim.Adam(model.parameters())
for step in range({steps}):
    optimizer.zero_grad()
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
print("the script has ended")
"""


def decided(path: Path, **decision: Any) -> Path:
    path.write_text(json.dumps({"version": file.VERSION, "decision": decision}))
    return path


def test_offline(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    # So slow that fewer bytes count for more than codecs, which are measured here, busy as this machine is.
    rest = ["--hosts", "2", "--rate", "100mbit", "--rtt", "0.2ms", "--allow", "close", "--json", str(out)]
    done = CliRunner().invoke(app, [*OFFLINE, *rest])
    assert done.exit_code == 0, done.output
    says(
        done.output,
        "11M parameters, 2 ranks on 2 hosts",
        "0.0948 Gbit/s",
        "exact: gradient_allreduce",
        "close: bytegrad",
    )
    content = json.loads(out.read_text())
    assert content["decision"] == content["recommended"]["close"]
    assert file.read(out).algorithm == "bytegrad"
    assert {row["algorithm"] for row in content["rows"]} > {"diloco", "powersgd", "async"}


def test_links_of_a_file(tmp_path: Path) -> None:
    links = tmp_path / "links.csv"
    links.write_text("host,rate\na,1gbit\nb,100mbit\n")
    done = CliRunner().invoke(app, [*OFFLINE, "--links", str(links)])
    says(done.output, "2 ranks on 2 hosts, 0.0948 to 0.948 Gbit/s")
    links.write_text("a,1gbit\nb,fast\n")
    done = CliRunner().invoke(app, [*OFFLINE, "--links", str(links)])
    assert done.exit_code == 2
    says(done.output, "the rate of b", "'fast'")
    links.write_bytes(b"\xef\xbb\xbfhost,rate\na,1gbit\nb,100mbit\n")  # as spreadsheets write it
    done = CliRunner().invoke(app, [*OFFLINE, "--links", str(links), "--hosts", "2"])
    says(done.output, "2 ranks on 2 hosts, 0.0948 to 0.948 Gbit/s")
    done = CliRunner().invoke(app, [*OFFLINE, "--links", str(links), "--hosts", "3"])
    assert done.exit_code == 2
    says(" ".join(done.output.replace("│", " ").split()), "rates of 2 hosts")
    links.write_bytes(b"h\xe4,1gbit\nb,1gbit\n")
    done = CliRunner().invoke(app, [*OFFLINE, "--links", str(links)])
    assert done.exit_code == 2
    says(" ".join(done.output.replace("│", " ").split()), "can't decode byte 0xe4")


@pytest.mark.parametrize(
    "argv, words",
    [
        ([], "--params and --compute"),
        (["--params", "1M", "--compute", "1", "--rate", "1gbit"], "no positive number"),
        (["--params", "1e400", "--compute", "1s", "--rate", "1gbit"], "no positive number"),
        (["--params", "99999999T", "--compute", "1s", "--rate", "1gbit"], "is not from 1 to"),
        (
            ["--params", "1M", "--compute", "1s", "--rate", "1gbit", "--hosts", f"{10**26}"],
            "less than or equal to 100000",
        ),
        (["--params", "1M", "--compute", "1s"], "--rate 10gbit"),
        (["--params", "1M", "--compute", "1s", "--rate", "1gbit", "--hosts", "1"], "nobody to average with"),
    ],
)
def test_what_is_missing_is_said(argv: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["plan", *argv])
    assert done.exit_code == 2
    says(" ".join(done.output.replace("│", " ").split()), words)


def planned(tmp_path: Path, steps: int) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT.format(steps=steps))
    argv = [
        "-m",
        "trigram",
        "plan",
        "-n",
        "2",
        "--steps",
        "4",
        "--json",
        "plan.json",
        "--",
        sys.executable,
        "train.py",
    ]
    return subprocess.run(
        [sys.executable, *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        env=os.environ,
        check=False,
    )


def test_a_script_is_measured_and_ended(tmp_path: Path) -> None:
    done = planned(tmp_path, 1000)
    assert done.returncode == 0, done.stderr
    says(done.stdout, "2 ranks on 1 hosts", "measured in 4 steps", "check: gradient_allreduce")
    assert "the script has ended" not in done.stdout
    content = json.loads((tmp_path / "plan.json").read_text())
    inputs = content["inputs"]
    assert 2.0 < inputs["costs"]["exact"]["own"] < 4.1
    assert "lossless" in {row["algorithm"] for row in content["rows"]}
    assert [t["shape"] for t in inputs["compute"]["tensors"]].count([64, 64]) == 4
    ready = [t["ready"] for t in inputs["compute"]["tensors"]]
    assert ready == sorted(ready) and 0 < inputs["compute"]["forward"] < ready[0]
    assert ready[-1] < inputs["compute"]["step"]
    assert inputs["compute"]["optimizer_state"] == pytest.approx(2.0, rel=0.01)


@pytest.mark.long
def test_a_script_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("an earlier plan")
    done = planned(tmp_path, 5)
    assert done.returncode == 1
    says(done.stderr, "ended after 5 training steps, and 14 are needed", "measured nothing")
    assert (tmp_path / "plan.json").read_text() == "an earlier plan"


def test_a_plan_that_cannot_be_written_whole_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "plan.json", tmp_path / "link.json"
    link.symlink_to(path)
    given = Job(Compute.even(1 << 20, 0.1), Machines((1e8, 1e8)), costs.measure([], 1 << 10, touched=1 << 10))
    found = choice.compare(given)
    file.write(link, given, found, "exact")
    before = path.read_text()
    assert link.is_symlink() and file.read(path).algorithm == "gradient_allreduce"

    def half(self: Path, text: str) -> None:
        with self.open("w") as f:
            f.write(text[:10])
        raise OSError("planned: the disk is full")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="planned"):
        file.write(path, given, found, "any")
    assert path.read_text() == before and sorted(p.name for p in tmp_path.iterdir()) == [
        "link.json",
        "plan.json",
    ]


def unpredicted(rank: int, _world: int, what: str) -> str:
    os.environ[measuring.VARIABLE] = "4:exact:plan.json"
    layer = torch.nn.Embedding(8, 4, sparse=True) if what == "sparse" else torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(layer, torch.nn.Linear(4, 4))
    if what == "double":
        model[1].double()
    return raises(trigram.UnsupportedError, trigram.with_bagua, model)


@pytest.mark.parametrize("what", ["sparse", "double"])
def test_a_model_that_is_not_predicted_is_refused(what: str) -> None:
    for text in run(2, unpredicted, what, timeout=30):
        says(text, "trigram plan", "dense float32")


def measured_under(rank: int, _world: int, name: str) -> tuple[int, set[torch.dtype]]:
    """Bytes of the transfer that is timed, and the types of what codecs and PowerSGD get."""
    trigram.init()
    torch.set_default_dtype(getattr(torch, name))
    made: list[torch.Tensor] = []

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(empty(*args, **kwargs))
        return made[-1]

    measuring.empty = noted
    group = trigram.runtime.world.current().group
    measuring._transfer(measuring.memory(1 << 10), group, 1)
    seen: set[torch.dtype] = set()
    costs._codec = lambda name, values: (seen.add(values.dtype), CodecCost(1.0, 1.0, 1.0))[1]
    costs.arithmetic = lambda m, q: seen.update((m.dtype, q.dtype))
    costs.measure([(64, 64)], 1 << 10, touched=1 << 10)
    return made[0].nbytes, seen


@pytest.mark.parametrize("name", ["float64", "bfloat16"])
def test_the_default_dtype_changes_no_measurement(name: str) -> None:
    assert run(1, measured_under, name, timeout=30) == [(1 << 10, {torch.float32})]


def use(rank: int, _world: int, paths: list[str], from_environment: bool) -> Any:
    if from_environment:
        os.environ["TRIGRAM_PLAN"] = paths[rank]  # "": none
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    try:
        trigram.with_bagua(model, plan=None if from_environment else paths[rank])
    except trigram.TrigramError as error:
        return type(error).__name__, str(error)
    counters = trigram.stats(model)
    return counters["algorithm"], len(counters["buckets"])


@pytest.mark.parametrize("from_environment", [False, True])
def test_a_plan_is_taken_by_all_ranks(tmp_path: Path, from_environment: bool) -> None:
    plan = decided(tmp_path / "plan.json", algorithm="bytegrad", options={}, bucket_mb=0.5)
    assert run(2, use, [str(plan)] * 2, from_environment) == [("bytegrad", 4)] * 2


def test_plans_that_differ_are_refused(tmp_path: Path) -> None:
    one = decided(tmp_path / "1.json", algorithm="bytegrad", options={}, bucket_mb=1)
    two = decided(tmp_path / "2.json", algorithm="bytegrad", options={}, bucket_mb=2)
    (tmp_path / "3.json").write_text("{}")
    for name, text in run(2, use, [str(one), str(two)], False):
        assert name == "MismatchError"
        says(text, "plan of rank(s) 1 differs from that of rank 0")
    (first, said), (second, broken) = run(2, use, [str(one), str(tmp_path / "3.json")], False)
    assert (first, second) == ("MismatchError", "ConfigError")
    says(said, "cannot be read there")
    says(broken, "no plan of version 1", "trigram plan")


def test_a_rank_without_a_plan_is_named(tmp_path: Path) -> None:
    plan = decided(tmp_path / "plan.json", algorithm="bytegrad", options={}, bucket_mb=1)
    for name, text in run(2, use, [str(plan), ""], True):
        assert name == "MismatchError"
        says(text, "plan of rank(s) 1 differs from that of rank 0")


def test_an_algorithm_and_a_plan(tmp_path: Path) -> None:
    with pytest.raises(trigram.MisuseError, match="plan= names the algorithm"):
        trigram.with_bagua(torch.nn.Linear(2, 2), "async", plan=tmp_path / "plan.json")
