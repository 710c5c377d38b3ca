"""Runs rows of the table on real ranks and in one process, and says what is wrong with the outcome."""

from __future__ import annotations

import importlib
import os
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import trigram
from tests.support.harness import Ranks, RanksFailed, say, scratch, until
from tests.support.loops.loop import Loop
from tests.support.loops.table import ALGORITHMS, ASYNC, EVERY, GOSSIP, GRADIENTS, ROWS, Row

SUBJECTS = [
    f"tests.support.loops.{p.stem}"
    for p in sorted(Path(__file__).parent.glob("*.py"))
    if p.stem not in ("__init__", "table", "loop", "judge")
]
for _subject in SUBJECTS:
    importlib.import_module(_subject)

PATIENCE = 60.0  # seconds for one row, after which its ranks hang
REFUSALS = (trigram.MisuseError, trigram.UnsupportedError, trigram.MismatchError)

Key = tuple[str, str]  # (row, algorithm)
Weights = list[torch.Tensor]  # of each model: all its parameters, one after the other


@dataclass
class Outcome:
    """What became of a row on one rank."""

    end: str  # "trained", "refused" or "raised"
    at: int = -1  # the iteration
    iterations: int = 0
    text: str = ""
    start: Weights = field(default_factory=list)
    before: Weights = field(default_factory=list)  # at the end, before `consensus`
    after: Weights = field(default_factory=list)  # and after it
    steps: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)


def _real(p: torch.Tensor) -> torch.Tensor:
    values = p.detach()
    return (torch.view_as_real(values) if p.is_complex() else values).double()


def _flat(models: list[Any]) -> Weights:
    parts = [[_real(p).flatten() for _, p in sorted(m.named_parameters())] for m in models]
    return [torch.cat(part) if part else torch.zeros(0).double() for part in parts]


# In a rank.


def _play(row: Row, algorithm: str, rank: int, world: int) -> Outcome:
    t = Loop(row, world, [rank], algorithm)
    try:
        row.loop(t)
        out = Outcome("trained", t.at, t.iterations, before=_flat(t.models))
        for model in t.models:
            counts = trigram.stats(model)
            out.steps.append(counts["steps"])
            out.rounds.append(counts["rounds"])
        for model in t.models:
            trigram.consensus(model)
        out.after = _flat(t.models)
        _unwrap(t)
    except REFUSALS as e:
        refused = Outcome("refused", t.at, t.iterations, f"{type(e).__name__}: {e}")
        try:  # so that the next row begins with nothing under way
            if row.alike:
                _unwrap(t)
        except trigram.TrigramError:
            text = f"{refused.text}, and then, in unwrap:\n{traceback.format_exc()}"
            return Outcome("raised", t.at, t.iterations, text)
        return refused
    except trigram.PeerLostError as e:
        lost = Outcome("told", t.at, t.iterations, f"{type(e).__name__}: {e}")
        return lost if not row.alike else Outcome("raised", t.at, t.iterations, traceback.format_exc())
    except BaseException:
        return Outcome("raised", t.at, t.iterations, traceback.format_exc())
    return out


def _unwrap(t: Loop) -> None:
    for model in t.models:
        if trigram.is_wrapped(model):
            trigram.unwrap(model)


def ranks_main(rank: int, world: int, keys: list[Key], patience: float) -> None:
    """In a rank: the rows in order, as long as the ranks can go on together."""
    trigram.init(op_timeout=patience / 3)  # so that a rank that waits for nobody says where
    for number, (name, algorithm) in enumerate(keys):
        say(("begins", number))
        outcome = _play(ROWS[name], algorithm, rank, world)
        say(("ends", number, outcome))
        mine = scratch() / f"ended-{number}-{rank}"
        mine.with_suffix(".part").write_text(f"{outcome.end} {outcome.at}")
        mine.with_suffix(".part").rename(mine)
        if outcome.end == "raised" or (outcome.end != "trained" and not ROWS[name].alike):
            os._exit(0)  # the others, who may wait for this rank, are told at once
        others = [scratch() / f"ended-{number}-{r}" for r in range(world)]
        with suppress(TimeoutError):
            until(lambda others=others: all(o.exists() for o in others), patience, "the other ranks")
        ends = {o.read_text() if o.exists() else "" for o in others}
        if len(ends) != 1:
            os._exit(0)


