"""What goes wrong on GPUs is told as on the CPU: disagreement, death, absence, and what is missing. Over
the stand-in (tests/support/gpu_standin.py), whose collectives hang where NCCL's would."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.support import gpu_standin, patience
from tests.support.harness import Died, await_flag, flag, run
from trigram import _core
from trigram.averaging.coded import CodedAverage
from trigram.averaging.groups import ModelGroups
from trigram.averaging.hierarchical import HierarchicalAverage, HostLevels
from trigram.codecs import find
from trigram.collectives import batch_send_recv
from trigram.collectives import work as works
from trigram.gpu import device, nccl
from trigram.gpu.host import CHUNK, HostRoute
from trigram.gpu.nccl import library

LIMIT = 15.0


def _error(call: Any) -> tuple[str, str, float]:
    """What a call raises, and after how long."""
    since = time.monotonic()
    try:
        call()
    except trigram.TrigramError as e:
        return type(e).__name__, str(e), time.monotonic() - since
    return "nothing", "", time.monotonic() - since


def _disagree(rank: int, world: int) -> list[Any]:
    told = []
    x, count = torch.ones(1000), 1000 if rank != 1 else 999
    told.append(_error(lambda: trigram.all_reduce(x[:count])))
    # The communicator was given up, and everybody makes a new one.
    trigram.all_reduce(x.fill_(1.0))
    assert x[0] == world
    told.append(_error(lambda: trigram.all_reduce(x, "max" if rank == 2 else "sum")))
    trigram.all_reduce(x.fill_(2.0))
    assert x[0] == 2 * world
    return told


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_ranks_that_disagree_are_told_and_go_on(way: str) -> None:
    for told in run(3, _disagree, env=gpu_standin.env(way), timeout=60):
        for name, text, _ in told:
            assert name in ("MismatchError", "AbortedError"), text
            assert "all_reduce(" in text
        assert "999 elements" in told[0][1]


def _raises_its_own_error(rank: int, world: int) -> str:
    """On a GPU, what only orders a stream knows of no error: the synchronous call waits on the host."""
    x = torch.ones(1000)
    trigram.all_reduce(x)
    nccl._OnStream.order = lambda call: None  # type: ignore[method-assign]
    return _error(lambda: trigram.all_reduce(x[: 999 + rank]))[0]


def test_a_synchronous_call_raises_its_own_error() -> None:
    for name in run(2, _raises_its_own_error, env=gpu_standin.env("nccl"), timeout=60):
        assert name in ("MismatchError", "AbortedError")


def _written_after_the_error(rank: int, world: int) -> float:
    x = torch.ones(1000)
    with pytest.raises(trigram.MismatchError):
        trigram.all_reduce(x, "max" if rank == 2 else "sum")
    x.fill_(7.0)
    time.sleep(0.5)
    return float((x - 7.0).abs().max())


def test_memory_is_the_callers_again_when_a_call_has_failed() -> None:
    """The collective was given to the stream, and is aborted while ranks write their results."""
    env = gpu_standin.env("nccl") | {"STANDIN_SLOW": "200"}
    assert run(3, _written_after_the_error, env=env, timeout=60) == [0.0] * 3


def _learns_between_two_calls(rank: int, world: int) -> None:
    sizes = (10, 12) if rank < 2 else (12, 10)
    first = trigram.all_reduce(torch.ones(sizes[0]), async_op=True)
    if rank == 1:
        limit = patience.Limit(LIMIT)
        while not first.is_completed():  # the others have made both calls
            assert not limit.is_over()
            time.sleep(0.01)
        time.sleep(0.2)
    second = trigram.all_reduce(torch.ones(sizes[1]), async_op=True)
    for work in (first, second):
        with pytest.raises(trigram.MismatchError, match=r"1[02] elements.*1[02] elements"):
            work.wait()
    x = torch.ones(5)
    trigram.all_reduce(x)
    assert x[0] == world


def test_a_rank_that_learns_of_a_failure_between_two_calls_numbers_them_as_the_others_do() -> None:
    run(3, _learns_between_two_calls, env=gpu_standin.env("nccl"), timeout=60)


def _cpu_and_gpu(rank: int, world: int) -> tuple[str, str, float]:
    from trigram.collectives import dispatch

    x = torch.ones(10)
    trigram.all_reduce(x)
    if rank == 0:
        dispatch.is_on_device = lambda t, asked: False
    return _error(lambda: trigram.all_reduce(x))


def test_a_cpu_tensor_on_one_rank_and_a_gpu_tensor_on_another() -> None:
    for name, text, _ in run(2, _cpu_and_gpu, env=gpu_standin.env("nccl"), timeout=60):
        assert name == "MismatchError" and "on a GPU" in text, text


def _dies(rank: int, world: int) -> Any:
    x = torch.ones(1 << 20)
    trigram.all_reduce(x)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(1000):
            trigram.all_reduce(x.fill_(1.0))
            assert x[0] == world, "a number that is nobody's sum"
    except trigram.PeerLostError as e:
        return e.rank, str(e)
    return None


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_a_dead_rank_is_named(way: str) -> None:
    since = time.monotonic()
    results = run(3, _dies, env=gpu_standin.env(way), dies=[1], timeout=60)
    for rank in (0, 2):
        assert results[rank] is not None and results[rank][0] == 1, results
        assert "all_reduce(sum, float32, 1048576 elements" in results[rank][1]
    assert time.monotonic() - since < patience.seconds(LIMIT + 10)


def _fills_the_stream(rank: int, world: int) -> tuple[int, int]:
    """Rank 1 never makes the calls that rank 0 makes until its stream has no room, and dies then."""
    trigram.all_reduce(torch.ones(8))
    if rank == 1:
        await_flag("full", 40)
        os.kill(os.getpid(), signal.SIGKILL)
    works: list[Any] = []
    counted: list[int] = []

    def watch() -> None:
        while not counted or len(works) > counted[-1]:
            counted.append(len(works))
            time.sleep(0.5)
        flag("full")

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3000):
        works.append(trigram.all_reduce(torch.ones(8), async_op=True))
    watcher.join()
    with pytest.raises(trigram.PeerLostError) as caught:
        works[0].wait()
    return caught.value.rank, counted[-1]


def test_a_call_that_waits_for_room_in_the_stream_ends_when_a_rank_dies() -> None:
    results = run(2, _fills_the_stream, env=gpu_standin.env("nccl"), dies=[1], timeout=60)
    who, made = results[0]
    assert who == 1 and 100 < made < 3000, results


def _never_comes(rank: int, world: int) -> tuple[str, str, float]:
    trigram.init(op_timeout=1.0)
    x = torch.ones(1000)
    trigram.all_reduce(x, timeout=30.0)
    if rank == 1:
        await_flag("told")
        late = _error(lambda: trigram.all_reduce(x))
        flag("late")
        return late
    told = _error(lambda: trigram.all_reduce(x))
    flag("told")
    await_flag("late")  # it has not left when the late one comes
    return told


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_a_rank_that_does_not_come_is_named_after_the_timeout(way: str) -> None:
    results = run(2, _never_comes, env=gpu_standin.env(way), timeout=60)
    name, text, seconds = results[0]
    assert name == "TimeoutError" and "rank 1" in text and 0.9 < seconds < patience.seconds(LIMIT), results
    assert results[1][0] in ("TimeoutError", "AbortedError"), results


def _is_stuck(rank: int, world: int) -> list[tuple[str, str, float]]:
    """All make the call, and NCCL does not get on with it on rank 1."""
    trigram.init(op_timeout=1.0)
    x = torch.ones(1000)
    trigram.all_reduce(x, timeout=30.0)
    if rank == 1:
        os.environ["STANDIN_STUCK"] = "1"
    trigram.barrier(timeout=30.0)
    told = [_error(lambda: trigram.all_reduce(x))]
    os.environ.pop("STANDIN_STUCK", None)
    # Over a new communicator; another rank may hear of the failure later.
    told.append(_error(lambda: trigram.all_reduce(x.fill_(1.0), timeout=30.0)))
    assert x[0] == world
    return told


def test_a_call_that_nccl_does_not_end_fails_after_the_timeout() -> None:
    results = run(3, _is_stuck, env=gpu_standin.env("nccl"), timeout=60)
    for (name, text, seconds), after in results:
        assert name in ("TimeoutError", "AbortedError") and after[0] == "nothing", results
        assert "all_reduce(sum, float32, 1000 elements" in text and "NCCL" in text, text
        assert 0.5 < seconds < patience.seconds(LIMIT), results
    assert any(told[0][0] == "TimeoutError" for told in results), results


def _combines_in_vain(rank: int, world: int, codec: str) -> tuple[str, str, float]:
    """Rank 1's part of the sum inside host 0 does not come, and the stream goes on, as a GPU's does."""
    group = trigram.init(op_timeout=1.5)
    nccl._OnStream.order = lambda call: None  # type: ignore[method-assign]
    x = torch.ones(64 * 1024)
    levels = HostLevels.of(ModelGroups(group), x)
    assert levels is not None
    int8 = find(codec or "int8")
    average = HierarchicalAverage(x, levels, lambda m, c: CodedAverage(m, c, int8, int8, (False, False)))

    def call() -> None:
        if codec:
            average.start(0)
            average.wait()
        else:
            trigram.all_reduce(x)

    call()
    if rank == 1:
        os.environ["STANDIN_STUCK"] = "1"
    trigram.barrier()
    return _error(call)


@pytest.mark.parametrize("codec", ["", "int8"])
def test_what_nccl_did_not_sum_is_sent_to_no_other_host(several_hosts: None, codec: str) -> None:
    env = gpu_standin.env("hierarchical")
    hosts = [0, 0, 1, 1]
    results = run(4, _combines_in_vain, codec, transport="auto", hosts=hosts, env=env, timeout=60)
    for name, _, seconds in results:
        assert name in ("TimeoutError", "AbortedError") and seconds < patience.seconds(LIMIT), results


def _recv_times_out(rank: int, world: int) -> tuple[str, str, float]:
    trigram.init(op_timeout=60.0)
    x = torch.ones(10)
    with pytest.raises(trigram.MisuseError, match="timeout=-1"):
        trigram.recv(x, 1 - rank, timeout=-1)
    if rank == 1:
        await_flag("told")  # it has not left
        return "", "", 0.0
    told = _error(lambda: trigram.recv(x, 1, timeout=0.5))
    flag("told")
    return told


def test_a_message_has_a_timeout_of_its_own() -> None:
    name, text, seconds = run(2, _recv_times_out, env=gpu_standin.env("nccl"), timeout=60)[0]
    assert name == "TimeoutError" and "rank 1" in text and 0.4 < seconds < patience.seconds(LIMIT), (
        name,
        text,
        seconds,
    )


def _is_interrupted(rank: int, world: int) -> int:
    """Ctrl-C in a synchronous call: who waits no longer does not take away what the call writes to."""
    x = torch.ones(1000)
    trigram.all_reduce(x)
    if rank == 1:
        await_flag("interrupted")
        trigram.all_reduce(x)
        flag("over")
        return 1
    actual = nccl._OnStream.wait

    def interrupted(call: Any, timeout: float | None = None) -> bool:
        nccl._OnStream.wait = actual  # type: ignore[method-assign]
        raise KeyboardInterrupt

    nccl._OnStream.wait = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trigram.all_reduce(x)
    held = sum(any(t is x for t in each._tensors) for each in works._held.works)  # type: ignore[attr-defined]
    flag("interrupted")
    await_flag("over")  # it has not left
    return held


def test_an_interrupted_call_keeps_its_memory() -> None:
    assert run(2, _is_interrupted, env=gpu_standin.env("nccl"), timeout=60) == [1, 1]


def _message_without_a_peer(rank: int, world: int) -> list[tuple[str, str, float]]:
    """Rank 1 is alive, and exchanges nothing before rank 0 has given up."""
    group = trigram.init(op_timeout=1.0)
    x, y = torch.ones(1000), torch.zeros(1000)
    messages = [(True, 1 - rank, x), (False, 1 - rank, y)]
    batch_send_recv(messages, group).wait()
    if rank == 1:
        await_flag("told")
    told = _error(lambda: batch_send_recv(messages, group).wait())
    flag("told")
    # On busy cores rank 1 may hear of it later than within the second of the calls above.
    after = _error(lambda: trigram.all_reduce(x.fill_(1.0), timeout=30.0))
    assert x[0] == world, after
    return [told, after]


def test_a_message_to_a_rank_that_does_not_come_fails_after_the_timeout() -> None:
    results = run(2, _message_without_a_peer, env=gpu_standin.env("nccl"), timeout=60)
    (name, text, seconds), after = results[0]
    assert (
        name == "TimeoutError" and "waiting for rank 1" in text and 0.9 < seconds < patience.seconds(LIMIT)
    ), results
    assert results[1][0][0] == "AbortedError" and "rank 0" in results[1][0][1], results
    assert after[0] == results[1][1][0] == "nothing", results


def _several_threads_wait(rank: int, world: int) -> tuple[bool, list[str]]:
    """For one call of many parts, and one more time each when it has ended."""
    group = trigram.init()
    x = torch.arange(10 * (CHUNK // 4) + 17, dtype=torch.float32)
    want, errors = x * world, []
    for _ in range(3):
        y = x.clone()
        if rank == 1:
            time.sleep(0.3)
        work = trigram.all_reduce(y, async_op=True, group=group)
        assert work is not None

        def wait(work: Any = work) -> None:
            try:
                work.wait()
                work.wait()
            except Exception as e:
                errors.append(repr(e))

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not torch.equal(y, want):
            return False, errors
    return True, errors


def test_several_threads_wait_for_one_call_through_the_host() -> None:
    results = run(2, _several_threads_wait, env=gpu_standin.env("host"), timeout=60)
    assert results == [(True, []), (True, [])]


class Streams(gpu_standin.StandIn):
    """Records which stream has waited for which; each thread has its own."""

    ordered: ClassVar[set[tuple[int, int]]] = set()

    def here(self) -> Callable[[], None]:
        made = threading.get_ident()
        return lambda: self.ordered.add((made, threading.get_ident()))


def _second_stream(rank: int, world: int, way: str) -> bool:
    """A thread of its own, whose stream is another, waits after the first has waited."""
    device.kinds["cpu"] = Streams
    x = torch.ones(1000)
    if way == "trigram":
        work: Any = trigram.all_reduce(x, async_op=True)
    else:
        dist.init_process_group("trigram")
        if way == "backend":
            work = dist.all_reduce(x, async_op=True)
        else:  # what is not contiguous is copied when it has arrived
            work = dist.all_reduce(torch.ones(10, 10)[:, :5], async_op=True)
    work.wait()
    Streams.ordered.clear()
    first = threading.get_ident()
    other = threading.Thread(target=work.wait)
    other.start()
    other.join()
    assert other.ident is not None
    return (first, other.ident) in Streams.ordered


@pytest.mark.parametrize("way", ["trigram", "backend", "copied"])
def test_each_wait_makes_its_stream_wait(way: str) -> None:
    assert run(2, _second_stream, way, env=gpu_standin.env("host"), timeout=60) == [True, True]


def _orders(rank: int, world: int) -> list[int]:
    """How often waits of the backend's call by NCCL have made a stream wait."""
    dist.init_process_group("trigram")
    work = dist.all_reduce(torch.ones(10), async_op=True)
    assert work is not None
    counts, order = [0], nccl._OnStream.order

    def counted(call: Any) -> None:
        counts[0] += 1
        order(call)

    nccl._OnStream.order = counted  # type: ignore[method-assign]
    for _ in range(3):
        work.wait()
        counts.append(counts[0])
    return counts


