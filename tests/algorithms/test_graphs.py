"""Every graph of 1 to 17 places: its edges and weights as specified, and what they are good for."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
import torch

import trigram
from tests.support.checks import close, equal, raises, says
from tests.support.marks import long
from trigram.algorithms import graphs

UNDIRECTED = ["ring", "pairs", "random", "torus", "complete"]
DIRECTED = ["exponential", "one_peer"]
PUSH = ["push:random", "push:exponential", "push:one_peer", "push:ring"]
KINDS = [*UNDIRECTED, *DIRECTED, *PUSH]
CHANGING = ["one_peer", "pairs", "random", "push:random", "push:one_peer"]
LONG = (10, 11, 13, 14, 15)
SIZES = [long(n) if n in LONG else n for n in range(1, 18)]
FAR = [1000, 123_457, 10**9]


def rounds(kind: str, n: int) -> list[int]:
    """Enough to see a cycle (where there is one) twice, and some that are far away."""
    return [*range(n + 2), *FAR] if kind in CHANGING else [0, 1, *FAR]


def cycle(kind: str, n: int) -> int:
    """The rounds after which a graph is itself again."""
    match kind.removeprefix("push:"):
        case "one_peer":
            return max(1, math.ceil(math.log2(n)))
        case "pairs":
            return (n + 1) // 2
    return 1


def hops(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << k for k in range(n.bit_length()) if 1 << k < n]


def torus(n: int, place: int, across: bool) -> set[int]:
    """The neighbours on the most square grid, whose places are counted by rows or by columns."""
    a = max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)
    b = n // a
    rows, columns = (a, b) if across else (b, a)
    r, c = divmod(place, columns)
    around = [((r + 1) % rows, c), ((r - 1) % rows, c), (r, (c + 1) % columns), (r, (c - 1) % columns)]
    return {y * columns + x for y, x in around} - {place}


def partner(n: int, place: int, k: int) -> set[int]:
    """Whom `pairs` gives a place in round k; nobody where it is the rank that there is not."""
    h = (n + 1) // 2
    other = h + (place + k) % h if place < h else (place - h - k) % h
    return {other} if other < n else set()


def sent(kind: str, n: int, place: int, k: int) -> set[int] | None:
    """Whom a place sends to in round k; None where that is drawn."""
    match kind.removeprefix("push:"):
        case "ring":
            return {(place + 1) % n, (place - 1) % n} - {place}
        case "complete":
            return set(range(n)) - {place}
        case "exponential":
            return {(place + h) % n for h in hops(n)}
        case "one_peer":
            return {(place + hops(n)[k % len(hops(n))]) % n} if n > 1 else set()
        case "pairs":
            return partner(n, place, k)
    return None


def metropolis(n: int, edges: Callable[[int], set[int]]) -> torch.Tensor:
    """Undirected weights: 1/(1 + the greater degree), and the rest for oneself."""
    w = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in edges(i):
            w[i, j] = 1 / (1 + max(len(edges(i)), len(edges(j))))
        w[i, i] = 1 - w[i].sum()
    return w


def ahead(n: int, edges: Callable[[int], set[int]]) -> torch.Tensor:
    """Directed weights: a place keeps and sends 1/(1 + out-degree). Rows receive."""
    w = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in {i, *edges(i)}:
            w[j, i] = 1 / (1 + len(edges(i)))
    return w


def drawn(g: graphs.Graph, k: int) -> Callable[[int], set[int]]:
    """Whom the graph says that places send to."""
    return lambda i: set(g.neighbours(i, k)[0])


def second(w: np.ndarray) -> float:
    """The second largest singular value."""
    return float(np.linalg.svd(w, compute_uv=False)[1])


def reached(w: torch.Tensor) -> bool:
    """Whether every place hears of every other, were all these edges used again and again."""
    n = len(w)
    a = (w > 0).double() + torch.eye(n, dtype=torch.float64)
    return bool((torch.linalg.matrix_power(a / a.sum(1, keepdim=True), n) > 0).all())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_edges(kind: str, n: int) -> None:
    """The specified ones; who sends is who is received from, with the matrix's weights; never oneself."""
    g = graphs.find(kind, n)
    for k in rounds(kind, n):
        w = g.matrix(k)
        assert w.dtype == torch.float64 and w.shape == (n, n)
        heard: list[set[int]] = [set() for _ in range(n)]
        for i in range(n):
            to, _ = g.neighbours(i, k)
            assert len(set(to)) == len(to) and i not in to and all(0 <= j < n for j in to), (k, i, to)
            expected = sent(kind, n, i, k)
            if kind == "torus":
                assert set(to) in (torus(n, i, True), torus(n, i, False)), (i, to)
            elif kind == "push:random":
                assert len(to) == min(1, n - 1)
            elif kind == "push:ring":  # of i±1, a directed graph may be one way
                assert set(to) in ({(i + 1) % n} - {i}, expected), f"place {i}"
            elif expected is not None:
                assert set(to) == expected, f"round {k}, place {i}"
            for j in to:
                heard[j].add(i)
        for i in range(n):
            to, received = g.neighbours(i, k)
            assert len({j for j, _ in received}) == len(received)
            assert {j for j, _ in received} == heard[i], f"round {k}, place {i}"
            for j, weight in received:
                assert weight == w[i, j].item() > 0, f"round {k}, {j} to {i}"
            assert w[i].count_nonzero() == len(received) + 1, f"round {k}, row {i}: {w[i]}"
            assert kind not in UNDIRECTED or set(to) == heard[i]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights(kind: str, n: int) -> None:
    g = graphs.find(kind, n)
    ones = torch.ones(n, dtype=torch.float64)
    for k in rounds(kind, n):
        w = g.matrix(k)
        assert bool((w >= 0).all()) and bool((w.diagonal() > 0).all())
        close(w.sum(0), ones, 1e-12, f"columns of round {k}")
        if kind != "push:random":  # where two may send to one, who then holds more than one share
            close(w.sum(1), ones, 1e-12, f"rows of round {k}")
        if kind in UNDIRECTED:
            equal(w, w.T.contiguous(), f"round {k}")
        weights = metropolis if kind in UNDIRECTED else ahead
        close(w, weights(n, drawn(g, k)), 1e-12, f"round {k}")


