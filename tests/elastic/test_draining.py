"""Ranks that are asked to leave an elastic job: they end their step, hand over and go; the others go on."""

from __future__ import annotations

import http.server
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import trigram
from tests.support import patience
from tests.support.checks import close, raises, says
from tests.support.elastic_run import batch, come, loss_of, model, optimizer, reference, weights
from tests.support.harness import Died, Ranks, await_flag, flag, free_port, run, say, until
from tests.support.harness import scratch as scratch_of_rank
from trigram.elastic import draining, membership, notices
from trigram.elastic.join_queue import JoinQueue
from trigram.runtime.group import Group
from trigram.steps.elastic_model import ElasticModel

pytestmark = pytest.mark.waits

GRADIENTS = ["gradient_allreduce", "bytegrad", "sharded"]
IN_STEP = ["local_sgd", "diloco", "decentralized", "low_precision_decentralized", "push_sum"]
APART = ["async", "async_decentralized"]


def _trains(
    rank: int,
    world: int,
    steps: int,
    drains: dict[int, int],
    algorithm: str = "gradient_allreduce",
    how: str = "call",
    pause: float = 0.0,
    again: bool = False,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A rank; those of ``drains`` are asked to leave when they begin these steps."""
    trigram.init(elastic=True)
    net, aborted = model(), [0]
    opt = optimizer(net)
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=True, bucket_mb=0.001, **(options or {}))
    abort_calls = ElasticModel.abort_calls

    def counted(part: ElasticModel) -> None:
        aborted[0] += 1
        abort_calls(part)

    ElasticModel.abort_calls = counted
    first = trigram.stats(net)["steps"]
    flag(f"entered-{rank}")
    history, left = [], False
    try:
        for step in range(first, steps):
            if drains.get(rank) == step and not again:
                _ask(how)
            if again or step < steps - 20 or not (scratch_of_rank() / "flag-comes-1").exists():
                time.sleep(pause)
            else:
                time.sleep(0.3 if not (scratch_of_rank() / "flag-entered-1").exists() else pause)
            opt.zero_grad()
            loss_of(net, step, rank).backward()
            history.append(tuple(trigram.stats(net)["ranks"]))
            opt.step()
            say(("did", step))
        if algorithm not in GRADIENTS:
            trigram.consensus(net, timeout=60)  # where ranks are apart, one may leave here
    except SystemExit as e:
        assert e.code == 0 and not trigram.is_initialized()
        assert trigram.rank() == -1 and trigram.world_size() == 0  # what a script asks in `finally`
        says(raises(trigram.MisuseError, trigram.barrier), "has left the elastic job")
        left = True
        # What it would train from now on is of nobody.
        says(raises(trigram.TrigramError, lambda: loss_of(net, 0, rank).backward()), "has left the")
    return {
        "left": left,
        "history": history,
        "weights": weights(net),
        "aborted": aborted[0],
    }


def _ask(how: str) -> None:
    """Asks this rank to leave."""
    if how == "call":
        trigram.drain()
        assert trigram.draining()
    elif how == "thread":
        thread = threading.Thread(target=trigram.drain)
        thread.start()
        thread.join()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def _took_part(world: int, steps: int, drains: dict[int, int]) -> list[tuple[int, ...]]:
    return [tuple(r for r in range(world) if step <= drains.get(r, steps)) for step in range(steps)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "world, drains, how",
    [
        (2, {1: 4}, "call"),
        (2, {0: 4}, "signal"),
        (4, {0: 3, 2: 3}, "signal"),
        (5, {4: 2, 1: 5, 0: 5}, "thread"),
    ],
)
def test_who_is_asked_to_leave_ends_its_step(
    world: int, drains: dict[int, int], how: str, transport: str
) -> None:
    """Nothing is repeated or aborted, and the steps are those of one process with the same ranks."""
    steps = 9
    results = run(world, _trains, steps, drains, "gradient_allreduce", how, transport=transport)
    expected = _took_part(world, steps, drains)
    for r, result in enumerate(results):
        assert result["left"] == (r in drains) and result["aborted"] == 0
        last = drains.get(r, steps - 1)
        assert result["history"] == expected[: last + 1], f"rank {r}"
        close(result["weights"], reference(expected[: last + 1]), 1e-9)


@pytest.mark.parametrize("algorithm", [*GRADIENTS[1:], *IN_STEP, *APART])
def test_every_algorithm_lets_ranks_go(algorithm: str) -> None:
    # Where ranks are apart they look into the store five times a second: more steps than that takes.
    world, steps, drains = 4, 300 if algorithm in APART else 60, {1: 10, 2: 11}
    options = {"every": 4} if algorithm in ("local_sgd", "diloco") else {}
    results = run(world, _trains, steps, drains, algorithm, "call", 0.004, False, options, timeout=90)
    for r, result in enumerate(results):
        assert result["left"] == (r in drains), f"rank {r}"
        assert bool(result["weights"].isfinite().all())
        # The next averaging step is at most four steps away; where ranks are apart, a look at the store. Who
        # is asked to when others leave anyway, leaves with them.
        done = len(result["history"])
        most = steps if r not in drains or algorithm in APART else drains[r] + 6
        assert drains.get(r, steps) <= done <= most, f"rank {r} has made {done} steps"
    assert torch.equal(results[0]["weights"], results[3]["weights"])
    if algorithm in GRADIENTS:
        expected = _took_part(world, steps, {r: len(results[r]["history"]) - 1 for r in drains})
        close(results[0]["weights"], reference(expected), 0.05 if algorithm == "bytegrad" else 1e-9)


def test_a_sharded_optimizer_lets_them_go_one_after_the_other() -> None:
    """Each part of its state is on two ranks: three that leave together would take some with them."""
    world, steps, drains = 5, 14, {1: 4, 2: 4, 3: 4}
    results = run(world, _trains, steps, drains, "sharded")
    gone = {r: len(results[r]["history"]) - 1 for r in drains}
    assert sorted(gone.values()) == [4, 5, 6], gone
    for r in (0, 4):
        close(results[r]["weights"], reference(_took_part(world, steps, gone)), 1e-9)


def _hands_over(rank: int, world: int) -> list[float]:
    """Neighbours have mixed a part only when rank 1 leaves: the others get what it has."""
    trigram.init(elastic=True)
    net = torch.nn.Linear(1, 1, bias=False).double()
    opt = torch.optim.SGD(net.parameters(), lr=1.0)
    torch.nn.init.zeros_(net.weight)
    net = trigram.with_bagua(net, "decentralized", optimizer=opt, elastic=True)
    seen = []
    try:
        for step in range(5):
            if step == 1 and rank == 1:
                trigram.drain()
            opt.zero_grad()
            (net(torch.ones(1, 1, dtype=torch.float64)) * (rank if step < 2 else 0)).sum().backward()
            opt.step()
            trigram.step(net)
            seen.append(float(net.weight))
    except SystemExit:
        pass
    trigram.shutdown()
    return seen


def test_what_only_they_have_is_handed_over() -> None:
    """Three ranks take 0, 1 and 2 off in two steps each: the mean is -2, whoever has left after that."""
    world = 3
    results = run(world, _hands_over)
    assert len(results[1]) == 2
    for r in (0, 2):
        assert len(results[r]) == 5
        close(torch.tensor(results[r][2:]), torch.full((3,), -2.0), 1e-6)


def _all_leave(rank: int, world: int, algorithm: str) -> int:
    draining_of = JoinQueue._draining

    def when_all_are_asked(queue: JoinQueue, period: tuple[int, int]) -> list[int]:
        """Else the first to be asked might have left before the last is."""
        all_are = all((scratch_of_rank() / f"flag-asked-{r}").exists() for r in range(world))
        return draining_of(queue, period) if all_are else []

    JoinQueue._draining = when_all_are_asked
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, algorithm, optimizer=opt, elastic=True)

    def training() -> None:
        for step in range(400):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                flag(f"asked-{rank}")
            if step > 3:
                time.sleep(0.01)
            loss_of(net, step, rank).backward()
            opt.step()

    error = raises(trigram.DrainError, training)
    says(error, "all ranks of the job (0, 1, 2) were asked to leave", "checkpoint")
    assert not trigram.draining() and trigram.is_initialized()
    steps = trigram.stats(net)["steps"]
    assert steps >= 3 and trigram.algorithm_state(net) and opt.state_dict()["state"], "it can be saved"
    trigram.consensus(net, timeout=60)
    loss_of(net, 0, rank).backward()  # and go on
    opt.step()
    return steps


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "sharded", "decentralized", "async"])
def test_if_all_are_to_leave_all_are_told(algorithm: str) -> None:
    steps = run(3, _all_leave, algorithm)
    if algorithm != "async":
        assert len(set(steps)) == 1


def test_who_has_left_comes_back() -> None:
    world, steps, drains = 3, 400, {1: 5}
    arguments = (steps, drains, "gradient_allreduce", "call", 0.005)
    with Ranks(world, _trains, *arguments) as ranks:
        ranks.await_said(0, ("did", 20), 60)
        come(ranks, 1, *arguments, True, run=_trains)
        results = ranks.results(120)
    assert not results[1]["left"] and results[0]["history"][-1] == (0, 1, 2)
    for r in range(world):
        assert torch.equal(results[r]["weights"], results[0]["weights"])


def test_it_may_die_while_it_leaves() -> None:
    """Or another rank: a change of the membership that fails is made again."""
    world, steps = 4, 30
    with Ranks(world, _dies_leaving, steps) as ranks:
        results = ranks.results(60, dies=[1, 2])
    assert results[1] == Died(-signal.SIGKILL) and results[2] == Died(-signal.SIGKILL)
    assert results[0] == results[3] == (0, 3)


def _dies_leaving(rank: int, world: int, steps: int) -> tuple[int, ...]:
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    if rank == 1:
        membership._await_next_epoch = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        build = membership.build

        def dies(*arguments: Any) -> Any:
            build(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        membership.build = dies
    for step in range(steps):
        if rank == 1 and step == 5:
            trigram.drain()
        loss_of(net, step, rank).backward()
        opt.step()
    return tuple(trigram.stats(net)["ranks"])


@pytest.mark.parametrize("dies", [3, 0])
def test_nobody_leaves_with_a_part_that_another_has_lost(dies: int) -> None:
    """Rank 1 and a rank that dies in the same step have the two copies of some part between them."""
    steps = 12
    with Ranks(4, _dies_beside, steps, dies) as ranks:
        results = ranks.results(60, dies=[dies])
    history = (
        [(0, 1, 2, 3)] * 5
        + [tuple(r for r in range(4) if r != dies)]
        + [tuple(r for r in range(4) if r not in (1, dies))] * (steps - 6)
    )
    for r in history[-1]:
        close(results[r], reference(history), 1e-9)


def _dies_beside(rank: int, world: int, steps: int, dies: int) -> torch.Tensor | None:
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, "sharded", optimizer=opt, elastic=True, bucket_mb=0.001)
    for step in range(steps):
        if rank == 1 and step == 4:
            trigram.drain()
        if step == 5:
            flag(f"stepped-{rank}")
            if rank == dies:
                for r in range(world):
                    await_flag(f"stepped-{r}")
                os.kill(os.getpid(), signal.SIGKILL)
            until(membership.has_lost)
        opt.zero_grad()
        try:
            loss_of(net, step, rank).backward()
        except SystemExit:
            return None
        opt.step()
    return weights(net)


def _barrier_fails(rank: int, world: int) -> tuple[int, ...]:
    """On the rank that leaves the last barrier fails, as if a third rank had died when all had passed it."""
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    await_next_epoch = membership._await_next_epoch

    def failing(group: Group) -> None:
        await_next_epoch(group)
        raise trigram.PeerLostError("as if a third rank had died", 2)

    membership._await_next_epoch = failing
    for step in range(8):
        if rank == 1 and step == 3:
            trigram.drain()
        try:
            loss_of(net, step, rank).backward()
        except SystemExit:
            return ()
        opt.step()
    return tuple(trigram.stats(net)["ranks"])


def test_a_rank_that_leaves_is_no_second_job() -> None:
    """All others have left the epoch before: they have not ended, so that this one would be the job."""
    assert run(3, _barrier_fails) == [(0, 2), (), (0, 2)]


def _asked_too_early(rank: int, world: int) -> int:
    if rank == 1:
        trigram.drain()  # as a handler of a signal may
        assert not trigram.is_initialized() and trigram.draining()
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    try:
        for step in range(5):
            loss_of(net, step, rank).backward()
            opt.step()
    except SystemExit:
        assert rank == 1
    return step


def test_who_is_asked_before_it_has_begun_leaves_after_a_step() -> None:
    assert run(3, _asked_too_early) == [4, 1, 4]


def _store_is_gone(rank: int, world: int) -> tuple[bool, int]:
    draining._PATIENCE = 1.0
    JoinQueue._draining = lambda *_: []  # the leader does not get to know
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, "async", optimizer=opt, elastic=True)
    step = 0
    try:
        while trigram.world_size() == world:
            if rank == 1 and step == 3:
                trigram.drain()
            loss_of(net, step, rank).backward()
            opt.step()
            time.sleep(0.01)
            step += 1
    except SystemExit:
        return True, step
    return False, step


def test_without_a_store_it_leaves_all_the_same() -> None:
    results = run(3, _store_is_gone)
    assert [left for left, _ in results] == [False, True, False]


def _forks(rank: int, world: int) -> int | None:
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    trigram.with_bagua(net, optimizer=opt, elastic=True)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    time.sleep(0.2)
    child.terminate()
    child.join(20)
    assert not trigram.draining()
    return child.exitcode


def test_a_forked_child_is_ended_by_the_signal() -> None:
    assert run(2, _forks) == [-signal.SIGTERM] * 2


def _before_any_step(rank: int, world: int) -> None:
    trigram.init(elastic=True)
    if rank == 1:
        say("ready")
        await_flag("never")
    await_flag("done", 60)


def _is_ended_by_the_signal(ranks: Ranks) -> None:
    """Rank 1, at once; the other ends when it may."""
    ranks.signal(1, signal.SIGTERM)
    until(lambda: ranks.ranks[1].process.exitcode is not None)
    assert ranks.ranks[1].process.exitcode == -signal.SIGTERM
    (ranks.dir / "flag-done").touch()
    ranks.results(30, dies=[1])


def test_without_a_model_the_signal_ends_it() -> None:
    with Ranks(2, _before_any_step) as ranks:
        ranks.await_said(1, "ready", 30)
        _is_ended_by_the_signal(ranks)


def _waits_long(rank: int, world: int) -> None:
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    loss_of(net, 0, rank).backward()
    opt.step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        assert trigram.draining()
        say("asked")
        await_flag("never", 60)
    await_flag("done", 60)


def test_a_second_signal_ends_it_at_once() -> None:
    with Ranks(2, _waits_long) as ranks:
        ranks.await_said(1, "asked", 30)
        _is_ended_by_the_signal(ranks)


def _handles_it_itself(rank: int, world: int) -> bool:
    mine: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: mine.append(number))
    trigram.init(elastic=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert mine == [signal.SIGTERM] and not trigram.draining()
    trigram.shutdown()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    trigram.init(elastic=True, rank=0, world_size=1, store=torch.distributed.HashStore())
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    trigram.shutdown()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "a script gets back what it had"
    return True


def test_a_script_that_handles_the_signal_keeps_it() -> None:
    assert run(2, _handles_it_itself) == [True, True]


def _not_elastic(rank: int, world: int) -> bool:
    trigram.init()
    says(raises(trigram.MisuseError, trigram.drain), "drain: the job is not elastic")
    return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not trigram.draining()


def test_only_elastic_jobs_let_ranks_go() -> None:
    assert run(2, _not_elastic) == [True, True]


SCRIPT = """
import os, signal, torch, trigram
trigram.init(elastic=True)
rank = trigram.rank()
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
net = trigram.with_bagua(net, optimizer=opt, elastic=True)
for step in range(40):
    if rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    net(torch.randn(8, 4)).square().mean().backward()
    opt.step()
print("rank", rank, "made", step + 1, "steps with", trigram.world_size(), flush=True)
"""


def _run(tmp_path: Path, status: str) -> tuple[int, str]:
    """Runs the script on three ranks, one of which leaves; the status of all, and what they have said."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"TRIGRAM_DRAIN_STATUS": status}
    command = [sys.executable, "-m", "trigram", "run", "-n", "3", str(script)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=patience.seconds(240), env=environment
    )
    return done.returncode, done.stdout + done.stderr


def test_its_process_ends_with_status_0(tmp_path: Path) -> None:
    status, said = _run(tmp_path, "0")
    assert status == 0, said
    assert "rank 0 made 40 steps with 2" in said and "rank 2 made 40 steps with 2" in said, said
    assert "rank 1 made" not in said and "as it was asked to (SIGTERM)" in said, said
    assert "Traceback" not in said, said


def test_its_process_ends_with_the_status_that_a_supervisor_needs(tmp_path: Path) -> None:
    status, said = _run(tmp_path, "143")
    assert status == 143 and "as it was asked to (SIGTERM)" in said and "Traceback" not in said, said


# Notices.


class _Answers(http.server.BaseHTTPRequestHandler):
    """What a cloud tells its machines; ``notice``: whether there is one."""

    notice = False

    def do_PUT(self) -> None:
        self._answer(200, b"a-token")

    def do_GET(self) -> None:
        if self.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != "a-token":
                self._answer(401, b"")
            elif self.notice:
                self._answer(200, b'{"action": "terminate", "time": "2026-11-28T08:22:00Z"}')
            else:
                self._answer(404, b"Not Found")
        elif self.path == "/computeMetadata/v1/instance/preempted":
            ours = self.headers["Metadata-Flavor"] == "Google"
            self._answer(200 if ours else 403, b"TRUE\n" if self.notice else b"FALSE\n")
        else:
            self._answer(200 if self.notice else 404, b"go")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@contextmanager
def _answering() -> Iterator[int]:
    _Answers.notice = False
    port = free_port()
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("kind", ["aws", "gcp", "address", "file"])
def test_a_notice_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(notices, "_EVERY", 0.02)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for addresses of this machine
    with _answering() as port:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{port}/")
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{port}")
        file = tmp_path / "leave"
        where = {"address": f"http://127.0.0.1:{port}/leave", "file": str(file)}.get(kind, kind)
        notice = notices.Notice(where, told.append)
        time.sleep(0.3)
        assert told == [], "there was none"
        _Answers.notice = True
        file.touch()
        until(lambda: told)
        time.sleep(0.1)
        assert told == [f"a notice ({where})"], "it is told once"
        notice.stop()


def test_an_address_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    lines: list[str] = []
    monkeypatch.setattr(notices, "_EVERY", 0.02)
    monkeypatch.setattr(notices.logs, "warning", lines.append)
    where = f"http://127.0.0.1:{free_port()}/x"
    notice = notices.Notice(where, told.append)
    until(lambda: lines)
    time.sleep(0.3)
    notice.stop()
    assert told == [] and len(lines) == 1 and where in lines[0], lines


@pytest.mark.parametrize("where", ["azur", "ftp://host/x", "http://", "http://[", "leave"])
def test_a_setting_that_says_nothing_is_refused(where: str) -> None:
    with pytest.raises(trigram.ConfigError, match=r"TRIGRAM_DRAIN=.*aws.*gcp.*file.*address"):
        notices.check(where)


@pytest.mark.parametrize("status", ["", "-1", "256", "one", "²"])
def test_a_status_that_is_none_is_refused(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIGRAM_DRAIN_STATUS", status)
    with pytest.raises(trigram.ConfigError, match=r"TRIGRAM_DRAIN_STATUS=.*0 to 255"):
        draining.check_settings()


def _starts(rank: int, world: int) -> str:
    try:
        trigram.init(elastic=True, init_timeout=20)
    except trigram.TrigramError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def test_all_ranks_are_told_of_a_wrong_setting() -> None:
    for told in run(2, _starts, env={"TRIGRAM_DRAIN": "azur"}):
        assert "TRIGRAM_DRAIN='azur' is invalid" in told, told


def _leaves_by_file(rank: int, world: int) -> tuple[bool, int]:
    os.environ["TRIGRAM_DRAIN"] = str(scratch_of_rank() / f"leave-{rank}")
    trigram.init(elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    step = 0
    try:
        while trigram.world_size() == world:
            if step == 3 and rank == 1:
                (scratch_of_rank() / "leave-1").touch()
            x, y = batch(step, rank)
            torch.nn.functional.cross_entropy(net(x), y).backward()
            opt.step()
            time.sleep(0.01)
            step += 1
    except SystemExit:
        return True, step
    return False, step


def test_a_notice_makes_a_rank_leave() -> None:
    results = run(3, _leaves_by_file)
    assert [left for left, _ in results] == [False, True, False]
    assert results[0][1] == results[2][1] == results[1][1] + 1, "the others have made one step more"


def _leaves_inside_a_step(rank: int, world: int) -> None:
    trigram.init(elastic=True)
    net = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    trigram.with_bagua(net, "local_sgd", every=2, optimizer=opt, elastic=True)
    loss = net(torch.ones(1, 2)).sum()
    trigram.shutdown()
    loss.backward()
    assert not trigram.is_initialized(), "the pass has begun another job"
    says(raises(trigram.MisuseError, lambda: (opt.step(), net(torch.ones(1, 2)))), "has left the elastic job")


def test_a_pass_after_the_job_begins_no_other() -> None:
    run(2, _leaves_inside_a_step)
