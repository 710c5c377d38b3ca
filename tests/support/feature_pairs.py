"""Features of `with_bagua`, and a training that uses two of them. What docs/compatibility.md says of a pair
is made to happen here: `trigram run -n 2 -m tests.support.feature_pairs` writes the page."""

from __future__ import annotations

import contextlib
import copy
import os
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trigram
from tests.support.ternary import register
from trigram.algorithms import parse
from trigram.algorithms.compatibility import REFUSALS

LATE = 30.0
NO_ALGORITHM = "no algorithm goes with both"


@dataclass(frozen=True)
class Feature:
    """A feature, and how a script asks for it.

    Attributes:
        name: As in the page.
        algorithm: For an algorithm: its name; None: it goes with any.
        options: Of `with_bagua`.
        optimizer: It is told the optimizer.
        act: What the script does around its loop, or in it; see `TRAININGS`.
    """

    name: str
    algorithm: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: bool = False
    act: str = ""


ALGORITHMS = [
    Feature("gradient_allreduce", "gradient_allreduce"),
    Feature("bytegrad", "bytegrad"),
    Feature("lossless", "lossless"),
    Feature("topk", "topk", {"fraction": 0.3}),
    Feature("powersgd", "powersgd", {"warmup_steps": 0}),
    Feature("qadam", "qadam", {"warmup_steps": 2}, True),
    Feature("central:median", "central:median/full/sync"),
    Feature("register(average=)", "ternary"),
    Feature("local_sgd", "local_sgd", {"every": 2}),
    Feature("central/int8/every:2", "central/int8/every:2"),
    Feature("diloco", "diloco", {"every": 2}),
    Feature("sparta", "sparta", {"share": 0.4}),
    Feature("decentralized", "decentralized"),
    Feature("low_precision_decentralized", "low_precision_decentralized"),
    Feature("push_sum", "push_sum"),
    Feature("register(step=)", "towards"),
    Feature("async", "async", {"staleness": 2}),
    Feature("async_decentralized", "async_decentralized", {"staleness": 2}),
    Feature("auto", "auto"),
]
OPTIONS = [
    Feature("every=function", options={"every": lambda step: step % 2 == 0}),
    Feature("overlap", options={"overlap": True}),
    Feature("fragments", options={"fragments": 2}),
    Feature("quorum", options={"quorum": 2}),
    Feature("warmup_steps", options={"warmup_steps": 3}),
    Feature("outer_lr", options={"outer_lr": 0.9}),
    Feature("state=sharded", options={"state": "sharded"}, optimizer=True),
    Feature("gradients=shards", options={"state": "sharded", "gradients": "shards"}, optimizer=True),
    Feature("fused", options={"fused": True}, optimizer=True),
    Feature("sample_weight", options={"sample_weight": 2.0}),
    Feature("check_finite", options={"check_finite": True}),
    Feature("check_replicas", options={"check_replicas": 2}),
    Feature("filters", options={"filters": [trigram.averaging.GradientFilter()]}),
    Feature("ignore", options={"ignore": ["one.bias"]}),
    Feature("group", act="group"),
    Feature("sparse", act="sparse"),
    Feature("elastic", options={"elastic": True}, optimizer=True),
    Feature("copies", options={"elastic": True, "state": "sharded", "copies": 2}, optimizer=True),
    Feature("join", act="join"),
    Feature("no_sync", act="no_sync"),
    Feature("switch", act="switch"),
    Feature("checkpoint", act="checkpoint"),
]
FEATURES = {feature.name: feature for feature in [*ALGORITHMS, *OPTIONS]}


