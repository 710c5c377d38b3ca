"""Ranks in containers and sandboxes: own namespaces, refused system calls, limits of a process."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import trigram
from tests.support import netns
from tests.support.harness import _enter, run, scratch

MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}
CLONE_NEWPID, CLONE_NEWNS = 0x20000000, 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


def _hosts(world: int, store: str | None = None, rank: int | None = None) -> str:
    """Joins, sums, and tells the number of each rank's host."""
    trigram.init(None if store is None else torch.distributed.FileStore(store, world), rank, world)
    t = torch.ones(1_000_000)
    trigram.all_reduce(t)
    assert t.min() == t.max() == world
    hosts = trigram.runtime.world.current().engine.hosts
    trigram.shutdown()
    return str(hosts)


def _in_a_pid_namespace(rank: int, world: int) -> str:
    """The job in a child that is the first process of a namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWPID) == 0, os.strerror(ctypes.get_errno())
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            assert os.getpid() == 1
            text = _hosts(world, rank=rank)
        except BaseException as e:
            text = f"{type(e).__name__}: {e}"
        os.write(w, text.encode()[:4000])
        os._exit(0)
    os.close(w)
    with os.fdopen(r) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_ranks_in_pid_namespaces_of_their_own_share_memory() -> None:
    """`docker run --network=host` once per rank: to each the other's process has the number 0."""
    assert run(2, _in_a_pid_namespace, transport="auto", timeout=50) == ["[0, 0]"] * 2


@contextmanager
def _two_hosts_with_bridges() -> Iterator[list[str]]:
    """Two hosts on one cable whose first interface is a bridge for containers, and the same on both."""
    hosts = [f"tg{os.getpid()}br{i}" for i in range(2)]
    try:
        for host in hosts:
            netns._ip("netns", "add", host)
            netns._ip("-n", host, "link", "set", "lo", "up")
            netns._ip("-n", host, "link", "add", "docker0", "type", "bridge")
            netns._ip("-n", host, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            netns._ip("-n", host, "link", "set", "docker0", "up")
        veth = ["type", "veth", "peer", "name", "eth0", "netns", hosts[1]]
        netns._ip("-n", hosts[0], "link", "add", "eth0", *veth)
        for i, host in enumerate(hosts):
            netns._ip("-n", host, "addr", "add", f"10.79.0.{i + 1}/24", "dev", "eth0")
            netns._ip("-n", host, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False, capture_output=True)


def _on_a_host(rank: int, world: int, hosts: list[str]) -> str:
    _enter(hosts[rank])
    libc = ctypes.CDLL(None, use_errno=True)  # as `ip netns exec`: /sys shows the namespace's interfaces
    assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None) == 0, os.strerror(ctypes.get_errno())
    return _hosts(world, str(scratch() / "store"), rank)


def test_the_address_of_a_bridge_is_not_announced(several_hosts: None) -> None:
    with _two_hosts_with_bridges() as hosts:
        assert run(2, _on_a_host, hosts, transport="auto", timeout=50) == ["[0, 1]"] * 2


def _refuse(number: int) -> None:
    """From now on this process gets EPERM for a system call, as under a strict seccomp profile."""
    code = [
        struct.pack("HBBI", 0x20, 0, 0, 0),
        struct.pack("HBBI", 0x15, 0, 1, number),
        struct.pack("HBBI", 0x06, 0, 0, 0x00050001),
        struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000),
    ]
    program = ctypes.create_string_buffer(b"".join(code))
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, header, 0, 0) == 0, os.strerror(ctypes.get_errno())


def _without_memfd() -> None:
    _refuse(MEMFD_CREATE[platform.machine()])
    with pytest.raises(PermissionError):
        os.memfd_create("refused")


def _without_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _without_much_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))


LACKS = {"memfd": _without_memfd, "ulimit -f": _without_large_files, "ulimit -v": _without_much_memory}


def _trains(rank: int, world: int, lacks: str) -> list[int]:
    LACKS[lacks]()
    trigram.init()
    t, memory = torch.ones(100_000), trigram.empty(1000)
    memory.fill_(1.0)
    trigram.all_reduce(t)
    trigram.all_reduce(memory)
    assert t.min() == t.max() == memory.min() == memory.max() == world
    model = trigram.with_bagua(torch.nn.Linear(100, 100))
    model(torch.ones(2, 100)).sum().backward()
    return trigram.runtime.world.current().engine.hosts


@pytest.mark.parametrize("lacks", list(LACKS))
def test_over_tcp_no_shared_memory_is_needed(lacks: str) -> None:
    assert run(2, _trains, lacks, transport="tcp", timeout=60)[0] == [0, 1]


@pytest.mark.parametrize("lacks", ["memfd", "ulimit -f"])
def test_ranks_that_may_have_no_shared_memory_use_tcp(lacks: str) -> None:
    assert run(2, _trains, lacks, transport="auto", timeout=60)[0] == [0, 1]
