"""`trigram doctor` between hosts: who reaches whom, what the ways carry, and what it says to do."""

from __future__ import annotations

import copy
import json
import multiprocessing as mp
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import trigram
from tests.support import netns, patience
from tests.support.checks import raises, says
from tests.support.harness import free_port, until
from trigram.cli.between import meeting, verdict
from trigram.cli.between.probing import Way, as_dict
from trigram.runtime import far_links

pytestmark = pytest.mark.waits

DOCTOR = [sys.executable, "-m", "trigram", "doctor"]


def _start(host: int, *words: str, **settings: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", netns.name(host), *DOCTOR, *words, "--seconds", "0.3", "--json"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **settings}
    )


def _check(hosts: int, settings: dict[int, dict[str, str]] | None = None) -> tuple[int, dict[str, Any]]:
    """The check by `--listen` and `--join`: exit code and JSON, the same of all."""
    settings = settings or {}
    started = [_start(0, "--listen", "29612", "--count", str(hosts), **settings.get(0, {}))]
    started += [
        _start(k, "--join", f"{netns.address(0)}:29612", **settings.get(k, {})) for k in range(1, hosts)
    ]
    try:
        done = [process.communicate(timeout=patience.seconds(100)) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (out, err) in zip(started, done, strict=True):
        assert process.returncode in (0, 1) and out, err
    found = [json.loads(out) for out, _ in done]
    for other in found:
        assert other["found"]["ways"] == found[0]["found"]["ways"], "all know the same"
    return started[0].returncode, found[0]


def _way_between(found: dict[str, Any], i: int, j: int) -> Any:
    """Hosts have the numbers in which they came."""
    here = [[a["address"] for a in host["addresses"]] for host in found["found"]["hosts"]]
    i, j = (next(k for k, known in enumerate(here) if netns.address(host) in known) for host in (i, j))
    return found["found"]["ways"][i][j]


def _lines(found: dict[str, Any]) -> dict[str, str]:
    """By name: status, what was found and what to do, of all lines with that name."""
    lines: dict[str, str] = {}
    for c in found["checks"]:
        lines[c["name"]] = f"{lines.get(c['name'], '')}{c['status']}: {c['found']}; {c['advice']} "
    return lines


def test_three_hosts_and_a_slow_one(several_hosts: None) -> None:
    with netns.limited({0: "200mbit", 1: "200mbit", 2: "20mbit"}):
        code, found = _check(3)
    lines = _lines(found)
    assert code == 0, lines
    says(lines["reach"], "ok: all 3 hosts reach each other, in each direction")
    says(lines["slow link"], "warn:", netns.address(2), "Mbit/s at most, others")
    assert 8 * _way_between(found, 0, 2)["rate"] < 25e6 < 8 * _way_between(found, 0, 1)["rate"]


def test_secrets_and_settings_that_differ(several_hosts: None) -> None:
    settings = {0: {"TRIGRAM_SECRET": "a" * 20}, 1: {"TRIGRAM_SECRET": "b" * 20, "TRIGRAM_TLS": "1"}}
    code, found = _check(2, settings)
    lines = _lines(found)
    assert code == 1
    says(lines["job secret"], "fail: different", "TRIGRAM_SECRET")
    says(lines["TRIGRAM_TLS"], "warn:", "1 on", "None on")
    assert "aaaa" not in json.dumps(found) and "bbbb" not in json.dumps(found)


def test_a_host_behind_a_router(several_hosts: None) -> None:
    with netns.behind_router(1, 600):
        code, found = _check(2)
    lines = _lines(found)
    assert code == 1
    says(lines["reach"], "fail: nobody reaches", "which reaches all others", "(NAT)", "TRIGRAM_OUTWARD=1")
    assert found["found"]["ways"][1][0]["rate"] > 0 and found["found"]["ways"][0][1] is None


def test_a_firewall_in_front_of_a_host(several_hosts: None) -> None:
    with netns.lets_nobody_in(2):
        code, found = _check(3)
    lines = _lines(found)
    assert code == 1
    says(lines["reach"], "fail: nobody reaches", f"{netns.address(2)}: dropped", "TRIGRAM_PORT")
    assert _way_between(found, 0, 1)["rate"] > 0, "the others were measured"


@pytest.mark.parametrize("ssh", [False, True])
def test_over_ssh(several_hosts: None, tmp_path: Path, ssh: bool) -> None:
    """As ssh does it: the words after the host go to a shell there."""
    run = "ip netns exec"
    if ssh:
        fake = tmp_path / "ssh"
        inside = 'exec env -i PATH="$PATH" ip netns exec "$host" sh -c "$*"'
        fake.write_text(f"#!/bin/sh\nhost=$1; shift; {inside}\n")
        fake.chmod(0o755)
        run = str(fake)
    hosts = f"{netns.name(0)}={netns.address(0)},{netns.name(1)}"
    command = [*DOCTOR, "--hosts", hosts, "--ssh", run, "--seconds", "0.2"]
    env = {**os.environ, "TRIGRAM_SECRET": "not $HOME told", "TRIGRAM_SILENCE": "9", "COLUMNS": "160"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience.seconds(100), check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    # The secret too is told, and on no command line.
    says(done.stdout, "all 2 hosts reach each other", "job secret", "the same on all", "bit/s")


def test_nothing_is_left_of_a_check_that_is_ended(several_hosts: None, tmp_path: Path) -> None:
    """The port is free again."""
    hosts = f"{netns.name(0)}={netns.address(0)},{netns.name(1)}"
    command = [*DOCTOR, "--hosts", hosts, "--ssh", "ip netns exec", "--seconds", "60"]
    mine = "--seconds 60.0 --json"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: len(_running(mine)) == 2, 60)
        process.kill()
    until(lambda: not _running(mine), 30)


def _running(words: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", "--", words], capture_output=True, text=True, check=False)
    return found.stdout.split()


def test_a_host_that_does_not_start_is_named(several_hosts: None) -> None:
    hosts = f"{netns.name(0)}={netns.address(0)},nowhere"
    command = [*DOCTOR, "--hosts", hosts, "--ssh", "ip netns exec", "--seconds", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience.seconds(60), check=False)
    assert done.returncode == 1
    says(done.stderr, "nowhere: exit code", "Cannot open network namespace")


@pytest.mark.parametrize(
    "words, told",
    [
        (["--listen", "1", "--join", "a:1"], "one of --hosts, --listen and --join"),
        (["--hosts", "a"], "two hosts or more"),
        (["--join", "a"], "--join 'a' is no HOST:PORT; trigram doctor --listen says"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], told: str) -> None:
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [*DOCTOR, *words], capture_output=True, text=True, timeout=patience.seconds(60), check=False, env=env
    )
    assert done.returncode == 2
    says(" ".join(done.stderr.split()), told)


def test_nothing_is_there_or_something_else() -> None:
    port = free_port()
    says(
        raises(trigram.TimeoutError, lambda: meeting.joined("127.0.0.1", port, 0.5)),
        f"nothing answers at 127.0.0.1:{port}",
        "Connection refused",
    )
    store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    store.set("some", "job's")
    with pytest.raises(trigram.TimeoutError, match="is that of something else; trigram doctor --listen"):
        meeting.joined("127.0.0.1", port, 5.0)


def test_the_host_that_listens_is_gone() -> None:
    served = [meeting.served(0, 2)]
    there = meeting.joined("127.0.0.1", served[0][1], 20.0)
    threading.Timer(1.0, served.clear).start()  # which ends its server
    with pytest.raises(trigram.TimeoutError, match="the host that listens has gone"):
        meeting.take_part(there, None, 0.3, 60.0)


def _takes_part_until_killed(port: int) -> None:
    meeting.take_part(meeting.joined("127.0.0.1", port, 20.0), None, 60.0, 60.0)


def test_a_host_that_goes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told from one that measures for long."""
    monkeypatch.setattr(meeting, "_SILENCE_SECONDS", patience.seconds(4.0))
    store, port = meeting.served(0, 2)
    other = mp.get_context("spawn").Process(target=_takes_part_until_killed, args=(port,), daemon=True)
    other.start()

    def kill() -> None:
        while not store.check(["doctor/reach/1"]):
            time.sleep(0.05)
        other.kill()

    threading.Thread(target=kill).start()
    try:
        with pytest.raises(
            trigram.TimeoutError, match=f"host 1, {socket.gethostname()}, has gone: not a word"
        ):
            meeting.take_part(store, 0, 0.3, 60.0)
    finally:
        other.kill()
        other.join()


@pytest.mark.parametrize("junk", [b"\xff", b"7", b"{}", b'{"addresses": 3}', b"[]"])
def test_what_no_host_has_written_is_refused(junk: bytes) -> None:
    store, port = meeting.served(0, 2)
    there = dist.TCPStore("127.0.0.1", port, None, False)
    there.set("doctor/host/1", junk)
    says(
        raises(trigram.TrigramError, lambda: meeting.take_part(store, 0, 0.3, 20.0)),
        "same version of trigram",
    )


# The verdict alone.


def _host(k: int) -> dict[str, Any]:
    return {
        "host": f"h{k}",
        "versions": {"trigram": "1", "torch": "2", "python": "3", "system": "Linux"},
        "addresses": [{"interface": "eth0", "address": f"10.0.0.{k}", "mtu": 1500}],
        "controls": ["cubic", far_links.BBR],
        "socket_bytes": 1 << 22,
        "shm_bytes": 1 << 30,
        "settings": {},
        "secret": "",
        "port": 5,
    }


def _way(k: int) -> dict[str, Any]:
    found = Way(f"10.0.0.{k}", trip=1e-4, longest_trip=1e-3, rate=1e8, packet=1500, control="cubic")
    return as_dict(found)


def _all_well(n: int = 3) -> dict[str, Any]:
    there = [{"address": f"10.0.0.{j}", "result": "ok", "detail": "", "seen": ""} for j in range(n)]
    reach = [[[{**there[j], "seen": f"10.0.0.{i}"}] if i != j else [] for j in range(n)] for i in range(n)]
    ways = [[_way(j) if i != j else None for j in range(n)] for i in range(n)]
    return {"hosts": [_host(k) for k in range(n)], "reach": reach, "ways": ways, "me": 0}


def _said(found: dict[str, Any]) -> list[str]:
    return [f"{c.status} {c.name}: {c.found}; {c.advice}" for c in verdict.checks(copy.deepcopy(found))]


def test_the_verdict_on_what_is_well() -> None:
    lines = _said(_all_well())
    assert all(line.startswith("ok") for line in lines), lines


def test_the_verdict_names_what_is_wrong() -> None:
    found = _all_well()
    found["hosts"][1]["versions"]["trigram"] = "0"
    found["hosts"][2]["versions"]["torch"] = "1"
    found["hosts"][2]["shm_bytes"] = 1 << 20
    found["hosts"][0]["addresses"][0]["mtu"] = 9000
    found["ways"][0][1] |= {"lost": 0.02, "trip": 0.05}
    found["ways"][1][2]["clock"] = 40.0
    found["ways"][2][0]["stalled"] = True
    found["hosts"][1]["controls"] = ["cubic"]
    lines = _said(found)
    text = "\n".join(lines)
    says(text, "fail trigram: 1 on h0, h2; 0 on h1", "warn torch", "fail large messages: from h2 to h0")
    says(text, "warn lost packets: 2 % of packets sent again from h0 to h1", "on h1: ", "bbr")
    says(text, "warn MTU: interfaces have 1500 and 9000 bytes", "warn clocks: h2 is +40.0 s beside h1")
    says(text, "warn /dev/shm: 1.0 MB on h2")
    order = [line.split()[0] for line in lines]
    assert order == sorted(order, key=["fail", "warn", "ok"].index)


def test_the_verdict_on_ways_that_are_closed() -> None:
    found = _all_well()
    found["reach"][0][1][0]["result"] = "refused"
    found["ways"][0][1] = None
    says("\n".join(_said(found)), "fail reach: h0 does not reach h1 (10.0.0.1: refused); the other direction")
    found = _all_well()
    for i in (0, 1):
        found["reach"][i][2][0]["result"], found["ways"][i][2] = "other", None
    found["reach"][2][0][0]["result"] = found["reach"][2][1][0]["result"] = "unreachable"
    found["ways"][2] = [None] * 3
    says("\n".join(_said(found)), "fail reach: nobody reaches h2 (10.0.0.2: other)", "TRIGRAM_IFACE")
    alone = _all_well()
    alone["hosts"][2]["addresses"], alone["ways"][0][2], alone["ways"][1][2] = [], None, None
    alone["reach"][0][2] = alone["reach"][1][2] = []
    says("\n".join(_said(alone)), "nobody reaches h2; it has no address but loopback's")
