"""Measures what it costs when a rank joins an elastic job: its own time, and the others'.

    python benches/joins.py [--hosts 4] [--rate 1gbit] [--millions 1,4,16] [--optimizer adam] [--step 0.2]
        [--algorithms gradient_allreduce,diloco] [--out joins-out]

Ranks on hosts with shaped cables train a model of so many million parameters; a step sleeps for `--step`
seconds in the place of computing. The last one is killed. Another process in its place, which has imported
everything, joins a while later. It is in when its first step has ended. *wire* is the time that its state
(weights and the optimizer's) takes on its cable. Writes results.json and table.md. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hosts
import torch

import trigram
from trigram.runtime.launch import end, free_port

STEPS, DIES, COMES = 60, 12, 24
"""How many a rank makes, in which one of them the last dies, and after which it comes again."""
WIDTH = 1000


def _optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(parameters, 1e-4)
    return torch.optim.SGD(parameters, 1e-4, momentum=0.9 if kind == "momentum" else 0.0)


def rank_main(args: argparse.Namespace) -> None:
    """One rank; writes when its steps began and ended."""
    rank, joins = int(os.environ["RANK"]), "TRIGRAM_BENCH_JOINS" in os.environ
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(args.millions[0])]
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    optimizer = _optimizer(args.optimizer, model.parameters())
    if joins:
        (args.out / "standby").touch()
        while not (args.out / "go").exists():
            time.sleep(0.01)
    began = time.time()
    trigram.init(elastic=True)
    more = {"every": 8} if args.algorithms[0] in ("diloco", "local_sgd") else {}
    model = trigram.with_bagua(model, args.algorithms[0], optimizer=optimizer, elastic=True, **more)
    admitted = time.time()
    x = torch.ones(1, WIDTH)
    times = []
    for step in range(int(trigram.stats(model)["steps"]), STEPS):
        if rank == args.hosts - 1 and step == DIES and not joins:
            os.kill(os.getpid(), 9)
        since = time.time()
        optimizer.zero_grad()
        time.sleep(args.step)
        model(x).square().mean().backward()
        optimizer.step()
        times.append((step, since, time.time(), len(trigram.stats(model)["ranks"])))
        if step == COMES and rank == 0:
            (args.out / "go").touch()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    nbytes = sum(t.nbytes for t in [*model.parameters(), *tensors])
    told = {"began": began, "admitted": admitted, "times": times, "bytes": nbytes}
    (args.out / f"rank{rank}.json").write_text(json.dumps(told))
    trigram.shutdown()


def measure(args: argparse.Namespace, millions: int, algorithm: str) -> dict[str, Any]:
    """One job."""
    for file in args.out.iterdir():
        if file.name in ("go", "standby") or file.name.startswith("rank"):
            file.unlink()
    argv = [sys.executable, __file__, *(f"--{name}={getattr(args, name)}" for name in ("hosts", "step"))]
    argv += [f"--optimizer={args.optimizer}", f"--millions={millions}", f"--algorithms={algorithm}"]
    argv += [f"--out={args.out.resolve()}"]
    with hosts.Hosts(args.hosts, args.rate) as cables, ExitStack() as stack:
        shared = {
            "WORLD_SIZE": str(args.hosts),
            "MASTER_ADDR": cables.addresses[0],
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "TRIGRAM_IFACE": hosts.INTERFACE,
            "TRIGRAM_TRANSPORT": "tcp",
        }
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(end, processes, hosts.EndSignals(stack))
        for rank in (*range(args.hosts), args.hosts - 1):
            mine = {"RANK": str(rank), "LOCAL_RANK": "0"}
            if len(processes) == args.hosts:
                mine["TRIGRAM_BENCH_JOINS"] = "1"
            where = ["ip", "netns", "exec", cables.names[rank]]
            environment = {**os.environ, **shared, **mine}
            processes.append(subprocess.Popen([*where, *argv], env=environment, stderr=subprocess.DEVNULL))
        for process in processes:
            process.wait(300)
    told = {rank: json.loads((args.out / f"rank{rank}.json").read_text()) for rank in range(args.hosts)}
    joined = told[args.hosts - 1]
    first = joined["times"][0]
    others = [each for rank in range(args.hosts - 1) for each in told[rank]["times"]]
    usual = statistics.median(to - since for step, since, to, n in others if DIES + 2 < step < COMES)
    meanwhile = [to - since for _, since, to, _ in others if to > joined["began"] and since < first[2]]
    nbytes = joined["bytes"]
    wire = 8e-6 * nbytes / hosts.megabits(args.rate)
    return {
        "algorithm": algorithm,
        "millions": millions,
        "bytes": nbytes,
        "wire": wire,
        "step": usual,
        "joins": first[2] - joined["began"],
        "admitted": joined["admitted"] - joined["began"],
        "longest": max(meanwhile),
    }


def markdown(runs: list[dict[str, Any]]) -> str:
    """A row for each job."""
    lines = [
        "| algorithm | state, MB | wire, s | a step, s | in after, s | less a step, of wire "
        "| others' longest step, s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for run in runs:
        more = (run["joins"] - run["step"]) / run["wire"]
        lines.append(
            f"| {run['algorithm']} | {run['bytes'] / 1e6:.0f} | {run['wire']:.2f} | {run['step']:.3f} "
            f"| {run['joins']:.2f} | {more:.2f} | {run['longest']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measures all; in a rank, trains."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--millions", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adam"), default="adam")
    parser.add_argument("--step", type=float, default=0.2, help="seconds")
    algorithms = ["gradient_allreduce", "diloco"]
    parser.add_argument("--algorithms", type=lambda text: text.split(","), default=algorithms)
    parser.add_argument("--out", type=Path, default=Path("joins-out"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:
        rank_main(args)
        return 0
    runs = []
    for algorithm in args.algorithms:
        for millions in args.millions:
            runs.append(measure(args, millions, algorithm))
            print(runs[-1], file=sys.stderr, flush=True)
    (args.out / "results.json").write_text(json.dumps({"arguments": str(vars(args)), "runs": runs}, indent=1))
    (args.out / "table.md").write_text(markdown(runs))
    print(markdown(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
