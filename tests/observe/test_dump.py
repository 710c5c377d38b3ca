"""Dumps of a failed job, read by torch's own analyser and by our postmortem."""

from __future__ import annotations

import dataclasses
import gc
import io
import logging
import os
import pickle
import signal
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import trigram
from tests.support.harness import run, until
from trigram.elastic.joining import MissingEngine
from trigram.observe import calls, dump, postmortem, spans, timeline
from trigram.runtime import engine_codes, job, world


def _job(rank: int, world: int, how: str) -> str:
    trigram.init(op_timeout=3.0)
    for _ in range(3):
        trigram.all_reduce(torch.ones(4))
    try:
        if how == "skipped" and rank != 2:
            trigram.all_reduce(torch.ones(8))
        elif how == "late" and rank == 2:
            time.sleep(4.0)
        trigram.all_reduce(torch.ones(4))
    except trigram.TrigramError as e:
        return str(e)
    return ""


def _torchs_verdict(folder: Path) -> str:
    """What torchfrtrace says of the dumps in a folder."""
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)]
    theirs = [logger for logger in loggers if "light" in logger.name.lower() or "fr" in logger.name.lower()]
    for logger in theirs:
        logger.addHandler(handler)
    try:
        with redirect_stdout(heard):
            fr_trace.main([str(folder)])
    finally:
        for logger in theirs:
            logger.removeHandler(handler)
    return heard.getvalue()