class Net(nn.Module):
    """Two layers."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 24), nn.Linear(24, 3)
        self.places = nn.Embedding(8, 3, sparse=True) if sparse else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(torch.tanh(self.one(inputs)))
        return out if self.places is None else out + self.places(torch.arange(len(inputs)))


def begin() -> None:
    """Registers what the table names."""
    register()
    if "towards" not in [entry["name"] for entry in trigram.algorithms()]:
        value = trigram.Trigram("central", "full", "every:2", "weights")
        trigram.register("towards", value, step=trigram.mixing.Mean)


def train(rank: int, algorithm: Feature, *features: Feature) -> None:
    """Trains with an algorithm and other features; raises what is refused."""
    acts = {feature.act for feature in features} - {""}
    torch.manual_seed(0)
    module = Net("sparse" in acts)
    kind: Any = torch.optim.SGD if "sparse" in acts else torch.optim.Adam
    optimizer: Any = (trigram.QAdam if algorithm.algorithm == "qadam" else kind)(module.parameters(), lr=0.01)
    options = dict(algorithm.options)
    for feature in features:
        options |= feature.options
    if algorithm.optimizer or any(feature.optimizer for feature in features):
        options["optimizer"] = optimizer
    elastic = "elastic" in options
    if elastic:  # such a model is unwrapped only by the end of the job
        trigram.init(op_timeout=LATE, elastic=True)
    if "group" in acts:
        options["group"] = trigram.new_group([0, 1])
    model = None
    try:
        model = trigram.with_bagua(module, algorithm.algorithm, **options)
        _loop(model, optimizer, rank, acts)
        trigram.consensus(model)
    finally:
        if elastic:
            trigram.shutdown()
        elif model is not None:
            trigram.unwrap(model)


def _loop(model: nn.Module, optimizer: Any, rank: int, acts: set[str]) -> None:
    generator = torch.Generator().manual_seed(rank)
    count = 8 - rank if "join" in acts else 8
    with trigram.join(model) if "join" in acts else contextlib.nullcontext():
        for step in range(count):
            if step == 4 and "switch" in acts:
                trigram.switch(model, "gradient_allreduce")
            if step == 4 and "checkpoint" in acts:
                trigram.load_algorithm_state(model, copy.deepcopy(trigram.algorithm_state(model)))
            optimizer.zero_grad()
            for k in range(2 if "no_sync" in acts else 1):
                inputs = torch.randn(4, 6, generator=generator)
                last = k == 1 or "no_sync" not in acts
                with contextlib.nullcontext() if last else trigram.no_sync(model):
                    (model(inputs) - inputs[:, :3]).square().mean().backward()
            optimizer.step()


def outcome(rank: int, *features: Feature) -> str:
    """Empty if a training with these features works, of which the first is an algorithm; else the error."""
    try:
        train(rank, *features)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# The page.

REASONS = [
    *dict.fromkeys(refusal.why for refusal in REFUSALS),
    "it must be a divisor of the 1 steps",
    "the model is in a block of join",
    "an elastic job keeps a sharded optimizer, and gets none later, because ranks that join call with_bagua "
    "with one algorithm",
]
"""Parts of the errors of pairs that are refused, beside that an algorithm does not have an option."""
HEAD = """# What goes with what

Each algorithm with each option of `with_bagua`, and with what a script does; then two of these with
each other. `trigram run -n 2 -m tests.support.feature_pairs` makes this page by training with every
pair on two ranks. A test compares it with what happens.

* **yes**: it trains.
* **-**: the algorithm has no such option, as it would have nothing to do; the error lists the
  options that it has.
* **no**: no algorithm goes with both.
* A number: it is refused, on all ranks, and the error says this
  (`trigram/algorithms/compatibility.py`):

