"""Hosts as network namespaces: own interfaces, own addresses, one switch between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HOSTS = 5
NETWORK = "10.78.0."
CONGESTION_CONTROL = "cubic"


def name(host: int) -> str:
    """The namespace of a host; unique to this test process."""
    return f"tg{os.getpid()}h{host}"


def address(host: int) -> str:
    return f"{NETWORK}{host + 1}"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _switch() -> str:
    return f"tg{os.getpid()}sw"


def make(hosts: int) -> None:
    """A switch in a namespace of its own (the machine's network stays as it is), hosts on cables to it."""
    switch = _switch()
    _ip("netns", "add", switch)
    _ip("-n", switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", switch, "link", "set", "br0", "up")
    for host in range(hosts):
        ns, port = name(host), f"port{host}"
        _ip("netns", "add", ns)
        _ip("-n", ns, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", ns)
        _ip("-n", switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", ns, "addr", "add", f"{address(host)}/24", "dev", "eth0")
        _ip("-n", ns, "link", "set", "eth0", "up")
        # By route: not every kernel lets a namespace change its default.
        route = [f"{NETWORK}0/24", "dev", "eth0", "src", address(host), "congctl", CONGESTION_CONTROL]
        _ip("-n", ns, "route", "replace", *route)


def remove(hosts: int) -> None:
    """Take everything away; what is in a namespace goes with it."""
    for ns in [*(name(host) for host in range(hosts)), _switch()]:
        subprocess.run(["ip", "netns", "del", ns], check=False, capture_output=True)


SECOND_NETWORK = "10.79.0."


@contextmanager
def second_cables(hosts: int) -> Iterator[None]:
    """Within the block, the first hosts have a second interface, eth1, at another switch."""
    switch = f"{_switch()}b"
    _ip("netns", "add", switch)
    try:
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in range(hosts):
            ns, port = name(host), f"port{host}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth1", "netns", ns)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", ns, "addr", "add", f"{SECOND_NETWORK}{host + 1}/24", "dev", "eth1")
            _ip("-n", ns, "link", "set", "eth1", "up")
        yield
    finally:
        subprocess.run(["ip", "netns", "del", switch], check=False, capture_output=True)
        for host in range(hosts):  # the other ends may outlive the switch for a moment
            gone = ["ip", "-n", name(host), "link", "del", "eth1"]
            subprocess.run(gone, check=False, capture_output=True)


def unplug(host: int, second: bool = True, back: bool = False) -> None:
    """Takes a host's cable out of its switch, silently: its interface stays up. `back`: puts it in again."""
    switch = f"{_switch()}b" if second else _switch()
    _ip("-n", switch, "link", "set", f"port{host}", *(["master", "br0"] if back else ["nomaster"]))


def cut(host: int, other: int, back: bool = False) -> None:
    """What a host sends to another one gets lost from now on, silently; the others reach both. `back`: it
    arrives again."""
    nobody = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
    change = ["del", address(other)] if back else ["replace", address(other), *nobody]
    _ip("-n", name(host), "neigh", *change, "dev", "eth0")


def put_down(host: int) -> None:
    """Its second interface keeps its address, and carries nothing."""
    _ip("-n", name(host), "link", "set", "eth1", "down")


@contextmanager
def limited(rates: dict[int, str], second: bool = False) -> Iterator[None]:
    """Within the block, hosts send and receive at these rates, such as `100mbit`. `second`: by eth1."""
    device, switch = ("eth1", f"{_switch()}b") if second else ("eth0", _switch())
    places = [at for host in rates for at in ((host, name(host), device), (host, switch, f"port{host}"))]
    try:
        for host, ns, device in places:
            bucket = ["tbf", "rate", rates[host], "burst", "64kb", "latency", "50ms"]
            subprocess.run(["tc", "-n", ns, "qdisc", "replace", "dev", device, "root", *bucket], check=True)
        yield
    finally:
        for _, ns, device in places:
            delete = ["tc", "-n", ns, "qdisc", "del", "dev", device, "root"]
            subprocess.run(delete, check=False, capture_output=True)


@contextmanager
def behind_router(host: int, forgets: int) -> Iterator[None]:
    """Within the block, a host is in a network of its own: a router translates its address (NAT).

    Args:
        host: The host. It keeps its address, which nobody else reaches.
        forgets: Seconds without a packet after which the router forgets a connection.
    """
    if shutil.which("nft") is None:
        pytest.skip("a router that translates addresses needs the command `nft` (nftables)")
    router, ns = f"tg{os.getpid()}rt", name(host)
    inside, home = ["ip", "netns", "exec", router], f"{NETWORK}{200 + host}"
    subprocess.run(["ip", "netns", "del", router], check=False, capture_output=True)
    _ip("netns", "add", router)
    try:
        _ip("-n", _switch(), "link", "set", f"port{host}", "nomaster")
        _ip("-n", _switch(), "link", "add", "wan0", "type", "veth", "peer", "name", "wan", "netns", router)
        _ip("-n", _switch(), "link", "set", "wan0", "master", "br0", "up")
        _ip("-n", _switch(), "link", "set", f"port{host}", "netns", router)
        for device, at in (("wan", f"{home}/24"), (f"port{host}", "172.30.0.1/24"), ("lo", "127.0.0.1/8")):
            if device != "lo":
                _ip("-n", router, "addr", "add", at, "dev", device)
            _ip("-n", router, "link", "set", device, "up")
        _ip("-n", ns, "addr", "flush", "dev", "eth0")
        _ip("-n", ns, "addr", "add", "172.30.0.2/24", "dev", "eth0")
        _ip("-n", ns, "route", "add", "default", "via", "172.30.0.1")
        for words in (
            ["sysctl", "-qw", "net.ipv4.ip_forward=1"],
            ["nft", "add", "table", "ip", "nat"],
            ["nft", "add", "chain", "ip", "nat", "post", "{ type nat hook postrouting priority 100; }"],
            ["nft", "add", "rule", "ip", "nat", "post", "oifname", "wan", "masquerade"],
            ["sysctl", "-qw", f"net.netfilter.nf_conntrack_tcp_timeout_established={forgets}"],
        ):
            done = subprocess.run([*inside, *words], check=False, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")
        yield
    finally:
        _ip("-n", router, "link", "set", f"port{host}", "netns", _switch())
        subprocess.run(["ip", "netns", "del", router], check=False, capture_output=True)
        _ip("-n", _switch(), "link", "set", f"port{host}", "master", "br0", "up")
        _ip("-n", ns, "addr", "flush", "dev", "eth0")
        _ip("-n", ns, "addr", "add", f"{address(host)}/24", "dev", "eth0")
        route = [f"{NETWORK}0/24", "dev", "eth0", "src", address(host), "congctl", CONGESTION_CONTROL]
        _ip("-n", ns, "route", "replace", *route)


@contextmanager
def one_way(host: int) -> Iterator[None]:
    """Within the block, a firewall drops what a host sends, and not what it receives."""
    with _firewall(host, "output", ["oifname", "eth0"]):
        yield


@contextmanager
def lets_nobody_in(host: int) -> Iterator[None]:
    """Within the block, a firewall drops connections to a host; it may connect to others."""
    with _firewall(host, "input", ["iifname", "eth0", "ct", "state", "new"]):
        yield


@contextmanager
def _firewall(host: int, hook: str, drops: list[str]) -> Iterator[None]:
    """Within the block, a firewall drops some packets of a host."""
    if shutil.which("nft") is None:
        pytest.skip("a firewall needs the command `nft` (nftables)")
    inside = ["ip", "netns", "exec", name(host), "nft"]
    try:
        for words in (
            ["add", "table", "ip", "wall"],
            ["add", "chain", "ip", "wall", "side", f"{{ type filter hook {hook} priority 0; }}"],
            ["add", "rule", "ip", "wall", "side", *drops, "drop"],
        ):
            subprocess.run([*inside, *words], check=True, capture_output=True)
        yield
    finally:
        subprocess.run([*inside, "delete", "table", "ip", "wall"], check=False, capture_output=True)


@contextmanager
def small_packets(host: int, mtu: int) -> Iterator[None]:
    """Within the block, a host's cable carries packets of at most so many bytes."""
    ends = [("-n", name(host), "link", "set", "eth0"), ("-n", _switch(), "link", "set", f"port{host}")]
    try:
        for end in ends:
            _ip(*end, "mtu", str(mtu))
        yield
    finally:
        for end in ends:
            _ip(*end, "mtu", "1500")


@contextmanager
def far(hosts: int, megabits: float, delay: float, loss: float = 0.0) -> Iterator[None]:
    """Within the block, the cables of the first hosts are long.

    Args:
        hosts: How many hosts.
        megabits: Mbit/s of each cable.
        delay: Milliseconds from host to host, one way.
        loss: Percent of frames that are lost, each way.
    """
    if shutil.which("cc") is None:
        pytest.skip("long cables need a C compiler")
    inside = [["ip", "netns", "exec", name(host)] for host in range(hosts)]
    ports = [("-n", _switch(), "link", "set", f"port{host}") for host in range(hosts)]
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/switch"
        source = Path(__file__).parents[2] / "benches" / "switch.c"
        subprocess.run(["cc", "-O2", str(source), "-o", program], check=True)
        for host in range(hosts):
            subprocess.run([*inside[host], program, "--plain", "eth0"], check=True)
            _ip(*ports[host], "nomaster")
        cables = [f"port{host}:{megabits}:{delay / 2}:{loss}" for host in range(hosts)]
        switch = ["ip", "netns", "exec", _switch(), program, str(max(50.0, 2 * delay)), "1", *cables]
        with subprocess.Popen(switch, stdout=subprocess.PIPE) as forwarder:
            try:
                assert forwarder.stdout is not None and forwarder.stdout.readline() == b"ready\n"
                yield
            finally:
                forwarder.terminate()
                for host in range(hosts):
                    subprocess.run([*inside[host], program, "--offload", "eth0"], check=False)
                    _ip(*ports[host], "master", "br0")


@pytest.fixture(scope="session")
def several_hosts() -> Iterator[None]:
    """Hosts 0 to 4 exist while tests use them."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command `ip` (iproute2)")
    try:
        make(HOSTS)
    except OSError as e:
        remove(HOSTS)
        pytest.skip(f"network namespaces cannot be made here: {e}")
    try:
        yield
    finally:
        remove(HOSTS)
