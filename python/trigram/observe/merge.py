"""Makes one timeline of those of all ranks, with arrows between them, and of torch.profiler's files.

Each rank's times are those of its host's clock. Where hosts differ, their clocks are aligned by the calls
themselves: no rank can end an all_reduce or a barrier before another has begun it, so each call bounds how
far the clocks of two hosts are apart, from both sides, and the bounds of the shortest calls are the tightest.
The files of torch.profiler have the same clock.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trigram.errors import MisuseError
from trigram.observe import profiling

_EVERYBODY = ("all_reduce", "barrier", "all_gather", "reduce_scatter", "all_to_all")
"""Calls that end on no rank before all have begun them."""
_PROFILED = 1_000_000
"""The first ``pid`` of processes in profiler files, which ranks do not have."""
_LANES = "trigram"
"""Until it gets a number, the process of our spans in a profiler file."""
_FLOWS = 1 << 40
"""More than the arrows of a file. Perfetto takes numbers only for their ids, in the whole picture."""

Event = dict[str, Any]


class RankTrace:
    """The timeline of one rank.

    Attributes:
        rank: The rank.
        host: Its host.
        pid: Its process.
        base: Nanoseconds since 1970 at which its ``ts`` is 0.
        job: The job; "": it came late into an elastic one, so it cannot say.
        began: When it was begun, in nanoseconds since 1970.
        events: Its events.
    """

    def __init__(self, path: Path, events: list[Event]) -> None:
        try:
            about = next(e["args"] for e in events if e.get("name") == "trigram" and e["ph"] == "M")
            self.rank: int = about["rank"]
            self.host: str = about["host"]
            self.pid: int = about["pid"]
            self.base: int = about["base_ns"]
        except (AttributeError, KeyError, StopIteration, TypeError):
            raise MisuseError(f"{path} is no timeline of a rank") from None
        self.job: str = about.get("job", "")
        self.began: int = about.get("began_ns", 0)
        self.path = path
        self.events = events

    def calls(self) -> Iterable[Event]:
        """The engine's calls."""
        return (e for e in self.events if e["ph"] == "X" and "call" in e.get("args", ()))


