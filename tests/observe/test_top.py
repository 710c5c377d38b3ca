"""`trigram top`: what ranks leave in the store of their job, who may have written it, what is shown."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import trigram
from tests.support import patience
from tests.support.checks import raises, says
from tests.support.harness import Ranks, free_port, say, scratch, until
from trigram.cli import job_store, top
from trigram.observe.snapshots import KEY, Snapshot, seal, unseal
from trigram.observe.steps import PHASES
from trigram.runtime.live_store import ReconnectingStore
from trigram.runtime.rendezvous import reopen

SECONDS = {**dict.fromkeys(PHASES, 0.03), "step": 0.2, "wait": 0.05}
WHOLE = Snapshot(
    3, 8, "node7", 12.5, 4, "GPT", 90, SECONDS, 1e6, 5, 0.2, [6], [[2, 5e5], [1, 7]], [[12.0, "it waits"]]
)


@pytest.mark.parametrize("key", [None, b"a secret"])
def test_a_snapshot_comes_back(key: bytes | None) -> None:
    value = seal(WHOLE, key)
    assert unseal(value, 3, key) == WHOLE
    says(raises(trigram.AuthError, unseal, value, 4 if key else 3, b"another"), "rank", "TRIGRAM_SECRET")
    says(raises(trigram.AuthError, unseal, value, 3, b"" if key is None else None), "TRIGRAM_SECRET")
    if key is not None:
        for at in range(0, len(value), 7):
            forged = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
            raises((trigram.AuthError, ValueError), unseal, forged, 3, key)


@pytest.mark.parametrize(
    "change",
    [
        {"rank": 4},
        {"host": "\x1b[2Jnode"},
        {"host": "n" * 100},
        {"sent": math.nan},
        {"sent": -1.0},
        {"sent": 10**400},
        {"time": 10**400},
        {"silent": [10**400]},
        {"links": [[1, 2.0]] * 9},
        {"links": [[1, -2.0]]},
        {"links": [[1]]},
        {"links": [["1", 2]]},
        {"lines": [[1.0, "x"]] * 5},
        {"lines": [[1.0, "x" * 201]]},
        {"lines": [[1.0, "x\n"]]},
        {"lines": ["ab"]},
        {"lines": [["now", "x"]]},
        {"lines": {}},
        {"silent": list(range(500))},
        {"seconds": {"step": 0.2}},
        {"steps": "many"},
        {"steps": 1 << 70},
        {"world_size": 2.5},
        {"seconds": {"step": "long"}},
        {"seconds": {"other thing": 1.0}},
        {"silent": {}},
        {"left": 1},
    ],
)
def test_what_no_rank_writes_is_refused(change: dict[str, Any]) -> None:
    body = json.dumps({**json.loads(seal(WHOLE, None)[64:]), **change}).encode()
    raises(ValueError, unseal, b"0" * 64 + body, 3, None)


@pytest.mark.parametrize("value", [b"", b"0" * 64, b"0" * 64 + b"[" * 3000, b"0" * 64 + b"{}", b"x" * 5000])
def test_noise_is_refused(value: bytes) -> None:
    raises((ValueError, trigram.AuthError), unseal, value, 0, None)


def test_the_table_is_as_long_as_the_terminal() -> None:
    store = dist.HashStore()
    now = time.time()
    ranks = [replace(WHOLE, rank=rank, world_size=40, silent=[], time=now) for rank in range(40)]
    ranks[17] = replace(ranks[17], seconds={**SECONDS, "step": 0.9, "wait": 0.0, "input": 0.8})
    ranks[30] = replace(ranks[30], silent=[17])
    for taken in ranks:
        store.set(KEY.format(taken.rank), seal(taken, None))
    job = top.Job(ReconnectingStore(store, None))
    job.read()
    assert len(job.ranks) == 40 and {17, 30} <= set(job.shown(5)) and len(job.shown(5)) == 5
    says(job.headline(), "40 of 40 ranks", "90 steps of GPT", "200 ms per step", "25% of it waiting")
    assert job.state(30) == "hears nothing of 17"
    store.set(KEY.format(17), seal(replace(ranks[17], time=1.0, steps=3), None))  # an old one, written again
    job.read()
    assert job.ranks[17][0].steps == 90


def _job(*ranks: Snapshot) -> top.Job:
    store = dist.HashStore()
    for taken in ranks:
        store.set(KEY.format(taken.rank), seal(taken, None))
    job = top.Job(ReconnectingStore(store, None))
    job.read()
    return job


def test_an_old_snapshot_is_not_taken_for_a_living_rank() -> None:
    now = time.time()
    job = _job(
        replace(WHOLE, rank=0, world_size=2, time=now - 3600, silent=[]),
        replace(WHOLE, rank=1, world_size=2, time=now, silent=[]),
    )
    says(job.state(0), "silent for 36")
    assert job.state(1) == ""


def test_ranks_of_a_larger_job_before_a_restart_are_left_out() -> None:
    now = time.time()
    before = [replace(WHOLE, rank=rank, world_size=4, time=now - 60, silent=[]) for rank in range(4)]
    job = _job(*[replace(taken, world_size=2, time=now) for taken in before[:2]], *before[2:])
    assert sorted(job.ranks) == [0, 1]
    job = _job(replace(before[0], world_size=2, time=now), *before[1:])  # rank 1 has not left one yet
    assert sorted(job.ranks) == [0, 1]
    says(job.headline(), "2 of 2 ranks")
    job.read()
    assert sorted(job.ranks) == [0, 1]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_number_is_cut(width: int) -> None:
    now = time.time()
    long = replace(WHOLE, host="gpu-node-17.cluster.example.org", steps=123456, world_size=2, time=now)
    job = _job(*[replace(long, rank=rank, waits_for=1 - rank, silent=[7]) for rank in range(2)])
    out = io.StringIO()
    Console(width=width, file=out).print(job.table(20, width))
    text = out.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    says(text, "123456", "200.0", "50.0", "1 (20%)")
    assert ("optimizer" in text) == (width == 120)
    letters = "".join(text.split())
    says(letters, "gpu-node-17", "hears")


def test_two_models_are_not_mixed() -> None:
    """Ranks of a job with two models may have stepped the one or the other last."""
    other = replace(WHOLE, model="Critic", steps=10, seconds={**SECONDS, "step": 0.9}, world_size=3)
    job = _job(*[replace(WHOLE if r == 0 else other, rank=r, world_size=3) for r in range(3)])
    says(job.headline(), "90 steps of GPT, 200 ms per step")


def test_an_address_of_ipv6() -> None:
    assert job_store.address("[::1]:29500") == ("::1", 29500)


def _train(rank: int, world: int) -> None:
    model = trigram.with_bagua(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    say("trains")
    for step in range(1_000_000):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        if step % 50 == 0:  # all ranks stop after the same step
            seen = torch.tensor([float((scratch() / "flag-seen").exists())])
            trigram.all_reduce(seen, "min")
            if seen.item():
                return
    raise AssertionError("the test has not looked")


def _top(port: str, secret: str | None) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRIGRAM_SECRET"}
    env |= {"TRIGRAM_SECRET": secret} if secret else {}
    argv = [sys.executable, "-m", "trigram", "top", "--once", "--store", f"127.0.0.1:{port}"]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=patience.seconds(60), env=env, check=False
    )


def test_a_running_job_is_seen() -> None:
    """By another process, with the secret only; nothing of it is left open when the job ends."""
    with Ranks(2, _train, env={"TRIGRAM_TOP": "1", "TRIGRAM_SECRET": "between us"}) as ranks:
        for rank in range(2):
            ranks.await_said(rank, "trains")
        port = ranks.env["MASTER_PORT"]
        client = ReconnectingStore(reopen("127.0.0.1", int(port)), None)

        def trained() -> bool:
            values = [client.get(KEY.format(rank)) for rank in range(2)]
            return all(v and unseal(v, r, b"between us").steps > 0 for r, v in enumerate(values))

        until(trained, 30.0, "snapshots with steps")
        done = _top(port, "between us")
        assert done.returncode == 0, done.stderr
        says(done.stdout, "2 of 2 ranks", "steps of Linear", "forward", "MB/s")
        blind = _top(port, None)
        assert blind.returncode == 1
        says(" ".join(blind.stdout.split()), "not sealed with this TRIGRAM_SECRET")
        says(ranks.log(0), "trigram top --store", port)
        (ranks.dir / "flag-seen").touch()
        ranks.results(40)


def _in_terminal(
    port: int, terminal: str, act: Callable[[subprocess.Popen[bytes], Callable[[], str]], None]
) -> str:
    """What ``trigram top`` has written to a terminal of this kind when it has ended, after ``act``."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
    # A shell that starts the tests in the background has them ignore Ctrl-C.
    argv = ["env", "--default-signal=INT", sys.executable, "-m", "trigram", "top"]
    argv += ["--store", f"127.0.0.1:{port}"]
    env = {k: v for k, v in os.environ.items() if k not in ("TRIGRAM_SECRET", "COLUMNS", "LINES")}
    process = subprocess.Popen(argv, stdin=its, stdout=its, stderr=its, env=env | {"TERM": terminal})
    os.close(its)
    os.set_blocking(mine, False)
    heard = b""

    def seen() -> str:
        nonlocal heard
        with contextlib.suppress(OSError):
            heard += os.read(mine, 1 << 16)
        return heard.decode()

    try:
        act(process, seen)
        until(lambda: (seen(), process.poll())[1] is not None, 90, "its end")
        assert process.returncode == 0, seen()
        return seen()
    finally:
        process.kill()
        process.wait()
        os.close(mine)


