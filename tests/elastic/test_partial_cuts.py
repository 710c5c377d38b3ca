"""Two ranks that do not hear each other while all others hear both: all agree which ranks go on."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import trigram
from tests.support import elastic_run, netns, patience
from tests.support.harness import Ranks, await_flag, say, until
from trigram.runtime import world as world_now

pytestmark = pytest.mark.waits

STEPS = 250


def until_cut(rank: int, world: int) -> tuple[Any, str]:
    """Who took part in the last step; or why this rank stopped."""
    try:
        return elastic_run.train(rank, world, STEPS, pause=0.02)["history"][-1], ""
    except trigram.PeerLostError as error:
        return None, str(error)


@pytest.mark.parametrize(
    "cuts", [((1, 2), (2, 1)), ((1, 2),), ((2, 1),), ((0, 3), (3, 0)), ((1, 2), (2, 1), (0, 3), (3, 0))]
)
def test_all_agree_who_goes_on(cuts: tuple[tuple[int, int], ...], several_hosts: None) -> None:
    """The higher of two stops, and says why."""
    stops = {max(pair) for pair in cuts}
    stay = tuple(rank for rank in range(4) if rank not in stops)
    settings = {"TRIGRAM_SILENCE": patience.silence(1.5)}
    try:
        with Ranks(4, until_cut, transport="tcp", hosts=[0, 1, 2, 3], env=settings) as ranks:
            for rank in range(4):
                ranks.await_said(rank, ("did", 20))
            for host, other in cuts:
                netns.cut(host, other)
            began = time.monotonic()
            results = ranks.results(60)
    finally:
        for host, other in cuts:
            netns.cut(host, other, back=True)
    assert time.monotonic() - began < patience.seconds(45)
    for rank, (last, why) in enumerate(results):
        assert (last is None and "continue the job" in why) if rank in stops else last == stay, results
        assert "hear them, and have evicted them" in why or rank in stay, results


def broken(rank: int, world: int, breaks: dict[int, int]) -> tuple[Any, str]:
    """As `until_cut`; connections of some ranks with another break meanwhile, on hosts that go on."""
    if rank in breaks:
        away = netns.address(breaks[rank])
        threading.Thread(target=break_connection, args=(away,), daemon=True).start()
    return until_cut(rank, world)


def break_connection(address: str) -> None:
    """Closes this process's connections with a host."""
    await_flag("break", 60)
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd.name))) as s:
            if address in str(s.getpeername()):
                s.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "world, breaks, stay",
    [(4, {1: 2}, (0, 1, 3)), (3, {1: 0}, (0, 2)), (4, {2: 0, 3: 0}, (0, 1)), (3, {2: 1}, (0, 1))],
)
def test_all_agree_after_connections_have_broken(
    world: int, breaks: dict[int, int], stay: tuple[int, ...], several_hosts: None
) -> None:
    """All ranks run, and some reach all; never do two halves go on."""
    settings = {"TRIGRAM_SILENCE": patience.silence(1.5)}
    with Ranks(world, broken, breaks, transport="tcp", hosts=list(range(world)), env=settings) as ranks:
        for rank in range(world):
            ranks.await_said(rank, ("did", 20))
        (ranks.dir / "flag-break").touch()
        results = ranks.results(60)
    for rank, (last, why) in enumerate(results):
        assert last == stay if rank in stay else last is None and "continue the job" in why, results


def named(rank: int, world: int) -> tuple[int, str]:
    """Who is lost, and why, once all know: a call before fails for what its first rank knows."""
    trigram.init()
    trigram.all_to_all(torch.empty(world), torch.ones(world))  # each has heard all others
    say("in the job")
    until(world_now.current().engine.losses, 60)
    say("knows")
    await_flag("all-know", 60)
    try:
        trigram.all_reduce(torch.ones(3))
    except trigram.PeerLostError as error:
        return error.rank, str(error)
    return -1, "nobody is lost"


def test_who_hears_both_says_so(several_hosts: None) -> None:
    """Also in a job that is not elastic."""
    cuts = ((1, 2), (2, 1))
    try:
        with Ranks(
            4, named, transport="tcp", hosts=[0, 1, 2, 3], env={"TRIGRAM_SILENCE": patience.silence(1.5)}
        ) as ranks:
            for rank in range(4):
                ranks.await_said(rank, "in the job")
            for host, other in cuts:
                netns.cut(host, other)
            for rank in range(4):
                ranks.await_said(rank, "knows", 60)
            (ranks.dir / "flag-all-know").touch()
            results = ranks.results(60)
    finally:
        for host, other in cuts:
            netns.cut(host, other, back=True)
    for rank in (0, 3):
        lost, why = results[rank]
        assert lost == 2 and "ranks 1 and 2 have lost each other, and others hear both" in why, results
    assert results[1][0] == 2, results
