"""Hosts with several cables: all of them carry, unequal ones too, and a call goes on when one is cut."""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path

import pytest
import torch

import trigram
from tests.runtime.test_far_ranks import _collectives, _peers, _train
from tests.support import netns, patience
from tests.support.checks import raises, says
from tests.support.harness import Ranks, flag, run, scratch, until
from tests.support.marks import long

BOTH = "eth0,eth1"
SECRET = {"TRIGRAM_SECRET": "a secret of some length"}


def _second(host: int) -> str:
    return f"{netns.SECOND_NETWORK}{host + 1}"


def _use(rank: int, world: int, ifaces: list[str]) -> tuple[dict[str, int], list[float]]:
    os.environ["TRIGRAM_IFACE"] = ifaces[rank]
    trigram.init()
    _collectives(world, 700_000)
    weights = _train("gradient_allreduce")
    _train("decentralized")
    peers = _peers()
    trigram.barrier()  # the others are there while each counts
    trigram.shutdown()
    return peers, weights


@pytest.mark.parametrize("tls", ["0", "1"])
def test_each_pair_of_ranks_uses_both_cables(several_hosts: None, tls: str) -> None:
    """Whatever the order in which they are named."""
    with netns.second_cables(3):
        env = {"TRIGRAM_TLS": tls, **SECRET}
        ifaces = [BOTH, "eth1,eth0", BOTH]
        results = run(3, _use, ifaces, transport="auto", hosts=[0, 1, 2], env=env, timeout=120)
    for rank, (peers, weights) in enumerate(results):
        for host in {0, 1, 2} - {rank}:
            assert peers[netns.address(host)] >= 1 and peers[_second(host)] == 1, (rank, peers)
        assert weights == results[0][1]


def test_a_rank_with_one_cable_uses_that_which_it_reaches(several_hosts: None) -> None:
    with netns.second_cables(3):
        ifaces = [BOTH, "eth1", BOTH]
        results = run(3, _use, ifaces, transport="auto", hosts=[0, 1, 2], timeout=120)
    assert results[1][0].get(netns.address(2), 0) == 0 and results[1][0][_second(2)] == 1
    assert results[0][0][_second(2)] == 1 and results[0][0][netns.address(2)] >= 1


def _seconds(count: int, times: int) -> float:
    """What an all_reduce takes, the median."""
    t, taken = torch.ones(count), []
    for _ in range(times):
        t.fill_(1.0)
        trigram.barrier()
        began = time.monotonic()
        trigram.all_reduce(t)
        taken.append(time.monotonic() - began)
        assert bool((t == trigram.world_size()).all())
    return statistics.median(taken)


def _carry(rank: int, world: int, iface: str) -> dict[str, int]:
    """Bytes that each interface has sent meanwhile."""
    os.environ["TRIGRAM_IFACE"] = iface
    trigram.init()
    _seconds(1_000_000, 3)  # learns what each carries
    before = _sent()
    _seconds(2_000_000, 3)
    after = _sent()
    trigram.shutdown()
    return {device: after[device] - before[device] for device in after}


def _sent() -> dict[str, int]:
    folder = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in folder}


@pytest.mark.parametrize(("second", "least", "most"), [("100mbit", 0.35, 0.65), ("20mbit", 0.05, 0.35)])
def test_each_cable_carries_what_it_can(several_hosts: None, second: str, least: float, most: float) -> None:
    with (
        netns.second_cables(2),
        netns.limited({0: "100mbit", 1: "100mbit"}),
        netns.limited({0: second, 1: second}, second=True),
    ):
        results = run(2, _carry, BOTH, transport="auto", hosts=[0, 1], timeout=120)
    for sent in results:
        share = sent["eth1"] / (sent["eth0"] + sent["eth1"])
        assert least < share < most, sent


