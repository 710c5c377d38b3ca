"""What averaging gradients adds to backward of a model of many small parameters, beside
DistributedDataParallel.

    trigram run -n 2 benches/hooks.py [--params 2000] [--values 64]

A chain of products of vectors, one parameter each, so that nearly all time is the engine's of autograd. Three
copies of it train in turns in one process: plain, with DDP over gloo, and with ``with_bagua``. A row is one
backward pass of each; what a library adds is the difference to the plain one of the same row. All ranks are
at the same step before each pass. The table has the quartiles of the rows, of rank 0.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trigram


class Chain(nn.Module):
    """Multiplies its input by one parameter after the other."""

    def __init__(self, params: int, values: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.ones(values)) for _ in range(params))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, of the input's shape."""
        for p in self.factors:
            x = x * p
        return x


def train(model: nn.Module, values: int) -> Callable[[], float]:
    """A step of the model; it returns the seconds that its backward pass took."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(values)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x).sum()
        trigram.barrier()
        began = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - began
        optimizer.step()
        return took

    return step


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The quartiles, in milliseconds."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low * 1e3, middle * 1e3, high * 1e3


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=int, default=2000)
    parser.add_argument("--values", type=int, default=64, help="of each parameter")
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--algorithm", default="gradient_allreduce")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trigram.init()
    dist.init_process_group("gloo")
    plain = Chain(args.params, args.values)
    ddp = DistributedDataParallel(Chain(args.params, args.values))
    ours = trigram.with_bagua(Chain(args.params, args.values), algorithm=args.algorithm)
    steps = {
        "plain": train(plain, args.values),
        "DistributedDataParallel": train(ddp, args.values),
        f"with_bagua {args.algorithm}": train(ours, args.values),
    }
    rows = [{name: step() for name, step in steps.items()} for _ in range(10 + args.rows)][10:]
    same = torch.allclose(ddp.module.factors[0], ours.factors[0])
    if trigram.rank() == 0:
        print(f"{args.params} parameters of {args.values} values, {trigram.world_size()} ranks\n")
        print("| | backward, ms (quartiles) | added, ms (quartiles) | added per parameter, us |")
        print("|---|---|---|---|")
        for name in steps:
            low, middle, high = quartiles([row[name] for row in rows])
            a, b, c = quartiles([row[name] - row["plain"] for row in rows])
            each = b / args.params * 1e3
            print(f"| {name} | {low:.2f} {middle:.2f} {high:.2f} | {a:.2f} {b:.2f} {c:.2f} | {each:.2f} |")
    if not same:
        raise SystemExit("hooks: the weights of DDP and of with_bagua differ")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
