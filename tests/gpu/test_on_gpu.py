"""On a GPU: `make test-gpu`. Ranks share it, each a host of its own to NCCL; what they give is compared
with torch, with DistributedDataParallel over NCCL, and with the same training on the CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import trigram
from tests.support import elastic_run, gpu_rehearsal, patience
from tests.support.harness import ROOT, Died, Ranks, await_flag, flag, free_port, run
from trigram.gpu import routes
from trigram.runtime.group import Group

gpu_rehearsal.use()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

cannot_be_rehearsed = pytest.mark.skipif(
    gpu_rehearsal.REHEARSES, reason="the stand-in has no graphs, and torch no NCCL"
)

WAYS = ["nccl", "host"]
OPS = {"sum": torch.sum, "min": torch.amin, "max": torch.amax, "prod": torch.prod, "avg": torch.mean}


def _take(rank: int) -> torch.device:
    """This rank's GPU."""
    return gpu_rehearsal.device(rank)


def _inputs(world: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(-4, 5, (world, n), generator=generator).to(dtype)


def _same(got: torch.Tensor, want: torch.Tensor, op: str, world: int) -> None:
    if op == "avg" and world & (world - 1):  # NCCL multiplies by a rounded 1/n, and rounds each product
        few = 8 * torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, want, rtol=few, atol=few)
    else:
        assert torch.equal(got, want), (got.dtype, got.numel(), op)


def _collectives(rank: int, world: int) -> None:
    device = _take(rank)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        for n in (1, 1000, 1 << 20):
            x = _inputs(world, n * world, dtype)
            mine = x[rank].to(device)
            for op, combine in OPS.items():
                if op == "avg" and not dtype.is_floating_point:
                    continue
                want = combine(x.double(), 0).to(dtype)
                t = mine.clone()
                trigram.all_reduce(t, op)
                _same(t.cpu(), want, op, world)
                out = torch.empty(n, dtype=dtype, device=device)
                trigram.reduce_scatter(out, mine, op)
                _same(out.cpu(), want[rank * n : (rank + 1) * n], op, world)
            wide = torch.empty(world, n * world, dtype=dtype, device=device)
            trigram.all_gather(wide, mine)
            assert torch.equal(wide.cpu(), x)
            t = mine.clone()
            trigram.broadcast(t, world - 1)
            assert torch.equal(t.cpu(), x[-1])
            out = torch.empty_like(mine)
            trigram.all_to_all(out, mine)
            assert torch.equal(out.view(world, n).cpu(), x.view(world, world, n)[:, rank])
            gathered = torch.empty_like(wide) if rank == 0 else None
            trigram.gather(gathered, mine, 0)
            assert gathered is None or torch.equal(gathered.cpu(), x)
            part = torch.empty(n, dtype=dtype, device=device)
            trigram.scatter(part, mine if rank == 0 else None, 0)
            assert torch.equal(part.cpu(), x[0].view(world, n)[rank])
            works = [trigram.all_reduce(mine.clone(), async_op=True) for _ in range(5)]
            for work in reversed(works):
                assert work is not None and work.wait() and work.is_completed()
    right = (rank + 1) % world
    got, mine = torch.empty(1000, device=device), torch.full((1000,), float(rank), device=device)
    work = trigram.recv(got, (rank - 1) % world, async_op=True)
    trigram.send(mine, right)
    assert work is not None and work.wait() and torch.equal(got, torch.full_like(got, (rank - 1) % world))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_collectives(way: str, world: int) -> None:
    run(world, _collectives, env={"TRIGRAM_GPU_TRANSPORT": way}, timeout=240)


def _net(device: torch.device) -> torch.nn.Module:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 8)).to(device)


def _train(model: Any, rank: int, device: torch.device, steps: int, optimizer: Any = None) -> torch.Tensor:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(32, 64, generator=generator).to(device)
        (model(x) - x[:, :8].sin()).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


def _as_ddp(rank: int, world: int) -> bool:
    device = _take(rank)
    dist.init_process_group(gpu_rehearsal.backend())
    ours = _train(trigram.with_bagua(_net(device)), rank, device, 20)
    of_ddp = None if gpu_rehearsal.REHEARSES else [device]
    ddp = torch.nn.parallel.DistributedDataParallel(_net(device), device_ids=of_ddp)
    return torch.equal(ours, _train(ddp, rank, device, 20))


def test_trains_as_ddp_bit_for_bit() -> None:
    assert run(2, _as_ddp, env={"TRIGRAM_GPU_TRANSPORT": "nccl"}, timeout=120) == [True, True]


def _as_on_the_cpu(rank: int, world: int, algorithm: str, options: dict[str, Any]) -> float:
    device, cpu = _take(rank), torch.device("cpu")
    weights = []
    for where in (cpu, device):
        net = _net(where)
        given = dict(options)
        optimizer = None
        if algorithm == "qadam":
            optimizer = given["optimizer"] = trigram.QAdam(net.parameters(), lr=0.005)
        model = trigram.with_bagua(net, algorithm, **given)
        weights.append(_train(model, rank, where, 8, optimizer).double())
    return float((weights[0] - weights[1]).norm() / weights[0].norm())