def test_each_wait_of_a_call_by_nccl_makes_its_stream_wait() -> None:
    assert run(2, _orders, env=gpu_standin.env("nccl"), timeout=60) == [[3, 1, 2, 3]] * 2


def _fails_inside_a_host(rank: int, world: int) -> list[tuple[str, str, float]]:
    """Rank 1 cannot take part in the sum inside its host; before, and after, all goes well."""
    group = trigram.init()
    x = torch.ones(1000)
    trigram.all_reduce(x)
    trigram.barrier()  # an abort of a communicator of NCCL ends all its calls, also those of before
    route = group.routes[x.device]
    assert isinstance(route, HostRoute) and route.levels is not None
    local = route.levels.local.routes[x.device]
    start = route.levels.start

    def fail(*args: Any) -> Any:
        raise trigram.TrigramError("on purpose")

    if rank == 1:
        route.levels.start = fail
    told = [_error(lambda: trigram.all_reduce(x))]
    route.levels.start = start
    assert isinstance(local, nccl.NcclRoute) and local.broken
    told.append(_error(lambda: trigram.all_reduce(x.fill_(1.0))))
    assert x[0] == world
    return told


def test_a_failure_inside_a_host_reaches_the_other_hosts(several_hosts: None) -> None:
    env = gpu_standin.env("hierarchical")
    results = run(4, _fails_inside_a_host, transport="auto", hosts=[0, 0, 1, 1], env=env, timeout=60)
    for rank, (told, after) in enumerate(results):
        assert told[0] == ("TrigramError" if rank == 1 else "AbortedError"), results
        assert "on purpose" in told[1] and told[2] < patience.seconds(LIMIT), results
        assert after[0] == "nothing", results


