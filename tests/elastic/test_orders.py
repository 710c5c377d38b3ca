"""``trigram drain``: ranks of an elastic job are asked from outside to leave it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from typer.testing import CliRunner

import trigram
from tests.support import patience
from tests.support.checks import close, raises, says
from tests.support.elastic_run import loss_of, model, optimizer, reference, weights
from tests.support.harness import Ranks, await_flag, free_port, say, scratch, until
from trigram.cli import app, drain
from trigram.cli.job_store import open_store
from trigram.elastic import orders
from trigram.elastic.join_queue import STATUS, JoinQueue
from trigram.elastic.orders import Orders, Period
from trigram.elastic.replicas import Replicas
from trigram.runtime import seals
from trigram.runtime.live_store import ReconnectingStore
from trigram.runtime.rendezvous import reopen

pytestmark = pytest.mark.waits

SECRET = "between us"
ALONE = Replicas(1).touched


def _trains(rank: int, world: int, algorithm: str = "gradient_allreduce", size: int = 1) -> dict[str, Any]:
    """A rank that trains until it is asked to leave, or until all see that the test is over."""
    if size > 1 and rank == world - 1:  # it reads no order before its replica takes it along
        JoinQueue._follow = lambda *_: None
    trigram.init(elastic=True, replica_size=size)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=True)
    history = []
    try:
        for step in range(100_000):
            opt.zero_grad()
            loss_of(net, step, rank).backward()
            opt.step()
            history.append(tuple(trigram.stats(net)["ranks"]))
            if step == 0:
                say("trains")
            time.sleep(0.05)
            if _is_over(algorithm):
                break
    except SystemExit as error:
        return {"left": error.code, "history": history}
    return {"left": None, "history": history, "weights": weights(net)}


def _is_over(algorithm: str) -> bool:
    over = torch.tensor([float((scratch() / "flag-over").exists())])
    if algorithm != "async":
        trigram.all_reduce(over, "min")
    return bool(over.item())


def _all_train(ranks: Ranks, world: int) -> str:
    for rank in range(world):
        ranks.await_said(rank, "trains", 60)
    return f"127.0.0.1:{ranks.env['MASTER_PORT']}"


@pytest.mark.parametrize("secret", [None, SECRET])
def test_ranks_that_are_named_leave_and_the_others_go_on(
    secret: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"TRIGRAM_SECRET": secret} if secret else {}
    with Ranks(4, _trains, env=env) as ranks:
        store = _all_train(ranks, 4)
        if secret:
            for wrong in (None, "another secret"):
                monkeypatch.delenv("TRIGRAM_SECRET", raising=False)
                if wrong:
                    monkeypatch.setenv("TRIGRAM_SECRET", wrong)
                assert drain.send_away(store, [1], 30) == 1
                said = capsys.readouterr().err
                says(said, "rank(s) 1 do not heed the order", "is set here" if wrong else "is not set here")
            monkeypatch.setenv("TRIGRAM_SECRET", secret)
        assert drain.send_away(store, [3, 1, 1], 30) == 0
        assert capsys.readouterr().out == "rank(s) 1, 3 left; the members are 0, 2\n"
        says(raises(typer.BadParameter, drain.send_away, store, [3, 2], 30), "3 are no members", "are 0, 2")
        says(raises(typer.BadParameter, drain.send_away, store, [2, 0], 30), "0, 2 are all members")
        if not secret:
            assert drain.send_away(store, [0], 30) in (0, 1)  # the leader, which serves the store
        (ranks.dir / "flag-over").touch()
        results = ranks.results(60)
        logs = [ranks.log(rank) for rank in range(4)]
    assert [result["left"] for result in results] == [None if secret else 0, 0, None, 0]
    history = results[2]["history"]
    assert history[-1] == ((0, 2) if secret else (2,)) and {(0, 1, 2, 3), (0, 2)} <= set(history)
    close(results[2]["weights"], reference(history), 1e-9)
    if secret:
        says(logs[0], "does not follow an order in the job's store: it is not sealed with this job's")
    says(logs[3], "trigram drain: this rank leaves the job when its step is over")


@pytest.mark.parametrize("algorithm, size, leaves", [("async", 1, [1]), ("gradient_allreduce", 2, [2, 3])])
def test_ranks_that_are_apart_and_replicas(algorithm: str, size: int, leaves: list[int]) -> None:
    with Ranks(4, _trains, algorithm, size, env={"TRIGRAM_DRAIN_STATUS": "6"}) as ranks:
        store = _all_train(ranks, 4)
        done = CliRunner().invoke(app, ["drain", str(leaves[0]), "--store", store])
        assert done.exit_code == 0, done.output
        says(done.output, f"rank(s) {', '.join(map(str, leaves))} left")
        (ranks.dir / "flag-over").touch()
        results = ranks.results(60)
    # For good, those too who leave with their replica before they have read the order.
    assert [result["left"] for result in results] == [0 if rank in leaves else None for rank in range(4)]


def test_trigram_run_does_not_start_them_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            from pathlib import Path
            sys.path.insert(0, {str(Path.cwd())!r})
            import torch, trigram
            trigram.init(elastic=True)
            net = torch.nn.Linear(2, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            net = trigram.with_bagua(net, optimizer=opt, elastic=True)
            rank, over = trigram.rank(), torch.zeros(1)
            while not over.item():
                net(torch.ones(1, 2)).sum().backward()
                opt.step()
                (Path({str(tmp_path)!r}) / f"began-{{rank}}").touch()
                time.sleep(0.02)
                over = torch.tensor([float(Path({str(tmp_path / "over")!r}).exists())])
                trigram.all_reduce(over, "min")
            print(rank, "ends", flush=True)
            """
        )
    )
    argv = [
        *(sys.executable, "-m", "trigram"),
        *("run", "-n", "3", "--restarts", "2", str(script)),
    ]
    job = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not all((tmp_path / f"began-{rank}").exists() for rank in range(3)):
            assert job.poll() is None, job.communicate()
            time.sleep(0.05)
        store = f"127.0.0.1:{_port_of(job.pid)}"
        assert drain.send_away(store, [1], 30) == 0
        time.sleep(1.0)
        (tmp_path / "over").touch()
        said, errors = job.communicate(timeout=patience.seconds(60))
    finally:
        job.kill()
        job.wait()
    assert job.returncode == 0 and "starting it again" not in errors, errors
    assert sorted(line for line in said.splitlines() if line.endswith("ends")) == ["0 ends", "2 ends"]