def _serve(world: int = 2) -> dist.TCPStore:
    """A store with snapshots of ranks."""
    store = dist.TCPStore("127.0.0.1", free_port(), None, True, wait_for_workers=False)
    for rank in range(world):
        taken = replace(WHOLE, rank=rank, world_size=world, silent=[], time=time.time())
        dist.PrefixStore("trigram", store).set(KEY.format(rank), seal(taken, None))
    return store


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_is_left_as_it_was(number: int) -> None:
    store = _serve()

    def act(process: subprocess.Popen[bytes], seen: Callable[[], str]) -> None:
        until(lambda: seen().count("2 of 2 ranks") > 2, 90, "a live table")
        process.send_signal(number)

    text = _in_terminal(store.port, "xterm-256color", act)
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    says(text.rpartition("\x1b[?1049l")[2], "2 of 2 ranks")


def test_a_terminal_that_draws_nothing_anew_gets_one_table() -> None:
    store = _serve()
    text = _in_terminal(store.port, "dumb", lambda process, seen: None)
    says(text, "2 of 2 ranks")
    assert "\x1b" not in text


def test_a_store_that_is_gone_is_told() -> None:
    stores = [_serve()]

    def act(process: subprocess.Popen[bytes], seen: Callable[[], str]) -> None:
        until(lambda: "2 of 2 ranks" in seen(), 90, "a table")
        stores.clear()
        until(lambda: "does not answer any more" in seen(), 90, "a word about the store")
        process.send_signal(signal.SIGINT)

    _in_terminal(stores[0].port, "xterm-256color", act)


def test_no_store() -> None:
    done = _top("1", None)
    assert done.returncode == 2
    says(" ".join(done.stderr.replace("│", " ").split()), "no store answers at 127.0.0.1:1", "TRIGRAM_TOP=1")
