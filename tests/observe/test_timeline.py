"""A timeline of real ranks, read as Perfetto reads it: slices of one track lie inside each other or apart."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.harness import Ranks, run
from trigram.observe import merge, steps, timeline

STEPS = 6


def _train(rank: int, folder: str, profiled: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = trigram.with_bagua(nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), bucket_mb=0.25)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(32, 256)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            optimizer.zero_grad()
            with trigram.no_sync(model):
                model(x).square().mean().backward()
            model(x).square().mean().backward()
            optimizer.step()
    profile.export_chrome_trace(f"{folder}/profile/rank{rank}.json")
    times = steps.latest()
    assert times is not None
    return times.summary()


def _job(rank: int, world: int, folder: str) -> dict[str, Any]:
    return _train(rank, folder)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a job with timelines and profiles, and the ranks' step times."""
    folder = tmp_path_factory.mktemp("timeline")
    (folder / "profile").mkdir()
    results = run(2, _job, str(folder), env={"TRIGRAM_TIMELINE": str(folder)}, timeout=60)
    return folder, results


def _misdrawn(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Slices that begin inside another of their track and end outside."""
    tracks = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            tracks[e["pid"], e["tid"]].append((e["ts"], -e["dur"], e["name"]))
    wrong = []
    for track, slices in tracks.items():
        inside: list[tuple[float, str]] = []
        for ts, minus, name in sorted(slices):
            end = ts - minus
            while inside and inside[-1][0] <= ts + 2e-3:
                inside.pop()
            if inside and end > inside[-1][0] + 2e-3:
                wrong.append((track, name, inside[-1][1]))
            inside.append((end, name))
    return wrong


def test_a_timeline_of_two_ranks(job: tuple[Path, list[dict[str, Any]]]) -> None:
    """Every step, bucket and call is there once, drawn right, with arrows between the ranks."""
    traces = merge.read_folder(job[0])
    assert [t.rank for t in traces] == [0, 1]
    merged, told = merge.merge(traces)
    assert told == []  # one host
    events = merged["traceEvents"]
    assert _misdrawn(events) == []
    for trace in traces:
        names = Counter(e["name"] for e in trace.events if e["ph"] == "X")
        assert names["optimizer"] == STEPS
        assert names["forward"] >= 2 * STEPS
        assert names["backward"] >= 2 * STEPS
        assert names["bucket 0 all_reduce"] == STEPS == names["bucket 5 all_reduce"]
    arrows = Counter((e["id"], e["ph"]) for e in events if e["ph"] in "sf")
    assert arrows
    assert set(arrows.values()) == {1}
    assert {(i, "f") for i, ph in arrows if ph == "s"} == {key for key in arrows if key[1] == "f"}
    assert all(isinstance(i, int) for i, _ in arrows)  # Perfetto drops the others
    spans = {0: [], 1: []}
    buckets = {0: [], 1: []}
    for e in events:
        if e["ph"] == "X" and e["name"] == "backward":
            spans[e["pid"]].append((e["ts"], e["ts"] + e["dur"]))
        if e["ph"] == "X" and e["name"] == "bucket 0 all_reduce":
            buckets[e["pid"]].append((e["ts"], e["ts"] + e["dur"]))
    for rank in (0, 1):  # the first bucket is averaged during backward
        assert all(any(a < end and began < b for a, b in spans[rank]) for began, end in buckets[rank])


def test_torchs_profiler_has_the_same_spans_on_the_same_clock(job: tuple[Path, list[dict[str, Any]]]) -> None:
    """What our timeline and the profiler's file show of one phase coincides after the merge."""
    folder, _ = job
    merged, _ = merge.merge(merge.read_folder(folder), sorted((folder / "profile").glob("*.json")))
    assert _misdrawn(merged["traceEvents"]) == []
    arrows = Counter((e["cat"], e["ph"], e["id"]) for e in merged["traceEvents"] if e["ph"] in "sf")
    assert {cat for cat, *_ in arrows} >= {"call", "fwdbwd"} and set(arrows.values()) == {1}
    assert all(isinstance(key[2], int) for key in arrows)
    ours = defaultdict(list)
    theirs = defaultdict(list)
    owner = {}
    for e in merged["traceEvents"]:
        if e["ph"] == "M" and e["name"] == "process_name" and "torch.profiler" in e["args"]["name"]:
            owner[e["pid"]] = int(e["args"]["name"].split()[1].strip(","))
    for e in merged["traceEvents"]:
        if e.get("name") == "forward" and e["ph"] == "X":
            ours[e["pid"]].append(e["ts"])
        if e.get("name") == "trigram:forward" and e["ph"] in "Xb":
            theirs[owner[e["pid"]]].append(e["ts"])
        if e.get("name") == "trigram:bucket 0 all_reduce":
            theirs["buckets", owner[e["pid"]]].append(e["ts"])
    for rank in (0, 1):
        assert len(theirs["buckets", rank]) >= STEPS
        assert len(theirs[rank]) >= len(ours[rank]) - 1
        nearest = sorted(min(abs(a - b) for b in ours[rank]) for a in theirs[rank])
        assert nearest[len(nearest) // 2] < 3000, f"rank {rank}: {nearest} us apart"


def test_clocks_of_hosts_are_aligned_by_the_calls(job: tuple[Path, list[dict[str, Any]]]) -> None:
    """A rank whose clock is three seconds ahead is found, as if it were on another host."""
    first, other = merge.read_folder(job[0])
    moved = copy.deepcopy(other.events)
    for e in moved:
        if "ts" in e:
            e["ts"] += 3e6
        if e["name"] == "trigram":
            e["args"]["host"] = "elsewhere"
    offset, error = merge.clock_offsets([first, merge.RankTrace(other.path, moved)])["elsewhere"]
    assert abs(offset - 3e6) <= error + 1
    assert error < 100_000


def test_the_phases_of_a_step_add_up(job: tuple[Path, list[dict[str, Any]]]) -> None:
    """Two backward passes and an update are one step; its phases are all of its time."""
    for found in job[1]:
        assert found["step"]["count"] == STEPS - 2  # not the first; the last ends with the next forward pass
        parts = [found[phase]["total"] for phase in steps.PHASES]
        assert sum(parts) == pytest.approx(found["step"]["total"], rel=1e-6)
        assert all(found[phase]["total"] > 0 for phase in (steps.FORWARD, steps.BACKWARD, steps.OPTIMIZER))


def _block(rank: int, world: int, folder: str) -> str:
    with pytest.raises(trigram.MisuseError, match=r"name it \.json"), trigram.timeline(f"{folder}/a.json.gz"):
        pass
    with trigram.timeline(f"{folder}/trace.json"):
        trigram.all_reduce(torch.ones(4))
        with pytest.raises(trigram.MisuseError, match="already"), trigram.timeline(f"{folder}/b.json"):
            pass
    trigram.all_reduce(torch.ones(4))
    return str(timeline.file_of(Path(folder) / "trace.json", rank))


def _full(rank: int, world: int, folder: str) -> bool:
    (Path(folder) / "trace-rank0.json").symlink_to("/dev/full")
    with trigram.timeline(f"{folder}/trace.json"):
        trigram.all_reduce(torch.ones(4))
    return trigram.Job.current().part(timeline._Recorded).recorder is None


def test_a_full_disk_ends_the_timeline_only(tmp_path: Path) -> None:
    with Ranks(1, _full, str(tmp_path)) as ranks:
        assert ranks.results(30) == [True]
        assert "it ends here" in ranks.log(0)


def test_a_block_records_what_is_inside(tmp_path: Path) -> None:
    """One call of two; and a file of a killed process, which has no end, is read."""
    for path in map(Path, run(2, _block, str(tmp_path), timeout=30)):
        events = json.loads(path.read_text())
        assert [e["name"] for e in events if e["ph"] == "X" and "args" in e] == ["all_reduce"]
        cut = tmp_path / "cut.json"
        cut.write_text(path.read_text()[:-30])
        assert merge.read_events(cut) == events[:-1]


@pytest.mark.parametrize(
    "content", [b'{"a": 1}', b"", b'[\n{"ph":"M","name":"trigram","args":{}}\n]', b"\xff\xfe"]
)
def test_what_is_no_timeline_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace-rank0.json").write_bytes(content)
    with pytest.raises(trigram.MisuseError, match="trace-rank0"):
        merge.read_folder(tmp_path)
    (tmp_path / "trace-rank0.json").rename(tmp_path / "trace-rank0.json.gz")
    with pytest.raises(trigram.MisuseError, match="trace-rank0"):
        merge.read_folder(tmp_path)
    cut = gzip.compress(b"[" * 1000)[:-9]
    (tmp_path / "trace-rank0.json.gz").write_bytes(cut)
    with pytest.raises(trigram.MisuseError, match="cannot be read"):
        merge.read_folder(tmp_path)


def _killed(rank: int, world: int, folder: str) -> None:
    with trigram.timeline(f"{folder}/trace.json"):
        shutil.copy(f"{folder}/trace-rank0.json", f"{folder}/killed-rank0.json")


def test_a_file_that_is_no_timeline_is_left_out(tmp_path: Path) -> None:
    """A report in the same folder, and a rank that was killed before it had written its first line."""
    run(1, _killed, str(tmp_path), timeout=30)
    (tmp_path / "trace-rank0.json").unlink()
    (tmp_path / "report-rank0.json").write_text('{"version": 1, "rank": 0}')
    (tmp_path / "trace-rank1.json").write_text("[\n")
    told: list[str] = []
    assert [t.rank for t in merge.read_folder(tmp_path, told)] == [0]
    assert len(told) == 2 and "report-rank0.json" in told[0] and "trace-rank1.json" in told[1]


def test_timelines_of_an_earlier_job_are_left_out(tmp_path: Path) -> None:
    for world in (3, 2):
        run(world, _once, env={"TRIGRAM_TIMELINE": str(tmp_path)}, timeout=60)
        assert [t.rank for t in merge.read_folder(tmp_path)] == list(range(world))


def _from_any(rank: int, world: int, folder: str) -> None:
    with trigram.timeline(f"{folder}/trace.json"):
        for k in range(3):
            if rank == 0:
                trigram.recv(torch.zeros(4), None, tag=7)
            else:
                trigram.send(torch.full((4,), float(k)), 0, tag=7)


def test_receives_from_any_source_have_the_numbers_of_their_messages(tmp_path: Path) -> None:
    """So an arrow leads from each message to its receive, and to no other."""
    run(2, _from_any, str(tmp_path), timeout=30)
    traces = merge.read_folder(tmp_path)
    keys = [[e["args"]["call"] for e in t.calls() if e["name"] in ("send", "recv")] for t in traces]
    assert len(set(keys[0])) == 3 and keys[0] == keys[1]


def _once(rank: int, world: int) -> None:
    trigram.barrier()
