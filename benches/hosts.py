"""Several hosts on one machine: network namespaces on shaped cables to a switch; and ranks started on them.

Used by the other scripts of this folder, and a command of its own:

    python benches/hosts.py --hosts 4 --rate 1gbit -- -m trigram bench all_reduce --against gloo

Namespaces need root and iproute2; everything made here has this process's id in its name, and is gone when
the `with` block ends, however it ends (but for SIGKILL).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType

from trigram.cli.launch import end, free_port

NETWORK = "10.79.0."
INTERFACE = "eth0"
# Some kernels' default is BBR, whose pacing halves what an unshaped cable between namespaces carries.
CONGESTION_CONTROL = "cubic"
# A small bucket and small segments, so that nothing passes faster than the rate. Faster cables have a larger
# one: the kernel wakes up too seldom to fill them from this.
BURST_KB, SEGMENT = 32, "16384"
GRACE_SECONDS = 5.0


class Hosts:
    """A context manager: so many hosts, one address each, whose cables carry `rate` in both directions.

    Args:
        count: How many hosts.
        rate: What `tc` calls a rate ("1gbit", "100mbit"), or one for each host with commas between
            them; None leaves the cables unshaped.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        self.count = count
        rates = rate.split(",") if rate else []
        self.rates = rates * count if len(rates) == 1 else rates
        if self.rates and len(self.rates) != count:
            raise ValueError(f"{len(self.rates)} rates for {count} hosts")
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
        """Takes everything away; cables and switch go with their namespaces."""
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def _make(self) -> None:
        # The switch has a namespace of its own: the machine's network stays as it is.
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for host, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{host}"
            inside, outside = ("ip", "-n", name), ("ip", "-n", self.switch)
            _run("ip", "netns", "add", name)
            _run(*inside, "link", "set", "lo", "up")
            _run(*outside, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run(*outside, "link", "set", port, "master", "br0", "up")
            _run(*inside, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run(*inside, "link", "set", INTERFACE, "up")
            # By route: not every kernel lets a namespace change its default.
            route = (f"{NETWORK}0/24", "dev", INTERFACE, "src", address, "congctl", CONGESTION_CONTROL)
            _run(*inside, "route", "replace", *route)
            if self.rates:
                shape(self.prefix, host, self.rates[host])


def shape(prefix: str, host: int, rate: str) -> None:
    """Gives a host's cable a rate, both ways, also while it is in use.

    Args:
        prefix: Of the hosts' names: `Hosts.prefix`, or `TRIGRAM_BENCH_HOSTS` in a rank.
        host: Which.
        rate: As `tc` writes it.
    """
    for namespace, device in ((f"{prefix}h{host}", INTERFACE), (f"{prefix}sw", f"port{host}")):
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
        argv: The command line behind `python`.
        ranks: How many processes.
        hosts: Where: rank i on host i modulo the number of hosts; None: all on this machine.
        extra: Further environment variables.
        quiet: Rank 0 prints nothing either.

    Returns:
        0, or the exit code of the first rank that failed; the others are ended then.
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
    signal.signal(signal.SIGTERM, leave)
    with ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(end, processes)
        for rank in range(ranks):
            where = ["ip", "netns", "exec", hosts.names[rank % count]] if hosts else []
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank // count)}
            if hosts:
                own["TRIGRAM_BENCH_ADDRESS"] = hosts.addresses[rank % count]
            processes.append(
                subprocess.Popen(
                    [*where, sys.executable, *argv],
                    env={**os.environ, **shared, **own, **(extra or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 and not quiet else subprocess.DEVNULL,
                )
            )
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                # The others find out by themselves and say what they know; then they are ended.
                deadline = time.monotonic() + GRACE_SECONDS
                while time.monotonic() < deadline and any(each.poll() is None for each in processes):
                    time.sleep(0.05)
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
    return next((code for code in codes if code), 0)


def sent_bytes() -> int:
    """Bytes that this host has sent over its cable, headers and acknowledgements included; 0 without one."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE and "TRIGRAM_BENCH_ADDRESS" in os.environ:
            return int(counts.split()[8])
    return 0


def address() -> str:
    """In a rank: its host's address."""
    return os.environ.get("TRIGRAM_BENCH_ADDRESS", "127.0.0.1")


def leave(number: int, _frame: FrameType | None) -> None:
    """A signal handler that ends this process as an exception does, so that `with` blocks are left."""
    raise SystemExit(128 + number)


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def run_ranks(
    parser: argparse.ArgumentParser, rank_main: Callable[[argparse.Namespace], None], out: str, ranks: int
) -> int:
    """Starts the ranks of a measurement on this machine, or is one; `--ranks` and `--out` are added."""
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
    parser.add_argument("arguments", nargs="+", help="behind --: what python runs")
    args = parser.parse_args()
    with Hosts(args.hosts, args.rate) as namespaces:
        return start(args.arguments, args.ranks or args.hosts, namespaces)


if __name__ == "__main__":
    sys.exit(main())
