"""NCCL's side of a network plugin, in ctypes: loads the library, reads its tables, calls what they hold.

An own reading of NCCL's headers: nothing here is taken from the plugin's sources.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_size_t,
    c_uint64,
    c_ulong,
    c_void_p,
)
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACES = [
    ROOT / "python/trigram/libnccl-net-trigram.so",
    ROOT / "target/release/libnccl_net_trigram.so",
    ROOT / "target/debug/libnccl_net_trigram.so",
]
HANDLE_SIZE = 128
DEADLINE = 20.0

_PP = POINTER(c_void_p)
_INTS = POINTER(c_int)
LOGGER = CFUNCTYPE(None, c_int, c_ulong, c_char_p, c_int, c_char_p, c_char_p)


class NetError(RuntimeError):
    """A call returned other than 0."""

    def __init__(self, call: str, code: int, log: list[str]) -> None:
        super().__init__(f"{call} returned {code}; log: {log[-5:]}")
        self.code = code


def library() -> Path:
    """Where the plugin is."""
    named = os.environ.get("TRIGRAM_NET_PLUGIN")
    for place in [Path(named)] if named else PLACES:
        if place.exists():
            return place
    raise FileNotFoundError(
        "no network plugin: run `cargo build --release -p trigram-net-plugin`, or set TRIGRAM_NET_PLUGIN"
    )


class PropsV7(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("pci_path", c_char_p),
        ("guid", c_uint64),
        ("ptr_support", c_int),
        ("speed", c_int),
        ("port", c_int),
        ("latency", c_float),
        ("max_comms", c_int),
        ("max_recvs", c_int),
        ("device_type", c_int),
        ("device_version", c_int),
    ]


class PropsV8(Structure):
    _fields_ = [*PropsV7._fields_[:4], ("reg_is_global", c_int), *PropsV7._fields_[4:]]


class VProps(Structure):
    _fields_ = [("ndevs", c_int), ("devs", c_int * 4)]


class PropsV11(Structure):
    _fields_ = [
        *PropsV8._fields_[:5],
        ("force_flush", c_int),
        *PropsV8._fields_[5:],
        ("vprops", VProps),
        ("max_p2p_bytes", c_size_t),
        ("max_coll_bytes", c_size_t),
        ("max_multi_request_size", c_int),
    ]


PROPS: dict[int, type[Structure]] = {7: PropsV7, 8: PropsV8, 11: PropsV11}
TABLE_SIZES = {7: 152, 8: 152, 11: 176}


def _functions(version: int) -> list[tuple[str, list[Any]]]:
    """The table's functions in their order, and what they take."""
    v11 = version == 11
    size = c_size_t if v11 else c_int
    context = [c_void_p] if v11 else []
    profile, profiles = ([c_void_p], [_PP]) if v11 else ([], [])
    registered = c_int if version == 7 else c_size_t
    table: list[tuple[str, list[Any]]] = [
        ("init", [_PP, c_uint64, c_void_p, LOGGER, c_void_p] if v11 else [LOGGER]),
        ("devices", [_INTS]),
        ("getProperties", [c_int, POINTER(PROPS[version])]),
        ("listen", [*context, c_int, c_void_p, _PP]),
        ("connect", [*context, c_int, c_void_p, _PP, _PP]),
        ("accept", [c_void_p, _PP, _PP]),
        ("regMr", [c_void_p, c_void_p, registered, c_int, _PP]),
        ("regMrDmaBuf", [c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_int, _PP]),
        ("deregMr", [c_void_p, c_void_p]),
        ("isend", [c_void_p, c_void_p, size, c_int, c_void_p, *profile, _PP]),
        ("irecv", [c_void_p, c_int, _PP, POINTER(size), _INTS, _PP, *profiles, _PP]),
        ("iflush", [c_void_p, c_int, _PP, _INTS, _PP, _PP]),
        ("test", [c_void_p, _INTS, _INTS]),
        ("closeSend", [c_void_p]),
        ("closeRecv", [c_void_p]),
        ("closeListen", [c_void_p]),
        ("getDeviceMr", [c_void_p, c_void_p, _PP]),
        ("irecvConsumed", [c_void_p, c_int, c_void_p]),
    ]
    if v11:
        table += [
            ("makeVDevice", [_INTS, POINTER(VProps)]),
            ("finalize", [c_void_p]),
            ("setNetAttr", [c_void_p, c_void_p]),
        ]
    return table