@pytest.mark.parametrize("how", ["skipped", "late"])
def test_the_dump_names_the_rank(how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 2 skips a call, or does not come to it: torch's analyser and ours name it, and the call."""
    errors = run(3, _job, how, env={"TRIGRAM_DUMP": str(tmp_path)}, timeout=60)
    assert all(errors), errors
    assert sorted(p.name for p in tmp_path.glob("rank*")) == ["rank0", "rank1", "rank2"]
    [finding, *_] = postmortem.find(postmortem.read(tmp_path))
    assert finding.ranks == (2,)
    elements = 8 if how == "skipped" else 4
    assert f"all_reduce of {elements} float32" in finding.call
    number = "call 5"  # after two barriers of init and three all_reduces, counted from 0
    assert number in finding.text
    text = postmortem.report(tmp_path)
    assert "Verdict: look at rank 2" in text
    if how == "skipped":
        assert number in errors[0], "errors and postmortem count alike"
    said = _torchs_verdict(tmp_path) + "".join(capfd.readouterr())
    assert ("Culprit rank 2" if how == "skipped" else "missing ranks: {2}") in said


def in_the_script(folder: Path) -> None:
    """Where rank 2 stays until all have dumped: nearly always in this function itself."""
    end = time.monotonic() + 15
    for file in [str(folder / f"rank{r}") for r in range(3)]:
        while not os.path.exists(file) and time.monotonic() < end:  # noqa: PTH110  # calls no Python
            time.sleep(0.02)


def _away(rank: int, world: int, folder: str) -> None:
    trigram.init()
    trigram.barrier()
    if rank == 2:
        in_the_script(Path(folder))
    trigram.all_reduce(torch.ones(4))


def test_the_postmortem_says_where_a_rank_stays(tmp_path: Path) -> None:
    """Rank 2 is elsewhere in its script: it dumps because the others wait, and says where it is."""
    env = {"TRIGRAM_DUMP": str(tmp_path), "TRIGRAM_DUMP_AFTER": "1"}
    run(3, _away, str(tmp_path), env=env, timeout=60)
    [finding, *_] = postmortem.find(postmortem.read(tmp_path))
    assert finding.ranks == (2,)
    assert "in_the_script at" in finding.text
    assert "test_dump.py" in finding.text


def _unsent(rank: int, world: int) -> str:
    trigram.init(op_timeout=3.0)
    try:
        if rank == 0:
            trigram.recv(torch.ones(4), 1)  # which goes on to the collective
        trigram.all_reduce(torch.ones(4))
    except trigram.TrigramError as e:
        return str(e)
    return ""


def test_a_rank_that_waits_for_a_message_is_not_blamed_alone(tmp_path: Path) -> None:
    assert all(run(3, _unsent, env={"TRIGRAM_DUMP": str(tmp_path)}, timeout=60))
    [finding, *_] = postmortem.find(postmortem.read(tmp_path))
    assert finding.ranks == (1, 0)
    assert "rank 0 waits for rank 1" in finding.text


def _asked(rank: int, world: int, folder: str) -> list[int]:
    trigram.init()
    seen: list[int] = []
    if rank == 1:
        signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
    trigram.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
    until(lambda: all((Path(folder) / f"rank{r}").exists() for r in range(2)), 15, "the dumps")
    trigram.barrier()
    return seen


def test_a_signal_asks_all_ranks_for_a_dump(tmp_path: Path) -> None:
    """SIGUSR2 on one rank; the other dumps because it is asked through the folder. Nothing is wrong."""
    run(2, _asked, str(tmp_path), env={"TRIGRAM_DUMP": str(tmp_path)}, timeout=60)
    dumps = postmortem.read(tmp_path)
    assert postmortem.find(dumps) == []
    assert "SIGUSR2" in dumps[0]["trigram"]["why"]
    assert "no call is open" in postmortem.report(tmp_path)


def _dumps(rank: int, world: int) -> list[str]:
    trigram.init()
    trigram.barrier()
    dumper = job.here().part(dump.Dumps).dumper
    assert dumper is not None
    dumper.write("of the test")
    return sorted(p.name for p in dumper.folder.glob(".*"))


def test_dumps_of_an_earlier_job_are_left_out(tmp_path: Path) -> None:
    for size in (3, 2):
        run(size, _dumps, env={"TRIGRAM_DUMP": str(tmp_path)}, timeout=60)
        assert sorted(postmortem.read(tmp_path)) == list(range(size))
    assert len(list(tmp_path.glob("rank*"))) == 3


def test_a_dump_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()  # no file can take its place
    assert run(1, _dumps, env={"TRIGRAM_DUMP": str(tmp_path)}, timeout=60) == [[]]


def test_a_dump_is_no_program(tmp_path: Path) -> None:
    """A pickle that would run code is refused."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    lacking = {"pg_config": {}, "entries": [{"is_p2p": False}]}
    others = {"pg_config": {}, "entries": [], "trigram": 3}
    for content in (Evil(), 5, {"entries": []}, {"pg_config": {}, "entries": 3}, lacking, others):
        (tmp_path / "rank0").write_bytes(pickle.dumps(content))
        with pytest.raises(trigram.MisuseError, match="no dump"):
            postmortem.read(tmp_path)
    assert not (tmp_path / "made").exists()


def _entry(call: int, state: str = "completed", what: str = "all_reduce", **trigram: Any) -> dict[str, Any]:
    """The entry of a collective of four values."""
    return {
        "process_group": ("7", "world"),
        "collective_seq_id": call + 1,
        "is_p2p": False,
        "profiling_name": f"gloo:{what}",
        "input_sizes": [[4]],
        "input_dtypes": ["float32"],
        "time_created_ns": call,
        "state": state,
        "trigram": {"failed": False, "waited_for": None, "on_gpu": False, "uneven": False, **trigram},
    }


def _dump(
    entries: list[dict[str, Any]], losses: Sequence[tuple[int, str]] = (), ranks: str = "[0, 1, 2]"
) -> dict[str, Any]:
    """A dump with these calls."""
    about = {"job": "j", "time_ns": 10**9, "losses": list(losses), "failures": [], "stack": []}
    config = {"7": {"name": "7", "desc": "world", "ranks": ranks}}
    return {"pg_config": config, "entries": entries, "trigram": about}


def test_the_rank_that_was_lost_first_is_named_first() -> None:
    """As most dumps say it, not the lowest number."""
    losses = [
        [(3, "dead"), (0, "dead")],
        [(0, "silent"), (3, "dead")],
        [(3, "silent"), (0, "dead")],
        [(2, "left")],
    ]
    found = postmortem.find(
        {rank: _dump([], of, "[1, 2, 4, 5]") for rank, of in zip([1, 2, 4, 5], losses, strict=True)}
    )
    assert [f.ranks for f in found] == [(3,), (0,)]
    assert found[0].text == "rank 3 died or fell silent first, as 2 of 3 ranks saw"
    assert "1 of 3" in found[1].text


def test_a_failure_that_was_survived_hides_no_hang() -> None:
    """All ranks have gone on after call 1 has failed, and rank 2 has not come to call 3."""
    began = [_entry(0), _entry(1, "started", failed=True), _entry(2)]
    waits = [*began, _entry(3, "started")]
    dumps = {0: _dump(waits), 1: _dump(waits), 2: _dump(began)}
    [finding] = postmortem.find(dumps)
    assert finding.ranks == (2,) and "call 3" in finding.call
    # One that is still under way is no failure, whatever has ended after it.
    began[1] = _entry(1, "started")
    [finding] = postmortem.find(dict.fromkeys(range(3), _dump(began)))
    assert "call 1" in finding.call


def test_a_rank_that_skipped_a_call_is_named_before_those_that_wait() -> None:
    """It waits in the next call, of another group, for the others, and may have begun that one first."""
    dumps = {}
    for rank in range(3):
        world, gradients = (
            [_entry(0), _entry(1, "started")],
            {**_entry(0, "started"), "process_group": ("8", "g")},
        )
        dumps[rank] = _dump([_entry(0), gradients] if rank == 1 else world)
        dumps[rank]["pg_config"]["8"] = {"name": "8", "desc": "gradients", "ranks": "[0, 1, 2]"}
    first, second = postmortem.find(dumps)
    assert (first.ranks, second.ranks) == ((1,), (0, 2))


def _uneven(rank: int, world: int, folder: str) -> None:
    """Each rank sends and receives parts of sizes of its own."""
    trigram.init()
    lengths = [[1, 2], [3, 4]]
    received = [row[rank] for row in lengths]
    trigram.all_to_all(
        list(torch.ones(sum(received)).split(received)),
        list(torch.ones(sum(lengths[rank])).split(lengths[rank])),
    )
    dumper = job.here().part(dump.Dumps).dumper
    assert dumper is not None
    dumper.write("of the test")
    trigram.barrier()


def test_ranks_may_have_other_sizes_in_an_uneven_call(tmp_path: Path) -> None:
    run(2, _uneven, str(tmp_path), env={"TRIGRAM_DUMP": str(tmp_path)}, timeout=60)
    dumps = postmortem.read(tmp_path)
    entries = {rank: dump["entries"][-1] for rank, dump in dumps.items()}
    assert len({str(e["input_sizes"]) for e in entries.values()}) == 2
    assert all(e["trigram"]["uneven"] for e in entries.values())
    for e in entries.values():  # as if it had not ended
        e["state"], e["trigram"]["waited_for"] = "started", 1
    for also in (True, False):  # equal lengths may be left out on a rank
        entries[1]["trigram"]["uneven"] = also
        [finding] = postmortem.find(dumps)
        assert "all ranks have made call" in finding.text and finding.ranks == (1,)


def test_a_group_that_is_gone_has_the_ranks_that_called_it() -> None:
    """Rank 2 was never its member. One rank that still knows the group tells its name and members."""
    waits = [_entry(0), _entry(1, "started", waited_for=1)]
    dumps = {0: _dump(waits, ranks="[]"), 1: _dump(waits, ranks="[]"), 2: _dump([], ranks="[]")}
    dumps[2]["pg_config"] = {}
    [finding] = postmortem.find(dumps)
    assert "all ranks have made call 1 of group 'world' of ranks [0, 1]" in finding.text
    dumps[1] = _dump(waits[:1], ranks="[0, 1]")
    [finding] = postmortem.find(dumps)
    assert finding.ranks == (1,) and "rank 1 has not made call 1" in finding.text


def _collected(rank: int, world: int) -> tuple[int, ...]:
    trigram.init()
    group = trigram.new_group([0])
    trigram.all_reduce(torch.ones(4), group=group)
    number = group.core.id
    del group
    gc.collect()
    return calls.Calls().group(number).ranks


def test_the_members_of_a_group_that_was_collected_are_not_guessed() -> None:
    assert run(1, _collected, timeout=30) == [()]


def _late(rank: int, world_size: int, folder: str) -> list[str]:
    """A rank that comes late into an elastic job, and joins after a while; the calls in its timeline."""
    trigram.init()
    joined = world.current()
    engine: Any = MissingEngine(rank)
    world.replace(dataclasses.replace(joined, engine=engine))
    known = calls.Calls()
    assert known.read() == known.all() == [] and known.wait_for_failure(0.0) is None
    dumper = dump.Dumper(Path(folder), rank, 60.0)
    with trigram.timeline(f"{folder}/trace.json"):
        time.sleep(0.6)  # the threads of both have looked
        assert dumper._thread.is_alive()
        dumper.write("of the test")
        world.replace(joined)
        trigram.all_reduce(torch.ones(4))
    dumper.close()
    known.failures = 5
    assert known.all()
    assert known.failures == 0, "those of an earlier engine do not count"
    lines = (Path(folder) / "trace-rank0.json").read_text().splitlines()
    return [line for line in lines if '"all_reduce"' in line]


def test_a_late_rank_has_a_dump_and_a_timeline(tmp_path: Path) -> None:
    [found] = run(1, _late, str(tmp_path), timeout=30)
    assert len(found) == 1
    assert postmortem.read(tmp_path)[0]["entries"] == []


def _broken(rank: int, world_size: int, folder: str) -> bool:
    with trigram.timeline(f"{folder}/trace.json"):
        recorder: Any = job.here().part(timeline._Recorded).recorder
        recorder._calls = None
        until(lambda: recorder._file is None, 10, "its end")
        return recorder not in job.here().part(spans.Listeners).all


def test_a_timeline_that_fails_takes_no_more_spans(tmp_path: Path) -> None:
    assert run(1, _broken, str(tmp_path), timeout=30) == [True]


def test_of_gpu_calls_only_the_check_is_known(tmp_path: Path) -> None:
    """All have ended, and a call on GPUs may still run: no verdict says that nothing is wrong."""
    for rank in range(2):
        ended = [_entry(0), _entry(1, on_gpu=True), _entry(2, on_gpu=True)]
        (tmp_path / f"rank{rank}").write_bytes(pickle.dumps(_dump(ended, ranks="[0, 1]")))
    text = postmortem.report(tmp_path)
    assert "no call is open" in text and "may still run" in text
    call = "call 2 of group 'world', all_reduce of 4 float32 (GPU call: only its check is recorded)"
    assert f"the last of rank 0 is {call}" in text and f"the last of rank 1 is {call}" in text


def _checked(rank: int, world_size: int, folder: str) -> None:
    """A check, which stands for a call on GPU memory."""
    with trigram.timeline(f"{folder}/trace.json"):
        world.current().group.core.check_consistency((engine_codes.ALL_REDUCE, 0, 4, 0, 0, 0)).wait()


def test_timelines_say_of_a_gpu_call_that_it_is_only_its_check(tmp_path: Path) -> None:
    run(1, _checked, str(tmp_path), timeout=30)
    assert '"on_gpu": "only its check is recorded"' in (tmp_path / "trace-rank0.json").read_text()
