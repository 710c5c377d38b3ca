"""A word in TRIGRAM_ALGORITHM changes the job without a change in the script, whatever the word is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import trigram
from tests.support.algorithm_run import loss, net
from tests.support.cases import Cases
from tests.support.checks import raises, says
from tests.support.harness import until
from trigram.runtime import logs

CASES = Cases()
NAMES = [a["name"] for a in trigram.algorithms()]
WORDS = [*NAMES, "gossip:exponential/topk:0.1/async:4", "central:median/full/sync", "central/f16/every:2"]


class Lines(logging.Handler):
    """The lines that the logger has written."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.getMessage()))

    def about(self, word: str) -> list[tuple[int, str]]:
        return [(level, text) for level, text in self.lines if word in text]


@contextmanager
def listening() -> Iterator[Lines]:
    """The lines of the logger within the block; the writer is a thread, so wait for them."""
    logs.flush()  # what the case before has logged
    logger, lines = logging.getLogger("trigram"), Lines()
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)


@contextmanager
def word(name: str) -> Iterator[None]:
    os.environ["TRIGRAM_ALGORITHM"] = name
    try:
        yield
    finally:
        del os.environ["TRIGRAM_ALGORITHM"]


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@CASES.over(*WORDS)
def one_script(rank: int, world: int, name: str) -> None:
    """It passes an optimizer, and options of three algorithms; each word trains with what it knows."""
    module = net()
    optimizer = trigram.QAdam(module.parameters(), lr=0.01)
    with word(name):
        model = trigram.with_bagua(
            module,
            optimizer=optimizer,
            warmup_steps=1,
            every=2,
            topology="ring",
            check_finite=True,
            check_replicas=2,
            sample_weight=1.0,
        )
    steps(model, optimizer, rank, 4)
    got = trigram.stats(model)
    assert got["algorithm"] == name and got["steps"] == 4
    if name == "local_sgd":
        assert got["rounds"] >= 1, "every=2 is an option that it knows"


@CASES
def an_optimizer_is_always_accepted(rank: int, world: int) -> None:
    """In code too, for the algorithms that do not need it."""
    for name in NAMES:
        module = net()
        optimizer = trigram.QAdam(module.parameters(), lr=0.01)
        steps(trigram.with_bagua(module, name, optimizer=optimizer), optimizer, rank, 2)
    trigram.switch(trigram.with_bagua(net()), "bytegrad", optimizer=optimizer)


@CASES
def ignored_options_are_logged(rank: int, world: int) -> None:
    """One line on rank 0, which names the options and where the algorithm came from; none elsewhere."""
    with listening() as lines, word("signsgd"):
        trigram.with_bagua(net(), bits=1, outer_lr=0.5, block=64)
        trigram.with_bagua(net(), "bytegrad")  # the line of its start comes after
        if rank == 0:
            until(lambda: lines.about("bytegrad"), 60.0, "the lines of the log")
    found = [(level, text) for level, text in lines.about("ignored") if "TRIGRAM_ALGORITHM" in text]
    assert len(found) == (1 if rank == 0 else 0), lines.lines
    for level, text in found:
        assert level == logging.WARNING
        says(text, "signsgd", "bits", "outer_lr")
        assert "block" not in text


@CASES
def another_optimizer_is_logged(rank: int, world: int) -> None:
    """The state of the optimizer that was given is averaged, and that of one made later is not: a line says
    so, once."""
    module = net()
    first = torch.optim.Adam(module.parameters(), lr=0.01)
    with listening() as lines:
        model = trigram.with_bagua(module, "local_sgd", every=2, optimizer=first)
        steps(model, first, rank, 3)
        until(lambda: lines.about("local_sgd") or rank > 0, 60.0, "the line of its start")
        assert not lines.about("not averaged")
        steps(model, torch.optim.AdamW(module.parameters(), lr=0.01), rank, 3)
        until(lambda: lines.about("not averaged"), 60.0, "the warning")
    ((level, text),) = lines.about("not averaged")
    assert level == logging.WARNING
    says(text, "AdamW", "optimizer=", "unwrap")


@CASES
def options_in_code_are_checked(rank: int, world: int) -> None:
    """An option that the algorithm named in code does not have is an error, whatever the environment says;
    so is an invalid value of one that the algorithm of the environment has."""

    def wrap(*args: Any, **options: Any) -> str:
        return raises(trigram.UnsupportedError, trigram.with_bagua, net(), *args, **options)

    says(wrap("bytegrad", every=3), "every", "bytegrad")
    says(wrap(every=3), "every", "gradient_allreduce")
    with word("decentralized"):
        says(wrap("bytegrad", every=3), "every", "bytegrad")
        says(wrap(topology="star"), "star")
    with word(""):
        says(wrap(every=3), "every", "gradient_allreduce")


@CASES
def qadam_with_another_optimizer(rank: int, world: int) -> None:
    """The one algorithm that needs an optimizer of its own says so."""
    module = net()
    with word("qadam"):
        for given in ({}, {"optimizer": torch.optim.Adam(module.parameters())}):
            says(raises(trigram.MisuseError, trigram.with_bagua, module, **given), "qadam", "trigram.QAdam")
    trigram.with_bagua(module)


@CASES
def an_unknown_word(rank: int, world: int) -> None:
    with word("gradient_pigeon"):
        text = raises(trigram.UnsupportedError, trigram.with_bagua, net(), every=2)
    says(text, "gradient_pigeon", "TRIGRAM_ALGORITHM", "push_sum")


@CASES
def words_differ(rank: int, world: int) -> None:
    with word("bytegrad" if rank == 0 else "topk"):
        says(raises(trigram.MismatchError, trigram.with_bagua, net()), "TRIGRAM_ALGORITHM")


@CASES.over("gradient_allreduce", "powersgd", "decentralized", "async", "diloco")
def one_line_at_start(rank: int, world: int, name: str) -> None:
    """Rank 0 says which algorithm, how many ranks and buckets, and whether replicas part; others nothing."""
    with listening() as lines:
        model = trigram.with_bagua(net(), name)
        trigram.with_bagua(net(), "signsgd")
        if rank == 0:
            until(lambda: lines.about("signsgd"), 60.0, "the lines of the log")
    found = lines.about(name)
    assert len(found) == (1 if rank == 0 else 0), lines.lines
    for level, text in found:
        assert level == logging.INFO
        says(text, name, f"{world} ranks")
        if buckets := trigram.stats(model)["buckets"]:
            says(text, f"{len(buckets)} bucket", "bytes")
        assert ("consensus" in text) == (name in ("decentralized", "async", "diloco"))


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_word(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm", patience=60)
