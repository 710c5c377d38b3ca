"""NCCL's network plugin, driven as NCCL drives it: data, limits, deaths, strangers, hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import patience
from tests.support.net_driver import (
    Buffer,
    Net,
    NetError,
    Request,
    _receive,
    pattern,
    until,
)
from tests.support.net_pair import (
    MIB,
    MIXED,
    REMOTE,
    ROOT,
    SIZES,
    USAGE,
    VERSIONS,
    fails,
    finish,
    on_loopback,
    pair,
    receive,
    send,
    transfer,
)

__all__ = ["on_loopback"]


@pytest.mark.parametrize("version", VERSIONS)
def test_table(version: int) -> None:
    net = Net(version)
    assert net.name == "Trigram"
    optional = {"regMrDmaBuf", "getDeviceMr", "irecvConsumed", "makeVDevice", "setNetAttr"}
    assert not any(net.has(name) for name in optional)
    required = "init devices getProperties listen connect accept regMr deregMr isend irecv iflush test "
    required += "closeSend closeRecv closeListen"
    assert all(net.has(name) for name in required.split())
    assert net.has("finalize") == (version == 11)


@pytest.mark.parametrize("version", VERSIONS)
def test_properties(version: int) -> None:
    net = Net(version).init()
    assert net.devices() == 1
    props = net.properties(0)
    assert props.name == b"lo" and props.pci_path is None
    assert props.ptr_support == 1 and props.speed > 0 and props.port == 0 and props.latency == 0.0
    assert props.max_comms >= 1024 and props.max_recvs == 1
    assert props.device_type == 0 and props.device_version == 0
    if version >= 8:
        assert props.reg_is_global == 0
    if version == 11:
        assert props.force_flush == 0
        assert props.vprops.ndevs == 1 and props.vprops.devs[0] == 0
        assert 0 < props.max_p2p_bytes <= 2**40 and 0 < props.max_coll_bytes <= 2**40
        assert props.max_multi_request_size == 1
    with pytest.raises(NetError):
        net.properties(1)
    net.finalize()


@pytest.mark.parametrize(
    ("name", "value"), [("STREAMS", "17"), ("STREAMS", "x"), ("CHUNK", "12parsecs"), ("TIMEOUT", "0")]
)
def test_wrong_settings_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"TRIGRAM_NET_{name}", value)
    net = Net(8)
    with pytest.raises(NetError) as failure:
        net.init()
    assert failure.value.code == USAGE
    assert any(line.startswith("WARN") and f"TRIGRAM_NET_{name}={value}" in line for line in net.log)


def test_no_interface_is_an_error() -> None:
    script = "from tests.support.net_driver import Net; n = Net(8)\ntry: n.init()\nfinally: print(n.log)"
    env = {**os.environ, "TRIGRAM_IFACE": "", "NCCL_SOCKET_IFNAME": "nosuch"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        cwd=ROOT,
        env=env,
        capture_output=True,
        timeout=patience.seconds(20),
    )
    assert done.returncode and b"NCCL_SOCKET_IFNAME=nosuch" in done.stdout


# Data


@pytest.mark.parametrize("version", VERSIONS)
def test_sizes(version: int) -> None:
    with pair(Net(version).init()) as (sender, receiver):
        for i, size in enumerate(SIZES):
            transfer(sender, receiver, [size], i)


@pytest.mark.parametrize("sending", VERSIONS)
@pytest.mark.parametrize("receiving", VERSIONS)
def test_versions_understand_each_other(sending: int, receiving: int) -> None:
    with pair(Net(sending).init(), Net(receiving).init()) as (sender, receiver):
        transfer(sender, receiver, [17, 0, MIB + 1])


@pytest.mark.parametrize("streams", ["1", "4", "8", "16"])
@pytest.mark.parametrize("chunk", ["1", "64K", "1M"])
def test_streams_and_chunks(monkeypatch: pytest.MonkeyPatch, streams: str, chunk: str) -> None:
    """Small chunks over many streams arrive in any order."""
    monkeypatch.setenv("TRIGRAM_NET_STREAMS", streams)
    monkeypatch.setenv("TRIGRAM_NET_CHUNK", chunk)
    with pair() as (sender, receiver):
        transfer(sender, receiver, MIXED[:32])


def test_both_directions_at_once() -> None:
    with pair() as (a, b), pair() as (c, d):
        sizes = MIXED[:32]
        into = [receive(comm, size) for size in sizes for comm in (b, d)]
        out = [send(comm, pattern(i, size)) for i, size in enumerate(sizes) for comm in (a, c)]
        finish(into + out)
        for i, request in enumerate(into):
            assert request.keep.data() == pattern(i // 2, sizes[i // 2])


def test_messages_sent_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wait for the buffer of what they carry; buffers are given one by one, in order."""
    monkeypatch.setenv("TRIGRAM_NET_STREAMS", "4")
    monkeypatch.setenv("TRIGRAM_NET_CHUNK", "4K")
    with pair() as (sender, receiver):
        out = [send(sender, pattern(i, size)) for i, size in enumerate(MIXED)]
        for i, size in enumerate(MIXED):
            request = receive(receiver, size)
            until(lambda request=request: [r.test() for r in out] and request.test(), "a late buffer")  # type: ignore[misc]
            assert request.keep.data() == pattern(i, size)
        finish(out)