def alone_main(_rank: int, _world: int, names: list[str], world: int) -> None:
    """In the one process: each row on the data of all ranks, then on the data of each rank alone."""
    for name in names:
        weights: list[Weights] = []
        try:
            for shares in (range(world), *([r] for r in range(world))):
                t = Loop(ROWS[name], world, shares, None)
                ROWS[name].loop(t)
                weights.append(_flat(t.models))
        except BaseException:
            say((name, traceback.format_exc()))
        else:
            say((name, weights))


# In the test.


def _run_ranks(world: int, keys: list[Key], patience: float) -> dict[Key, list[Outcome | str]]:
    """Each rank's outcome of each row, or the report of ranks that hung or died in it."""
    outcomes: dict[Key, list[Outcome | str]] = {}
    left = list(keys)
    while left:
        with Ranks(world, ranks_main, left, patience) as ranks:
            report = ""
            try:
                ranks.results(patience, dies=range(world), renew=True)
            except RanksFailed as e:
                report = str(e)
            reached = 0
            for number, key in enumerate(left):
                of = {
                    r: word[2]
                    for r, rank in ranks.ranks.items()
                    for word in rank.said
                    if word[0] == "ends" and word[1] == number
                }
                if not of and number:
                    break
                outcomes[key] = [of.get(r, report or "the rank ended without a word") for r in range(world)]
                reached = number + 1
        left = left[reached:]
    return outcomes


_alone: dict[tuple[int, str], Any] = {}  # the one process's weights, which all algorithms share


def _run_alone(world: int, names: list[str]) -> dict[str, Any]:
    missing = [name for name in names if (world, name) not in _alone]
    if missing:
        _alone.update({(world, name): weights for name, weights in _start_alone(world, missing).items()})
    return {name: _alone[world, name] for name in names if (world, name) in _alone}


def _start_alone(world: int, names: list[str]) -> dict[str, Any]:
    with Ranks(1, alone_main, names, world) as ranks:
        try:
            ranks.results(PATIENCE, renew=True)
        except RanksFailed as e:
            print(e)
        return dict(ranks.ranks[0].said)


def run(world: int, keys: list[Key], patience: float = PATIENCE) -> dict[Key, str | None]:
    """The verdict on each row: None, or what is wrong. `patience` is for one row."""
    names = list(dict.fromkeys(name for name, _ in keys))
    alone = _run_alone(world, names)
    outcomes = _run_ranks(world, keys, patience)
    verdicts: dict[Key, str | None] = {}
    for key in keys:
        row = ROWS[key[0]]
        verdicts[key] = verdict(row, key[1], outcomes.get(key, ["never reached"]), alone.get(row.name))
    return verdicts


def verdict(row: Row, algorithm: str, outcomes: list[Outcome | str], alone: Any) -> str | None:
    """What is wrong with the outcome of a row; None if nothing is."""
    lost = [f"rank {r}: {o}" for r, o in enumerate(outcomes) if isinstance(o, str)]
    mine = [o for o in outcomes if isinstance(o, Outcome)]
    ends = [(o.end, o.at) for o in mine]
    told = [
        f"rank {r}: {o.end} at {o.at}: {o.text}" for r, o in enumerate(outcomes) if isinstance(o, Outcome)
    ]
    if lost:
        return "\n".join(["hangs or dies", *told, *lost])
    if any(o.end == "raised" for o in mine):
        return "\n".join(["raises", *told])
    if not row.alike and "refused" in {o.end for o in mine} and "trained" not in {o.end for o in mine}:
        return _refused(row, algorithm, [o for o in mine if o.end == "refused"], told)
    if len(set(ends)) > 1:
        return "\n".join([f"the ranks fare differently: {ends}", *told])
    if mine[0].end == "refused":
        return _refused(row, algorithm, mine, told)
    if row.is_refused(algorithm):
        return "is trained without a word; it was to be refused"
    return trained(row, algorithm, mine, alone)


def _refused(row: Row, algorithm: str, mine: list[Outcome], told: list[str]) -> str | None:
    """What is wrong with a refusal."""
    if not row.may_be_refused(algorithm):
        return "\n".join(["is refused", *told])
    assert row.refused is not None
    missing = [(w, o.text) for w in row.refused.says for o in mine if not _says(o.text, w)]
    return "\n".join(f"the refusal does not say {w!r}: {text}" for w, text in missing) or None


