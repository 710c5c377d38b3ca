"""Who or what holds the steps of a job up, from what its ranks say of them.

Ranks that average gradients end each step together, so a late rank shows in the others' waiting and not in
its own. *Own time* is a step without the waiting: it is what tells ranks apart, and a rank that is late
because it waited for another one is not blamed.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field

from trigram.observe.figures import Rank
from trigram.observe.phases import BACKWARD, FORWARD, INPUT, OPTIMIZER, OTHER, WAIT, WITH_BAGUA

_LATE = 1.1
"""A rank is slow if its own time is this many times that of the others, and it waits for less than that costs
them."""
_FAR, _COSTLY = 1.5, 0.15
"""With this many times, or if its input takes longer by this part of a step, it is slow whatever
communication takes."""
_EXPOSED = 0.1
"""Of a step: from here on, waiting is worth a word."""
_SLOW_LINK = 2 / 3
"""A link is slow if it carries less than this part of the median: of four links, one of a quarter of the rate
was seen at a half, because the others carry no more than it takes, even at their best of six declarations
(`REMEMBERED` in agreed_rates.rs); on a busy machine equal ones at 0.75."""
_CHANCE = 0.25
"""Of the time that is waited for the longest rank of each step, one rank is to blame for all but this part at
most, and of several each for as much less. One of ranks that are late by turns has 0.26 to 0.71 of it."""
_ALIKE = 8
"""Steps of all ranks, at least, that tell whether ranks are late by turns."""
_SMALL_BUCKET = 256 << 10
_MANY_BUCKETS = 8


@dataclass
class Finding:
    """What the figures say.

    Attributes:
        cause: ``input``, ``compute``, ``turns``, ``link``, ``buckets``, ``network``, or ``none``.
        rank: The rank that holds the others up, the slowest if there are several; None: no single one does.
        ranks: All that hold the others up, the slowest first.
        chronic: Whether it does so in most steps, not in some.
        verdict: One sentence.
        why: Figures behind it, one sentence each.
        then: What to do, one sentence each.
    """

    cause: str
    rank: int | None
    chronic: bool
    verdict: str
    why: list[str]
    then: list[str]
    ranks: list[int] = field(default_factory=list)


def judge(rows: list[Rank]) -> Finding:
    """Who or what holds the job up.

    Args:
        rows: All ranks, or those that are known.
    """
    trained = [row for row in rows if row.steps > 0]
    if not trained:
        return Finding(
            "none",
            None,
            False,
            "no step of training was counted",
            [
                "a step is a forward and a backward pass of a model, and its update; the first is left out, "
                "and where with_bagua does not train the model, an optimizer of torch.optim must update it"
            ],
            [],
        )
    step = statistics.median(row.mean["step"] for row in trained)
    exposed = statistics.median(row.exposed for row in trained)
    waits = f"half of the ranks wait for more than {exposed:.0%} of a step"
    slowest = _apart(trained)
    late = slowest[0]
    others = [row for row in trained if row not in slowest]
    usual = statistics.median(row.own() for row in others) if others else late.own()
    excess = late.own() - usual
    slower = bool(others) and late.own() > _LATE * usual and excess > 0.05 * step
    # What the slowest waits is communication, which all have; what others wait longer is its lateness.
    # Communication takes processor time, so it may be what makes a rank compute longer, but no input.
    fetches = late.mean[INPUT] - statistics.median([row.mean[INPUT] for row in others] or [late.mean[INPUT]])
    costly = fetches > _COSTLY * step
    on_gpu = any(row.on_gpu for row in trained)
    far = late.own() > _FAR * usual and not on_gpu  # while the GPU has work, it costs nothing
    if any(row.asynchronous for row in trained):
        if slower and (far or costly):
            waits = "the other ranks do not wait, and make more steps"
            return _slow_ranks(slowest, others, usual, waits)
        waited = statistics.median(row.mean[WAIT] for row in trained)
        why = [
            f"averaging takes {_ms(waited)} of a {_ms(step)} step: copies and codecs, and waiting where "
            "staleness bounds how far ranks are apart"
        ]
        return Finding("none", None, False, "nothing stands out: ranks average in the background", why, [])
    if not on_gpu and exposed >= _EXPOSED and (turns := _by_turns(trained, slowest)) is not None:
        return turns
    if slower and (far or excess > late.mean[WAIT] or costly):
        return _slow_ranks(slowest, others, usual, waits)
    if on_gpu:
        return Finding(
            "none",
            None,
            False,
            "no rank's input or host holds the others up; what GPUs and links take is not known",
            [
                "the model is on GPUs: phases are times of the host, which launches kernels and goes on, and "
                "its waiting includes what the GPU still has to do",
                waits,
            ],
            ["torch.profiler shows what the GPUs do, trigram timeline --profiler shows it beside the calls"],
        )
    # The rank that waits least waits for communication; the others also for ranks that are late by turns.
    least = min(row.exposed for row in trained)
    if least < _EXPOSED:
        why = [f"own times are within {late.own() / usual - 1:.0%} of each other"] if others and usual else []
        if exposed >= _EXPOSED:
            why.append(f"{waits}, most of it for ranks that are late by turns: one waits for {least:.0%}")
        return Finding(
            "none", None, False, f"nothing stands out: ranks wait for {least:.0%} of a step", why, []
        )
    why = [waits]
    if slower:
        why.append(
            f"rank {late.rank} computes {_ms(excess)} longer than the others, "
            f"and waits {_ms(late.mean[WAIT])}"
        )
    return _communication(trained, why, late if slower and excess > _EXPOSED * step else None)


def _apart(rows: list[Rank]) -> list[Rank]:
    """The ranks with the longest own times, longest first: those above the widest gap between two ranks if
    these are half of all at most (of an odd number, one more), and else the slowest alone."""
    ordered = sorted(rows, key=Rank.own, reverse=True)
    gaps = [a.own() - b.own() for a, b in itertools.pairwise(ordered)]
    above = gaps.index(max(gaps)) + 1 if gaps else 1
    return ordered[: above if above <= (len(rows) + 1) // 2 else 1]


def _by_turns(rows: list[Rank], slowest: list[Rank]) -> Finding | None:
    """Ranks wait mostly for whichever of them computes longest in a step, and these are not always the
    ``slowest`` ones; None: they do not, or it is not known."""
    last = min(row.steps for row in rows)
    known = min(len(row.recent) - (row.steps - last) for row in rows)
    if known < _ALIKE or len(rows) < 2:
        return None
    of_steps = list(
        zip(*(row.recent[: len(row.recent) - (row.steps - last)][-known:] for row in rows), strict=True)
    )
    waits = [statistics.fmean(max(step) - step[k] for step in of_steps) for k in range(len(rows))]
    waited = statistics.median(row.mean[WAIT] for row in rows)
    lateness = statistics.median(waits)
    if lateness < 0.5 * waited:
        return None
    apart = [row in slowest for row in rows]
    # By how much the longest of a step takes longer than those who are not with it.
    late = {True: 0.0, False: 0.0}
    for own in of_steps:
        longest_of = max(range(len(rows)), key=own.__getitem__)
        with_it = apart if apart[longest_of] else [k == longest_of for k in range(len(rows))]
        rest = [t for t, together in zip(own, with_it, strict=True) if not together]
        late[apart[longest_of]] += own[longest_of] - max(rest)
    if late[True] >= (1 - _CHANCE / len(slowest)) * sum(late.values()):
        return None
    times_last = [sum(step[k] == max(step) for step in of_steps) for k in range(len(rows))]
    k = max(range(len(rows)), key=times_last.__getitem__)
    step = statistics.median(row.mean["step"] for row in rows)
    longest = statistics.median(max(own) for own in of_steps)
    usual = statistics.median(statistics.median(own) for own in of_steps)
    then = [
        "trigram timeline shows which steps: look for batches of unequal work, and for logging, evaluation, "
        "checkpoints and other programs that stop one rank at a time",
        "trigram.data.BalancedBatchSampler gives ranks batches of equal work",
    ]
    if all(row.trained_by == WITH_BAGUA for row in rows):
        then.append("asynchronous algorithms do not wait for each other: algorithm='async'")
    return Finding(
        "turns",
        None,
        True,
        f"ranks are late by turns: half of the ranks wait {_ms(waited)} of a {_ms(step)} step "
        f"({waited / step:.0%}), most of it for the one that computes longest in that step",
        [
            f"without waiting the longest of a step takes {_ms(longest)}, half of the ranks {_ms(usual)} at "
            f"most; over the last {known} steps that would make half of the ranks wait {_ms(lateness)}",
            f"rank {rows[k].rank} was the longest most often, in {times_last[k] / known:.0%} of them",
        ],
        then,
    )


@dataclass
class _Slowness:
    """In what a rank is slow.

    Attributes:
        cause: See :class:`Finding`.
        chronic: See :class:`Finding`.
        phase: Where most of the difference is.
        excess: The difference there, in seconds.
    """

    cause: str
    chronic: bool
    phase: str
    excess: float


def _slowness(late: Rank, others: list[Rank], usual: float) -> _Slowness:
    excess = {
        phase: late.mean[phase] - statistics.median(row.mean[phase] for row in others)
        for phase in (INPUT, FORWARD, BACKWARD, OPTIMIZER, OTHER)
    }
    phase = max(excess, key=excess.__getitem__)
    typical = statistics.median(row.own(typical=True) for row in others)
    # A rank that is late once has a long mean and an ordinary median.
    chronic = late.own(typical=True) - typical > 0.5 * (late.own() - usual)
    return _Slowness("input" if phase == INPUT else "compute", chronic, phase, excess[phase])


def _slow_ranks(slowest: list[Rank], others: list[Rank], usual: float, waits: str) -> Finding:
    """These ranks hold the others up; the slowest comes first."""
    found = [_slowness(late, others, usual) for late in slowest]
    alike: dict[str, list[Rank]] = {}
    then: list[str] = []
    for late, slow in zip(slowest, found, strict=True):
        host = "what {} host does" if late.on_gpu else "{} computation"
        what = "{} input" if slow.cause == "input" else f"{host} (most in: {slow.phase})"
        alike.setdefault(
            f"slow in {what}, {'in most steps' if slow.chronic else 'in some steps'}", []
        ).append(late)
        if slow.cause == "input" and not slow.chronic:
            then.append(
                "look at what the script does from an update to the next forward pass in these steps: "
                "evaluation, checkpoints, logging, a new epoch; do it on all ranks, or beside the training"
            )
        elif slow.cause == "input":
            then.append(
                "give the DataLoader more workers or a longer prefetch_factor, or cache what it reads "
                "(trigram.data.CachedDataset)"
            )
        else:
            then += [
                f"look at {late.host}: other programs, clocks, threads",
                "trigram.data.BalancedBatchSampler with speeds='measured' gives slow ranks less work",
            ]
    first = slowest[0]
    if found[0].chronic and first.trained_by == WITH_BAGUA and not first.asynchronous:
        then.append("asynchronous algorithms do not wait for slow ranks: algorithm='async'")
    verdict = "; ".join(
        f"{_names(rows)} " + (f"is {how}".format("its") if len(rows) == 1 else f"are {how}".format("their"))
        for how, rows in alike.items()
    )
    why = [
        f"without waiting a step of rank {late.rank} takes {_ms(late.own())}, the others' {_ms(usual)}; "
        f"{_ms(slow.excess)} of the difference are in {slow.phase}"
        for late, slow in zip(slowest, found, strict=True)
    ]
    ranks = [late.rank for late in slowest]
    return Finding(
        found[0].cause, first.rank, found[0].chronic, verdict, [*why, waits], list(dict.fromkeys(then)), ranks
    )


def _names(rows: list[Rank]) -> str:
    """Ranks with their hosts."""
    ordered = sorted(rows, key=lambda row: row.rank)
    names = [f"rank {row.rank} on {row.host}" for row in ordered]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _communication(rows: list[Rank], why: list[str], late: Rank | None) -> Finding:
    """Ranks wait for communication, and less for a ``late`` rank, if there is one."""
    most = max(rows, key=lambda row: len(row.rates))
    links = {
        rank: rate / 1e6 for rank, rate in zip(most.ranks, most.rates, strict=False)
    }  # helpers come last
    rates = list(links.values())
    if len(rates) > 2 and min(rates) < _SLOW_LINK * statistics.median(rates):
        rank = min(links, key=links.__getitem__)
        host = next((row.host for row in rows if row.rank == rank), "its host")
        return Finding(
            "link",
            rank,
            True,
            f"the link of rank {rank} on {host} is slow",
            [
                f"it carries {min(rates):.0f} MB/s, the median link {statistics.median(rates):.0f}",
                *why,
            ],
            [
                f"look at the cable, the port and other traffic of {host}",
                *_less(rows[0]),
            ],
        )
    buckets = max((row.buckets for row in rows), key=len)
    usual = statistics.median(buckets) if buckets else 0
    if len(buckets) >= _MANY_BUCKETS and usual < _SMALL_BUCKET:
        return Finding(
            "buckets",
            None,
            True,
            "the gradient buckets are small",
            [
                f"{len(buckets)} buckets, half of them of {usual / 1024:.0f} KiB at most; each costs a call",
                *why,
            ],
            ["leave bucket_mb out, or set it to 4"],
        )
    if rates:
        why.append(f"links carry {min(rates):.0f} to {max(rates):.0f} MB/s")
    else:
        sent = statistics.median(row.sent / row.steps for row in rows)
        if sent > 0:
            rate = sent / statistics.median(row.mean["step"] for row in rows)
            why.append(
                f"half of the ranks send at least {sent / 1e6:.3g} MB per step: {rate / 1e6:.3g} MB/s, "
                "averaged over the step"
            )
    step = statistics.median(row.mean["step"] for row in rows)
    waited = statistics.median(row.mean[WAIT] for row in rows)
    verdict = (
        f"communication takes longer than backward can hide: {_ms(waited)} of a {_ms(step)} step "
        f"({waited / step:.0%}) are waited for it; "
    )
    if late is not None:
        verdict += f"rank {late.rank} is late by less"
    else:
        verdict += f"no rank{' or link' if len(rates) > 2 else ''} stands out"
        if not all(row.recent for row in rows):
            verdict += ", unless ranks are late by turns"
    size = max(row.world_size for row in rows)
    if len(rows) < size:
        verdict += ", or a rank is late whose figures are missing"
    return Finding("network", None, True, verdict, why, _less(rows[0]))


def _less(row: Rank) -> list[str]:
    """How to communicate less, for the job of this rank."""
    bagua = row.trained_by in ("", WITH_BAGUA)
    if row.hosts == 1:
        block = {
            "FSDP2": "model.set_requires_gradient_sync(False)",
            WITH_BAGUA: "trigram.no_sync(model)",
        }.get(row.trained_by or WITH_BAGUA, "no_sync")
        return [
            "inside a host a codec costs more than it saves: larger batches, or gradients accumulated "
            f"over some of them ({block}), communicate less often"
        ]
    if row.trained_by == "FSDP2":
        return [
            "trigram.integrations.fsdp.use(model, codec='int8') sends a quarter of the gradients' bytes, and "
            "weights='bf16' half of the weights'"
        ]
    then = ["algorithm='bytegrad' sends a quarter of the bytes and trains as DDP does within noise"]
    if row.coded:
        then = ["larger batches, or local_sgd or diloco, communicate less often"]
    if bagua:
        return ["trigram plan -- python SCRIPT predicts the step with every algorithm", *then]
    return [f"trigram.with_bagua(model) in place of {row.trained_by}: its {then[0]}"]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
