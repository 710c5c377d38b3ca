"""Ranks in different places: long and lossy cables, several connections, ranks that nobody reaches."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import trigram
from tests.support import netns, patience
from tests.support.checks import init_refuses, raises, says
from tests.support.harness import Ranks, flag, run, scratch, until
from trigram.runtime import far_links

LONG = 6


def _peers() -> dict[str, int]:
    """The number of TCP connections of this process to each other address."""
    mine = {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    found: dict[str, int] = {}
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in mine and fields[3] == "01":
            host = ".".join(str(byte) for byte in reversed(bytes.fromhex(fields[2].split(":")[0])))
            found[host] = found.get(host, 0) + 1
    return found


def _with_bbr() -> int:
    """The number of TCP connections of this process that use BBR."""
    count = 0
    for link in list(Path("/proc/self/fd").iterdir()):
        if link.is_symlink() and str(link.readlink()).startswith("socket:"):
            with socket.socket(fileno=os.dup(int(link.name))) as each:
                if each.family == socket.AF_INET and each.type == socket.SOCK_STREAM:
                    name = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                    count += name.rstrip(b"\0") == b"bbr"
    return count


def _collectives(world: int, size: int) -> None:
    """Each kind of collective once, of several sizes, with values that only the right result has."""
    rank = trigram.rank()
    for count in (1, 1000, size):
        base = torch.arange(count, dtype=torch.float32) % 97
        t = base * (rank + 1)
        trigram.all_reduce(t)
        assert torch.equal(t, base * (world * (world + 1) // 2))
        whole = torch.empty(world * count)
        trigram.all_gather(whole, base + rank)
        assert torch.equal(whole, torch.cat([base + other for other in range(world)]))
        t = base + rank
        trigram.broadcast(t, world - 1)
        assert torch.equal(t, base + world - 1)
        halves = torch.ones(count, dtype=torch.float16) * (rank + 1)
        trigram.all_reduce(halves)
        assert bool((halves == world * (world + 1) // 2).all())


def _train(algorithm: str) -> list[float]:
    """A few steps; the weights of the first layer."""
    torch.manual_seed(7)
    model: nn.Module = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = trigram.with_bagua(model, algorithm, optimizer=optimizer)
    torch.manual_seed(trigram.rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()
    trigram.unwrap(model)
    return [float(value) for value in next(model.parameters()).flatten()[:5]]


def _far(rank: int, world: int) -> tuple[dict[str, int], list[list[float]]]:
    trigram.init()
    _collectives(world, 200_000)
    weights = [_train(name) for name in ("gradient_allreduce", "decentralized", "bytegrad")]
    peers = _peers()
    assert not far_links.is_usable("bbr") or _with_bbr() >= 4 * (world - 1)
    for _ in range(10):
        trigram.barrier()  # the others are there while each counts
    return peers, weights


@pytest.mark.parametrize("world", [2, 3])
def test_long_lossy_links(several_hosts: None, world: int) -> None:
    with netns.far(world, megabits=200, delay=LONG, loss=0.5):
        results = run(world, _far, transport="auto", hosts=list(range(world)), timeout=120)
    for rank, (peers, weights) in enumerate(results):
        others = [netns.address(host) for host in range(world) if host != rank]
        streams = {host: peers.get(host, 0) for host in others}
        assert all(4 <= count <= 9 for count in streams.values()), (rank, peers)
        assert weights[0] == results[0][1][0]


def _dies(rank: int, world: int, victim: int, number: int = signal.SIGKILL) -> int | None:
    """The rank that is blamed for the loss of the victim, which gets this signal."""
    trigram.init()
    t = torch.ones(1000)
    trigram.all_reduce(t)
    if rank == victim:
        time.sleep(0.5)  # what it passes on for others has arrived
        os.kill(os.getpid(), number)
    limit = patience.Limit(30)
    try:
        while not limit.is_over():
            trigram.all_reduce(t)
    except trigram.PeerLostError as error:
        return error.rank
    return None


def test_who_dies_far_away_is_named(several_hosts: None) -> None:
    with (
        netns.far(3, megabits=200, delay=LONG, loss=0.5),
        Ranks(3, _dies, 2, transport="auto", hosts=[0, 1, 2]) as ranks,
    ):
        assert ranks.results(60, dies={2})[:2] == [2, 2]


def _several(rank: int, world: int) -> dict[str, int]:
    os.environ["TRIGRAM_CONGESTION"] = "cubic"
    trigram.init()
    _collectives(world, 3_000_000)
    peers = _peers()
    trigram.barrier()  # the others are there while each counts
    return peers


@pytest.mark.parametrize("tls", ["0", "1"])
def test_several_connections_to_each_rank(several_hosts: None, tls: str) -> None:
    env = {"TRIGRAM_STREAMS": "3", "TRIGRAM_TLS": tls, "TRIGRAM_SECRET": "a secret of some length"}
    results = run(3, _several, transport="auto", hosts=[0, 1, 2], env=env, timeout=120)
    for rank, peers in enumerate(results):
        assert all(peers[netns.address(host)] >= 3 for host in range(3) if host != rank), (rank, peers)


def _outward(rank: int, world: int, unreachable: list[int]) -> list[float]:
    """Ranks that nobody reaches listen at an address of their own host alone."""
    os.environ["TRIGRAM_PORT"] = "29610-29612"
    if rank in unreachable:
        os.environ |= {"TRIGRAM_OUTWARD": "1", "TRIGRAM_IFACE": "lo"}
    trigram.init()
    _collectives(world, 300_000)
    weights = _train("gradient_allreduce")
    _train("decentralized")
    trigram.shutdown()
    return weights


@pytest.mark.parametrize("unreachable", [[1, 2, 3], [0, 2], [0]])
@pytest.mark.parametrize("tls", ["0", "1"])
def test_ranks_that_nobody_reaches(several_hosts: None, unreachable: list[int], tls: str) -> None:
    env = {"TRIGRAM_TLS": tls, "TRIGRAM_SECRET": "a secret of some length"} if tls == "1" else {}
    hosts = [0, 1, 2, 3]
    results = run(4, _outward, unreachable, transport="auto", hosts=hosts, env=env, timeout=120)
    assert all(weights == results[0] for weights in results)


def _lost_through_a_relay(rank: int, world: int, victim: int, number: int) -> int | None:
    if rank > 0:
        os.environ |= {"TRIGRAM_OUTWARD": "1", "TRIGRAM_IFACE": "lo"}
    return _dies(rank, world, victim, number)


@pytest.mark.parametrize("victim", [0, 2])
def test_who_dies_behind_a_relay_or_is_it_is_named(several_hosts: None, victim: int) -> None:
    args = (victim, signal.SIGKILL)
    with Ranks(4, _lost_through_a_relay, *args, transport="auto", hosts=[0, 1, 2, 3]) as ranks:
        told = ranks.results(60, dies={victim})
    assert [each for rank, each in enumerate(told) if rank != victim] == [victim] * 3


@pytest.mark.parametrize("victim", [0, 2])
def test_who_is_stopped_behind_a_relay_or_is_it_is_named(several_hosts: None, victim: int) -> None:
    """If the relay is silent, so are those behind it; they are not to be blamed."""
    args, env = (victim, signal.SIGSTOP), {"TRIGRAM_SILENCE": patience.silence(1.2)}
    with Ranks(4, _lost_through_a_relay, *args, transport="auto", hosts=[0, 1, 2, 3], env=env) as ranks:
        others = [rank for rank in range(4) if rank != victim]
        until(lambda: not ranks.hear(0.1) or all(ranks.ranks[r].answer for r in others), 40)
        answers = {rank: ranks.ranks[rank].answer for rank in others}
    assert answers == dict.fromkeys(others, ("returned", victim))


def _says_how(rank: int, world: int) -> None:
    if rank == 0:
        os.environ["TRIGRAM_IFACE"] = "lo"
    error = raises(trigram.TrigramError, trigram.init, init_timeout=4.0)
    says(error, "TRIGRAM_OUTWARD=1", "TRIGRAM_ANNOUNCE")


def test_an_error_says_how_to_become_reachable(several_hosts: None) -> None:
    run(2, _says_how, transport="auto", hosts=[0, 1], timeout=60)


def _wrong_settings(rank: int, world: int) -> None:
    init_refuses(
        ("TRIGRAM_PORT", "0"),
        ("TRIGRAM_PORT", "9-2"),
        ("TRIGRAM_PORT", "a"),
        ("TRIGRAM_OUTWARD", "yes"),
        ("TRIGRAM_ANNOUNCE", "no such host:1"),
    )
    os.environ |= {"TRIGRAM_ANNOUNCE": "10.0.0.1", "TRIGRAM_OUTWARD": "1"}
    says(raises(trigram.ConfigError, trigram.init), "exclude each other")


def test_wrong_settings_of_ways() -> None:
    run(1, _wrong_settings)


def _announced(rank: int, world: int) -> None:
    """The right address is the announced one: the other is of no use to the other rank."""
    if rank == 0:
        os.environ |= {"TRIGRAM_IFACE": "lo", "TRIGRAM_PORT": "29620"}
        os.environ["TRIGRAM_ANNOUNCE"] = f"{os.environ['MASTER_ADDR']}:29621"
        _forward(29621, 29620)
    trigram.init()
    _collectives(world, 1000)


def _forward(outside: int, inside: int) -> None:
    """What a router does that passes a port on."""
    listener = socket.create_server(("", outside))

    def pass_on(a: socket.socket, b: socket.socket) -> None:
        while data := a.recv(1 << 16):
            b.sendall(data)
        b.shutdown(socket.SHUT_WR)

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(("127.0.0.1", inside))
            for ends in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=ends, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


def test_the_announced_address_is_used(several_hosts: None) -> None:
    run(2, _announced, transport="auto", hosts=[0, 1], timeout=60)


def _idle(rank: int, world: int) -> None:
    """Says nothing for longer than its router remembers."""
    if rank == 1:
        os.environ |= {"TRIGRAM_OUTWARD": "1"}
    trigram.init()
    for _ in range(2):
        _collectives(world, 100_000)
        time.sleep(5.0)
    _collectives(world, 100_000)
    trigram.shutdown()


def test_a_router_that_forgets_idle_connections(several_hosts: None) -> None:
    """Heartbeats keep them alive."""
    with netns.behind_router(1, forgets=2):
        run(3, _idle, transport="auto", hosts=[0, 1, 2], timeout=60)


def _large_and_small(rank: int, world: int) -> None:
    trigram.init()
    _collectives(world, 2_000_000)
    trigram.shutdown()


def test_a_cable_for_small_packets(several_hosts: None) -> None:
    with netns.small_packets(1, 1280):
        run(3, _large_and_small, transport="auto", hosts=[0, 1, 2], timeout=60)


def _walled(rank: int, world: int) -> str:
    """After init, what host 1 sends is dropped."""
    trigram.init()
    t = torch.ones(1000)
    trigram.all_reduce(t)
    flag(f"met {rank}")
    until((scratch() / "flag-wall").exists, 30.0)
    return raises(trigram.PeerLostError, lambda: [trigram.all_reduce(t) for _ in range(100)])


def test_a_firewall_that_drops_one_direction_meanwhile(several_hosts: None) -> None:
    """Each rank names the other, and says for how long it has heard nothing, or that it was evicted."""
    env = {"TRIGRAM_SILENCE": patience.silence(1.5)}
    with Ranks(2, _walled, transport="auto", hosts=[0, 1], env=env) as ranks:
        until(lambda: all((ranks.dir / f"flag-met {rank}").exists() for rank in (0, 1)), 30.0)
        with netns.one_way(1):
            (ranks.dir / "flag-wall").touch()
            told = ranks.results(60)
    says(told[0], "rank 1", "no heartbeat")
    says(told[1], "rank 0")