def _port_of(pid: int) -> str:
    """Where the ranks of this `trigram run` have met."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    environ = Path(f"/proc/{children[0]}/environ").read_bytes().split(b"\0")
    found = dict(pair.decode().split("=", 1) for pair in environ if b"=" in pair)
    return found["MASTER_PORT"]


@pytest.fixture
def store() -> ReconnectingStore:
    port = free_port()
    served = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = ReconnectingStore(reopen("127.0.0.1", port), lambda: reopen("127.0.0.1", port), "")
    client.served = served  # type: ignore[attr-defined]  # as long as the client
    return client


def test_which_orders_a_rank_follows(
    store: ReconnectingStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRIGRAM_SECRET", SECRET)
    now = Period(4, 1)
    orders.give(store, now, [3, 1])
    given = orders.found(store, now)
    assert [Orders(rank, ALONE).name_me(given, now) for rank in range(4)] == [False, True, False, True]
    # One of another period, whoever publishes it now.
    for other in (Period(4, 2), Period(5, 1)):
        assert orders.found(store, other) == []
        assert not Orders(3, ALONE).name_me(given, other)
    # What any process may have written.
    for text in (None, 7, {}, [7], [None], [""], ["x" * 200], [given[0][:-1]], ["\ud800" * 80], ["€" * 80]):
        assert not Orders(3, ALONE).name_me(text, now), text
    kind = "drain in 4.1"
    for body in (
        b"[]",
        b"{}",
        b'{"ranks": 3, "at": 0}',
        b"[" * 100_000,
        b'{"ranks": [3], "at": 1.0}',
        b"\xff",
    ):
        sealed = seals.sealed(kind, body, SECRET.encode()).decode("latin-1")
        assert not Orders(3, ALONE).name_me([sealed], now), body
    late = json.dumps({"ranks": [3], "at": float("nan")}).encode()
    assert not Orders(3, ALONE).name_me([seals.sealed(kind, late, SECRET.encode()).decode("latin-1")], now)
    # The newest count, and too long ones do not.
    for _ in range(40):
        orders.give(store, now, [0])
    assert len(orders.found(store, now)) == 16 and not Orders(3, ALONE).name_me(orders.found(store, now), now)
    orders.give(store, now, range(2000))
    assert len(orders.found(store, now)) == 15


def test_what_the_leader_publishes(store: ReconnectingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """No order that would leave nobody, and none of somebody without the secret."""
    monkeypatch.setenv("TRIGRAM_SECRET", "another")
    now, members = Period(0, 0), [0, 1, 2, 3]
    orders.give(store, now, [1])
    monkeypatch.setenv("TRIGRAM_SECRET", SECRET)
    for ranks in ([0], [1, 2], [3], [9]):
        orders.give(store, now, ranks)
    found = orders.found(store, now)
    leads = Orders(0, ALONE)
    assert leads.accepted(found, now, members, []) == [found[1], found[2], found[4]]
    assert leads.accepted(found, now, members, [3]) == [found[1], found[3], found[4]]
    assert Orders(0, Replicas(2).touched).accepted(found, now, members, []) == [found[1], found[4]]
    assert [Orders(r, Replicas(2).touched).name_me([found[1]], now) for r in members] == [
        True,
        True,
        False,
        False,
    ]


def _while_it_steps(rank: int, world: int) -> int | str | None:
    """A rank that ends its first step when the test has given its orders."""
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    try:
        for step in range(8):
            loss_of(net, step, rank).backward()
            opt.step()
            if step == 0:
                say("trains")
                await_flag("given", 60)
            time.sleep(0.1)
    except SystemExit as error:
        return error.code
    return None


@pytest.mark.parametrize("first", ["order", "signal"])
def test_an_order_and_a_signal(first: str) -> None:
    """Whichever comes first: it ends its step, and leaves for good."""
    statuses = {"TRIGRAM_LEFT_STATUS": "5", "TRIGRAM_DRAIN_STATUS": "6"}
    with Ranks(3, _while_it_steps, env=statuses) as ranks:
        store = _all_train(ranks, 3)
        if first == "signal":
            ranks.signal(1, signal.SIGTERM)
        assert drain.send_away(store, [1], 0) == 0
        if first == "order":
            until(lambda: "asked to" in ranks.log(1) or "leaves the job when" in ranks.log(1), 20)
            ranks.signal(1, signal.SIGTERM)
        (ranks.dir / "flag-given").touch()
        assert ranks.results(60) == [None, 5, None]


def test_two_drains_at_once_leave_somebody() -> None:
    with Ranks(2, _while_it_steps) as ranks:
        client = open_store(_all_train(ranks, 2))
        # Of two who look at the same time neither finds the other's order in the status.
        for rank in (0, 1):
            orders.give(client, Period(0, 0), [rank])
        (ranks.dir / "flag-given").touch()
        assert sorted(map(str, ranks.results(60))) == ["0", "None"]


def test_a_status_that_lies_sends_nobody_else_away(
    store: ReconnectingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIGRAM_SECRET", SECRET)
    told = {"epoch": 0, "empty_regroups": 0, "ranks": [0, 1, 2, 3], "leader": 0, "replica_size": 2}
    stop = threading.Event()

    def leads() -> None:
        beat = 0
        while not stop.wait(0.1):
            beat += 1
            store.put(STATUS, json.dumps(told | {"heartbeat": beat}))

    leader = threading.Thread(target=leads)
    leader.start()
    try:
        port = store.served.port  # type: ignore[attr-defined]
        assert drain.send_away(f"127.0.0.1:{port}", [1], 0) == 0
        found = orders.found(store, Period(0, 0))
        assert [Orders(rank, ALONE).name_me(found, Period(0, 0)) for rank in range(4)] == [
            False,
            True,
            False,
            False,
        ]
        told["replica_size"] = 10**14
        says(raises(typer.BadParameter, drain.send_away, f"127.0.0.1:{port}", [1], 0), "all members")
    finally:
        stop.set()
        leader.join()


def test_where_no_job_is(store: ReconnectingStore, capsys: pytest.CaptureFixture[str]) -> None:
    port = store.served.port  # type: ignore[attr-defined]
    assert drain.send_away(f"127.0.0.1:{port}", [0], 1) == 1
    says(capsys.readouterr().err, "no elastic job is alive at the store")


def test_a_status_of_the_exit_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIGRAM_LEFT_STATUS", "256")
    says(raises(trigram.ConfigError, trigram.init, elastic=True), "TRIGRAM_LEFT_STATUS='256' is invalid")