@pytest.mark.parametrize("n", SIZES)
def test_torus_is_the_most_square(n: int) -> None:
    """One of the two ways to count its places, for all places alike."""
    w = graphs.find("torus", n).matrix(0)
    both = [metropolis(n, lambda i, across=across: torus(n, i, across)) for across in (True, False)]
    assert any(torch.allclose(w, e, rtol=0, atol=1e-12) for e in both), w


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["pairs", "random"])
def test_matchings_are_perfect(kind: str, n: int) -> None:
    """Everybody has one partner, who has them; one sits out where the number is odd."""
    g = graphs.find(kind, n)
    for k in rounds(kind, n):
        alone = 0
        for i in range(n):
            to, received = g.neighbours(i, k)
            assert len(to) == len(received) <= 1
            if to:
                assert g.neighbours(to[0], k)[0] == [i]
                assert received == [(to[0], 0.5)]
            alone += not to
        assert alone == n % 2, f"round {k}: {alone} of {n} sit out"


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_everybody_hears_of_everybody(kind: str, n: int) -> None:
    """Over a cycle; over rounds enough where they are drawn."""
    g = graphs.find(kind, n)
    many = 100 if "random" in kind else cycle(kind, n)
    assert reached(sum((g.matrix(k) for k in range(many)), torch.zeros(n, n, dtype=torch.float64)))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_cycles(kind: str, n: int) -> None:
    """Fixed graphs are the same in all rounds, cycles begin anew; and every rank finds the same graph."""
    g, other = graphs.find(kind, n), graphs.find(kind, n)
    for k in rounds(kind, n):
        equal(g.matrix(k), other.matrix(k), f"round {k} of another")
        equal(g.matrix(k), g.matrix(k), f"round {k} again")
        if "random" not in kind:
            equal(g.matrix(k + cycle(kind, n)), g.matrix(k), f"round {k} and a cycle")
    if kind not in CHANGING:
        assert g.changes is False
    elif n > 4:
        assert g.changes is True
        assert any(not g.matrix(k).equal(g.matrix(0)) for k in range(1, 10))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in CHANGING])
def test_gap_of_fixed(kind: str, n: int) -> None:
    """1 less the second largest singular value; if symmetric, the second largest eigenvalue by size."""
    g = graphs.find(kind, n)
    assert isinstance(g.gap(), float)
    if n == 1:
        assert 0 <= g.gap() <= 1
        return
    w = g.matrix(0).numpy()
    assert abs(g.gap() - (1 - second(w))) < 1e-7, kind
    if kind in UNDIRECTED:
        eigenvalues = np.sort(np.abs(np.linalg.eigvalsh(w)))
        assert abs(g.gap() - (1 - eigenvalues[-2])) < 1e-7
    assert 0 < g.gap() <= 1 + 1e-9


def test_gaps_that_are_known() -> None:
    for n in range(3, 18):
        largest = max(abs((1 + 2 * math.cos(2 * math.pi * k / n)) / 3) for k in range(1, n))
        assert abs(graphs.find("ring", n).gap() - (1 - largest)) < 1e-7, n
        assert abs(graphs.find("complete", n).gap() - 1) < 1e-7
        assert graphs.find("exponential", n).gap() > graphs.find("ring", n).gap() - 1e-9, n
    assert graphs.find("torus", 16).gap() > graphs.find("ring", 16).gap()


