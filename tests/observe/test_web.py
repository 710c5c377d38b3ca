"""`trigram top --web`: the page of a running job, as a browser gets and draws it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.support import patience
from tests.support.checks import says
from tests.support.harness import free_port, until
from trigram.cli import web
from trigram.elastic import orders
from trigram.elastic.join_queue import STATUS
from trigram.elastic.orders import Period
from trigram.observe.snapshots import KEY, Snapshot, seal
from trigram.observe.steps import PHASES
from trigram.runtime import seals
from trigram.runtime.live_store import ReconnectingStore

KEY_OF_JOB = b"between us"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def job() -> Iterator[tuple[dist.Store, int]]:
    """A store with the snapshots of two ranks, and its port. One has a name that is no HTML."""
    port = free_port()
    store = dist.PrefixStore(
        "trigram", dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    )
    seconds = dict.fromkeys(PHASES, 0.01) | {"step": 0.06}
    for rank, host in enumerate(["<img src=x onerror=document.title='bad'>", "node1"]):
        taken = Snapshot(
            rank, 2, host, time.time(), 1, "Net", 90 + rank, dict(seconds), 4.2e6, 1 - rank, 0.25
        )
        taken.links = [[1 - rank, 4_200_000]]
        taken.lines = [[time.time(), f"rank {rank} has waited <b>long</b>"]]
        store.set(KEY.format(rank), seal(taken, KEY_OF_JOB))
        seconds["forward"] = 0.03
    yield store, port


@pytest.fixture
def page(job: tuple[dist.Store, int]) -> Iterator[str]:
    """The page's address."""
    env = {**os.environ, "TRIGRAM_SECRET": KEY_OF_JOB.decode()}
    argv = ["env", "--default-signal=INT", sys.executable, "-m", "trigram", "top"]
    argv += ["--store", f"127.0.0.1:{job[1]}", "--web", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found is not None, line
        yield found[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(patience.seconds(30)) == 0
    finally:
        process.kill()
        process.wait()


def _get(address: str) -> tuple[bytes, Any]:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return answer.read(), answer.headers


def test_what_the_page_asks_for(job: tuple[dist.Store, int], page: str) -> None:
    body, headers = _get(page)
    assert b"<title>trigram top</title>" in body
    assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"") and b"https://" not in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    found = json.loads(_get(page + "job.json")[0])
    assert found["size"] == 2 and found["problem"] == "" and found["elastic"] is None
    assert [one["steps"] for one in found["ranks"]] == [90, 91]
    assert set(found["ranks"][0]["seconds"]) == {"step", *PHASES}
    for path in ("x", "../web.py", "job.json/", "%2e%2e/web.py"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            _get(page + path)
    other = urllib.request.Request(page + "job.json", headers={"Host": "evil.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(other, timeout=20)
    request = urllib.request.Request(page, data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(request, timeout=20)
    elastic = until(lambda: _members(job[0], page), 20, "the members")
    assert elastic["members"] == [0, 1] and elastic["epoch"] == 2
    forged = Snapshot(1, 2, "node1", time.time() + 9, 9, "Net", 99, {}, 0.0)
    job[0].set(KEY.format(1), seal(forged, b"another secret"))
    until(lambda: "not sealed" in json.loads(_get(page + "job.json")[0])["problem"], 20, "the forgery")


def _members(store: dist.Store, page: str) -> Any:
    """The leader of an elastic job says something new; what the page knows of it."""
    told = {"epoch": 2, "empty_regroups": 1, "ranks": [0, 1], "leader": 0, "heartbeat": time.time()}
    store.set(STATUS, json.dumps(told))
    return json.loads(_get(page + "job.json")[0])["elastic"]


def _order(page: str, body: bytes, header: str = "drain", path: str = "drain", **headers: str) -> str:
    """What the page answers to an order."""
    request = urllib.request.Request(page + path, body, {"X-Trigram": header, **headers}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return f"{answer.status} {answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.read().decode()}"


def test_who_knows_the_secret_sends_ranks_away(job: tuple[dist.Store, int], page: str) -> None:
    stop = threading.Event()

    def leads() -> None:
        while not stop.wait(0.1):
            _members(job[0], page)

    leader = threading.Thread(target=leads)
    leader.start()
    try:
        assert json.loads(_get(page + "job.json")[0])["orders"] is True
        given = {"rank": 1, "secret": KEY_OF_JOB.decode()}
        right = json.dumps(given).encode()
        for wrong in (
            b"",
            b"[]",
            b"[" * 3000,
            b"\xff",
            json.dumps({"rank": 1}).encode(),
            b"x" * 5000,
            b'{"rank": Infinity, "secret": "x"}',
        ):
            assert "this is no order" in _order(page, wrong)
        says(_order(page, json.dumps(given | {"secret": "guessed"}).encode()), "403", "not the job's TRIGRAM")
        says(_order(page, json.dumps(given | {"rank": 7}).encode()), "403", "rank(s) 7 are no members")
        for header, path in (("", "drain"), ("drain", "drain/"), ("drain", "job.json"), ("drain", "evict")):
            assert _order(page, right, header, path).startswith("404")
        assert _order(page, right, Host="evil.example").startswith("403")
        period = Period(2, 1)
        store = ReconnectingStore(job[0], None)
        assert orders.found(store, period) == []
        assert _order(page, right) == "200 it was ordered\n"
        found = orders.found(store, period)
        assert len(found) == 1
        body = seals.opened("drain in 2.1", found[0].encode("latin-1"), KEY_OF_JOB)
        assert body is not None and json.loads(body)["ranks"] == [1] and not json.loads(body)["evicts"]
        assert _order(page, right, "evict", "evict").startswith("200")
        body = seals.opened("drain in 2.1", orders.found(store, period)[1].encode("latin-1"), KEY_OF_JOB)
        assert body is not None and json.loads(body)["ranks"] == [1] and json.loads(body)["evicts"] is True
    finally:
        stop.set()
        leader.join()


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_what_a_browser_draws(page: str) -> None:
    assert CHROMIUM is not None
    argv = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*argv, "--dump-dom", page], capture_output=True, text=True, timeout=patience.seconds(120), check=True
    )
    dom = done.stdout
    says(dom, "<title>trigram top</title>", "2 of 2", "&lt;img src=x", "1 (25 %)", "<b>91</b>")
    says(dom, "ranks 0 and 1: 8.40 MB/s", "rank 1 has waited &lt;b&gt;long")
    assert "<img" not in dom
    assert len(re.findall(r'class="stack"', dom)) == 2 and dom.count("<polygon") == 2
    slowest = re.search(r'<tr class="slowest"><td>(\d)</td>', dom)
    assert slowest is not None and slowest[1] == "1"


def test_clients_that_go_or_send_nonsense_are_no_tracebacks(capfd: pytest.CaptureFixture[str]) -> None:
    class Idle:
        text = b"{}" * 1_000_000

    with web.server(Idle(), "127.0.0.1", 0) as serving:  # type: ignore[arg-type]
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        where = serving.server_address[:2]
        for _ in range(3):
            with socket.create_connection(where) as client:
                client.sendall(b"GET /job.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with socket.create_connection(where) as client:
            client.settimeout(20)
            client.sendall(
                b"POST /drain HTTP/1.1\r\nHost: localhost\r\nX-Trigram: drain\r\nContent-Length: "
                + b"9" * 5000
                + b"\r\n\r\n"
            )
            assert client.recv(100).split()[1] == b"400"
        serving.shutdown()
    assert "Traceback" not in capfd.readouterr().err


def test_a_port_that_is_taken(job: tuple[dist.Store, int]) -> None:
    argv = [sys.executable, "-m", "trigram", "top", "--store", f"127.0.0.1:{job[1]}", "--web", str(job[1])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patience.seconds(60), check=False)
    assert done.returncode == 2
    says(" ".join(done.stderr.split()), f"cannot listen on 127.0.0.1:{job[1]}")