ALGORITHMS: list[tuple[str, dict[str, Any]]] = [
    ("gradient_allreduce", {}),
    ("bytegrad", {}),
    ("topk", {"fraction": 0.1}),
    ("signsgd", {}),
    ("powersgd", {"warmup_steps": 2}),
    ("qadam", {"warmup_steps": 3}),
    ("local_sgd", {"every": 2}),
    ("decentralized", {}),
    ("low_precision_decentralized", {}),
    ("gossip:ring/full/sync", {}),
    ("push_sum", {}),
]


@pytest.mark.parametrize(("algorithm", "options"), ALGORITHMS, ids=[a for a, _ in ALGORITHMS])
@pytest.mark.parametrize("way", WAYS)
def test_trains_as_on_the_cpu(way: str, algorithm: str, options: dict[str, Any]) -> None:
    env = {"TRIGRAM_GPU_TRANSPORT": way}
    for far in run(2, _as_on_the_cpu, algorithm, options, env=env, timeout=120):
        assert far < 1e-2, far


def _learns(rank: int, world: int, algorithm: str) -> tuple[float, float]:
    device = _take(rank)
    net = _net(device)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(7)).to(device)

    def loss() -> float:
        with torch.no_grad():
            return float((net(x) - x[:, :8].sin()).square().mean())

    before = loss()
    model = trigram.with_bagua(net, algorithm)
    _train(model, rank, device, 100)
    trigram.consensus(model)
    return before, loss()


@pytest.mark.parametrize(
    "algorithm",
    ["async", "async_low_precision", "async_decentralized", "async_low_precision_decentralized"],
)
@pytest.mark.parametrize("way", WAYS)
def test_asynchronous_training_learns(way: str, algorithm: str) -> None:
    for before, after in run(2, _learns, algorithm, env={"TRIGRAM_GPU_TRANSPORT": way}, timeout=120):
        assert after < 0.7 * before


def _dies(rank: int, world: int) -> Any:
    device = _take(rank)
    x = torch.ones(1 << 22, device=device)
    trigram.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(10_000):
            work = trigram.all_reduce(x, async_op=True)
            assert work is not None
            work.wait()
    except trigram.PeerLostError as e:
        y = torch.ones(10, device=device) * 2  # the GPU is free again
        return e.rank, float(y.sum())
    return None


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_rank_is_named(way: str) -> None:
    results = run(3, _dies, env={"TRIGRAM_GPU_TRANSPORT": way}, dies=[1], timeout=60)
    assert results == [(1, 20.0), Died(-9), (1, 20.0)]


