"""The backend of torch.distributed next to gloo, to trigram's own calls and to with_bagua, in turn.

    python benches/backend.py [--ranks 2] [--seconds 0.4] [--parts calls,ddp,fsdp2] [--widths 512]
    python benches/hosts.py --hosts 2 --rate 1gbit -- benches/backend.py --parts fsdp2 --seconds 20

Each line gives medians in microseconds of calls that alternate, then the median and the quartiles of the
ratios of pairs. *torch alone* is the same call of torch on a process group that answers at once. Under a
launcher, the process is one rank of its job.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
from torch import nn
from torch._C._distributed_c10d import AllreduceOptions, _register_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import trigram
from trigram.integrations import fsdp

Calls = dict[str, Callable[[], object]]
_made = itertools.count()


def measure(calls: Calls, seconds: float) -> dict[str, list[float]]:
    """Times of each call in microseconds; the calls take turns in blocks of a few milliseconds."""
    agreed = torch.zeros(1)
    counts = {}
    for name, call in calls.items():
        call()
        began = time.perf_counter()
        for _ in range(3):
            call()
        agreed[0] = (time.perf_counter() - began) / 3
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        counts[name] = max(1, int(0.004 / agreed.item()))
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    end, more = time.perf_counter() + seconds * len(calls), torch.ones(1)
    while more.item():
        for name, call in calls.items():
            count = counts[name]
            began = time.perf_counter()
            for _ in range(count):
                call()
            blocks[name].append((time.perf_counter() - began) / count * 1e6)
        more[0] = float(time.perf_counter() < end or len(blocks[name]) < 5)
        dist.broadcast(more, 0)
    return blocks


class AtOnce(dist.ProcessGroup):
    """A process group whose sums do nothing: what remains is the time that torch itself takes."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch has this form too
        self.work = dist.group.WORLD.allreduce([torch.zeros(1)], AllreduceOptions())
        self.known_as = f"at once {next(_made)}"
        _register_process_group(self.known_as, self)

    def allreduce(self, given: object, options: object = None) -> dist.Work:
        """Answers."""
        return self.work


def small_calls(gloo: dist.ProcessGroup, numbers: int) -> Calls:
    """Calls on few bytes."""
    t, world = torch.zeros(numbers), dist.group.WORLD
    rank, other = dist.get_rank(), dist.get_rank() ^ 1
    ranks = dist.get_world_size()
    taken, given = [torch.zeros(numbers) for _ in range(ranks)], [torch.zeros(numbers) for _ in range(ranks)]
    torch_alone = AtOnce()
    operators = torch.ops._c10d_functional  # what compiled graphs call, without torch's wrappers in Python

    def ping(group: dist.ProcessGroup | None) -> None:
        if rank == 0:
            dist.send(t, other, group=group)
            dist.recv(t, other, group=group)
        elif rank == 1:
            dist.recv(t, other, group=group)
            dist.send(t, other, group=group)

    def our_ping() -> None:
        if rank == 0:
            trigram.send(t, other)
            trigram.recv(t, other)
        elif rank == 1:
            trigram.recv(t, other)
            trigram.send(t, other)

    return {
        "trigram.all_reduce": lambda: trigram.all_reduce(t),
        "dist.all_reduce": lambda: dist.all_reduce(t),
        "dist.all_reduce, torch alone": lambda: dist.all_reduce(t, group=torch_alone),
        "dist.all_reduce, gloo": lambda: dist.all_reduce(t, group=gloo),
        "async and wait": lambda: dist.all_reduce(t, async_op=True).wait(),
        "async and future": lambda: dist.all_reduce(t, async_op=True).get_future().wait(),
        "functional": lambda: funcol.wait_tensor(funcol.all_reduce(t, "sum", world)),
        "functional operator": lambda: operators.wait_tensor(
            operators.all_reduce_(t, "sum", world.group_name)
        ),
        "functional operator, torch alone": lambda: operators.wait_tensor(
            operators.all_reduce_(t, "sum", torch_alone.known_as)
        ),
        "functional, gloo": lambda: funcol.wait_tensor(funcol.all_reduce(t, "sum", gloo)),
        "send and recv": lambda: ping(None),
        "send and recv, gloo": lambda: ping(gloo),
        "trigram.send and recv": our_ping,
        "all_gather to a list": lambda: dist.all_gather(taken, t),
        "all_gather to a list, gloo": lambda: dist.all_gather(taken, t, group=gloo),
        "all_to_all of lists": lambda: dist.all_to_all(taken, given),
        "trigram.all_to_all of lists": lambda: trigram.all_to_all(taken, given),
    }


