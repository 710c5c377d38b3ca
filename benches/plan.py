"""Compares predicted step times with measured ones, between hosts that are network namespaces.

    python benches/plan.py --hosts 2 --rate 1gbit --out plan-out

`trigram plan` measures the inputs in a training of its own: computation, links, codecs. Then `steptime.py`
measures some algorithms on the same hosts, and a second plan measures the inputs again: the ratio of the two
tells how steady the machine was. The table has predicted over measured time by algorithm, with the mean of
both plans. Namespaces need root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import hosts
import torch

import trigram
from trigram.algorithms.parse import find
from trigram.cli import workloads
from trigram.plan import measuring
from trigram.plan.inputs import CodecCost, Compute, Costs, ExactCodes, Job, Machines, Tensor
from trigram.plan.step import predict

METHODS = (
    "gradient_allreduce,bytegrad,decentralized,low_precision_decentralized,async,async_low_precision,"
    "async_decentralized,local_sgd,diloco,powersgd,topk,signsgd"
)
ALONE = "compute alone"


def train() -> None:
    """The training of `steptime.py`, until its measurement ends it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = trigram.with_bagua(workloads.TinyGPT(384, 6, 6))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    data = workloads.data("gpt")
    while True:
        optimizer.zero_grad()
        workloads.loss_of(model, data.x[:4], data.y[:4]).backward()
        optimizer.step()


def planned(namespaces: hosts.Hosts, file: Path, steps: int) -> Job:
    """The inputs that a plan has measured."""
    setting = {measuring.VARIABLE: f"{steps}:exact:{file}"}
    if hosts.start([__file__, "--train"], namespaces.count, namespaces, setting, quiet=True):
        raise SystemExit("the measurement of the inputs has failed")
    return job_of(json.loads(file.read_text())["inputs"])


def job_of(given: dict[str, Any]) -> Job:
    """The inputs of a plan.json."""
    tensors = tuple(Tensor(tuple(t["shape"]), t["ready"]) for t in given["compute"]["tensors"])
    codecs = {name: CodecCost(**cost) for name, cost in given["costs"]["codecs"].items()}
    return Job(
        Compute(**given["compute"] | {"tensors": tensors}),
        Machines(**given["machines"] | {"rates": tuple(given["machines"]["rates"])}),
        Costs(**given["costs"] | {"codecs": codecs, "exact": _exact(given["costs"].get("exact"))}),
    )


def _exact(given: dict[str, Any] | None) -> ExactCodes | None:
    return given and ExactCodes(**given | {"cost": CodecCost(**given["cost"])})


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of every cable")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--out", type=Path, default=Path("plan-out"))
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train()
    args.out.mkdir(parents=True, exist_ok=True)
    measure = [str(Path(__file__).with_name("steptime.py")), "--hosts", str(args.hosts), "--rate", args.rate]
    measure += ["--repeats", "1", "--steps", str(args.steps), "--untimed", "3", "--out", str(args.out)]
    measure += ["--methods", f"{ALONE},{args.methods}"]
    with hosts.Hosts(args.hosts, args.rate) as namespaces:
        jobs = [planned(namespaces, (args.out / "before.json").absolute(), args.steps)]
        if hosts.start(measure, args.hosts, namespaces, quiet=True):
            raise SystemExit("steptime.py has failed")
        jobs.append(planned(namespaces, (args.out / "after.json").absolute(), args.steps))
    rows = json.loads((args.out / f"{args.hosts}x{args.rate}.json").read_text())["rows"]
    times = {row["method"]: row["ms"] for row in rows}
    alone = [1e3 * job.compute.step for job in jobs]
    machines = jobs[0].machines
    print(
        f"{args.hosts} hosts, {args.rate}: {machines.rates[0] / 1e6:.1f} MB/s, a hop of "
        f"{1e6 * machines.latency:.0f} us, {1e9 * jobs[0].costs.wire:.2f} ns of a processor per byte; "
        f"computation {alone[0]:.0f} ms before, {times[ALONE]:.0f} between, {alone[1]:.0f} after\n"
    )
    print("| algorithm | measured, ms | predicted, ms | predicted / measured |\n|---|---:|---:|---:|")
    errors = []
    for name in args.methods.split(","):
        predicted = statistics.fmean(
            1e3 * predict(job, find(name), 4 << 20, name == "local_sgd").seconds for job in jobs
        )
        ratio = predicted / times[name]
        errors.append(abs(ratio - 1))
        print(f"| {name} | {times[name]:.0f} | {predicted:.0f} | {ratio:.2f} |")
    print(f"\nmedian error {100 * statistics.median(errors):.0f} %, worst {100 * max(errors):.0f} %")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
