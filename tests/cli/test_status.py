"""`trigram status`: what an elastic job says of itself, to whoever reaches its store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer

import trigram
from tests.support import patience
from tests.support.elastic_run import come, loss_of, model, optimizer
from tests.support.harness import Ranks, await_flag, flag, free_port, scratch
from trigram.cli import job_store, status
from trigram.elastic.history import History
from trigram.elastic.join_queue import STATUS
from trigram.runtime.rendezvous import reopen

pytestmark = pytest.mark.waits


def _trains(rank: int, world: int, again: bool = False) -> None:
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    flag(f"entered-{rank}")
    step = trigram.stats(net)["steps"]
    over = torch.zeros(1)
    with suppress(SystemExit):  # of the rank that was asked to leave
        _steps(rank, step, again, net, opt, over)


def _steps(
    rank: int, step: int, again: bool, net: torch.nn.Module, opt: torch.optim.Optimizer, over: torch.Tensor
) -> None:
    while not over.item():
        if step == 5 and rank == 1 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 9 and rank == 2:
            await_flag("look")  # all wait for this rank, and the others ask who drains
            trigram.drain()
        loss_of(net, step, rank).backward()
        opt.step()
        step += 1
        time.sleep(0.01)
        over = torch.tensor([float((scratch() / "flag-seen").exists())])
        trigram.all_reduce(over, "min")


def _status(port: str, *more: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "trigram", "status", "--store", f"127.0.0.1:{port}", *more]
    return subprocess.run(argv, capture_output=True, text=True, timeout=patience.seconds(60), check=False)


def _until(port: str, what: Any) -> dict[str, Any]:
    """The first status that fits."""
    limit = patience.Limit(60)
    while True:
        done = _status(port, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        if what(found):
            return found
        assert not limit.is_over(), found


def test_an_elastic_job_says_how_it_is() -> None:
    with Ranks(4, _trains) as ranks:
        port = ranks.env["MASTER_PORT"]
        found = _until(port, lambda s: s["members"] == [0, 2, 3])
        assert found["joining"] == found["draining"] == [] and found["leader"] == 0
        [event] = found["events"]
        assert event["what"] == "dead" and event["ranks"] == [1] and event["epoch"] == 0
        assert found["epoch"] == 1 and found["model"] == "Sequential" and found["steps"] >= 5
        assert 0 < found["goodput"] < 1 and found["seconds_wasted"] > 0
        (ranks.dir / "flag-look").touch()
        found = _until(port, lambda s: s["members"] == [0, 3])
        assert found["events"][-1]["what"] == "asked to leave" and found["events"][-1]["ranks"] == [2]
        come(ranks, 1, True, run=_trains)
        found = _until(port, lambda s: s["members"] == [0, 1, 3])
        assert found["events"][-1]["what"] == "joined" and found["events"][-1]["ranks"] == [1]
        shown = _status(port)
        assert shown.returncode == 0
        for line in (
            "members   0, 1, 3",
            "rank 1 joined",
            "rank 2 left, as asked to",
            "rank 1 dead",
            "goodput",
        ):
            assert line in shown.stdout, shown.stdout
        (ranks.dir / "flag-seen").touch()
        ranks.results(60)
        gone = _status(port)
        assert gone.returncode != 0


def test_a_store_without_a_job() -> None:
    port = free_port()
    none = _status(str(port))
    assert none.returncode == 2 and "no store answers" in " ".join(none.stderr.split())
    _store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    empty = _status(str(port))
    assert empty.returncode == 1 and "has never run" in empty.stderr
    reopen("127.0.0.1", port).set(STATUS, json.dumps({"epoch": 3, "ranks": [0]}))
    ended = _status(str(port))
    assert ended.returncode == 1 and "has ended" in ended.stderr


def test_a_store_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        none = _status(str(mute.getsockname()[1]))
    assert none.returncode == 2 and "has not answered" in " ".join(none.stderr.replace("│", "").split())


@pytest.mark.parametrize("where", ["nowhere", "host:", ":1", "host:0", "host:70000", "host:one"])
def test_what_is_no_store(where: str) -> None:
    with pytest.raises(typer.BadParameter, match="no HOST:PORT"):
        job_store.address(where)


WRONG: list[Any] = [None, -1, 1e300, True, "\x1b[2J", "x" * 1000, [], [1, "a", True], {}, [{}], [{"at": "x"}]]


@pytest.mark.parametrize("value", WRONG)
def test_what_others_write_is_not_believed(value: Any) -> None:
    """Any process may write to the store: it is shown, or left out, and moves no cursor."""
    keys = ["epoch", "leader", "model", "algorithm", "steps", "goodput", "wasted", "began", "ranks", "events"]
    for key in keys:
        found = status.checked({key: value, "model": value if key == "model" else "Net"})
        shown = status.text(found, time.time())
        assert "\x1b" not in shown and len(shown) < 2000
        json.dumps(found)


def test_history_keeps_the_newest() -> None:
    history = History(began=time.time() - 100)
    history.add(0, "dead", [])
    assert history.events == []
    for epoch in range(50):
        history.add(epoch, "dead", [2, 1])
    assert [e["epoch"] for e in history.events] == list(range(34, 50)) and history.events[0]["ranks"] == [
        1,
        2,
    ]
    history.wasted = 5.0
    assert abs(history.summary()["goodput"] - 0.95) < 0.001
    with history.waste():
        time.sleep(0.01)
    assert history.wasted >= 5.01
    history.wasted = 1e9
    assert history.summary()["goodput"] == 0.0
