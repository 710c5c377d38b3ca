"""Measures one connection through NCCL's network plugin, compared with iperf3 and one plain TCP stream.

    python benches/net_plugin.py --rate 1gbit
    python benches/net_plugin.py --streams 1,2,4,8 --out net-plugin-out

There are two network namespaces (`hosts.py`) with one process each. Messages have 4 MiB, and eight are in
flight. Time runs from the first send on an idle connection until the receiver has the last message. The data
are checked before and after. The candidates take turns. Both ends poll, as NCCL's threads do: run nothing
else meanwhile.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.net_driver import Net, Request  # noqa: E402

if TYPE_CHECKING:
    from hosts import Hosts

MIB = 2**20
UNDER_WAY = 8
PORT = 5201
CHECKED = 16  # messages before the measurement starts
LIMIT = 120.0
IDLE_SECONDS = 0.3  # after the check, so that the kernels' buffers are empty when the measurement starts


class Buffers:
    """The buffers of the messages in flight, with different contents."""

    def __init__(self, size: int, filled: bool) -> None:
        self.size = size
        self.patterns = [bytes([i + 1]) + bytes(range(251)) * (size // 251 + 1) for i in range(UNDER_WAY)]
        self.memory = [bytearray(p[:size]) if filled else bytearray(size) for p in self.patterns]
        self.addresses = [ctypes.addressof((ctypes.c_char * size).from_buffer(m)) for m in self.memory]

    def check(self) -> None:
        """Raises if the contents are not what the sender sent."""
        for memory, pattern in zip(self.memory, self.patterns, strict=True):
            if memory != pattern[: self.size]:
                raise ValueError("the received data differ from the data sent")


def pump(post: Callable[[int], Request | None], count: int) -> None:
    """Posts `count` messages, eight at a time, and waits until all have finished."""
    pending: deque[Request] = deque()
    posted, done, end = 0, 0, time.monotonic() + LIMIT
    while done < count:
        while posted < count and len(pending) < UNDER_WAY:
            request = post(posted % UNDER_WAY)
            if request is None:
                break
            pending.append(request)
            posted += 1
        if pending and pending[0].test():
            pending.popleft()
            done += 1
        else:
            os.sched_yield()
            if time.monotonic() > end:
                raise TimeoutError(f"only {done} of {count} messages have finished after {LIMIT} s")


def receive_plugin(size: int, count: int) -> float:
    net = Net(8).init()
    handle, listener = net.listen()
    print(handle.hex(), flush=True)
    comm = net.accept(listener)
    buffers = Buffers(size, filled=False)

    def post(i: int) -> Request | None:
        return comm.irecv(buffers.addresses[i], size)

    pump(post, CHECKED)
    buffers.check()
    pump(post, count)
    end = time.monotonic()
    buffers.check()
    comm.close()
    return end


def send_plugin(size: int, count: int) -> float:
    net = Net(8).init()
    comm = net.connect(bytes.fromhex(sys.stdin.readline()))
    buffers = Buffers(size, filled=True)

    def post(i: int) -> Request | None:
        return comm.isend(buffers.addresses[i], size)

    pump(post, CHECKED)
    time.sleep(IDLE_SECONDS)
    start = time.monotonic()
    pump(post, count)
    comm.close()
    return start


def receive_plain(size: int, count: int) -> float:
    with socket.create_server((os.environ["TRIGRAM_BENCH_ADDRESS"], 0)) as server:
        print(f"{server.getsockname()[1]}", flush=True)
        connection, _ = server.accept()
    buffers = Buffers(size, filled=False)
    views = [memoryview(m) for m in buffers.memory]
    with connection:
        for i in range(CHECKED + count):
            view = views[i % UNDER_WAY]
            have = 0
            while have < size:
                got = connection.recv_into(view[have:])
                if not got:
                    raise EOFError
                have += got
            if i == CHECKED - 1:
                buffers.check()
    end = time.monotonic()
    buffers.check()
    return end


def send_plain(size: int, count: int) -> float:
    port = int(sys.stdin.readline())
    buffers = Buffers(size, filled=True)
    with socket.create_connection((os.environ["TRIGRAM_BENCH_PEER"], port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(CHECKED + count):
            if i == CHECKED:
                time.sleep(IDLE_SECONDS)
                start = time.monotonic()
            connection.sendall(buffers.memory[i % UNDER_WAY])
    return start


def pair(hosts: Hosts, kind: str, size: int, count: int, extra: dict[str, str]) -> float:
    """Bits per second of one run of `kind` from host 0 to host 1."""

    def begin(host: int, role: str, **pipes: Any) -> subprocess.Popen[str]:
        script = [sys.executable, __file__, "--role", role, "--kind", kind]
        sizes = ["--size", str(size), "--count", str(count)]
        env = {
            **os.environ,
            "TRIGRAM_IFACE": "eth0",
            "TRIGRAM_BENCH_ADDRESS": hosts.addresses[host],
            "TRIGRAM_BENCH_PEER": hosts.addresses[1 - host],
            **extra,
        }
        words = ["ip", "netns", "exec", hosts.names[host], *script, *sizes]
        return subprocess.Popen(words, env=env, text=True, **pipes)

    with begin(1, "receive", stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout
        with begin(0, "send", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
            try:
                start, _ = sender.communicate(receiver.stdout.readline(), timeout=LIMIT)
                end = receiver.stdout.read()
                if sender.wait(LIMIT) or receiver.wait(LIMIT):
                    raise RuntimeError(f"{kind} failed")
            finally:
                sender.kill()
                receiver.kill()
    return 8 * size * count / (float(end) - float(start))


def iperf(hosts: Hosts, seconds: float) -> float:
    """The goodput of iperf3 without its first second, in bits per second."""
    server_words = ["ip", "netns", "exec", hosts.names[1], "iperf3", "-s", "-1", "-p", str(PORT)]
    with subprocess.Popen(server_words, stdout=subprocess.DEVNULL) as server:
        try:
            time.sleep(0.3)
            words = ["iperf3", "-c", hosts.addresses[1], "-p", str(PORT), "-J", "-O", "1"]
            words += ["-t", str(max(2, round(seconds)))]
            done = subprocess.run(
                ["ip", "netns", "exec", hosts.names[0], *words], check=True, capture_output=True, text=True
            )
            return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"])
        finally:
            server.kill()


def candidates(args: argparse.Namespace, hosts: Hosts) -> dict[str, Callable[[], float]]:
    count = max(UNDER_WAY, round(args.seconds * args.expect * 1e9 / 8 / args.size))
    found: dict[str, Callable[[], float]] = {}
    if shutil.which("iperf3"):
        found["iperf3"] = lambda: iperf(hosts, args.seconds)
    else:
        print("iperf3 is not installed (apt-get install iperf3); it is left out", file=sys.stderr)
    found["plain TCP stream"] = lambda: pair(hosts, "plain", args.size, count, {})
    for chunk in args.chunks.split(","):
        for streams in args.streams.split(","):
            extra = {"TRIGRAM_NET_STREAMS": streams, "TRIGRAM_NET_CHUNK": chunk}
            name = f"plugin, {streams} x {chunk}"
            found[name] = lambda extra=extra: pair(hosts, "plugin", args.size, count, extra)  # type: ignore[misc]
    return found


def compare(args: argparse.Namespace) -> None:
    """Measures all candidates in turns, and prints the table."""
    from hosts import Hosts  # only here: the import takes seconds, and senders do not need it

    with Hosts(2, args.rate) as hosts:
        all_ = candidates(args, hosts)
        figures: dict[str, list[float]] = {name: [] for name in all_}
        for _ in range(args.repeats):
            for name, run in all_.items():
                figures[name].append(run() / 1e9)
    base = next(iter(figures))
    lines = [
        f"| {args.rate or 'unshaped'} | best Gbit/s | median Gbit/s | median / {base}'s |",
        "|---|---|---|---|",
    ]
    for name, runs in figures.items():
        median = statistics.median(runs)
        ratio = median / statistics.median(figures[base])
        lines.append(f"| {name} | {max(runs):.3f} | {median:.3f} | {ratio:.3f} |")
    print("\n".join(lines))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = f"net_plugin_{args.rate or 'unshaped'}"
        (args.out / f"{stem}.md").write_text("\n".join(lines) + "\n")
        (args.out / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", help="of the cables, as tc writes it; else unshaped")
    parser.add_argument("--streams", default="1,2,4,8")
    parser.add_argument("--chunks", default="512K", help="TRIGRAM_NET_CHUNK, with commas between")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run, roughly")
    parser.add_argument("--expect", type=float, help="Gbit/s, to know how many messages that is")
    parser.add_argument("--size", type=int, default=4 * MIB)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", choices=["send", "receive"], help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "send":
        print((send_plugin if args.kind == "plugin" else send_plain)(args.size, args.count))
    elif args.role == "receive":
        print((receive_plugin if args.kind == "plugin" else receive_plain)(args.size, args.count))
    else:
        if args.expect is None:
            args.expect = float(args.rate.removesuffix("gbit")) if (args.rate or "").endswith("gbit") else 20
        compare(args)


if __name__ == "__main__":
    main()
