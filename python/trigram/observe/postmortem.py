"""Says what stopped a job, from the dumps of its ranks (``dump``): which rank, and in which call.

For each group it looks for the first call that not all of its ranks have ended. A rank that has not made it,
while others wait in it, is the culprit; if all have made a call there, those whose call differs from that of
most ranks are. A rank that others have lost, or that left no dump, is named first.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trigram.errors import MisuseError
from trigram.observe.dump import PREFIX

_LIBRARIES = ("site-packages", "dist-packages", "/lib/python", "<frozen")
"""In the path of a function that is no part of the script."""


@dataclass(frozen=True)
class Finding:
    """What a postmortem has found.

    Attributes:
        ranks: The ranks to look at.
        call: The call that they have kept from ending, in words; "": none.
        text: What happened.
    """

    ranks: tuple[int, ...]
    call: str
    text: str


class _Harmless(pickle.Unpickler):
    """Reads plain values only: a pickle may otherwise run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it has a {module}.{name}, which no dump has")


@dataclass
class _Group:
    """A group in the dumps.

    Attributes:
        name: Its name.
        ranks: Its members.
        calls: By number and rank, the entry.
    """

    name: str
    ranks: list[int]
    calls: dict[int, dict[int, dict[str, Any]]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def label(self) -> str:
        """As messages name it."""
        return f"group {self.name!r} of ranks {self.ranks}"


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """The dumps of a folder, by rank; of several jobs, those of the last one.

    Raises:
        MisuseError: There are none, or one cannot be read.
    """
    dumps = {}
    for path in folder.glob(f"{PREFIX}*"):
        found = re.fullmatch(rf"{PREFIX}(\d+)", path.name)
        if found is None:
            continue
        try:
            with path.open("rb") as f:
                dumps[int(found[1])] = _checked(_Harmless(f).load())
        except (OSError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as e:
            raise MisuseError(f"{path} is no dump: {e}") from e
    if not dumps:
        raise MisuseError(f"{folder} has no dumps; run the job with TRIGRAM_DUMP={folder}")
    last = max(dumps.values(), key=lambda dump: (_job(dump) != "", dump.get("trigram", {}).get("time_ns", 0)))
    return {rank: dump for rank, dump in sorted(dumps.items()) if _job(dump) in ("", _job(last))}


_KEYS = {
    "is_p2p",
    "process_group",
    "collective_seq_id",
    "state",
    "profiling_name",
    "input_sizes",
    "input_dtypes",
    "time_created_ns",
}


def _checked(dump: Any) -> dict[str, Any]:
    if not (
        isinstance(dump, dict)
        and isinstance(dump.get("pg_config"), dict)
        and isinstance(dump.get("entries"), list)
    ):
        raise ValueError("it has no groups and calls")
    for entry in dump["entries"]:
        if not isinstance(entry, dict) or not entry.keys() >= _KEYS:
            raise ValueError("a call lacks what a flight recorder says of it")
    if not all(isinstance(of.get("trigram", {}), dict) for of in (dump, *dump["entries"])):
        raise ValueError("what Trigram says of a call is no dictionary")
    return dump


def _job(dump: dict[str, Any]) -> str:
    """Its job; "": it came late into an elastic one, so it cannot say."""
    return str(dump.get("trigram", {}).get("job", ""))


def _groups(dumps: dict[int, dict[str, Any]]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for dump in dumps.values():
        for number, about in dump["pg_config"].items():
            ranks = [int(r) for r in re.findall(r"\d+", about["ranks"])]
            if number not in groups or not groups[number].ranks:
                groups[number] = _Group(about["desc"], ranks)
    for rank, dump in dumps.items():
        for entry in dump["entries"]:
            if not entry["is_p2p"]:
                groups[entry["process_group"][0]].calls[entry["collective_seq_id"]][rank] = entry
    for group in groups.values():  # ranks that had let it go do not know its members
        group.ranks = group.ranks or sorted({rank for of in group.calls.values() for rank in of})
    return list(groups.values())


def _is_uneven(entry: dict[str, Any]) -> bool:
    return bool(entry.get("trigram", {}).get("uneven"))


def _is_on_gpu(entry: dict[str, Any]) -> bool:
    return bool(entry.get("trigram", {}).get("on_gpu"))


def _what(entry: dict[str, Any], uneven: bool = False) -> str:
    """A call in words; ``uneven``: one of its ranks has parts of unequal lengths in it."""
    name = entry["profiling_name"].partition(":")[2]
    if _is_uneven(entry) or (uneven and name == "all_to_all"):
        return f"{name} of unequal parts of {entry['input_dtypes'][0]}"  # each rank has its own size
    on_gpu = " (GPU call: only its check is recorded)" if _is_on_gpu(entry) else ""
    return f"{name} of {entry['input_sizes'][0][0]} {entry['input_dtypes'][0]}{on_gpu}"


def _listed(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def find(dumps: dict[int, dict[str, Any]]) -> list[Finding]:
    """What stopped the job, the most telling first; nothing if no call is open."""
    found = _lost(dumps)
    open_calls = []
    for group in _groups(dumps):
        newest = {
            rank: max((n for n, by_rank in group.calls.items() if rank in by_rank), default=0)
            for rank in group.ranks
        }
        for number in sorted(group.calls):
            entries = group.calls[number]
            if any(entry["state"] != "completed" for entry in entries.values()):
                if _survived(group, number):
                    continue
                waiting = [e for e in entries.values() if e["state"] != "completed"]
                missing = [r for r in group.ranks if r not in entries and r in dumps]
                # A rank that has skipped a call waits in the next one for the others, who wait for it.
                order = len(missing) > len(waiting), min(e["time_created_ns"] for e in waiting)
                open_calls.append((order, group, number, newest))
                break
    for _, group, number, newest in sorted(open_calls, key=lambda o: o[0]):
        found += _in_call(group, number, newest, dumps)
    absent = sorted({r for g in _groups(dumps) for r in g.ranks} - dumps.keys())
    named = {r for f in found for r in f.ranks}
    if absent and not set(absent) <= named:
        text = f"{_listed(absent)} left no dump: ended before, or on a host with another folder"
        found.append(Finding(tuple(absent), "", text))
    return found


def _survived(group: _Group, number: int) -> bool:
    """Whether a call has failed, and each of its ranks has completed a later one."""
    entries = group.calls[number]
    if any(e["state"] != "completed" and not e.get("trigram", {}).get("failed") for e in entries.values()):
        return False
    return all(
        any(n > number and rank in of and of[rank]["state"] == "completed" for n, of in group.calls.items())
        for rank in entries
    )


def _lost(dumps: dict[int, dict[str, Any]]) -> list[Finding]:
    """Ranks that died or fell silent, as the others saw it: first the one that most of them lost first."""
    words = {"dead": "died", "silent": "fell silent", "evicted": "was evicted by trigram evict"}
    how: dict[int, set[str]] = defaultdict(set)
    first: Counter[int] = Counter()
    for dump in dumps.values():
        lost = [(r, words[kind]) for r, kind in dump.get("trigram", {}).get("losses", []) if kind in words]
        first.update(rank for rank, _ in lost[:1])
        for rank, kind in lost:
            how[rank].add(kind)
    found = []
    for rank in sorted(how, key=lambda r: (-first[r], r)):
        when = f"first, as {first[rank]} of {first.total()} ranks saw" if first[rank] else "later"
        found.append(Finding((rank,), "", f"rank {rank} {' or '.join(sorted(how[rank]))} {when}"))
    return found


def _in_call(
    group: _Group, number: int, newest: dict[int, int], dumps: dict[int, dict[str, Any]]
) -> list[Finding]:
    entries = group.calls[number]
    # A rank whose record was overwritten has gone further; one without a dump is not known.
    missing = [r for r in group.ranks if r not in entries and r in dumps and newest[r] < number]
    uneven = any(map(_is_uneven, entries.values()))
    what = {rank: _what(e, uneven) for rank, e in entries.items()}
    kinds = Counter(what.values())
    usual = kinds.most_common(1)[0][0]
    waiting = [r for r, e in entries.items() if e["state"] != "completed"]
    shown = number - 1  # as error messages count
    call = f"call {shown} of {group.label}, {usual}"
    if missing:
        text = (
            f"{_listed(missing)} {_have(missing)} not made {call}, in which {_listed(waiting)} "
            f"{'waits' if len(waiting) == 1 else 'wait'}; " + _last_calls(missing, dumps)
        )
        awaited = {rank: _awaited(dumps[rank]) for rank in missing}
        if None not in awaited.values():  # none of them is where it should not be: another has kept them all
            for rank, peer in awaited.items():
                text += f"; rank {rank} waits for rank {peer} there, which has not come to that message"
            first = sorted({peer for peer in awaited.values() if peer is not None} - set(missing))
            return [Finding((*first, *missing), call, text)]
        return [Finding(tuple(missing), call, text)]
    if len(kinds) > 1:
        other = [r for r in entries if what[r] != usual]
        if len(kinds) == 2 and kinds[usual] == len(other):
            other = sorted(entries)  # as many have made the one as the other
        made = "; ".join(f"rank {r} made {what[r]}" for r in sorted(entries))
        text = (
            f"the ranks made different calls as call {shown} of {group.label}: {made}. One of them has "
            "skipped or added a call before"
        )
        return [Finding(tuple(sorted(other)), call, text)]
    absent = [r for r in group.ranks if r not in dumps]
    if absent:
        text = f"{_listed(absent)} left no dump, and {_listed(waiting)} waited in {call}"
        return [Finding(tuple(absent), call, text)]
    blamed = Counter(
        e["trigram"]["waited_for"]
        for e in entries.values()
        if e["state"] != "completed" and e.get("trigram", {}).get("waited_for") is not None
    )
    if not blamed:
        return [Finding((), call, f"all ranks have made {call}, and it has not ended on {_listed(waiting)}")]
    rank = blamed.most_common(1)[0][0]
    text = f"all ranks have made {call}; {_listed(waiting)} waited longest for rank {rank} in it"
    return [Finding((rank,), call, text)]


def _awaited(dump: dict[str, Any]) -> int | None:
    """The rank for whose message the last call of a rank waits; None: it waits for none."""
    last = dump["entries"][-1] if dump["entries"] else None
    if last is None or not last["is_p2p"] or last["state"] == "completed":
        return None
    peer: int | None = last.get("trigram", {}).get("waited_for")
    return peer


def _last_calls(ranks: Sequence[int], dumps: dict[int, dict[str, Any]]) -> str:
    """What ranks did last."""
    parts = []
    for rank in ranks:
        entries = dumps[rank]["entries"]
        if not entries:
            parts.append(f"rank {rank} has made no call")
            continue
        last = entries[-1]
        state = "ended" if last["state"] == "completed" else "is under way or failed"
        ago = (dumps[rank]["trigram"]["time_ns"] - last["time_created_ns"]) / 1e9
        text = f"the last call of rank {rank}, {_what(last)}, made {ago:.1f} s before its dump, {state}"
        stack = dumps[rank]["trigram"].get("stack", [])
        parts.append(text + (f"; it was in {_place(stack)}" if stack else ""))
    return "; ".join(parts)


def _place(stack: Sequence[str]) -> str:
    """Where a rank was, in words: the innermost function, and those of the script that have called it."""
    own = [frame for frame in stack[1:] if not any(of in frame for of in _LIBRARIES)]
    return ", called by ".join([stack[0], *own[:2]])


def report(folder: Path) -> str:
    """What :func:`find` finds, as text, with the errors of the ranks."""
    dumps = read(folder)
    found = find(dumps)
    lines = [f"{len(dumps)} dumps, of {_listed(list(dumps))}"]
    if found:
        who = f"look at {_listed(found[0].ranks)}" if found[0].ranks else "no rank stands out"
        lines += [f"Verdict: {who}", *(f"- {f.text}" for f in found)]
    else:
        lines.append("Verdict: no call is open; the ranks have ended all calls that they have made")
        checks = {rank: [e for e in dump["entries"] if _is_on_gpu(e)] for rank, dump in dumps.items()}
        if any(checks.values()):
            lines.append(
                "- of GPU calls only the check is recorded: one that all ranks have made may still run"
            )
            lines += [
                f"- the last of rank {rank} is call {of[-1]['collective_seq_id'] - 1} of group "
                f"{of[-1]['process_group'][1]!r}, {_what(of[-1])}"
                for rank, of in checks.items()
                if of
            ]
    errors: Counter[str] = Counter()
    for dump in dumps.values():
        errors.update({text for *_, text in dump.get("trigram", {}).get("failures", [])})
    lines += [f"Error on {n} of {len(dumps)} ranks: {text}" for text, n in errors.most_common(5)]
    return "\n".join(lines)