def _trains_and_dies(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(50, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
    model = trigram.with_bagua(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(50):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 50)).square().mean()
        flag(f"step-{step}-of-{rank}")
        if rank == 1 and step == 5:
            for other in (0, 2):  # they have ended the step before
                await_flag(f"step-5-of-{other}")
            os.kill(os.getpid(), signal.SIGKILL)
        before = [p.detach().clone() for p in model.parameters()]
        try:
            loss.backward()
        except trigram.PeerLostError as e:
            same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            return e.rank, step, same
        optimizer.step()
    return None


def test_training_ends_with_the_name_before_the_weights_are_touched() -> None:
    results = run(3, _trains_and_dies, env=gpu_standin.env("nccl"), dies=[1], timeout=60)
    assert results == [(1, 5, True), Died(-9), (1, 5, True)]


def _asks_for(rank: int, world: int) -> tuple[str, str, float]:
    return _error(lambda: trigram.all_reduce(torch.ones(3)))


def test_a_way_that_there_is_not_is_refused_on_all_ranks() -> None:
    env = gpu_standin.env("nccl") | {"TRIGRAM_GPU_TRANSPORT": "pigeon"}
    for name, text, _ in run(2, _asks_for, env=env):
        assert name == "ConfigError" and "pigeon" in text and "hierarchical" in text, text


def test_without_nccl_the_error_says_where_it_was_looked_for() -> None:
    env = gpu_standin.env("nccl") | {"TRIGRAM_NCCL_LIB": "/no/such/libnccl.so"}
    for name, text, _ in run(2, _asks_for, env=env):
        assert name == "UnsupportedError", text
        assert "rank 0" in text and "/no/such/libnccl.so from TRIGRAM_NCCL_LIB (no such file)" in text


def _sums(rank: int, world: int) -> float:
    x = torch.ones(3)
    trigram.all_reduce(x)
    return float(x[0])


def test_without_nccl_tensors_go_through_the_host_unless_nccl_was_asked_for() -> None:
    env = gpu_standin.env("auto") | {"TRIGRAM_NCCL_LIB": "/no/such/libnccl.so"}
    assert run(2, _sums, env=env) == [2.0, 2.0]


def _version(rank: int, world: int) -> str:
    try:
        return _core.Nccl([]).version
    except trigram.TrigramError as e:
        return f"{type(e).__name__} {e}"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"STANDIN_VERSION": "21700"}, "UnsupportedError a communicator needs NCCL 2.18 or newer; "),
        ({"STANDIN_VERSION": "22304"}, "2.23.4"),
        ({"TRIGRAM_NCCL_LIB": sys.executable}, "UnsupportedError libnccl.so.2 was not found"),
    ],
)
def test_a_library_is_looked_at_before_it_is_used(env: dict[str, str], said: str) -> None:
    (answer,) = run(1, _version, env=gpu_standin.libraries() | env)
    assert answer.startswith(said), answer


