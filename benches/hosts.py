"""Creates several hosts on one machine, network namespaces with shaped cables to a switch, and starts ranks
on them.

The other scripts of this folder use it; it is also a command:

    python benches/hosts.py --hosts 4 --rate 1gbit -- -m trigram bench all_reduce --against gloo
    python benches/hosts.py --rate 100mbit --delay 50 --loss 0.1 -- -m trigram bench all_reduce

Cables with a delay or loss lead to `switch.c`, a program that forwards frames (compiled with `cc`), because
not every kernel has netem. Namespaces need root and iproute2. The names of everything created here contain
the process id; all of it is removed when the `with` block ends, also by an exception or SIGTERM, but not by
SIGKILL.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType

from trigram.runtime.end_signals import EndSignals
from trigram.runtime.launch import end, free_port

NETWORK = "10.79.0."
INTERFACE = "eth0"
SECOND_NETWORK, SECOND_INTERFACE = "10.80.0.", "eth1"
# The default of some kernels is BBR, whose pacing halves the rate of an unshaped cable between namespaces.
CONGESTION_CONTROL = "cubic"
# A small bucket and small segments, so that no burst exceeds the rate. Faster cables need a larger bucket,
# because the kernel's timer is too coarse to fill them from this one.
BURST_KB, SEGMENT = 32, "16384"
GRACE_SECONDS = 5.0
MOST_QUEUE_MS = 50.0
"""What waits longer for a far cable is dropped; twice the delay, if that is more."""


class Hosts:
    """A context manager that creates hosts with one address each, and cables with a rate in both directions.

    Args:
        count: The number of hosts.
        rate: A rate as `tc` writes it ("1gbit", "100mbit"), or one for each host, separated by commas; None:
            the cables are not shaped.
        delay: Milliseconds from host to host, one way. With it or loss, `rate` must be given.
        loss: Percent of frames that are lost, each way.
        second: The rate of a second cable of each host, to another switch; None: there is none.

    Raises:
        ValueError: The number of rates is wrong, or far cables have no rate, or second ones.
    """

    def __init__(
        self,
        count: int,
        rate: str | None = None,
        delay: float = 0.0,
        loss: float = 0.0,
        second: str | None = None,
    ) -> None:
        self.count = count
        rates = rate.split(",") if rate else []
        self.rates = rates * count if len(rates) == 1 else rates
        if self.rates and len(self.rates) != count:
            raise ValueError(f"{len(self.rates)} rates for {count} hosts")
        if (delay or loss) and not self.rates:
            raise ValueError("cables with a delay or loss need a rate")
        if second and (delay or loss):
            raise ValueError("second cables have no delay and no loss")
        self.delay, self.loss, self.second = delay, loss, second
        self.forwarder: subprocess.Popen[bytes] | None = None
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.prefix = f"tgbench{os.getpid()}"
        self.names = [f"{self.prefix}h{host}" for host in range(count)]
        self.addresses = [f"{NETWORK}{host + 1}" for host in range(count)]
        self.switch = f"{self.prefix}sw"

    def __enter__(self) -> Hosts:
        signal.signal(signal.SIGTERM, leave)
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Removes the namespaces, and with them the cables and the switch."""
        if self.forwarder is not None:
            stop([self.forwarder])
        if self.folder is not None:
            self.folder.cleanup()
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _make(self) -> None:
        # The switch is in its own namespace, so that the network of the machine does not change.
        far = bool(self.delay or self.loss)
        _run("ip", "netns", "add", self.switch)
        for name in self.names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self._connect(None if far else "br0", "port", INTERFACE, NETWORK, [] if far else self.rates)
        if self.second:
            self._connect("br1", "second", SECOND_INTERFACE, SECOND_NETWORK, [self.second] * self.count)
        if far:
            self._forward()

    def _connect(
        self, bridge: str | None, port: str, interface: str, network: str, rates: Sequence[str]
    ) -> None:
        """Gives each host a cable to a bridge of the switch; without one, their other ends are left open."""
        outside = ("ip", "-n", self.switch)
        if bridge:
            _run(*outside, "link", "add", bridge, "type", "bridge")
            _run(*outside, "link", "set", bridge, "up")
        for host, name in enumerate(self.names):
            inside, end = ("ip", "-n", name), f"{port}{host}"
            address = f"{network}{host + 1}"
            _run(*outside, "link", "add", end, "type", "veth", "peer", "name", interface, "netns", name)
            _run(*outside, "link", "set", end, *(("master", bridge) if bridge else ()), "up")
            _run(*inside, "addr", "add", f"{address}/24", "dev", interface)
            _run(*inside, "link", "set", interface, "up")
            # Set for the route, because not every kernel allows a namespace to change its default.
            route = (f"{network}0/24", "dev", interface, "src", address, "congctl", CONGESTION_CONTROL)
            _run(*inside, "route", "replace", *route)
            if rates:
                shape(self.prefix, host, rates[host], interface, port)

    def _forward(self) -> None:
        """Starts the program that is the switch of far cables."""
        self.folder = tempfile.TemporaryDirectory()
        program = Path(self.folder.name) / "switch"
        _run("cc", "-O2", str(Path(__file__).with_name("switch.c")), "-o", str(program))
        for name in self.names:
            _run("ip", "netns", "exec", name, str(program), "--plain", INTERFACE)
        cables = [
            f"port{host}:{megabits(rate)}:{self.delay / 2}:{self.loss}"
            for host, rate in enumerate(self.rates)
        ]
        queue = str(max(MOST_QUEUE_MS, 2 * self.delay))
        self.forwarder = subprocess.Popen(
            ["ip", "netns", "exec", self.switch, str(program), queue, "1", *cables],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        if self.forwarder.stdout is None or self.forwarder.stdout.readline() != b"ready\n":
            raise OSError("the switch of far cables has not started")


def megabits(rate: str) -> float:
    """The number of Mbit/s of a rate as `tc` writes it: "1gbit" or "100mbit"."""
    return float(rate.removesuffix("mbit").removesuffix("gbit")) * (1000 if rate.endswith("gbit") else 1)


def shape(prefix: str, host: int, rate: str, interface: str = INTERFACE, port: str = "port") -> None:
    """Sets the rate of a host's cable in both directions, also while it is in use.

    Args:
        prefix: The prefix of the hosts' names: `Hosts.prefix`, or `TRIGRAM_BENCH_HOSTS` in a rank.
        host: The index of the host.
        rate: A rate as `tc` writes it.
        interface: The interface at the host's end.
        port: What the name of the other end begins with.
    """
    for namespace, device in ((f"{prefix}h{host}", interface), (f"{prefix}sw", f"{port}{host}")):
        _run("ip", "-n", namespace, "link", "set", device, "gso_max_size", SEGMENT)
        gigabits = float(rate.removesuffix("gbit")) if rate.endswith("gbit") else 1.0
        burst = f"{round(BURST_KB * max(1.0, gigabits**2))}kb"
        tbf = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *tbf)


