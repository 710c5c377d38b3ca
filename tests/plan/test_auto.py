"""``algorithm="auto"``: what it proposes and confirms, and that a training goes on as without it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.cases import Cases
from tests.support.checks import equal, raises, same_on_all_ranks, says
from tests.support.harness import scratch
from tests.support.twin_training import x
from trigram.model import auto
from trigram.model.wrapped import lookup
from trigram.plan import choice, measuring, settle
from trigram.plan.choice import Decision
from trigram.plan.inputs import CodecCost, Compute, Costs, ExactCodes, Job, Machines
from trigram.plan.settle import Proposal, Settings, Verdict

CASES = Cases()
MIB = 1 << 20
FREE = CodecCost(1e-10, 1e-10, 1e-10)
COSTS = Costs(
    dict.fromkeys(("bf16", "f16", "int8", "sign", "topk:0.01", "chunktopk:0.02"), FREE),
    {"2": 1e-9},
    1e-10,
    1e-10,
    0.0,
)
ROUND = 4 * (auto.UNTIMED + auto.TIMED)
"""Passes of a trial."""


def job(elements: int, compute: float, rate: float) -> Job:
    return Job(Compute.even(elements, compute), Machines((rate, rate), 1e-4), COSTS)


def test_exact_changes_buckets_only() -> None:
    slow = job(20_000_000, 0.4, 118e6)
    given = settle.propose(slow, Decision("gradient_allreduce", {}, 64.0), "exact")
    assert [(p.decision.algorithm, p.kind) for p in given.first] == [("gradient_allreduce", "exact")]
    assert given.first[0].decision.bucket_mb in (1.0, 2.0, 4.0) and given.first[0].gain >= choice.WORTH
    says(given.refused, "auto:close", "bytegrad", "predicted")
    # What is best already is left alone, and a network that does not matter too.
    best = given.first[0].decision
    assert settle.propose(slow, best, "exact").first == ()
    fast = settle.propose(job(1_000_000, 0.4, 1e10), Decision("gradient_allreduce", {}, 25.0), "any")
    assert fast.first == () and fast.refused == ""


def test_a_size_of_buckets_is_worth_a_trial_for_less_than_what_changes_numbers() -> None:
    now = Decision("gradient_allreduce", {}, 4.0)
    [proposal] = settle.propose(job(5_000_000, 0.4, 60e6), now, "exact").first
    assert settle.EXACT_WORTH < proposal.gain < choice.WORTH
    assert proposal.decision == Decision("gradient_allreduce", {}, 1.0)
    assert settle.propose(job(20_000_000, 0.4, 118e6), now, "exact").first == ()  # 2 % or less
    blocks = [[100, 96, 100, 96]]
    assert settle.judge(blocks, settle.enough("exact")).confirmed
    assert not settle.judge(blocks, settle.enough("close")).confirmed
    assert not settle.judge([[100, 98, 100, 98]], settle.enough("exact")).confirmed


def test_exact_codes_are_proposed_where_they_gain() -> None:
    """The link is slower than the coding, and gradients are sixteen bits in disguise."""
    cost = CodecCost(1e-9, 1e-9, 1e-9)
    now = Decision("gradient_allreduce", {}, 4.0)
    for own, rate, gains in ((1.4, 12e6, True), (4.1, 12e6, False), (1.4, 12e9, False)):
        of = job(20_000_000, 0.4, rate)
        of = replace(of, costs=replace(of.costs, exact=ExactCodes(own, 4.0, cost)))
        found = [p.decision.algorithm for p in settle.propose(of, now, "exact").first]
        assert ("lossless" in found) == gains, (own, rate, found)


def test_more_freedom_proposes_more() -> None:
    slow = job(20_000_000, 0.4, 12e6)
    now = Decision("gradient_allreduce", {}, 25.0)
    kinds = {
        allowed: [p.kind for p in settle.propose(slow, now, allowed).first] for allowed in settle.ALLOWED
    }
    assert (
        set(kinds["exact"]) <= {"exact"} and kinds["close"][0] == "close" and kinds["any"][0] == "different"
    )
    # Each next proposal is stricter: it is tried if the one before does not hold what was predicted.
    assert kinds["any"][1] == "close"
    # What cannot be taken here is named, and not proposed.
    few = settle.propose(slow, now, "any", lambda a: a.name == "bytegrad")
    says(few.refused, "predicted", "from the start only")
    assert [p.decision.algorithm for p in few.first][:1] == ["bytegrad"]
    assert "async" in {row.algorithm for row in few.comparison.rows}
    only = settle.propose(slow, now, "close", lambda a: a.value.what != "int8").first
    assert only[0].decision.algorithm in ("central/bf16/sync", "central/f16/sync")


@pytest.mark.parametrize(
    "blocks, confirmed",
    [
        ([[100, 80, 100, 80], [90, 82, 98, 80], [99, 200, 101, 79]], True),  # one rank was disturbed once
        ([[100, 97, 100, 97]], False),  # too little
        ([[100, 60, 100, 101]], False),  # not in both turns
        ([[100, 110, 100, 110]], False),
        ([[100, 50, 100, 50], [100, 50, 0, 50], [100, 50, 100, 50]], False),  # one has made no such steps
        ([[0, 0, 0, 0]], False),
    ],
)
def test_verdict(blocks: list[list[int]], confirmed: bool) -> None:
    assert settle.judge(blocks).confirmed is confirmed


@pytest.mark.parametrize(
    "norms, departed",
    [
        ([1.0] * 10 + [11.0] * 5, True),
        ([1.0] * 10 + [9.0] * 5, False),
        ([1e6] + [1.0] * 9 + [11.0] * 5, True),  # one spike does not count
        ([1.0] * 14 + [1e6], False),
        ([1.2**k for k in range(15)], False),  # as gradients grow at the start of some trainings
        ([2.0 ** (k // 3) for k in range(15)], False),  # a loss scale that doubles every 30 updates
        ([0.0] * 10 + [0.0] * 5, False),
        ([100.0] * 5, False),  # nothing to compare with
        ([1.0] * 2 + [100.0] * 5, False),
        ([1.0] * 3 + [100.0] * 5, True),
        ([math.nan, math.inf, 1.0, 1.0, math.nan], True),  # needs no comparison
        ([1.0] * 10 + [math.nan, math.inf, 1.0, 1.0, 1.0], False),
        ([1.0] * 10 + [math.nan, 1.0, 11.0, 11.0, 1.0], True),
        ([math.inf] * 3 + [1.0] * 5, False),
    ],
)
def test_departed(norms: list[float], departed: bool) -> None:
    assert bool(settle.departed(norms)) is departed


def test_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settle.settings("bytegrad", {}) is None and settle.settings(None, {}) is None
    assert settle.settings("auto", {"after": 0}) == Settings("exact", 0.0)
    assert settle.settings("auto:any", {"save_plan": "p"}) == Settings("any", settle.AFTER, "p")
    says(raises(trigram.UnsupportedError, settle.settings, "auto:fast", {}), "auto:close")
    says(raises(trigram.UnsupportedError, settle.settings, "auto:", {}), "auto:close")
    says(raises(trigram.UnsupportedError, settle.settings, "auto", {"every": 4}), "every", "save_plan")
    says(raises(trigram.UnsupportedError, settle.settings, "auto", {"after": math.nan}), "after")
    monkeypatch.setenv("TRIGRAM_ALGORITHM", "auto:close")
    assert settle.settings(None, {"every": 4}) == Settings("close", ignored=("every",))
    assert settle.settings("bytegrad", {}) is None


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(64, 64), nn.Tanh())])


def start(algorithm: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = trigram.with_bagua(net(), algorithm, **options)
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def steps(model: nn.Module, optimizer: Any, rank: int, first: int, count: int, micro: int = 1) -> None:
    """``micro`` passes for each update, of which the last is synchronized."""
    for step in range(first, first + count):
        optimizer.zero_grad()
        for k in range(micro - 1):
            with trigram.no_sync(model):
                model(x(rank, step, 4, 64, salt=100 + k)).square().mean().backward()
        model(x(rank, step, 4, 64)).sin().square().mean().backward()
        optimizer.step()


def tuner(model: nn.Module) -> auto.Auto:
    found = lookup(model, "test").tuner
    assert isinstance(found, auto.Auto)
    return found


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


EXACT = Proposal(Decision("gradient_allreduce", {}, 0.02), "exact", 0.2)
LOSSLESS = Proposal(Decision("lossless", {}, 0.02), "exact", 0.2)
CLOSE = Proposal(Decision("bytegrad", {}, 0.02), "close", 0.2)
TOPK = Proposal(Decision("topk", {}, 0.004), "different", 0.2)


def take(model: nn.Module, proposal: Proposal) -> None:
    """As if a trial had confirmed it."""
    tuner(model)._decide(auto._Trial(proposal, []), Verdict(2e-3, 1e-3, True))


@CASES.over("auto", "auto:any")
def measures_and_trains_on(rank: int, world: int, algorithm: str) -> None:
    """A whole search, whatever it finds: the loop is the same, and all ranks hold the same."""
    plan = scratch() / f"{algorithm}.json"
    model, optimizer = start(algorithm, after=0, save_plan=plan, bucket_mb=0.001)
    steps(model, optimizer, rank, 0, auto.FIRST + 2)
    report = trigram.stats(model)["auto"]
    assert report["state"] in ("trying", "settled")
    steps(model, optimizer, rank, auto.FIRST + 2, 3 * ROUND + 2)
    report = trigram.stats(model)["auto"]
    assert report["state"] == "settled" and report["allowed"] == (algorithm.partition(":")[2] or "exact")
    says(report["said"], "takes" if any(t["confirmed"] for t in report["trials"]) else "stays")
    same_on_all_ranks(rank, world, f"measured {algorithm}", [weights(model)])
    if rank == 0:
        content = json.loads(plan.read_text())
        assert content["decision"] == report["decision"]
    trigram.barrier()
    again = trigram.stats(trigram.with_bagua(net(), plan=plan))
    assert again["algorithm"] == report["decision"]["algorithm"]
    assert [b["bytes"] for b in again["buckets"]] == [
        b["bytes"]
        for b in trigram.stats(start(again["algorithm"], bucket_mb=report["decision"]["bucket_mb"])[0])[
            "buckets"
        ]
    ]
    if algorithm == "auto":  # the bits are those of a training without it, here inside one host
        twin, other = start("gradient_allreduce", bucket_mb=0.001)
        steps(twin, other, rank, 0, auto.FIRST + 3 * ROUND + 4)
        equal(weights(model), weights(twin), "auto beside gradient_allreduce")


@CASES.over(1, 2)
def a_trial_changes_no_bit(rank: int, world: int, micro: int) -> None:
    """An exact change, through all blocks and after it, with accumulation in ``no_sync`` too."""
    model, optimizer = start("auto")
    twin, other = start("gradient_allreduce")
    steps(model, optimizer, rank, 0, 3, micro)
    tuner(model)._begin_trials([EXACT])
    counts = set()
    for step in range(3, 3 + ROUND + 4):
        steps(model, optimizer, rank, step, 1, micro)
        counts.add(len(trigram.stats(model)["buckets"]))
    steps(twin, other, rank, 0, 3 + ROUND + 4, micro)
    assert len(counts) == 2, counts
    assert len(tuner(model).trials) == 1
    equal(weights(model), weights(twin), "after a trial")


@CASES
def exact_codes_change_no_bit(rank: int, world: int) -> None:
    """What was seen of the gradients of this training is measured; then its codes are tried, and taken."""
    model, optimizer = start("auto", after=0)
    twin, other = start("gradient_allreduce")
    seen: list[Job | str] = []
    measure = tuner(model)._measure

    def measured() -> str:
        seen.append(measure())
        return "only the measurement is wanted"

    tuner(model)._measure = measured  # type: ignore[method-assign]
    steps(model, optimizer, rank, 0, auto.FIRST + 2)
    [of] = seen
    assert isinstance(of, Job) and of.costs.exact is not None and 2.5 < of.costs.exact.own < 4.1
    tuner(model)._begin_trials([LOSSLESS])
    used = set()
    for step in range(auto.FIRST + 2, auto.FIRST + 2 + ROUND):
        steps(model, optimizer, rank, step, 1)
        used.add(trigram.stats(model)["algorithm"])
    assert used == {"gradient_allreduce", "lossless"}
    take(model, LOSSLESS)
    steps(model, optimizer, rank, 2 + ROUND + auto.FIRST, 4)
    assert trigram.stats(model)["algorithm"] == "lossless" and tuner(model).safe == LOSSLESS.decision
    steps(twin, other, rank, 0, auto.FIRST + 2 + ROUND + 4)
    equal(weights(model), weights(twin), "with exact codes")


@CASES.over(True, False)
def a_verdict_is_kept(rank: int, world: int, confirmed: bool) -> None:
    model, optimizer = start("auto:close")
    steps(model, optimizer, rank, 0, 2)
    before = tuner(model).current
    tuner(model)._begin_trials([CLOSE])
    trial = tuner(model).trial
    assert trial is not None
    steps(model, optimizer, rank, 2, 10)
    assert trigram.stats(model)["algorithm"] == "bytegrad"
    tuner(model)._decide(trial, Verdict(2e-3, 1e-3 if confirmed else 3e-3, confirmed))
    steps(model, optimizer, rank, 4, 2)
    assert trigram.stats(model)["algorithm"] == ("bytegrad" if confirmed else "gradient_allreduce")
    assert tuner(model).current == (CLOSE.decision if confirmed else before)
    says(trigram.stats(model)["auto"]["said"], "bytegrad", "takes" if confirmed else "stays")
    same_on_all_ranks(rank, world, f"verdict {confirmed}", [weights(model)])


@CASES.over(math.nan, 1e3)
def gradients_that_depart_end_a_codec(rank: int, world: int, factor: float) -> None:
    """Of one rank only: all ranks go back."""
    model, optimizer = start("auto:close")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(12 * auto.NORM_EVERY):
        if step == 4 * auto.NORM_EVERY:
            take(model, CLOSE)
        optimizer.zero_grad()
        scale = factor if step > 6 * auto.NORM_EVERY and rank == world - 1 else 1.0
        if step == auto.NORM_EVERY:  # a look at a single spike, which says nothing
            scale = 1e6
        (scale * model(x(rank, step, 4, 64)).sin().square().mean()).backward()
        optimizer.step()
    report = trigram.stats(model)["auto"]
    assert trigram.stats(model)["algorithm"] == "gradient_allreduce", report
    says(
        report["said"],
        "goes back",
        "bytegrad",
        "norm of the gradients",
        "not finite" if math.isnan(factor) else "was",
    )
    again = tuner(model)._proposals("" if rank else job(20_000_000, 0.4, 12e6))
    assert all(p.kind == "exact" for p in again), again


@CASES
def a_growing_loss_scale_is_no_departure(rank: int, world: int) -> None:
    model, _ = start("auto:close")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4 * auto.NORM_EVERY)
    for step in range(20 * auto.NORM_EVERY):
        if step == 4 * auto.NORM_EVERY:
            take(model, CLOSE)
        optimizer.zero_grad()
        scaler.scale(model(x(rank, step % 4, 4, 64)).sin().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() >= 2**14
    report = trigram.stats(model)["auto"]
    assert trigram.stats(model)["algorithm"] == "bytegrad", report


@CASES.over("auto", "norms only later", "bytegrad")
def a_codec_goes_on_after_a_checkpoint(rank: int, world: int, saved_by: str) -> None:
    """As long as gradients stay as they are; what they were like is in the state."""
    source, _ = start("auto:close")
    if saved_by == "bytegrad":
        source, _ = start("bytegrad", bucket_mb=0.02)
    else:
        other = torch.optim.SGD(source.parameters(), lr=0.0)
        steps(source, other, rank, 0, 4 * auto.NORM_EVERY)
        take(source, CLOSE)
    state = trigram.algorithm_state(source)
    if saved_by == "norms only later":
        del state["auto"]  # of an earlier release
    model, _ = start("auto:close")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trigram.load_algorithm_state(model, state)
    assert len(tuner(model).norms) == (3 if saved_by == "auto" else 0)
    tuner(model).next = 1 << 40  # measures nothing
    steps(model, optimizer, rank, 0, (settle.LOOKS + 2) * auto.NORM_EVERY)
    assert trigram.stats(model)["algorithm"] == "bytegrad", trigram.stats(model)["auto"]


@CASES
def what_a_codec_held_back_is_not_lost(rank: int, world: int) -> None:
    """A trial of topk, refused, against plain SGD: the weights are the sum of the same gradients, also if a
    checkpoint of the trial goes on, and if ranks do not use a layer."""

    def begin(algorithm: str) -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        trigram.with_bagua(model, algorithm)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model: nn.ModuleList, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            values = x(rank, step, 4, 32)
            layers = model[: 3 - (rank + step) % 2]
            sum((values.cos() * layer(values)).sum() for layer in layers).backward()
            optimizer.step()

    block, end = auto.UNTIMED + auto.TIMED, 4 + ROUND + 6
    plain, model, resumed = begin("gradient_allreduce"), begin("auto:any"), begin("auto:any")
    train(*plain, 0, 4)
    train(*model, 0, 4)
    tuner(model[0])._begin_trials([TOPK])
    train(*plain, 4, 4 + block + 3)
    train(*model, 4, 4 + block + 3)
    assert trigram.stats(model[0])["algorithm"] == "topk"
    apart = (weights(model[0]) - weights(plain[0])).norm()
    state = trigram.algorithm_state(model[0])
    assert state["owed"]
    resumed[0].load_state_dict(model[0].state_dict())
    trigram.load_algorithm_state(resumed[0], state)
    lacking = {k: v for k, v in state.items() if k != "owed"} | {"world_size": world + 1}
    trigram.load_algorithm_state(begin("auto:any")[0], lacking)
    says(
        raises(
            trigram.MisuseError, trigram.load_algorithm_state, resumed[0], {**lacking, "owed": state["owed"]}
        ),
        "owed",
        "belongs to one of them",
    )
    for each in (plain, model, resumed):
        train(*each, 4 + block + 3, end)
    assert trigram.stats(model[0])["algorithm"] in ("topk", "gradient_allreduce")
    tuner(model[0])._use(tuner(model[0]).safe)
    for each in (plain, model, resumed):
        train(*each, end, end + 4)
    for each in (model, resumed):
        left = (weights(each[0]) - weights(plain[0])).norm()
        assert apart > 1e3 * left, (apart, left)


@CASES
def changes_begin_with_an_update(rank: int, world: int) -> None:
    """All of several passes for an update are synchronized; blocks are as many updates."""
    model, optimizer = start("auto:close")
    seen: list[str] = []
    tried = 0
    for step in range(3 + ROUND + 4):
        if step == 3:
            tuner(model)._begin_trials([CLOSE])
        optimizer.zero_grad()
        for micro in range(3):
            model(x(rank, step, 4, 64, salt=micro)).square().mean().backward()
            seen.append(trigram.stats(model)["algorithm"])
        assert len(set(seen[-3:])) == 1, (step, seen[-3:])
        tried += seen[-1] == "bytegrad" and tuner(model).trial is not None
        optimizer.step()
    assert tried == 2 * (auto.UNTIMED + auto.TIMED) and len(tuner(model).trials) == 1
    same_on_all_ranks(rank, world, "micro-passes", [weights(model)])


@CASES
def updates_without_an_optimizer(rank: int, world: int) -> None:
    """Each pass counts as an update."""
    model, _ = start("auto:close")
    for step in range(3 + ROUND + 2):
        if step == 3:
            tuner(model)._begin_trials([CLOSE])
        model.zero_grad()
        model(x(rank, step, 4, 64)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(1e-3 * p.grad)
    assert len(tuner(model).trials) == 1


@CASES
def checkpoints_do_not_end_a_trial(rank: int, world: int) -> None:
    model, optimizer = start("auto:close")
    steps(model, optimizer, rank, 0, 2)
    tuner(model)._begin_trials([CLOSE])
    used = []
    for step in range(2, 2 + ROUND):
        steps(model, optimizer, rank, step, 1)
        used.append(trigram.stats(model)["algorithm"])
        if step % 5 == 0 and tuner(model).trial is not None:
            assert trigram.algorithm_state(model)["algorithm"].startswith("gradient_allreduce")
    assert len(tuner(model).trials) == 1, trigram.stats(model)["auto"]
    assert used.count("bytegrad") >= 2 * (auto.UNTIMED + auto.TIMED)


@CASES.over("one rank", "rank 0", "memory")
def an_error_in_measuring(rank: int, world: int, where: str) -> None:
    """Of any class: all ranks are told, and go on."""
    model, optimizer = start("auto", after=0)
    steps(model, optimizer, rank, 0, auto.FIRST - 1)
    broken: Any = None
    if where == "rank 0" and rank == 0:
        tuner(model).ready = [(0.0, broken)] * auto.WATCHED
    if where == "one rank" and rank == 1:
        tuner(model).steps.append(broken)
    kept = measuring.memory
    if where == "memory" and rank == 1:
        measuring.memory = _none_left
    steps(model, optimizer, rank, 50, 2)
    measuring.memory = kept
    report = trigram.stats(model)["auto"]
    assert report["state"] == "settled"
    says(report["said"], "stays", "no prediction", "rank(s) 0" if where == "rank 0" else "rank(s) 1")
    same_on_all_ranks(rank, world, f"error on {where}", [weights(model)])


@CASES
def a_checkpoint_in_a_trial(rank: int, world: int) -> None:
    """What is saved is what was chosen, and it loads again; a codec that was chosen comes back."""
    model, optimizer = start("auto:close")
    steps(model, optimizer, rank, 0, 3)
    tuner(model)._begin_trials([CLOSE])
    steps(model, optimizer, rank, 3, auto.UNTIMED + auto.TIMED + 1)
    assert trigram.stats(model)["algorithm"] == "bytegrad"
    saved = [model.state_dict(), optimizer.state_dict(), trigram.algorithm_state(model)]
    assert saved[2]["algorithm"].startswith("gradient_allreduce")
    file = io.BytesIO()
    torch.save(saved, file)
    steps(model, optimizer, rank, 40, 1)
    assert trigram.stats(model)["algorithm"] == "bytegrad"  # the trial goes on
    file.seek(0)
    w, o, s = torch.load(file)
    model.load_state_dict(w)
    optimizer.load_state_dict(o)
    trigram.load_algorithm_state(model, s)
    assert tuner(model).trial is None
    steps(model, optimizer, rank, 50, 4)
    twin, other = start("auto:close")
    steps(twin, other, rank, 7, 2)
    tuner(twin)._begin_trials([CLOSE])
    steps(twin, other, rank, 9, auto.UNTIMED + auto.TIMED + 1)
    file.seek(0)
    w, o, s = torch.load(file)
    twin.load_state_dict(w)
    other.load_state_dict(o)
    trigram.load_algorithm_state(twin, s)
    steps(twin, other, rank, 50, 4)
    equal(weights(twin), weights(model), "resumed")
    # A state of bytegrad, in a job that may use it and in one that may not.
    source, _ = start("bytegrad", bucket_mb=0.02)
    state = trigram.algorithm_state(source)
    trigram.load_algorithm_state(twin, state)
    assert trigram.stats(twin)["algorithm"] == "bytegrad"
    strict, _ = start("auto")
    says(raises(trigram.MisuseError, trigram.load_algorithm_state, strict, state), "bytegrad")


@CASES
def a_pass_that_fails_in_a_trial(rank: int, world: int) -> None:
    model, optimizer = start("auto:close")
    steps(model, optimizer, rank, 0, 2)
    tuner(model)._begin_trials([CLOSE])
    for step in range(2, 2 + ROUND + 9):
        optimizer.zero_grad()
        loss = model(x(rank, step, 4, 64)).square().mean()
        if step % 9 == 5:
            hook = next(model.parameters()).register_hook(_raise) if rank == 0 else None
            with pytest.raises((RuntimeError, trigram.AbortedError)):
                loss.backward()
            if hook is not None:
                hook.remove()
            continue
        loss.backward()
        optimizer.step()
    assert len(tuner(model).trials) == 1
    same_on_all_ranks(rank, world, "failed passes", [weights(model)])


def _none_left(most_bytes: int = 0) -> torch.Tensor:
    raise trigram.IoError("planned: no shared memory")


def _raise(_: torch.Tensor) -> None:
    raise RuntimeError("planned")


@CASES
def refusals(rank: int, world: int) -> None:
    says(
        raises(
            trigram.UnsupportedError,
            trigram.with_bagua,
            net(),
            "auto",
            elastic=True,
            optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1),
        ),
        "elastic",
        "plan=",
    )
    says(raises(trigram.UnsupportedError, trigram.switch, start("async")[0], "auto"), "with_bagua")
    says(raises(trigram.MismatchError, start, ["auto", "gradient_allreduce"][rank % 2]), "differ")
    says(raises(trigram.MismatchError, start, "auto", after=float(rank % 2)), "different options")
    model = trigram.with_bagua(net().double(), "auto")
    says(trigram.stats(model)["auto"]["said"], "stays", "float32")
    model, optimizer = start("auto")
    trigram.switch(model, "bytegrad")
    steps(model, optimizer, rank, 0, 2)
    assert "auto" not in trigram.stats(model)


@CASES.over(1, 2)
def uneven_inputs(rank: int, world: int, passes: int) -> None:
    """Inside ``trigram.join`` a trial is suspended, whatever the passes of an update; it goes on after it."""
    model, _ = start("auto:close")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    steps(model, optimizer, rank, 0, 2)
    tuner(model)._begin_trials([CLOSE])
    steps(model, optimizer, rank, 2, 10)
    assert trigram.stats(model)["algorithm"] == "bytegrad"
    with trigram.join(model):
        for step in range(12, 12 + 4 + 9 * rank):
            optimizer.zero_grad()
            for micro in range(passes):
                model(x(rank, step, 4, 64, salt=micro)).square().mean().backward()
            optimizer.step()
    assert trigram.stats(model)["algorithm"] == "gradient_allreduce"
    says(trigram.stats(model)["auto"]["said"], "nothing is tried inside trigram.join")
    steps(model, optimizer, rank, 40, ROUND - 10)
    assert len(tuner(model).trials) == 1
    same_on_all_ranks(rank, world, f"join {passes}", [weights(model)])


ALONE = Cases()


@ALONE
def one_rank(rank: int, world: int) -> None:
    model, optimizer = start("auto")
    steps(model, optimizer, rank, 0, 2)
    report = trigram.stats(model)["auto"]
    assert report["state"] == "off"
    says(report["said"], "stays", "one rank")
    trigram.load_algorithm_state(model, trigram.algorithm_state(model))


@pytest.mark.parametrize("case", list(ALONE))
@pytest.mark.parametrize("world", [1])
def test_auto_alone(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("ALONE", case, world)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [3])
def test_auto(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, patience=60)


@pytest.mark.parametrize("case", ["a_trial_changes_no_bit-1", "measures_and_trains_on-auto"])
@pytest.mark.parametrize("world", [2])
def test_auto_over_tcp(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="tcp", patience=60)