def _gpus(rank: int, world: int) -> str:
    try:
        return str(_core.gpus())
    except trigram.TrigramError as e:
        return f"{type(e).__name__} {e}"


def _nccl_of_torch(rank: int, world: int) -> tuple[str, int, bool, str, str]:
    nccl = library()
    fresh = nccl.unique_id() != nccl.unique_id()
    return nccl.version, len(nccl.unique_id()), fresh, nccl.path, _gpus(rank, world)


def test_the_nccl_that_torch_brings() -> None:
    """Real, without a GPU: it is found, says its version and makes an id; a communicator needs a driver."""
    ((version, length, fresh, path, gpus),) = run(1, _nccl_of_torch)
    want = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    assert (version, length, fresh) == (want, 128, True)
    assert path == "libnccl.so.2, already in the process"
    if not torch.cuda.is_available():
        assert gpus.startswith("UnsupportedError libcuda.so.1 was not found; install NVIDIA's driver")


def test_a_driver_without_a_gpu_is_said() -> None:
    (answer,) = run(1, _gpus, env=gpu_standin.libraries() | {"STANDIN_NO_GPU": "1"})
    assert answer == "UnsupportedError no CUDA device 0: CUDA_ERROR_NO_DEVICE"


def _parameters(rank: int, world: int) -> tuple[list[float], list[float], bool]:
    """Tensors that autograd watches, outside of `no_grad`, several times over the same pinned memory."""
    p = torch.nn.Parameter(torch.full((5,), float(rank)))
    for _ in range(3):
        trigram.broadcast(p, world - 1)
        work = trigram.all_reduce(p, async_op=True)
        assert work is not None
        work.wait()
    out = torch.zeros(world)
    trigram.all_gather(out, torch.nn.Parameter(torch.tensor([float(rank)])))
    return p.tolist(), out.tolist(), p.is_leaf and p.grad_fn is None


@pytest.mark.parametrize("way", ["nccl", "host"])
def test_parameters_are_tensors(way: str) -> None:
    want = ([8.0] * 5, [0.0, 1.0], True)
    assert run(2, _parameters, env=gpu_standin.env(way), timeout=60) == [want, want]