def test_too_many_requests_are_put_off() -> None:
    with pair() as (sender, receiver):
        into = []
        while (request := _receive(receiver, 8)) is not None:
            into.append(request)
            assert len(into) <= 1024
        assert len(into) >= 32
        out: list[Request] = []
        for i in range(len(into)):
            out.append(send(sender, pattern(i, 8)))
        finish(into + out)
        assert [request.keep.data() for request in into] == [pattern(i, 8) for i in range(len(into))]
        transfer(sender, receiver, [5])


def test_sizes_may_be_null() -> None:
    with pair() as (sender, receiver):
        into, out = receiver.irecv(None, 0), sender.isend(None, 0)
        assert into and out
        until(lambda: out.test(want_size=False) and into.test(want_size=False), "a message without bytes")


def test_actual_size_is_reported() -> None:
    with pair() as (sender, receiver):
        into, out = receive(receiver, 2 * MIB), send(sender, pattern(0, MIB + 5))
        finish([into, out])
        assert into.size == MIB + 5
        assert into.keep.data() == pattern(0, MIB + 5) + bytes(MIB - 5)


@pytest.mark.parametrize(("size", "room"), [(18, 17), (1, 0), (4 * MIB, 4 * MIB - 1)])
def test_message_larger_than_its_buffer(size: int, room: int) -> None:
    with pair() as (sender, receiver):
        into, out = receive(receiver, room), send(sender, b"\xff" * size)
        until(out.test, "sending") if size < MIB else out.test()
        error = fails(into.test, USAGE, 10)
        assert f"{size} bytes" in str(error) and "127.0.0.1" in str(error)
        assert into.keep.data() == bytes(room)
        with pytest.raises(NetError):
            receive(receiver, size)


def test_memory_of_a_gpu_is_refused() -> None:
    with pair() as (sender, receiver):
        buffer = Buffer(8)
        for comm in (sender, receiver):
            assert comm.register(buffer.address, 8) == 0
            assert comm.register(buffer.address, 8, kind=2) != 0


def test_several_connections_to_one_listener() -> None:
    net = Net(11).init()
    handle, listener = net.listen()
    attempts = [net.connecting(handle) for _ in range(5)]
    until(lambda: None not in [attempt.step() for attempt in attempts], "connecting")
    senders = [attempt.done for attempt in attempts if attempt.done]
    receivers = [net.accept(listener) for _ in attempts]
    out = [send(comm, bytes([i]) * MIB) for i, comm in enumerate(senders)]
    into = [receive(comm, MIB) for comm in receivers]
    finish(out + into)
    # Whose connection is whose is not said; each message is of one sender.
    assert {request.keep.data() for request in into} == {bytes([i]) * MIB for i in range(5)}
    for comm in [*senders, *receivers]:
        comm.close()
    net.call("closeListen", listener)


# Ends


def test_descriptors_come_back() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    net = Net(8).init()
    before = count()
    for _ in range(3):
        with pair(net) as (sender, receiver):
            transfer(sender, receiver, [MIB])
            assert count() > before
            # Closing with requests under way.
            receive(receiver, MIB)
            send(sender, bytes(16 * MIB))
    assert count() == before
    # Attempts and listeners that nobody goes on with.
    handle, listener = net.listen()
    sender = net.connect(handle)
    net.call("closeListen", listener)
    sender.close()
    assert count() == before


@pytest.mark.parametrize("code", [4, 5])
def test_wrong_handles(code: int) -> None:
    net = Net(8).init()
    handle, listener = net.listen()
    wrong = b"x" * 128 if code == 4 else handle[:8] + b"\x63\0" + handle[10:]
    with pytest.raises(NetError) as failure:
        net.connect(wrong)
    assert failure.value.code == code
    with pytest.raises(NetError):
        net.connect(handle[:64] + b"\1" * 8 + handle[72:])  # names an attempt that is not under way
    net.call("closeListen", listener)


def test_nobody_listens() -> None:
    net = Net(8).init()
    handle, listener = net.listen()
    net.call("closeListen", listener)
    attempt = net.connecting(handle)
    fails(attempt.step, REMOTE, 10)


def test_peer_closes() -> None:
    with pair() as (sender, receiver):
        finished = send(sender, pattern(0, 100))
        finish([finished])
        sender.close()
        into = receive(receiver, 100)
        finish([into])
        assert into.keep.data() == pattern(0, 100), "what was sent before the end arrives"
        lost = receive(receiver, 100)
        assert "127.0.0.1" in str(fails(lost.test, REMOTE, 10))
        with pytest.raises(NetError):
            lost.test()


# Other processes