"""


def cell(errors: str) -> str:
    """What the page says of a pair."""
    if not errors:
        return "yes"
    if errors == NO_ALGORITHM:
        return "no"
    known = [k for k, reason in enumerate(REASONS, 1) if reason in errors]
    rest = [line for line in errors.split("\n") if "Error: " in line and "unknown option" not in line]
    if not known and rest:
        return f"unknown: {rest[0]}"
    return str(known[0]) if known else "-"


def reasons() -> str:
    """The numbered list of the reasons."""
    return _listed(REASONS)


def _listed(texts: list[str]) -> str:
    items = [f"{k}. {text}" for k, text in enumerate(texts, 1)]
    return "".join(
        textwrap.fill(i, 100, subsequent_indent=" " * (i.index(" ") + 1), break_on_hyphens=False) + "\n"
        for i in items
    )


def page(found: dict[tuple[str, str], str]) -> str:
    """The page, from the outcome of each pair."""
    text = HEAD + reasons() + trigrams()
    names = [feature.name for feature in OPTIONS]
    for title, rows in (
        ("Algorithms", [a.name for a in ALGORITHMS]),
        ("Options with each other", names[:-1]),
    ):
        text += f"\n## {title}\n\n| | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n"
        for row in rows:
            cells = [cell(found[row, name]) if (row, name) in found else "" for name in names]
            text += f"| {row} | {' | '.join(cells)} |\n"
    text += beside()
    text += "\n## All refusals\n\n| | is not supported with | |\n|---|---|---|\n"
    for one, other, why in REFUSALS:
        text += f"| {one} | {other} | {REASONS.index(why) + 1} |\n"
    return text


WHO = {
    "central": "central",
    "central:median (all robust ones)": "central:median",
    "gossip": "gossip:ring",
    "push": "push:ring",
}
WHAT = ["full", "lossless", "int8", "topk:0.1", "chunktopk:0.1", "powersgd:2", "share:0.3"]
WHEN = {
    "gradients, sync": ("sync", "gradients"),
    "momentum, sync": ("sync", "momentum"),
    "weights, sync": ("sync", "weights"),
    "differences, sync": ("sync", "differences"),
    "every:2": ("every:2", None),
    "async": ("async", None),
}


def trigrams() -> str:
    """The part of the page about trigrams; `int8` stands for all codecs of blocks, and their floats."""
    rows, reasons = "", dict[str, int]()
    for name, who in WHO.items():
        for what in WHAT:
            cells = []
            for when, carry in WHEN.values():
                try:
                    parse.find(trigram.Trigram(who, what, when, carry), {})
                    cells.append("yes")
                except trigram.UnsupportedError as error:
                    reason = str(error).split(": ", 1)[1].replace("momentum: with", "gradients: with")
                    cells.append(str(reasons.setdefault(reason, len(reasons) + 1)))
            rows += f"| {name} | {what} | {' | '.join(cells)} |\n"
    return (
        "\n## Trigrams\n\nWhich trigrams there are. `int8` stands for int4, fp8, sign, bf16 and f16 too, and "
        "`topk` for\nrandomk. A number is the reason below.\n\n"
        f"| who | what | {' | '.join(WHEN)} |\n|---|---|{'---|' * len(WHEN)}\n{rows}\n"
    ) + _listed(list(reasons))


BESIDE = {
    "a helper, `trigram.init(helper=True)`": (
        "all algorithms that average uncompressed gradients over all ranks use it, the others train without; "
        "not in elastic jobs",
        "tests/collectives/test_helpers.py",
    ),
    "a spare rank, `trigram.init(elastic=True, spare=True)`": (
        "what averages gradients and is not registered by the script; see the refusals below",
        "tests/elastic/test_spares.py",
    ),
    "replicas of several ranks, `trigram.init(elastic=True, replica_size=8)`": (
        "with `local_shards`, what is not asynchronous; without, what goes with "
        "`elastic=True` and is not asynchronous",
        "tests/elastic/test_replicas.py",
    ),
    "GPU tensors, over NCCL, the host or both in two levels": (
        "all algorithms; what is special is in [gpu.md](gpu.md)",
        "tests/gpu/test_routes.py",
    ),
    "FSDP2 (`fully_shard`) over the backend": (
        "collectives on registered memory, with a codec if asked: `trigram.integrations.fsdp.use`",
        "tests/integrations/test_fsdp.py",
    ),
    "FSDP2 inside, an algorithm between replicas": (
        "all algorithms, with `trigram.local_shards`",
        "tests/backend/test_shards_gradients.py",
    ),
    "a sharded optimizer inside, an algorithm between replicas": (
        "algorithms that average weights, with `trigram.local_shards`",
        "tests/sharded/test_replicas.py",
    ),
    "DistributedDataParallel, as its hook": (
        "algorithms that average gradients: `trigram.ddp_hook`",
        "tests/training/test_ddp_hook.py",
    ),
    "`torch.compile`, autocast, `GradScaler`, functional calls": (
        "all algorithms; the test has the default, and five of them in `torch.compile`",
        "tests/training/test_torch_modes.py",
    ),
    "Lightning, Accelerate": ("all algorithms", "tests/integrations/test_lightning.py"),
    'Lightning in elastic jobs, `strategy="trigram_elastic"`': (
        "what averages gradients and goes with `elastic=True`",
        "tests/integrations/test_lightning_elastic.py",
    ),
    "Accelerate in elastic jobs, `ElasticAccelerator`": (
        "what averages gradients and goes with `elastic=True`",
        "tests/integrations/test_accelerate_elastic.py",
    ),
    "transformers' Trainer in elastic jobs, `TrigramElasticTrainer`": (
        "what averages gradients and goes with `elastic=True`",
        "tests/frameworks/test_transformers_elastic.py",
    ),
    "ranks as threads, `trigram.Job`": (
        "all algorithms; eight have the bits of processes in a test",
        "tests/runtime/test_job.py",
    ),
}
"""What a job may have beside `with_bagua`: what goes with it, and the test."""


def beside() -> str:
    """The part of the page about it."""
    rows = "".join(
        f"| {what} | {says} | [{Path(test).name}](../{test}) |\n" for what, (says, test) in BESIDE.items()
    )
    return f"\n## Beside with_bagua\n\n| a job has | what goes with it | test |\n|---|---|---|\n{rows}"


def outcomes(rank: int, elastic: bool = True) -> dict[tuple[str, str], str]:
    """The outcome of each pair, on this rank.

    Args:
        rank: This rank.
        elastic: Also of those in elastic jobs, which take longer: each is a job of its own.
    """
    begin()
    found: dict[tuple[str, str], str] = {}
    plain = [feature for feature in OPTIONS if "elastic" not in feature.options]
    trigram.init(op_timeout=LATE)
    _look(rank, found, plain)
    trigram.shutdown()
    if elastic:
        _look(rank, found, OPTIONS)
    return found


def _look(rank: int, found: dict[tuple[str, str], str], options: list[Feature]) -> None:
    """Adds the outcomes that are not known. Two options are tried with algorithms that go with one of them
    and do not refuse the other for a reason of its own."""
    for algorithm in ALGORITHMS:
        for option in options:
            if (algorithm.name, option.name) not in found:
                found[algorithm.name, option.name] = outcome(rank, algorithm, option)
    for k, a in enumerate(options):
        for b in options[k + 1 :]:
            if (a.name, b.name) in found:
                continue
            found[a.name, b.name] = _together(rank, found, a, b)


def _together(rank: int, found: dict[tuple[str, str], str], a: Feature, b: Feature) -> str:
    """The outcome of two options: empty if an algorithm goes with both; else the reason of one that goes with
    each alone, if there is one."""
    told = [(x, found[x.name, a.name], found[x.name, b.name]) for x in ALGORITHMS]
    reason = NO_ALGORITHM
    for x, *errors in told:
        if "" in errors and {cell(e) for e in errors} <= {"yes", "-"}:
            error = outcome(rank, x, a, b)
            if not error:
                return ""
            if not any(errors) and cell(error).isdigit():
                reason = error
    return reason


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    made = page(outcomes(rank))
    if rank == 0:
        Path("docs/compatibility.md").write_text(made)