def _expected(row: Row, algorithm: str, o: Outcome, model: int) -> int:
    """The steps that `stats` counts: backward passes, or where weights are averaged, updates."""
    if row.steps is not None:
        return row.steps if isinstance(row.steps, int) else row.steps[model]
    return int(o.iterations * (row.passes if algorithm in GRADIENTS else row.boundaries))


def _says(text: str, words: str) -> bool:
    return any(word.lower() in text.lower() for word in words.split("|"))


def trained(row: Row, algorithm: str, mine: list[Outcome], alone: Any) -> str | None:
    """What is wrong with what the ranks trained."""
    if not isinstance(alone, list):
        return f"the row itself fails in one process:\n{alone}"
    wrong: list[str] = []
    reference, single = alone[0], alone[1:]
    if len(reference) != len(mine[0].before):
        return f"{len(mine[0].before)} models were wrapped, {len(reference)} in one process"
    for m, expected in enumerate(reference):
        what = f"model {m}: " if len(reference) > 1 else ""
        before, after = [o.before[m] for o in mine], [o.after[m] for o in mine]
        if any(w.numel() != expected.numel() for w in before):
            wrong.append(f"{what}{before[0].numel()} weights, {expected.numel()} in one process")
            continue
        if not all(bool(w.isfinite().all()) for w in before + after):
            wrong.append(f"{what}weights are not finite")
        due = _expected(row, algorithm, mine[0], m)
        steps, rounds = [o.steps[m] for o in mine], [o.rounds[m] for o in mine]
        if row.even and set(steps) != {due}:
            wrong.append(f"{what}counted {steps} steps, made {due}")
        if algorithm in GRADIENTS:
            if any(not torch.equal(w, before[0]) for w in before):
                far = max(float((w - before[0]).abs().max()) for w in before)
                wrong.append(
                    f"{what}the replicas of an algorithm that averages gradients are {far:.3g} apart"
                )
        elif row.rounds and row.even:
            every = int({**ALGORITHMS[algorithm], **row.options.get(algorithm, {})}.get("every", 1))
            # The last may be due in the forward that does not come, and be applied one step later.
            late = (0, 1) if algorithm in EVERY else (0, 1, 2)
            fine = {due // every - k for k in late}
            if algorithm in ASYNC and algorithm in GOSSIP and len(mine) % 2:
                fine = set(range(1, due + 1))  # in each, one rank sits out
            if not set(rounds) <= fine or 0 in rounds:
                wrong.append(f"{what}averaged the weights {rounds} times, {due // every} were due")
        if any(not torch.equal(w, after[0]) for w in after):
            wrong.append(f"{what}the replicas differ after consensus")
        apart_alone = max(float((s[m] - single[0][m]).norm()) for s in single)
        apart = max(float((w - before[0]).norm()) for w in before)
        # Asynchronous gossip leaves one of three ranks alone in each step.
        bound = 0.9 if algorithm in ASYNC and algorithm in GOSSIP else 0.75
        timed = algorithm in ASYNC and not row.even  # averages come when they come
        if algorithm not in GRADIENTS and row.spread and not timed and apart > bound * apart_alone:
            wrong.append(f"{what}the replicas are {apart:.3g} apart, {apart_alone:.3g} if each trains alone")
        if row.is_compared(algorithm):
            moved = max(float((expected - s[m]).norm()) for s in single)
            far = float((after[0] - expected).norm()) / max(float(expected.norm()), 1e-9)
            scale = moved / max(float(expected.norm()), 1e-9)
            allowed = _tolerance(row, algorithm) * scale + 2e-6
            if far > allowed:
                wrong.append(
                    f"{what}the weights are {far:.3g} (relative) off those of one process; allowed "
                    f"{allowed:.3g}; those of a rank alone are {scale:.3g} off"
                )
    return "; ".join(wrong) or None


def _tolerance(row: Row, algorithm: str) -> float:
    """How far off the one process's weights is right, in parts of how far a rank alone is off."""
    if row.tolerance is not None:
        return row.tolerance
    if algorithm in ("gradient_allreduce", "topk"):
        return 1e-4
    if algorithm == "bytegrad":
        return 0.03
    if algorithm == "powersgd":
        return 0.5
    return 0.01 if row.linear else 0.2
