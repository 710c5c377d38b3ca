"""Ranks that come late: who is let in and gets everything, who is told why not, and whom that disturbs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import trigram
from tests.support import patience
from tests.support.checks import raises, says
from tests.support.elastic_run import (
    await_step,
    come,
    reference,
    the_same,
    train,
)
from tests.support.harness import ROOT, Ranks, await_flag, flag, free_port, say, until
from tests.support.marks import long
from trigram import _core
from trigram.elastic import joining, membership

pytestmark = pytest.mark.waits


@pytest.mark.parametrize("transport, victim", [("shm", 0), long("tcp", 2), long("shm", 2), long("tcp", 0)])
def test_who_comes_back_gets_everything(victim: int, transport: str) -> None:
    world, steps = 3, 150
    arguments = (steps, "gradient_allreduce", {victim: 5}, 0.01)
    with Ranks(world, train, *arguments, transport=transport) as ranks:
        other = (victim + 1) % world
        await_step(ranks, other, 8)
        come(ranks, victim, *arguments, True)
        results = ranks.results(120)
    got = the_same(results, list(range(world)))
    entered = results[victim]["first"]
    assert 5 < entered < steps
    history = list(results[other]["history"])
    assert history[entered - 1] != history[entered] == tuple(range(world))
    assert results[victim]["history"] == history[entered:]
    # In its first step it has nothing to give.
    history[entered] = tuple(r for r in range(world) if r != victim)
    torch.testing.assert_close(got["weights"], reference(history), rtol=1e-7, atol=1e-10)


def test_one_more_than_there_were() -> None:
    world, steps = 2, 150
    with Ranks(world, train, steps, "gradient_allreduce", None, 0.01) as ranks:
        await_step(ranks, 0, 5)
        ranks.env["WORLD_SIZE"] = "3"
        come(ranks, 2, steps, "gradient_allreduce", None, 0.01, True)
        results = ranks.results(120)
    got = the_same(results, [0, 1, 2])
    entered = results[2]["first"]
    history = list(results[0]["history"])
    assert history[-1] == (0, 1, 2) and history[entered - 1] == (0, 1)
    history[entered] = (0, 1)
    torch.testing.assert_close(got["weights"], reference(history), rtol=1e-7, atol=1e-10)


def test_several_join_at_once() -> None:
    """One broadcast brings all of them the state."""
    world, steps = 2, 250
    with Ranks(world, train, steps, "gradient_allreduce", None, 0.01, transport="tcp") as ranks:
        await_step(ranks, 0, 5)
        ranks.env["WORLD_SIZE"] = "5"
        for rank in (2, 3, 4):
            come(ranks, rank, steps, "gradient_allreduce", None, 0.01, True)
        results = ranks.results(120)
    got = the_same(results, [0, 1, 2, 3, 4])
    history = list(results[0]["history"])
    assert history[-1] == (0, 1, 2, 3, 4)
    # Who entered one step before contributes already: only who enters in a step has nothing to give in it.
    entered = {rank: results[rank]["first"] for rank in (2, 3, 4)}
    for step in set(entered.values()):
        history[step] = tuple(r for r in history[step] if entered.get(r) != step)
    torch.testing.assert_close(got["weights"], reference(history), rtol=1e-7, atol=1e-10)


def test_a_joining_rank_that_is_the_lowest_leads() -> None:
    """Ranks 0 and 1 die; when 0 is back, it alone answers join requests, and admits 1."""
    world, steps = 3, 200
    arguments = (steps, "gradient_allreduce", {0: 5, 1: 5}, 0.01)
    with Ranks(world, train, *arguments) as ranks:
        await_step(ranks, 2, 8)
        for victim in (0, 1):
            come(ranks, victim, *arguments, True)
            until(
                lambda victim=victim: ranks.hear(0.1) and any("did" in s for s in ranks.ranks[victim].said),
                60,
            )
        results = ranks.results(120)
    got = the_same(results, [0, 1, 2])
    history = list(results[2]["history"])
    for newcomer in (0, 1):
        entered = results[newcomer]["first"]
        assert 5 < entered < steps and newcomer not in history[entered - 1]
        history[entered] = tuple(r for r in history[entered] if r != newcomer)
    torch.testing.assert_close(got["weights"], reference(history), rtol=1e-7, atol=1e-10)


def test_replicas_are_compared_while_ranks_enter() -> None:
    """A newcomer's weights are on their way: that they differ is no error."""
    world, steps = 3, 150
    arguments = (steps, "gradient_allreduce", {1: 5}, 0.01)
    options = {"check_replicas": 1, "check_finite": True}
    with Ranks(world, train, *arguments, False, options) as ranks:
        await_step(ranks, 0, 8)
        come(ranks, 1, *arguments, True, options)
        results = ranks.results(120)
    the_same(results, [0, 1, 2])
    assert 5 < results[1]["first"] < steps


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "async"])
def test_a_rank_that_asks_to_join_and_ends_disturbs_nobody(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members regroup for it and find that it has ended, or that it cannot be reached."""

    world, steps = 2, 300
    secret = {"TRIGRAM_SECRET": "a long secret of this job"}
    with Ranks(world, train, steps, algorithm, None, 0.01, env=secret) as ranks:
        for r in range(world):
            await_step(ranks, r, 5)
        monkeypatch.setenv("TRIGRAM_SECRET", secret["TRIGRAM_SECRET"])
        port = int(ranks.env["MASTER_PORT"])
        store = dist.PrefixStore("trigram", dist.TCPStore("127.0.0.1", port, None, False))

        def turn() -> tuple[int, int]:
            status = json.loads(store.get("elastic/job_status"))
            return status["epoch"], status["empty_regroups"]

        for comer in range(6, 12):
            before, request = turn(), store.add("elastic/join_requests", 1)
            endpoint = _core.Rendezvous(comer, comer + 1, None, "127.0.0.1", "shm").endpoint_record().hex()
            store.set(f"elastic/handshake/{request}", "no")
            store.set(f"elastic/join_request/{request}", json.dumps({"rank": comer, "endpoint": endpoint}))
            store.set(f"elastic/heartbeat/{request}", "once")
            until(lambda before=before: turn() != before, 10, "all members to regroup")
        results = ranks.results(60)
    for r in range(world):
        assert results[r]["steps"] == steps and bool(results[r]["weights"].isfinite().all()), f"rank {r}"
        assert set(results[r]["history"]) == {(0, 1)}


def through(rank: int, world: int, steps: int, algorithm: str, again: bool = False) -> dict[str, Any]:
    """Rank 0 is through long before the others, and lets its model go; rank 2 dies after that."""
    dies = {2: 60}
    done = train(rank, world, steps, algorithm, dies, 0.0 if rank == 0 else 0.05, again)
    trigram.shutdown()
    return done


@pytest.mark.parametrize("algorithm", ["async", "async_decentralized"])
def test_who_is_through_lets_others_in(algorithm: str) -> None:
    world, steps = 3, 150
    with Ranks(world, through, steps, algorithm) as ranks:
        ranks.await_said(0, ("did", steps - 1))
        await_step(ranks, 1, 63)
        (ranks.dir / "flag-comes-2").touch()
        ranks.restart(2, through, steps, algorithm, True)
        results = ranks.results(60)
    assert 60 <= results[2]["first"] < steps, "it begins where the slowest is"
    for r in range(world):
        assert results[r]["steps"] == steps and bool(results[r]["weights"].isfinite().all()), f"rank {r}"


def late(rank: int, world: int, steps: int, change: str, algorithm: str = "gradient_allreduce") -> str:
    """A newcomer that does not fit: what it is told."""
    try:
        if change == "model":
            trigram.init(elastic=True)
            net: Any = torch.nn.Linear(3, 3)
            trigram.with_bagua(net, algorithm, optimizer=torch.optim.Adam(net.parameters()), elastic=True)
        else:
            train(rank, world, steps, algorithm, None, 0.01, True)
    except trigram.TrigramError as e:
        return f"{type(e).__name__}: {e}"
    finally:
        flag(f"entered-{rank}")
    return "it was let in"


UNFIT = {
    "secret": ({"TRIGRAM_SECRET": "another one, longer"}, ("AuthError", "rank 2", "TRIGRAM_SECRET")),
    "tls": ({"TRIGRAM_TLS": "1"}, ("Error", "TRIGRAM_TLS")),
    "transport": ({"TRIGRAM_TRANSPORT": "tcp"}, ("ConfigError", "TRIGRAM_TRANSPORT")),
    "model": (
        {},
        ("MismatchError", "rank 2", "another model", "(16, 20) float64 there"),
    ),
}


@pytest.mark.parametrize("change", list(UNFIT))
def test_who_does_not_fit_is_told_and_disturbs_nobody(change: str) -> None:
    world, steps = 2, 150
    env, words = UNFIT[change]
    with Ranks(
        world, train, steps, "gradient_allreduce", None, 0.01, env={"TRIGRAM_SECRET": "the job's own"}
    ) as ranks:
        await_step(ranks, 0, 5)
        ranks.extra = {"WORLD_SIZE": "3"} | ranks.extra | env
        (ranks.dir / "flag-comes-2").touch()
        ranks.restart(2, late, steps, change)
        results = ranks.results(60)
    says(results[2], *words)
    got = the_same(results, [0, 1])
    assert got["steps"] == steps and got["history"][-1] == (0, 1)
    if change != "model":
        torch.testing.assert_close(got["weights"], reference([(0, 1)] * steps), rtol=1e-8, atol=1e-11)


def unfit_at_first(rank: int, world: int, steps: int, algorithm: str) -> dict[str, Any]:
    """A newcomer whose script goes on after it was told, and comes again with the right model."""
    says(late(rank, world, steps, "model", algorithm), "MismatchError", "another model")
    say("told")
    await_flag("right-now")
    return train(rank, world, steps, algorithm, None, 0.01, True)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "local_sgd"])
def test_who_does_not_fit_may_come_again(algorithm: str) -> None:
    """Nobody waits for it meanwhile."""
    steps = 200
    with Ranks(2, train, steps, algorithm, None, 0.01) as ranks:
        await_step(ranks, 0, 5)
        ranks.env["WORLD_SIZE"] = "3"
        come(ranks, 2, steps, algorithm, run=unfit_at_first)
        ranks.await_said(2, "told")
        made = max(s[1] for s in ranks.ranks[0].said if s[0] == "did")
        await_step(ranks, 0, made + 10)
        (ranks.dir / "flag-entered-2").unlink()  # the others slow down at the end until it has come
        (ranks.dir / "flag-right-now").touch()
        results = ranks.results(120)
    assert 15 < results[2]["first"] < steps
    assert results[0]["history"][-1] == (0, 1, 2)


@pytest.mark.parametrize("algorithm", ["local_sgd", "async", "decentralized"])
def test_who_does_not_fit_ends_without_another_error(algorithm: str) -> None:
    """Where its hooks have not begun, nothing of them is ended."""
    with Ranks(2, train, 150, algorithm, None, 0.01) as ranks:
        await_step(ranks, 0, 5)
        ranks.env["WORLD_SIZE"] = "3"
        come(ranks, 2, 150, "model", algorithm, run=late)
        results = ranks.results(60)
        said = ranks.log(2)
    says(results[2], "MismatchError", "another model")
    assert "at the end of the job" not in said, said


def without_a_model(rank: int, world: int) -> list[int]:
    """Rank 2 comes late, and has collectives of its own only."""
    group = trigram.init(elastic=True)
    if rank == 2:
        assert trigram.rank() == -1
        for call in (
            trigram.stats,
            lambda: trigram.empty(3),
            lambda: trigram.new_group([0]),
            trigram.barrier,
        ):
            says(raises(trigram.MisuseError, call), "late", "has not")
        assert trigram.recover() is group
    else:
        say("in")
        until(lambda: trigram.recover().size == 3, 60)
    one = torch.ones(1)
    trigram.all_reduce(one)
    assert float(one) == 3.0 and trigram.rank() == rank
    return list(group.ranks)


def test_who_comes_late_without_a_model() -> None:
    with Ranks(2, without_a_model) as ranks:
        for r in range(2):
            ranks.await_said(r, "in")
        ranks.extra = {"WORLD_SIZE": "3"}
        ranks.restart(2, without_a_model)
        assert ranks.results(60) == [[0, 1, 2]] * 3


def by_a_store(rank: int, world: int, port: int) -> int:
    """Rank 2 comes when the store that the others met in has gone and come back."""

    trigram.init(dist.TCPStore("127.0.0.1", port, is_master=False), rank, world, elastic=True)
    if rank == 2:
        return trigram.recover().size
    say("in")
    return int(until(lambda: trigram.recover().size == 3 and 3, 60))


def test_a_store_may_go_and_come_back() -> None:

    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with Ranks(2, by_a_store, port) as ranks:
        for r in range(2):
            ranks.await_said(r, "in")
        del store
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        ranks.extra = {"WORLD_SIZE": "3"}
        ranks.restart(2, by_a_store, port)
        assert ranks.results(60) == [3, 3, 3]
    del store


def two_jobs(rank: int, world: int, port: int, again: bool = False) -> int:
    """Rank 1 dies and comes back; then all leave, and meet once more in the same store."""

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    trigram.init(store, rank, world, elastic=True)
    say("in")
    if rank == 1 and not again:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        trigram.recover()
    else:
        until(membership.has_lost, 30)
        until(lambda: trigram.recover().size == world, 60)
    trigram.barrier()
    trigram.shutdown()
    flag(f"out{rank}")
    for r in range(world):
        await_flag(f"out{r}")
    return trigram.init(store, rank, world, elastic=True, init_timeout=30).size


def test_all_may_meet_once_more() -> None:

    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with Ranks(2, two_jobs, port) as ranks:
        ranks.await_said(1, "in")
        ranks.restart(1, two_jobs, port, True)
        assert ranks.results(60) == [2, 2]
    del store


def too_late(rank: int, world: int, port: int, killed: bool = False) -> str:
    """Rank 2 comes while the job runs, and asks to join when all have left, or when all are `killed` and the
    store is another."""

    trigram.init(dist.TCPStore("127.0.0.1", port, is_master=False), rank, world, elastic=True)
    if rank == 2:
        flag("late")
        for r in range(2):
            await_flag(f"out{r}")
        joining._SILENT_SECONDS, joining._EMPTY_SECONDS = (100.0, 3.0) if killed else (3.0, 100.0)
        began = time.monotonic()
        text = raises(trigram.TimeoutError, trigram.recover)
        assert time.monotonic() - began < patience.seconds(30)
        return text
    say("in")
    await_flag("late")
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    trigram.shutdown()
    flag(f"out{rank}")
    return ""


def test_who_asks_to_join_a_job_that_has_ended_is_told() -> None:
    """After a minute without a word of it, not after the five that an admission may take."""

    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with Ranks(2, too_late, port) as ranks:
        for r in range(2):
            ranks.await_said(r, "in")
        ranks.extra = {"WORLD_SIZE": "3"}
        ranks.restart(2, too_late, port)
        says(ranks.results(60)[2], "rank 2 cannot join", "it has ended")
    del store


def test_who_waits_for_a_job_all_of_whose_ranks_die_is_told() -> None:
    """Rank 0 has served the store, and serves another when it is started again; the launcher starts this rank
    again too, and then all meet."""

    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with Ranks(2, too_late, port, True) as ranks:
        for r in range(2):
            ranks.await_said(r, "in")
        ranks.extra = {"WORLD_SIZE": "3"}
        ranks.restart(2, too_late, port, True)
        until(lambda: not ranks.hear(0.05) or not any(ranks.ranks[r].process.is_alive() for r in (0, 1)), 60)
        del store
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        for r in range(2):
            (ranks.dir / f"flag-out{r}").touch()
        says(ranks.results(60, dies=[0, 1])[2], "rank 2 cannot join", "it has ended; start again")
    del store


SCRIPT = """
    import os, pathlib, signal, sys, time, torch
    import torch.distributed as dist
    sys.path[:0] = {path!r}
    import trigram
    from tests.support.elastic_run import model, optimizer, loss_of, weights

    rank, steps, again = {rank}, {steps}, os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", {port}, is_master=False)
    trigram.init(store, rank, {world}, elastic=True)
    net = model()
    opt = optimizer(net)
    net = trigram.with_bagua(net, optimizer=opt, elastic=True)
    first = trigram.stats(net)["steps"]
    entered = pathlib.Path({entered!r})
    if again:
        entered.touch()
    for step in range(first, steps):
        if rank == 1 and step == 5 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.zero_grad()
        loss_of(net, step, rank).backward()
        opt.step()
        if not entered.exists():
            time.sleep(0.05 if step < steps - 50 else 0.5)
    print("END", rank, first, float(weights(net).sum()), flush=True)
"""


def test_a_worker_that_torchrun_restarts_rejoins(tmp_path: Path) -> None:
    """Each rank under an agent of its own, as on preemptible machines; the store is a process of its own."""

    world, steps, port = 3, 400, free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    path = [str(ROOT / "python"), str(ROOT)]
    agents = []
    for rank in range(world):
        script = tmp_path / f"rank{rank}.py"
        values = {"path": path, "rank": rank, "steps": steps, "port": port, "world": world}
        values["entered"] = str(tmp_path / "entered")
        script.write_text(textwrap.dedent(SCRIPT).format(**values))
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=2"]
        with (tmp_path / f"log{rank}").open("w") as log:
            agents.append(
                subprocess.Popen(
                    [sys.executable, *command, str(script)], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
                )
            )
    try:
        codes = [agent.wait(patience.seconds(120)) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    logs = [(tmp_path / f"log{r}").read_text() for r in range(world)]
    assert codes == [0] * world, "\n".join(logs)
    ends = [next(line for line in log.splitlines() if line.startswith("END")).split() for log in logs]
    assert int(ends[1][2]) > 5 and int(ends[0][2]) == 0
    assert len({e[3] for e in ends}) == 1
    del store


def test_who_has_no_secret_is_not_let_in() -> None:
    """A stranger who can write to the store sends garbage, and endpoint records without the secret."""

    world, steps = 2, 300
    secret = {"TRIGRAM_SECRET": "a long secret of this job"}
    with Ranks(world, train, steps, "gradient_allreduce", None, 0.01, env=secret) as ranks:
        await_step(ranks, 0, 5)
        port = int(ranks.env["MASTER_PORT"])
        store = dist.PrefixStore("trigram", dist.TCPStore("127.0.0.1", port, None, False))
        requests = ["garbage", "[]", '{"rank": -1, "endpoint": "00"}', '{"rank": 7, "endpoint": "zz"}']
        requests += ['{"rank": 7, "endpoint": "%s"}' % ("ab" * 200), '{"rank": 8, "endpoint": "00"}']
        ids = []
        for text in requests:
            ids.append(store.add("elastic/join_requests", 1))
            store.set(f"elastic/join_request/{ids[-1]}", text)
        for heartbeat in range(15):
            for i in ids:
                store.set(f"elastic/heartbeat/{i}", str(heartbeat))
            time.sleep(0.1)
        answered = [i for i in ids if store.check([f"elastic/answer/{i}"])]
        assert all(b"refused" in store.get(f"elastic/answer/{i}") for i in answered)
        assert json.loads(store.get("elastic/job_status"))["regroup_request"] is None, (
            "members regrouped for a stranger"
        )
        results = ranks.results(60)
    got = the_same(results, [0, 1])
    assert got["history"] == [(0, 1)] * steps


class Steps:
    """So many steps have been made."""

    made = 0

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = state["made"]


def freezes(rank: int, world: int) -> tuple[list[bool], torch.Tensor]:
    """The first bias is frozen after three steps, by which a rank that comes later is not there."""
    torch.set_num_threads(1)
    trigram.init(elastic=True)
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer, steps, is_late = torch.optim.Adam(net.parameters(), lr=0.1), Steps(), trigram.rank() < 0
    trigram.with_bagua(net, optimizer=optimizer, elastic=[steps])
    while steps.made < 8 or trigram.world_size() < 3:
        if not is_late and steps.made == 3:
            net[0].bias.requires_grad_(False)
        if not is_late and rank == 1 and steps.made == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        net(torch.ones(3, 6)).sum().backward()
        optimizer.step()
        steps.made += 1
        time.sleep(0.05)
    return [p.requires_grad for p in net.parameters()], torch.cat([p.flatten() for p in net.parameters()])


def test_who_comes_late_freezes_what_is_frozen() -> None:
    with Ranks(3, freezes) as ranks:
        until(lambda: not ranks.ranks[1].process.is_alive(), 60)
        ranks.restart(1, freezes)
        (frozen, weights), *others = ranks.results(60)
    assert frozen == [True, False, True, True]
    for theirs, found in others:
        assert theirs == frozen
        torch.testing.assert_close(found, weights, rtol=0, atol=0)