def start(
    argv: Sequence[str],
    ranks: int,
    hosts: Hosts | None = None,
    extra: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> int:
    """Runs `python ARGV` once per rank, with torchrun's variables and one thread, and waits for all.

    Args:
        argv: The arguments of `python`.
        ranks: The number of processes.
        hosts: Rank i runs on host i modulo the number of hosts; None: all ranks run on this machine.
        extra: Additional environment variables.
        quiet: Discard the output of rank 0 too; that of other ranks is always discarded.

    Returns:
        0, or the exit code of the first rank that failed; then the other ranks are ended.
    """
    count = hosts.count if hosts else 1
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(-(-ranks // count)),
        "MASTER_ADDR": hosts.addresses[0] if hosts else "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    if hosts:
        shared |= {"GLOO_SOCKET_IFNAME": INTERFACE, "TRIGRAM_IFACE": INTERFACE}
        shared["TRIGRAM_BENCH_HOSTS"] = hosts.prefix
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        signals = EndSignals(stack)
        stack.callback(end, processes, signals)
        for rank in range(ranks):
            where = ["ip", "netns", "exec", hosts.names[rank % count]] if hosts else []
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank // count)}
            if hosts:
                of_rank["TRIGRAM_BENCH_ADDRESS"] = hosts.addresses[rank % count]
            processes.append(
                subprocess.Popen(
                    [*where, sys.executable, *argv],
                    env={**os.environ, **shared, **of_rank, **(extra or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 and not quiet else subprocess.DEVNULL,
                )
            )
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                # Give the other ranks time to detect the failure and report it, before they are ended.
                deadline = time.monotonic() + GRACE_SECONDS
                while time.monotonic() < deadline and any(each.poll() is None for each in processes):
                    signals.pause(0.05)
                break
            signals.pause(0.05)
        codes = [process.poll() for process in processes]
    return next((code for code in codes if code), 0)


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends programs that this one has started."""
    with ExitStack() as stack:
        end(processes, EndSignals(stack))


def sent_bytes() -> int:
    """Bytes that this host has sent over its cable, including headers and acknowledgements; 0 if it has no
    cable."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE and "TRIGRAM_BENCH_ADDRESS" in os.environ:
            return int(counts.split()[8])
    return 0


def address() -> str:
    """The address of this rank's host."""
    return os.environ.get("TRIGRAM_BENCH_ADDRESS", "127.0.0.1")


def leave(number: int, _frame: FrameType | None) -> None:
    """A signal handler that ends the process with an exception, so that `with` blocks clean up."""
    raise SystemExit(128 + number)


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def run_ranks(
    parser: argparse.ArgumentParser, rank_main: Callable[[argparse.Namespace], None], out: str, ranks: int
) -> int:
    """Starts the ranks of a measurement on this machine; in a rank, measures. Adds `--ranks` and `--out`."""
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--out", type=Path, default=Path(out))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if "RANK" not in os.environ:
        return start(sys.argv, args.ranks)
    rank_main(args)
    return 0


def main() -> int:
    """Runs `python ARGUMENTS` once on each host."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, help="as many as hosts, if not given")
    parser.add_argument("--rate", help="of each cable, or one for each with commas; else unshaped")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds between hosts, one way")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of frames, each way")
    parser.add_argument("arguments", nargs="+", help="behind --: what python runs")
    args = parser.parse_args()
    with Hosts(args.hosts, args.rate, args.delay, args.loss) as namespaces:
        return start(args.arguments, args.ranks or args.hosts, namespaces)


if __name__ == "__main__":
    sys.exit(main())