def _two_hosts(rank: int) -> torch.device:
    """Ranks 0 and 1 are one host to Trigram, ranks 2 and 3 another."""

    def hosts(group: Group) -> list[list[int]]:
        found = ([p for p, r in enumerate(group.ranks) if r // 2 == host] for host in (0, 1))
        return [places for places in found if places]

    Group.hosts = hosts  # type: ignore[method-assign]
    return _take(rank)


def _sums_in_two_levels(rank: int, world: int) -> bool:
    device = _two_hosts(rank)
    for n in (1, 1000, 100_003, 1 << 20):
        x = _inputs(world, n)
        for op in ("sum", "avg", "max"):
            t = x[rank].clone().to(device)
            trigram.all_reduce(t, op)
            assert torch.equal(t.cpu(), OPS[op](x.double(), 0).float()), (n, op)
    return routes.is_hierarchical(trigram.init(), device)


def test_sums_in_two_levels() -> None:
    env = {"TRIGRAM_GPU_TRANSPORT": "hierarchical"}
    assert run(4, _sums_in_two_levels, env=env, timeout=120) == [True] * 4


def _trains_in_two_levels(rank: int, world: int, algorithm: str) -> float:
    device = _two_hosts(rank)
    weights = []
    for where in (torch.device("cpu"), device):
        model = trigram.with_bagua(_net(where), algorithm)
        weights.append(_train(model, rank, where, 8).double())
    return float((weights[0] - weights[1]).norm() / weights[0].norm())


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_training_in_two_levels(algorithm: str) -> None:
    env = {"TRIGRAM_GPU_TRANSPORT": "hierarchical"}
    assert max(run(4, _trains_in_two_levels, algorithm, env=env, timeout=120)) < 1e-2


def _told(call: Callable[[], Any]) -> str:
    try:
        call()
    except trigram.TrigramError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def _goes_wrong(rank: int, world: int) -> list[str]:
    """Ranks disagree; one comes too late; the GPU of one is busy for longer than a call may last. After each
    the next call is right."""
    device = _take(rank)
    trigram.init(op_timeout=2.0)
    x = torch.ones(1000, device=device)

    def next_is_right(after: str) -> None:
        torch.cuda.synchronize()
        flag(f"{after}-{rank}")
        for other in range(world):
            await_flag(f"{after}-{other}", 30)
        trigram.all_reduce(x.fill_(rank + 1.0))
        assert float(x[-1]) == world * (world + 1) / 2

    next_is_right("start")
    told = [_told(lambda: trigram.all_reduce(x[: 1000 if rank else 999]))]
    next_is_right("disagreement")
    if rank == 1:
        await_flag("told", 30)
    told.append(_told(lambda: trigram.all_reduce(x)))
    flag("told")
    next_is_right("absence")
    if gpu_rehearsal.REHEARSES:
        return told
    if rank == 1:
        torch.cuda._sleep(12_000_000_000)  # type: ignore[no-untyped-call]  # clock cycles: 6 s and more
    told.append(_told(lambda: trigram.all_reduce(x)))
    next_is_right("busy")
    return told


@pytest.mark.parametrize("way", WAYS)
def test_errors_are_told_and_the_next_call_is_right(way: str) -> None:
    results = run(3, _goes_wrong, env={"TRIGRAM_GPU_TRANSPORT": way}, timeout=120)
    assert any(told[0].startswith("MismatchError") for told in results), results
    for rank, told in enumerate(results):
        assert told[0].startswith(("MismatchError", "AbortedError")) and "999 elements" in told[0], results
        assert all(t.startswith(("TimeoutError", "AbortedError")) for t in told[1:]), results
        assert rank == 1 or "rank 1" in told[1], results


def _loses_a_rank(rank: int, world: int, *args: Any) -> dict[str, Any]:
    torch.set_default_device(_take(rank))
    results = elastic_run.train(rank, world, *args)
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in results.items()}


@pytest.mark.parametrize("way", [*WAYS, "shrink"])
def test_an_elastic_job_goes_on_without_a_rank(way: str) -> None:
    dies = {1: 6, 2: 12}
    env = {"TRIGRAM_GPU_TRANSPORT": "nccl" if way == "shrink" else way}
    env |= {"TRIGRAM_GPU_SHRINK": "1"} if way == "shrink" else {}
    with Ranks(4, _loses_a_rank, 20, "gradient_allreduce", dies, 0.02, env=env) as ranks:
        results = ranks.results(120, dies=dies)
    first = elastic_run.the_same(results, [0, 3])
    assert first["history"][0] == (0, 1, 2, 3) and first["history"][-1] == (0, 3)
    want = elastic_run.reference(first["history"])
    assert float((first["weights"] - want).norm() / want.norm()) < 1e-9


def _over_our_backend(rank: int, world: int) -> tuple[bool, float]:
    """DDP and FSDP over the backend of torch.distributed, beside `with_bagua`."""
    device = _take(rank)
    dist.init_process_group("trigram")
    ours = _train(trigram.with_bagua(_net(device)), rank, device, 8)
    of_ddp = None if gpu_rehearsal.REHEARSES else [device]
    ddp = torch.nn.parallel.DistributedDataParallel(_net(device), device_ids=of_ddp)
    same = torch.equal(ours, _train(ddp, rank, device, 8))
    net = _net(device)
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    _train(net, rank, device, 8, optimizer)
    full = torch.cat([p.full_tensor().detach().flatten() for p in net.parameters()]).cpu()  # type: ignore[attr-defined]
    return same, float((full - ours).norm() / ours.norm())


@cannot_be_rehearsed
def test_ddp_and_fsdp_train_over_our_backend() -> None:
    for same, far in run(2, _over_our_backend, env={"TRIGRAM_GPU_TRANSPORT": "nccl"}, timeout=120):
        assert same and far < 1e-5, (same, far)


def _captured(rank: int, world: int) -> float:
    device = _take(rank)
    x = torch.ones(1000, device=device)
    trigram.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    x.fill_(1.0)
    with torch.cuda.graph(graph):
        trigram.all_reduce(x)
    for _ in range(3):
        x.fill_(1.0)
        graph.replay()
    torch.cuda.synchronize()
    return float(x[0])


@cannot_be_rehearsed
def test_collectives_are_captured_in_graphs() -> None:
    assert run(2, _captured, env={"TRIGRAM_GPU_TRANSPORT": "nccl"}, timeout=60) == [2.0, 2.0]


PLAIN = """
import os, sys, torch, torch.distributed as dist
os.environ["NCCL_HOSTID"] = "rank" + os.environ["RANK"]
torch.cuda.set_device(0)
dist.init_process_group("nccl")
x = torch.ones(1 << 20, device="cuda")
for _ in range(20):
    dist.all_reduce(x.fill_(1.0))
torch.cuda.synchronize()
assert float(x[0]) == 2.0
"""


@cannot_be_rehearsed
def test_nccl_goes_through_the_plugin() -> None:
    from pathlib import Path

    plugin = Path(trigram.__file__).parent / "libnccl-net-trigram.so"
    env = os.environ | {
        "NCCL_NET_PLUGIN": str(plugin),
        "NCCL_NET": "Trigram",
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
        "NCCL_DEBUG": "INFO",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PLAIN],
            cwd=ROOT,
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=patience.seconds(120))[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said[0]
    assert "Using network Trigram" in said[0] and "via NET/Trigram" in said[0]