def _goes_on(rank: int, world: int) -> int:
    """Sums until told to end; how many."""
    os.environ["TRIGRAM_IFACE"] = BOTH
    trigram.init()
    count, t, over = 0, torch.empty(400_000), torch.zeros(1)
    while not over[0]:
        t.fill_(rank + 1)
        trigram.all_reduce(t)
        assert bool((t == world * (world + 1) // 2).all())
        count += 1
        if rank == 0:
            flag(f"sum {count}")
        over[0] = (scratch() / "flag-end").exists()
        trigram.all_reduce(over, op="max")
    trigram.shutdown()
    return count


@pytest.mark.parametrize(
    ("second", "tls"), [(True, "1"), (False, "0"), long(True, "0"), long(False, "1")], ids=str
)
def test_a_cable_that_is_cut_in_a_call_does_not_end_it(several_hosts: None, second: bool, tls: str) -> None:
    """Calls end over the other cable, and both are used again when it is mended."""
    env = {"TRIGRAM_TLS": tls, **SECRET}
    with (
        netns.second_cables(2),
        netns.limited({0: "200mbit", 1: "200mbit"}),
        netns.limited({0: "200mbit", 1: "200mbit"}, second=True),
        Ranks(2, _goes_on, transport="auto", hosts=[0, 1], env=env) as ranks,
    ):

        def sums(more: int) -> None:
            """Waits for so many more."""
            count = len(list(ranks.dir.glob("flag-sum*")))
            until((ranks.dir / f"flag-sum {count + more}").exists, 60.0, f"{more} more sums")

        sums(5)
        netns.unplug(1, second)
        sums(12)
        # The other one before it is known that this one carries again.
        netns.unplug(1, second, back=True)
        netns.unplug(0, not second)
        sums(12)
        netns.unplug(0, not second, back=True)
        sums(12)
        (ranks.dir / "flag-end").touch()
        counts = ranks.results(60)
        assert counts[0] == counts[1] >= 41
        logged = "\n".join(ranks.log(rank) for rank in (0, 1))
    assert "has carried nothing for" in logged and "although rank" in logged, logged


def _dies(rank: int, world: int) -> int | None:
    """The rank that is named."""
    os.environ["TRIGRAM_IFACE"] = BOTH
    trigram.init()
    t = torch.ones(300_000)
    trigram.all_reduce(t)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while time.monotonic() - began < 30:
            trigram.all_reduce(t)
    except trigram.PeerLostError as error:
        assert time.monotonic() - began < patience.seconds(3.0)
        return error.rank
    return None


def test_who_dies_is_named_at_once(several_hosts: None) -> None:
    with netns.second_cables(3), Ranks(3, _dies, transport="auto", hosts=[0, 1, 2]) as ranks:
        assert ranks.results(60, dies={2})[:2] == [2, 2]


def _leads_nowhere(rank: int, world: int) -> None:
    os.environ["TRIGRAM_IFACE"] = BOTH
    # Rank 0 gives up first, and the store goes with it; rank 1 says what it knew all the same.
    error = raises(trigram.TimeoutError, trigram.init, init_timeout=6.0 if rank == 0 else 30.0)
    if rank == 1:
        says(error, f"over eth1 ({_second(1)}) to {_second(0)}", "cannot be reached")
        says(error, "waits no longer", "lost the connection to the store")
    else:
        says(error, "of 2 connections of rank 1, 1 have come")


def test_a_cable_that_leads_nowhere_is_named(several_hosts: None) -> None:
    with netns.second_cables(2):
        netns.unplug(1)
        run(2, _leads_nowhere, transport="auto", hosts=[0, 1], timeout=60)


def _wrong_names(rank: int, world: int) -> None:
    for iface, words in (
        ("eth0,", ["empty name"]),
        ("eth0,eth1,eth0", ["names eth0 twice"]),
        ("eth0,nowhere7", ["nowhere7", "no network interface"]),
        (BOTH, ["eth1", "is down", "ip link set eth1 up"]),
    ):
        says(raises(trigram.ConfigError, trigram.init, iface=iface), "TRIGRAM_IFACE", *words)


def test_wrong_interfaces_are_named(several_hosts: None) -> None:
    with netns.second_cables(1):
        netns.put_down(0)
        run(1, _wrong_names, transport="auto", hosts=[0], timeout=60)
