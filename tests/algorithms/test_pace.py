"""How many averaging steps of fragments asynchronous ranks have under way, and what they say of rare ones."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest
import torch

import trigram
from tests.support.harness import run, scratch
from trigram.mixing import rare_averages
from trigram.training.pace import MOST, Pace, default_fragments


def _model(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(layers)))


class _Lines(logging.Handler):
    """The lines of the log that say that averages are rare."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`."""
        if "averaged each weight" in record.getMessage():
            self.lines.append(record.getMessage())


def _train(
    rank: int, world: int, algorithm: str, pauses: list[float], leader: int, count: int
) -> tuple[int, int, list[str]]:
    """Steps and averaging steps of a rank that pauses in each step, and its lines of rare averages. All train
    until the rank ``leader`` has made ``count`` steps, however busy the cores are."""
    said = _Lines()
    logging.getLogger("trigram").addHandler(said)
    module = _model(8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = trigram.with_bagua(module, algorithm, fragments=8)
    over = scratch() / "over"
    while not over.exists():
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
        time.sleep(pauses[rank])
        if rank == leader and trigram.stats(model)["steps"] == count:
            over.touch()
    stats = trigram.stats(model)
    trigram.barrier()  # lines are written in another thread
    return stats["steps"], stats["rounds"], said.lines


def test_a_slow_rank_averages_all_fragments_in_each_step() -> None:
    """It alone sees that the network is fast: for the others its snapshots are late. Fragment by fragment
    each weight would be averaged in every eighth of its steps."""
    results = run(3, _train, "async", [0.004, 0.06, 0.004], 1, 60, timeout=100)
    steps, rounds, _ = results[1]
    assert rounds > 2.5 * steps, results
    assert results[0][0] > 1.5 * steps, results  # nobody waits for it


def test_equal_ranks_average_each_weight_every_fourth_step() -> None:
    results = run(2, _train, "async_low_precision", [0.01, 0.01], 0, 200, timeout=100)
    for steps, rounds, _ in results:
        assert 0.8 * steps < rounds < 2.6 * steps, results


@pytest.mark.parametrize("algorithm", ["async", "async_low_precision_decentralized"])
def test_a_rank_says_once_that_its_averages_are_rare(algorithm: str) -> None:
    """It makes dozens of steps while the other makes one. The other has no hundred steps."""
    results = run(2, _train, algorithm, [0.001, 0.4], 0, 250, timeout=100)
    said = results[0][2]
    assert len(said) == 1, results
    assert said[0].startswith("rank 0 averaged each weight "), said
    assert not results[1][2], results


@pytest.mark.parametrize("every, lines", [(4, 0), (9, 0), (11, 1), (1000, 1)])
def test_averages_are_rare_below_ten_in_a_hundred_steps(
    monkeypatch: pytest.MonkeyPatch, every: int, lines: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(rare_averages.logs, "warning", said.append)
    rare = rare_averages.RareAverages(groups=SimpleNamespace(name="rank 3", size=2), fragments=2)  # type: ignore[arg-type]
    for step in range(300):
        rare.boundary()
        for _ in range(2 * (step % every == every - 1)):
            rare.count()
    assert len(said) == lines
    assert all(line.startswith("rank 3 averaged each weight ") for line in said)


def test_more_ranks_average_more_often() -> None:
    assert [rare_averages.most(8, ranks) for ranks in (1, 2, 3, 4, 8, 64)] == [1, 2, 3, 4, 8, 8]
    assert [rare_averages.most(8, ranks, 2.0) for ranks in (2, 3, 4, 8)] == [4, 6, 8, 8]  # pairs
    assert rare_averages.most(8, 2, 4.0) == 8  # a rank four times slower than the fastest
    assert [rare_averages.most(1, ranks) for ranks in (1, 2, 16)] == [1, 1, 1]


def test_small_models_have_one_fragment() -> None:
    assert [default_fragments(n) for n in (0, 1 << 20, (1 << 21) - 1, 1 << 21, 1 << 30)] == [1, 1, 1, 2, MOST]


def test_the_window() -> None:
    """One more when all have arrived in time and it was the limit; one fewer when they are late."""
    pace = Pace(8, groups=SimpleNamespace(size=2))  # type: ignore[arg-type]  # it tells nobody here
    windows = []
    for oldest, waiting in ((None, 0), (None, 0), (1, 1), (2, 2), (3, 2), (None, 1)):
        pace.boundary(oldest, waited=False)
        under_way = waiting
        while pace.allows(under_way):
            pace.started()
            under_way += 1
        windows.append(pace.window)
    assert windows == [1, 2, 2, 1, 1, 2], windows
    assert pace.burst == 2