def read_events(path: Path) -> Any:
    """The JSON of a file, also of one whose process was killed while it wrote.

    Raises:
        MisuseError: It cannot be read.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as f:
            text = f.read()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as e:
        raise MisuseError(f"{path} cannot be read: {e}") from e
    try:
        return json.loads(text)
    except ValueError:
        lines = text.splitlines()
        events = []
        for line in lines[1:]:
            try:
                events.append(json.loads(line.rstrip(",\n ")))
            except ValueError:
                break
        return events


def read_folder(folder: Path, told: list[str] | None = None) -> list[RankTrace]:
    """The timelines of a folder, by rank; of several jobs, those of the last one.

    Args:
        folder: Other files in it, and those that cannot be read, are left out.
        told: Gets a line for each of these.

    Raises:
        MisuseError: There are none, or two are of one rank.
    """
    traces, others = [], []
    for path in sorted(folder.glob("*-rank*.json*")):
        try:
            traces.append(RankTrace(path, read_events(path)))
        except MisuseError as e:
            others.append(str(e))
    if not traces:
        found = f" ({'; '.join(others)})" if others else ""
        raise MisuseError(f"{folder} has no timelines{found}; run the job with TRIGRAM_TIMELINE={folder}")
    if told is not None:
        told += (f"left out: {why}" for why in others)
    last = max(traces, key=lambda t: (t.job != "", t.began))
    by_rank: dict[int, RankTrace] = {}
    for trace in [t for t in traces if t.job in ("", last.job)]:
        if trace.rank in by_rank:
            raise MisuseError(
                f"{by_rank[trace.rank].path} and {trace.path} are both of rank {trace.rank}; keep the "
                "timelines of one job in a folder"
            )
        by_rank[trace.rank] = trace
    return [by_rank[rank] for rank in sorted(by_rank)]


def clock_offsets(traces: list[RankTrace]) -> dict[str, tuple[float, float]]:
    """How far the clock of each host is ahead of that of the first rank's host.

    Returns:
        By host, microseconds and how far they may be wrong; 0 and infinity for a host that shares no calls
        with the first, not even by way of others.
    """
    first = traces[0].host
    spans: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        shift = (trace.base - traces[0].base) / 1000
        for event in trace.calls():
            if event["name"].split()[-1] in _EVERYBODY and "failed" not in event["args"]:
                began = event["ts"] + shift
                spans[event["args"]["call"]][trace.host].append((began, began + event["dur"]))
    bounds: dict[tuple[str, str], tuple[float, float]] = {}
    for by_host in spans.values():
        for a in by_host:
            for b in by_host:
                if a == b:
                    continue
                # In true time b begins before a ends, and a before b ends.
                low = max(s for s, _ in by_host[b]) - min(e for _, e in by_host[a])
                high = min(e for _, e in by_host[b]) - max(s for s, _ in by_host[a])
                known = bounds.get((a, b), (float("-inf"), float("inf")))
                bounds[a, b] = max(known[0], low), min(known[1], high)
    found = {first: (0.0, 0.0)}
    while True:
        reached = [
            ((high - low) / 2 + found[a][1], a, b, (low + high) / 2)
            for (a, b), (low, high) in bounds.items()
            if a in found and b not in found
        ]
        if not reached:
            break
        error, a, b, offset = min(reached)
        found[b] = found[a][0] + offset, abs(error)
    return {host: found.get(host, (0.0, float("inf"))) for host in {t.host for t in traces}}


def merge(traces: list[RankTrace], profiles: Iterable[Path] = ()) -> tuple[Event, list[str]]:
    """One trace of all ranks.

    Args:
        traces: The ranks' timelines.
        profiles: Files of torch.profiler; each goes to the rank that its ``distributedInfo`` or its process
            names.

    Returns:
        The trace, and lines to tell the user.

    Raises:
        MisuseError: A profiler's file is of no rank.
    """
    offsets = clock_offsets(traces)
    base = traces[0].base
    told = []
    for host, (offset, error) in sorted(offsets.items()):
        if error == float("inf"):
            told.append(f"{host} shares no collective with {traces[0].host}: its clock is taken as it is")
        elif host != traces[0].host:
            told.append(
                f"the clock of {host} is {offset / 1000:.3f} ms ahead of that of {traces[0].host}, to "
                f"{error / 1000:.3f} ms"
            )
    events: list[Event] = []
    for trace in traces:
        shift = (trace.base - base) / 1000 - offsets[trace.host][0]
        events += (_moved(e, shift) for e in trace.events)
    events += _arrows(events)
    for n, path in enumerate(profiles):
        events += _profile(path, traces, offsets, base, _PROFILED + 10 * n)
    return {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}, told


def _moved(event: Event, shift: float) -> Event:
    return {**event, "ts": event["ts"] + shift} if "ts" in event else event


def _arrows(events: list[Event]) -> list[Event]:
    """From the rank that came last into a call to the ends on the others, which it has kept waiting."""
    calls: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and "call" in event.get("args", ()):
            calls[event["args"]["call"]].append(event)
    arrows: list[Event] = []
    for slices in calls.values():
        last = max(slices, key=lambda e: e["ts"])
        for other in (e for e in slices if e is not last):
            end = other["ts"] + other["dur"]
            about = {"cat": "call", "name": last["name"], "id": len(arrows)}
            start = min(last["ts"], end)
            arrows.append({**about, "ph": "s", "pid": last["pid"], "tid": last["tid"], "ts": start})
            arrows.append(
                {**about, "ph": "f", "bp": "e", "pid": other["pid"], "tid": other["tid"], "ts": end}
            )
    return arrows


def _profile(
    path: Path, traces: list[RankTrace], offsets: dict[str, tuple[float, float]], base: int, pid: int
) -> list[Event]:
    """The events of a file of torch.profiler, on the common clock."""
    profile = read_events(path)
    if not isinstance(profile, dict) or "traceEvents" not in profile:
        raise MisuseError(f"{path} is no file of torch.profiler (export_chrome_trace)")
    events: list[Event] = profile["traceEvents"]
    pids = {e.get("pid") for e in events}
    rank = profile.get("distributedInfo", {}).get("rank")
    owners = [t for t in traces if t.rank == rank] or [t for t in traces if t.pid in pids]
    if len(owners) != 1:
        raise MisuseError(
            f"{path}: the rank of this profile is not known: {len(owners)} timelines have one of "
            "its processes; keep the files of one job in a folder"
        )
    trace = owners[0]
    shift = (profile.get("baseTimeNanoseconds", 0) - base) / 1000 - offsets[trace.host][0]
    renamed: dict[Any, int] = {}
    flows: dict[Any, int] = {}
    named = _in_lanes(events, trace.rank)
    moved = []
    for event in events:
        if "pid" in event:
            event["pid"] = renamed.setdefault(event["pid"], pid + len(renamed))
        if event.get("ph") == "M" and event.get("name") == "process_name":
            event["args"]["name"] = f"rank {trace.rank}, torch.profiler: {event['args'].get('name')}"
        if event.get("ph") in ("s", "t", "f"):
            event["id"] = flows.setdefault(event["id"], pid * _FLOWS + len(flows))
        moved.append(_moved(event, shift))
    for event in named:
        moved.append({**event, "pid": renamed[event["pid"]]})
    return moved


def _in_lanes(events: list[Event], rank: int) -> list[Event]:
    """Moves the spans of trigram from the thread that made them, where calls overlap its other spans, to
    lanes of a process of their own; returns its name."""
    ends: list[float] = []
    for event in sorted(
        (e for e in events if e.get("ph") == "X" and e.get("name", "").startswith(profiling.PREFIX)),
        key=lambda e: float(e["ts"]),
    ):
        lane = next((n for n, end in enumerate(ends) if end <= event["ts"]), len(ends))
        ends[lane : lane + 1] = [event["ts"] + event["dur"]]
        event["pid"], event["tid"] = _LANES, lane
    about = {"name": f"rank {rank}, torch.profiler: trigram"}
    return [{"ph": "M", "name": "process_name", "pid": _LANES, "tid": 0, "args": about}] if ends else []


def write(trace: Event, path: Path) -> None:
    """Writes a trace, compressed if its name ends in ``.gz``."""
    data = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(data, 5) if path.suffix == ".gz" else data)