class Net:
    """The plugin through one version of its interface."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.log: list[str] = []
        self._logger = LOGGER(self._write)  # the plugin keeps it
        _kept.append(self._logger)
        functions = _functions(version)
        table = (c_void_p * (1 + len(functions))).in_dll(
            ctypes.CDLL(str(library())), f"ncclNetPlugin_v{version}"
        )
        assert ctypes.sizeof(table) == TABLE_SIZES[version]
        self.name = ctypes.string_at(table[0] or 0).decode()
        self._calls = {
            name: CFUNCTYPE(c_int, *takes)(address)
            for (name, takes), address in zip(functions, table[1:], strict=True)
            if address is not None
        }
        self.context: list[Any] = []
        self._size = c_size_t if version == 11 else c_int

    def _write(self, level: int, _flags: int, _file: bytes, _line: int, form: bytes, text: bytes) -> None:
        assert form == b"%s"
        self.log.append(f"{'WARN' if level == 2 else 'INFO'} {text.decode()}")

    def has(self, name: str) -> bool:
        return name in self._calls

    def raw(self, name: str, *arguments: Any) -> int:
        return int(self._calls[name](*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        code = self.raw(name, *arguments)
        if code:
            raise NetError(name, code, self.log)

    def init(self) -> Net:
        if self.version == 11:
            context, config = c_void_p(), c_int(-(2**31))
            self.call("init", byref(context), 1, byref(config), self._logger, None)
            assert context.value
            self.context = [context]
        else:
            self.call("init", self._logger)
        return self

    def finalize(self) -> None:
        if self.version == 11:
            self.call("finalize", *self.context)

    def devices(self) -> int:
        count = c_int(-1)
        self.call("devices", byref(count))
        return count.value

    def properties(self, device: int) -> Any:
        props = PROPS[self.version]()
        ctypes.memset(byref(props), 0xAA, ctypes.sizeof(props))
        self.call("getProperties", device, byref(props))
        return props

    def listen(self, device: int = 0) -> tuple[bytes, c_void_p]:
        handle, comm = ctypes.create_string_buffer(HANDLE_SIZE), c_void_p()
        self.call("listen", *self.context, device, handle, byref(comm))
        assert comm.value
        return handle.raw, comm

    def connecting(self, handle: bytes, device: int = 0) -> Connecting:
        return Connecting(self, handle, device)

    def connect(self, handle: bytes, device: int = 0) -> Sender:
        attempt = self.connecting(handle, device)
        until(lambda: attempt.step() is not None, "connect")
        assert attempt.done
        return attempt.done

    def try_accept(self, listener: c_void_p) -> Receiver | None:
        comm = c_void_p(0xBAD)
        self.call("accept", listener, byref(comm), None)
        return Receiver(self, comm) if comm.value else None

    def accept(self, listener: c_void_p, seconds: float = DEADLINE) -> Receiver:
        found: list[Receiver] = []

        def step() -> bool:
            comm = self.try_accept(listener)
            found.extend([comm] if comm else [])
            return bool(found)

        until(step, "accept", seconds)
        return found[0]


_kept: list[Any] = []  # loggers: the plugin may call them as long as it is loaded


class Connecting:
    """A connection in the making, whose handle buffer stays."""

    def __init__(self, net: Net, handle: bytes, device: int) -> None:
        self.net, self.device = net, device
        self.handle = ctypes.create_string_buffer(handle, HANDLE_SIZE)
        self.done: Sender | None = None

    def step(self) -> Sender | None:
        if self.done:
            return self.done
        comm = c_void_p(0xBAD)
        self.net.call("connect", *self.net.context, self.device, self.handle, byref(comm), None)
        if comm.value:
            self.done = Sender(self.net, comm)
        return self.done


class Request:
    """A message under way; `size` when it is done."""

    def __init__(self, net: Net, pointer: c_void_p, keep: Any) -> None:
        self.net, self.pointer, self.keep = net, pointer, keep
        self.size: int | None = None

    def test(self, want_size: bool = True) -> bool:
        if self.size is not None:
            return True
        done, size = c_int(-1), c_int(-1)
        self.net.call("test", self.pointer, byref(done), byref(size) if want_size else None)
        assert done.value in (0, 1)
        if done.value:
            self.size = size.value
        return self.size is not None

    def wait(self, seconds: float = DEADLINE) -> int:
        until(self.test, "test", seconds)
        assert self.size is not None
        return self.size


class _Comm:
    CLOSE = ""

    def __init__(self, net: Net, comm: c_void_p) -> None:
        self.net, self.comm = net, comm

    def close(self) -> None:
        if self.comm.value:
            self.net.call(self.CLOSE, self.comm)
            self.comm = c_void_p()

    def register(self, address: int, size: int, kind: int = 1) -> int:
        handle = c_void_p()
        return self.net.raw("regMr", self.comm, address, size, kind, byref(handle))


class Sender(_Comm):
    CLOSE = "closeSend"

    def isend(self, address: int | None, size: int, keep: Any = None) -> Request | None:
        """`None`: the plugin wants to be asked again later."""
        pointer = c_void_p(0xBAD)
        profile = [None] if self.net.version == 11 else []
        self.net.call("isend", self.comm, address, size, 0, None, *profile, byref(pointer))
        return Request(self.net, pointer, keep) if pointer.value else None


class Receiver(_Comm):
    CLOSE = "closeRecv"

    def irecv(self, address: int | None, size: int, keep: Any = None) -> Request | None:
        """`None`: the plugin wants to be asked again later."""
        pointer = c_void_p(1 if self.net.version == 11 else 0xBAD)
        size_type: Any = self.net._size
        profiles = [None] if self.net.version == 11 else []
        buffers, sizes, tags = (c_void_p * 1)(address), (size_type * 1)(size), (c_int * 1)(0)
        handles = (c_void_p * 1)()
        arguments = (self.comm, 1, buffers, sizes, tags, handles, *profiles)
        self.net.call("irecv", *arguments, byref(pointer))
        return Request(self.net, pointer, keep) if pointer.value else None


def until(step: Any, what: str, seconds: float = DEADLINE) -> None:
    """Calls `step` until it is true; a deadline."""
    end = time.monotonic() + seconds
    tries = 0
    while not step():
        tries += 1
        if time.monotonic() > end:
            raise TimeoutError(f"{what} is not done after {seconds} s")
        # The other side may want the processor.
        time.sleep(0 if tries % 64 else 0.0002)


class Buffer:
    """Memory with guard bytes around it."""

    GUARD = bytes(range(200, 256)) + b"guarded!"

    def __init__(self, contents: bytes | int) -> None:
        filled = contents if isinstance(contents, bytes) else b"\0" * contents
        self.size = len(filled)
        self._all = ctypes.create_string_buffer(
            self.GUARD + filled + self.GUARD, self.size + 2 * len(self.GUARD)
        )
        self.address = ctypes.addressof(self._all) + len(self.GUARD)

    def data(self, size: int | None = None) -> bytes:
        """The contents; an error if a guard byte has changed."""
        raw, n = self._all.raw, len(self.GUARD)
        assert raw[:n] == self.GUARD, "written before the buffer"
        assert raw[n + self.size :] == self.GUARD, "written past the buffer"
        return raw[n : n + (self.size if size is None else size)]


def pattern(number: int, size: int) -> bytes:
    """A message's contents: no two are alike, nor two parts of one."""
    return random.Random(number * 1_000_003 + size).randbytes(size)