@pytest.mark.parametrize("n", SIZES[1:])
@pytest.mark.parametrize("kind", ["one_peer", "pairs", "push:one_peer"])
def test_gap_of_cycles(kind: str, n: int) -> None:
    """The product's second singular value, per round; compared over a cycle, where no root enlarges noise."""
    g, c = graphs.find(kind, n), cycle(kind, n)
    product = reduce(lambda p, k: g.matrix(k).numpy() @ p, range(c), np.eye(n))
    gap = g.gap()
    assert 0 < gap <= 1 + 1e-9
    assert abs(max(0.0, 1 - gap) ** c - second(product)) < 1e-9, f"gap {gap}, product {second(product)}"
    if second(product) > 1e-3:
        assert abs(gap - (1 - second(product) ** (1 / c))) < 1e-7


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["random", "push:random"])
def test_gap_of_random(kind: str, n: int) -> None:
    """A matching leaves half of the variance, in the mean: a gap of about 0.3.

    Exact means (a hypercube drawn by chance) are possible only at powers of two.
    """
    gap = graphs.find(kind, n).gap()
    assert isinstance(gap, float) and 0 <= gap <= 1 + 1e-9
    if kind == "random" and n > 2:
        assert gap > 0.1, gap
        assert n & (n - 1) == 0 or gap < 0.7, gap


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["one_peer", "push:one_peer"])
def test_one_peer_averages_exactly(kind: str, n: int) -> None:
    """After log2 n rounds, from whichever it began."""
    g, c = graphs.find(kind, n), n.bit_length() - 1
    for start in range(c + 1):
        x = torch.eye(n, dtype=torch.float64)
        for k in range(start, start + c):
            x = g.matrix(k) @ x
        equal(x, torch.full((n, n), 1 / n, dtype=torch.float64), f"from round {start}")


@pytest.mark.parametrize("n", SIZES[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_average(kind: str, n: int) -> None:
    """What a graph is for: all come to the mean (push graphs by the shares of the weight)."""
    g = graphs.find(kind, n)
    y = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    w, mean = torch.ones(n, dtype=torch.float64), y.mean()
    for k in range(3000):
        if k % 10 == 0 and bool(((y / w - mean).abs() < 1e-9).all()):
            return
        y, w = g.matrix(k) @ y, g.matrix(k) @ w
    raise AssertionError(f"{y / w} is not all {mean}")


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["ring", "torus", "complete", "pairs", "random", "exponential", "one_peer"])
def test_closure(kind: str, n: int) -> None:
    """Both ways along each edge, with the weights of undirected graphs."""
    g = graphs.find(kind, n)
    closed = g.closure()
    for k in rounds(kind, n):
        if kind in UNDIRECTED:
            equal(closed.matrix(k), g.matrix(k), f"round {k}")
            continue

        def both(i: int, k: int = k) -> set[int]:
            return {j for j in range(n) if j != i and (j in drawn(g, k)(i) or i in drawn(g, k)(j))}

        close(closed.matrix(k), metropolis(n, both), 1e-12, f"round {k}")
        equal(closed.matrix(k), closed.matrix(k).T.contiguous(), f"round {k}")
        for i in range(n):
            to, received = closed.neighbours(i, k)
            assert set(to) == both(i) == {j for j, _ in received}
            for j, weight in received:
                assert weight == closed.matrix(k)[i, j].item()
    if kind not in CHANGING:
        assert closed.changes is False
        if n > 1:
            assert abs(closed.gap() - (1 - second(closed.matrix(0).numpy()))) < 1e-7
    equal(closed.closure().matrix(3), closed.matrix(3), "closed already")


def test_random_matchings_are_fair() -> None:
    """Each pair as often as any other; each sits out as often as any other; and no round is like the last."""
    for n in (6, 7):
        g, often, alone, same = graphs.find("random", n), np.zeros((n, n)), np.zeros(n), 0
        for k in range(1000):
            w = g.matrix(k).numpy()
            often += (w > 0) & ~np.eye(n, dtype=bool)
            alone += (w > 0).sum(axis=1) == 1
            same += np.array_equal(w, g.matrix(k + 1).numpy())
        expected = 1000 / (n - 1 + n % 2)
        pairs = often[~np.eye(n, dtype=bool)]
        assert pairs.min() > expected * 0.6 and pairs.max() < expected * 1.4, often
        if n % 2:
            assert alone.min() > 1000 / n * 0.6 and alone.max() < 1000 / n * 1.4, alone
        assert same < 150  # one in 15, or in 105


def test_random_pushes_are_fair() -> None:
    for n in (3, 6, 7):
        g, often = graphs.find("push:random", n), np.zeros((n, n))
        for k in range(1000):
            for i in range(n):
                often[i, g.neighbours(i, k)[0][0]] += 1
        others = often[~np.eye(n, dtype=bool)]
        expected = 1000 / (n - 1)
        assert others.min() > expected * 0.6 and others.max() < expected * 1.4, often


def test_places_draw_on_their_own() -> None:
    """Not all the same offset: two places that always send alike would never meet others."""
    g, n = graphs.find("push:random", 8), 8
    alike = 0
    for k in range(200):
        offsets = {(g.neighbours(i, k)[0][0] - i) % n for i in range(n)}
        alike += len(offsets) == 1
    assert alike < 5


@pytest.mark.parametrize("kind", ["", "star", "push:", "push:star", "push", "Ring", "ring:2"])
def test_unknown_kinds(kind: str) -> None:
    text = raises(trigram.TrigramError, graphs.find, kind, 4)
    says(text, "ring", "one_peer")
