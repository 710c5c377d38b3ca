"""The graphs of the references: what they borrow, and what they do not."""

from __future__ import annotations

import pytest
import torch

from tests.reference.codec_roundtrip import how_many
from tests.reference.graphs import graph
from trigram.algorithms import graphs


@pytest.mark.parametrize("kind", ["ring", "exponential", "one_peer", "pairs", "torus", "complete"])
def test_graph(kind: str) -> None:
    for n in range(1, 14):
        for round in range(9):
            actual = torch.as_tensor(graphs.find(kind, n).matrix(round)).float()
            assert torch.allclose(actual, graph(kind, n)(round), atol=1e-6), (n, round)


def test_random_graphs() -> None:
    """Matchings: symmetric, at most one sits out; pushes: everyone to one other. Both change."""
    for n in range(2, 10):
        seen = set()
        for round in range(20):
            w = torch.as_tensor(graphs.find("random", n).matrix(round))
            assert bool((w == w.T).all()) and bool((w.sum(1) == 1).all())
            assert int((w.diagonal() == 1).sum()) == n % 2 and bool((w[w > 0] >= 0.5).all())
            push = torch.as_tensor(graphs.find("push:random", n).matrix(round))
            assert bool((push.diagonal() == 0.5).all()) and bool((push.sum(0) == 1).all())
            assert bool(((push > 0).sum(0) == 2).all())
            seen.add((str(w.tolist()), str(push.tolist())))
        assert len(seen) > (n > 2) * 5
    assert how_many(0.01, 1360) == 14
