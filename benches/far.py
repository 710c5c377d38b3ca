"""Measures all_reduce over long and lossy links, beside gloo, and beside iperf3 on the same cables.

    python benches/far.py --rate 100mbit,1gbit --delay 10,50 --loss 0,0.1,1 --hosts 2

Hosts are network namespaces behind `switch.c` (see `hosts.py`; needs root, `cc` and iperf3). Each cell of
rates, delays and losses has fresh cables. iperf3 sends from one host to another with cubic and with BBR,
with one stream and with eight; the table has the best of the four. `floors` is the time in parts of what no
all_reduce can beat: the payload over the cable, and one hop (two hosts) or two. `of iperf3` is the rate of
the payload of one direction beside iperf3's: it contains the hops. Calls run for `--seconds` in each cell, at
least once; a contestant that takes longer than `--limit` seconds for one has no figure.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hosts
from paired_hosts import PAYLOAD, Contestant

CHOICES = (("cubic", 1), ("cubic", 8), ("bbr", 1), ("bbr", 8))


def iperf(where: hosts.Hosts, control: str, streams: int, seconds: int) -> float:
    """Mbit/s that iperf3 carries from the first host to the second; 0 if it fails."""
    inside = ["ip", "netns", "exec"]
    server = subprocess.Popen(
        [*inside, where.names[1], "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(0.5)
        client = [*inside, where.names[0], "iperf3", "-c", where.addresses[1], "-J", "-O", "3"]
        client += ["-C", control, "-P", str(streams), "-t", str(seconds)]
        done = subprocess.run(client, check=False, capture_output=True, timeout=seconds + 60)
        return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 1e6
    except (KeyError, ValueError, subprocess.TimeoutExpired):
        return 0.0
    finally:
        hosts.stop([server])


def measure(team: Contestant, size: int, seconds: float, limit: float) -> list[float]:
    """Seconds of calls; none if one takes longer than the limit, and then the contestant is of no use."""
    times: list[float] = []
    began = time.monotonic()
    while not times or time.monotonic() - began < seconds:
        for each in team.asks:
            each.write(f"{size} 1\n")
        for each in team.answers:
            left = began + limit + len(times) * limit - time.monotonic()
            if not select.select([each], [], [], max(left, 0.0))[0]:
                return []
        times.append(max(json.loads(each.readline())[0] for each in team.answers))
    # In each request one call is checked and not counted: the first of a connection has found its rate.
    return times


def cell(args: argparse.Namespace, rate: str, delay: float, loss: float) -> None:
    """Measures with one kind of cables, and prints the rows."""
    with tempfile.TemporaryDirectory() as folder, hosts.Hosts(args.hosts, rate, delay, loss) as where:
        best, choice = max((iperf(where, *each, args.iperf), each) for each in CHOICES)
        name = f"{choice[0]} x{choice[1]}"
        for text in args.contestants:
            team = Contestant(text, where, Path(folder), 1, "all_reduce", None)
            try:
                for size in args.sizes:
                    times = measure(team, size, args.seconds, args.limit)
                    share = 2 * (args.hosts - 1) / args.hosts * size
                    hops = 1 if args.hosts == 2 else 2
                    floor = hops * delay / 1000 + share * 8 / (hosts.megabits(rate) * 1e6 * PAYLOAD)
                    cells = [str(args.hosts), rate, f"{delay:g}", f"{loss:g}", f"{best:.0f} ({name})"]
                    cells += [f"{size / 2**20:g}", team.name]
                    if times:
                        took = statistics.median(times)
                        cells += [f"{1000 * took:.0f}", f"{took / floor:.2f}"]
                        cells += [f"{share * 8 / took / 1e6 / best:.2f}" if best else "", str(len(times))]
                    else:
                        cells += [f"over {1000 * args.limit:.0f}", "", "", "0"]
                    print("| " + " | ".join(cells) + " |", flush=True)
                    if not times:
                        break
            finally:
                team.end()


def main() -> int:
    """Measures all cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="100mbit,1gbit", help="with commas")
    parser.add_argument("--delay", default="10,50", help="milliseconds one way, with commas")
    parser.add_argument("--loss", default="0,0.1,1", help="percent each way, with commas")
    parser.add_argument("--sizes", default="1048576,8388608,26214400", help="bytes, with commas")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each size")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one call")
    parser.add_argument("--iperf", type=int, default=6, help="seconds for each run of iperf3")
    parser.add_argument("contestants", nargs="*", default=["gloo", "trigram=python"])
    args = parser.parse_args()
    args.sizes = [int(each) for each in args.sizes.split(",")]
    print("| hosts | rate | ms one way | loss % | iperf3, Mbit/s | MiB | | ms | floors | of iperf3 | calls |")
    print("|---:|---|---:|---:|---|---:|---|---:|---:|---:|---:|")
    for rate in args.rate.split(","):
        for delay in args.delay.split(","):
            for loss in args.loss.split(","):
                cell(args, rate, float(delay), float(loss))
    return 0


if __name__ == "__main__":
    sys.exit(main())