def layers(width: int = 512) -> nn.Sequential:
    """Ten layers; 10 MB of gradients where they are 512 wide."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(10)))


def step_of(net: nn.Module, width: int = 512) -> Callable[[], None]:
    """A training step."""
    optimizer = torch.optim.SGD(net.parameters(), 1e-6)
    x = torch.randn(8, width)

    def step() -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step


def sharded(group: dist.ProcessGroup | None, ranks: int, width: int) -> nn.Module:
    """The same model under FSDP2, each layer on its own."""
    net = layers(width)
    mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu", list(range(ranks)))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def run(rank: int, ranks: int, port: int | None, seconds: float, parts: list[str], widths: list[int]) -> None:
    """One rank."""
    if port is not None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("trigram", rank=rank, world_size=ranks)
    gloo = dist.new_group(backend="gloo")

    def report(title: str, times: dict[str, list[float]], pairs: list[tuple[str, str]]) -> None:
        if rank == 0:
            print(title)
            for name, blocks in times.items():
                print(f"  {name:28} {statistics.median(blocks):10.1f} us")
            for one, other in pairs:
                both = list(zip(times[one], times[other], strict=True))
                low, ratio, high = statistics.quantiles([a / b for a, b in both], n=4)
                apart = statistics.median(a - b for a, b in both)
                print(f"  {one} / {other}: {ratio:.2f} ({low:.2f} to {high:.2f}), {apart:+.1f} us")

    pairs = [
        ("dist.all_reduce", "trigram.all_reduce"),
        ("dist.all_reduce, gloo", "dist.all_reduce"),
        ("functional, gloo", "functional"),
        ("send and recv, gloo", "send and recv"),
        ("send and recv", "trigram.send and recv"),
        ("all_gather to a list, gloo", "all_gather to a list"),
        ("all_to_all of lists", "trigram.all_to_all of lists"),
    ]
    if "calls" in parts:
        report("4 bytes", measure(small_calls(gloo, 1), seconds), pairs)
        report("1 MiB", measure(small_calls(gloo, 1 << 18), seconds), pairs)
    if "ddp" in parts:
        steps: Calls = {
            "no communication": step_of(layers()),
            "DDP, gloo": step_of(DDP(layers(), process_group=gloo)),
            "DDP": step_of(DDP(layers())),
            "DDP, views": step_of(DDP(layers(), gradient_as_bucket_view=True)),
            "with_bagua": step_of(trigram.with_bagua(layers())),
        }
        report(
            "a step with 10 MB of gradients",
            measure(steps, seconds),
            [("DDP", "with_bagua"), ("DDP, views", "with_bagua"), ("DDP, gloo", "DDP")],
        )
    for width in widths if "fsdp2" in parts else ():
        registered, used = sharded(None, ranks, width), sharded(None, ranks, width)
        registered.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
        fsdp.use(used)
        steps = {
            "FSDP2, gloo": step_of(sharded(gloo, ranks, width), width),
            "FSDP2": step_of(sharded(None, ranks, width), width),
            "FSDP2, registered": step_of(registered, width),
            "FSDP2, fsdp.use": step_of(used, width),
        }
        report(
            f"a step of FSDP2 with ten layers of {4e-6 * width * (width + 1):.2f} MB",
            measure(steps, seconds),
            [("FSDP2, gloo", name) for name in steps if name != "FSDP2, gloo"],
        )
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.4, help="for each line")
    parser.add_argument("--parts", default="calls,ddp,fsdp2", help="what to measure")
    parser.add_argument("--widths", default="512", help="of the layers that FSDP2 wraps, with , between")
    args = parser.parse_args()
    parts, widths = args.parts.split(","), [int(width) for width in args.widths.split(",")]
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None, args.seconds, parts, widths)
        return
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(run, (args.ranks, port, args.seconds, parts, widths), args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