def send_all(comm: Sender, sizes: list[int], ahead: int = 32) -> None:
    _run(lambda i: _send(comm, pattern(i, sizes[i])), len(sizes), ahead, lambda i, request: None)


def receive_all(comm: Receiver, sizes: list[int], ahead: int = 32) -> None:
    """Receives messages into buffers that are larger than they, and checks them."""

    def check(i: int, request: Request) -> None:
        assert request.size == sizes[i], (i, request.size)
        assert request.keep.data(sizes[i]) == pattern(i, sizes[i]), f"message {i}"

    _run(lambda i: _receive(comm, sizes[i] + i % 3), len(sizes), ahead, check)


def _send(comm: Sender, contents: bytes) -> Request | None:
    buffer = Buffer(contents)
    return comm.isend(buffer.address, buffer.size, buffer)


def _receive(comm: Receiver, size: int) -> Request | None:
    buffer = Buffer(size)
    return comm.irecv(buffer.address, size, buffer)


def _run(
    post: Callable[[int], Request | None], count: int, ahead: int, done: Callable[[int, Request], None]
) -> None:
    pending: deque[tuple[int, Request]] = deque()
    posted = 0
    while posted < count or pending:
        while posted < count and len(pending) < ahead and (request := post(posted)) is not None:
            pending.append((posted, request))
            posted += 1
        i, first = pending.popleft()
        first.wait()
        done(i, first)


def main() -> None:
    """A peer in a process of its own: `ROLE VERSION SIZE...`; `-1` as the only size: 4 MiB until the end."""
    role, version, *words = sys.argv[1:]
    sizes = [int(word) for word in words]
    forever = sizes == [-1]
    net = Net(int(version)).init()
    if role == "receive":
        handle, listener = net.listen()
        print(handle.hex(), flush=True)
        receiver = net.accept(listener)
        print("ready", flush=True)
        while forever:
            buffer = Buffer(4 << 20)
            request = receiver.irecv(buffer.address, buffer.size)
            assert request is not None
            request.wait()
        receive_all(receiver, sizes)
        receiver.close()
        net.call("closeListen", listener)
    else:
        sender = net.connect(bytes.fromhex(sys.stdin.readline()))
        print("ready", flush=True)
        while forever:
            request = _send(sender, bytes(4 << 20))
            assert request is not None
            request.wait()
        send_all(sender, sizes)
        sender.close()
    net.finalize()
    print("done", flush=True)


if __name__ == "__main__":
    main()
