"""How many averaging steps of fragments asynchronous ranks have under way."""

from __future__ import annotations

import time

import torch

import trigram
from tests.support.harness import run
from trigram.training.pace import MOST, RAREST, Pace, default_fragments


def _model(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(layers)))


def _train(rank: int, world: int, algorithm: str, pauses: list[float], seconds: float) -> tuple[int, int]:
    """Steps and averaging steps of a rank that pauses in each of its steps."""
    module = _model(8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = trigram.with_bagua(module, algorithm, fragments=8)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().sum().backward()
        optimizer.step()
        time.sleep(pauses[rank])
    stats = trigram.stats(model)
    return stats["steps"], stats["rounds"]


def test_a_slow_rank_averages_all_fragments_in_each_step() -> None:
    """It alone sees that the network is fast: for the others its snapshots are late. Fragment by fragment
    each weight would be averaged in every eighth of its steps."""
    results = run(3, _train, "async", [0.004, 0.06, 0.004], 4.0, timeout=60)
    steps, rounds = results[1]
    assert rounds > 2.5 * steps, results
    assert results[0][0] > 3 * steps, results  # nobody waits for it


def test_equal_ranks_average_each_weight_every_fourth_step() -> None:
    results = run(2, _train, "async_low_precision", [0.01, 0.01], 3.0, timeout=60)
    for steps, rounds in results:
        assert 0.8 * steps < rounds < 2.6 * steps, results


def test_small_models_have_one_fragment() -> None:
    assert [default_fragments(n) for n in (0, 1 << 20, (1 << 21) - 1, 1 << 21, 1 << 30)] == [1, 1, 1, 2, MOST]


def test_the_window() -> None:
    """One more when all have arrived in time and it was the limit; one fewer when they are late."""
    pace = Pace(8, groups=None)  # type: ignore[arg-type]  # it tells nobody here
    windows = []
    for oldest, waiting in ((None, 0), (None, 0), (1, 1), (2, 2), (3, 2), (None, 1)):
        pace.boundary(oldest, waited=False)
        under_way = waiting
        while pace.allows(under_way):
            pace.started()
            under_way += 1
        windows.append(pace.window)
    assert windows == [1, 2, 2, 1, 1, 2], windows
    assert pace.burst == 8 // RAREST
