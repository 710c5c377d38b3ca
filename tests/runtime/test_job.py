"""Several ranks as threads of one process, each with a job of its own."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trigram
from tests.support import patience
from tests.support.harness import run
from tests.support.threads import as_threads, returned
from trigram.data import BalancedBatchSampler

IN_STEP = [
    "gradient_allreduce",
    "bytegrad",
    "decentralized",
    "central/int8/every:2",
    "gossip:ring/int8/sync",
    "powersgd",
    "local_sgd",
    "sparta",
]
ASYNCHRONOUS = ["async", "async_low_precision", "async_decentralized", "gossip:ring/int8/async"]

_building = threading.Lock()


def _model(rank: int) -> nn.Module:
    with _building:  # random numbers are the process's
        torch.manual_seed(rank)
        return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))


def _trained(rank: int, world: int, algorithm: str, in_threads: bool = True) -> list[torch.Tensor]:
    model = trigram.with_bagua(_model(rank), algorithm=algorithm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = torch.Generator().manual_seed(rank)
    for _ in range(8):
        loss = model(torch.randn(4, 6, generator=inputs)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with trigram.consensus(model):
        weights = [p.detach().clone() for p in model.parameters()]
    trigram.unwrap(model)
    if not in_threads:
        return [w.tolist() for w in weights]
    return weights


def _all_in_threads(rank: int, world: int, algorithms: list[str]) -> dict[str, list[list[Any]]]:
    found = {}
    for algorithm in algorithms:
        weights = returned(as_threads(3, _trained, algorithm))
        found[algorithm] = [[w.tolist() for w in mine] for mine in weights]
    assert not trigram.is_initialized(), "the process itself has joined no job"
    return found


def _all_in_processes(rank: int, world: int, algorithms: list[str]) -> dict[str, list[Any]]:
    return {algorithm: _trained(rank, world, algorithm, False) for algorithm in algorithms}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_training_has_the_bits_of_processes(transport: str) -> None:
    [threads] = run(1, _all_in_threads, IN_STEP, transport=transport, timeout=120)
    processes = run(3, _all_in_processes, IN_STEP, transport=transport, timeout=120)
    for algorithm in IN_STEP:
        assert threads[algorithm] == [of[algorithm] for of in processes], algorithm


def test_asynchronous_training_ends_in_agreement() -> None:
    [found] = run(1, _all_in_threads, ASYNCHRONOUS, timeout=120)
    for algorithm, (first, *others) in found.items():
        assert all(mine == first for mine in others), algorithm


def _raises(rank: int, world: int) -> float:
    trigram.barrier()
    if rank == 1:
        raise ValueError("planned, of the test")
    began = time.monotonic()
    try:
        trigram.all_reduce(torch.ones(4))
    except trigram.PeerLostError as e:
        assert "rank 1" in str(e)
        return time.monotonic() - began
    raise AssertionError("the lost rank was not missed")


def _one_raises(rank: int, world: int) -> tuple[str, float]:
    first, lost, third = as_threads(3, _raises)
    assert isinstance(lost, ValueError)
    return str(lost), max(first, third)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_who_raises_is_missed_at_once(transport: str) -> None:
    [(text, seconds)] = run(1, _one_raises, transport=transport)
    assert text == "planned, of the test" and seconds < patience.seconds(5)


def _outside(rank: int, world: int) -> None:
    trigram.init()  # the process's own job, of this one rank
    mine = trigram.with_bagua(nn.Linear(2, 2))

    def inside(rank: int, world: int) -> tuple[int, int]:
        with pytest.raises(trigram.MisuseError, match="entered"), job:
            pass
        sum_of_ranks = torch.tensor([float(rank)])
        trigram.all_reduce(sum_of_ranks)
        assert sum_of_ranks.item() == 1.0
        return trigram.rank(), trigram.world_size()

    with trigram.Job() as job:
        assert not trigram.is_initialized()
    assert trigram.is_initialized() and trigram.world_size() == 1
    with job:  # it may be entered again when it has been left
        trigram.init(dist.HashStore(), 0, 1)
        assert returned(as_threads(2, inside)) == [(0, 2), (1, 2)]
        assert trigram.world_size() == 1
        theirs = trigram.with_bagua(nn.Linear(2, 2))
        assert trigram.is_wrapped(theirs)
    assert repr(job) == "Job()"
    with job.here(), pytest.raises(trigram.MisuseError, match="has been shut down"):
        trigram.all_reduce(torch.ones(1))  # a thread that is late; it would be a job of one rank
    with pytest.raises(trigram.MisuseError, match=r"asked for rank 1, but this is rank 0 already"):
        trigram.init(dist.HashStore(), 1, 2)
    assert trigram.is_wrapped(mine)
    trigram.stats(mine)
    with pytest.raises(trigram.MisuseError, match=r"trigram\.shutdown has ended"):
        trigram.stats(theirs)


def _without_blocks(rank: int, world: int) -> list[str]:
    store, said = dist.HashStore(), []

    def work(rank: int) -> None:
        try:
            trigram.init(store, rank, 2, init_timeout=3)
        except trigram.TrigramError as e:
            said.append(f"{type(e).__name__}: {e}")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(said)


def test_threads_without_blocks_are_told_so() -> None:
    [(missed, said)] = run(1, _without_blocks)
    assert missed.startswith("MisuseError: init: asked for rank") and "trigram.Job()" in missed
    assert said.startswith("TimeoutError"), said


def test_a_block_is_a_job_beside_that_of_the_process() -> None:
    run(1, _outside)


def _helped(rank: int, world: int) -> int:
    """A thread of the script's own that works for the rank."""
    job, seen = trigram.Job.current(), []

    def work() -> None:
        seen.append(trigram.is_initialized())
        with pytest.raises(trigram.MisuseError, match="this thread is in no job"):
            trigram.all_reduce(torch.ones(1))
        with job.here():
            group = trigram.new_group([0, 1])
            value = torch.tensor([rank])
            trigram.all_reduce(value, group=group)
            seen.append((trigram.rank(), value.item()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, (rank, 1)]
    return trigram.world_size()


def _with_callbacks(rank: int, world: int) -> float:
    """The callback of each rank waits for those of the others."""
    beside, done = trigram.new_group(range(world)), threading.Event()
    value, second = torch.ones(4), torch.full((1,), float(rank))

    def then(future: torch.futures.Future[Any]) -> None:
        trigram.all_reduce(second, group=beside)
        assert trigram.rank() == rank
        done.set()

    work = trigram.all_reduce(value, async_op=True)
    assert work is not None
    work.get_future().then(then)
    assert done.wait(20)
    return second.item()


def _out_of_step(rank: int, world: int) -> list[float]:
    """Rank 1 waits for the future of a call before it makes the next; rank 0 has asked for both."""
    values = [torch.ones(1), torch.ones(1)]
    futures = []
    for value in values:
        work = trigram.all_reduce(value, async_op=True)
        assert work is not None
        futures.append(work.get_future().then(lambda f: f.value()[0].item()))
        if rank == 1:
            futures[-1].wait()
    return [f.wait() for f in futures]


def _threads_of_threads(rank: int, world: int) -> None:
    assert returned(as_threads(2, _helped)) == [2, 2]
    assert returned(as_threads(3, _with_callbacks)) == [3.0, 3.0, 3.0]
    assert returned(as_threads(2, _out_of_step)) == [[2.0, 2.0]] * 2


def test_other_threads_work_for_a_rank() -> None:
    run(1, _threads_of_threads)


def _kept_apart(rank: int, world: int, folder: str) -> int:
    """What is numbered, recorded or measured is that of the rank."""
    if rank:  # ranks make different numbers of other things
        time.sleep(0.1)
    with trigram.timeline(f"{folder}/trace.json"):
        sampler = BalancedBatchSampler([1.0] * 12, batch_size=2, speeds="measured")
        sampler.set_epoch(1)
        list(sampler)
        _trained(rank, world, "gradient_allreduce")
    trigram.barrier()
    return len(list(Path(folder).glob("trace-rank*.json")))


def _apart(rank: int, world: int, folder: str) -> list[int]:
    return returned(as_threads(3, _kept_apart, folder))


def test_what_a_rank_keeps_is_its_own(tmp_path: Path) -> None:
    [found] = run(1, _apart, str(tmp_path), env={"TRIGRAM_DUMP": str(tmp_path)})
    assert found == [3, 3, 3]


def _elastic(rank: int, world: int) -> tuple[list[int], list[list[int]]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sizes: list[list[int]] = [[], [], [], []]
    joined = threading.Event()

    def train(place: int, rank: int) -> None:
        with trigram.Job():
            mine = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
            trigram.init(mine, rank, 3, elastic=True)
            model = _model(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            model = trigram.with_bagua(model, optimizer=optimizer, elastic=True)
            while not (joined.is_set() and len(sizes[place]) > 10):
                if place == 1 and len(sizes[place]) == 5:
                    raise ValueError("planned, of the test")
                optimizer.zero_grad()
                model(torch.ones(2, 6)).sum().backward()
                optimizer.step()
                sizes[place].append(trigram.world_size())
                if place == 3 and len(sizes[place]) == 5:
                    joined.set()
            trigram.step(model)

    def quietly(place: int, rank: int) -> None:
        with contextlib.suppress(ValueError):
            train(place, rank)

    threads = [threading.Thread(target=quietly, args=(r, r), daemon=True) for r in range(3)]
    for thread in threads:
        thread.start()
    threads[1].join(30)
    again = threading.Thread(target=quietly, args=(3, 1), daemon=True)
    again.start()
    again.join(40)
    return [len(s) for s in sizes], sizes


@pytest.mark.waits
def test_a_lost_rank_comes_back_as_another_thread() -> None:
    [(steps, sizes)] = run(1, _elastic, timeout=100)
    assert steps[1] == 5 and steps[3] >= 5
    assert sizes[0][0] == 3 and 3 in sizes[0][sizes[0].index(2) :], sizes


def _random(rank: int, world: int, seed: int) -> None:
    """Jobs one after another in the same threads, of random sizes and algorithms."""
    chosen = random.Random(seed)
    for _ in range(6):
        size, algorithm = chosen.randint(1, 4), chosen.choice([*IN_STEP, *ASYNCHRONOUS])
        first, *others = returned(as_threads(size, _trained, algorithm))
        assert all(all(map(torch.equal, first, mine)) for mine in others), (size, algorithm)


@pytest.mark.parametrize("seed", range(2))
def test_one_job_after_another(seed: int) -> None:
    run(1, _random, seed, timeout=100)
