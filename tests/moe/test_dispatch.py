"""dispatch and combine: the values and gradients of one process that has all experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import trigram
import trigram.moe
from tests.support.cases import Cases, launch
from tests.support.checks import close, raises, relative, says
from tests.support.harness import run
from tests.support.marks import long

CASES = Cases()
WIDTH, OUT, LOCAL = 5, 3, 2


def _apply(weights: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    parts = zip(tokens.split(counts.tolist()), weights, strict=True)
    return torch.cat([torch.tanh(part @ w) for part, w in parts])


def _inputs(world: int, how: str, k: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """Of all ranks: tokens, their experts and scores; and all experts."""
    draw = torch.Generator().manual_seed(world + 10 * k)
    experts = world * LOCAL
    lengths = [
        0 if how == "no tokens" or (how == "some ranks" and r % 2) else 4 + 3 * r for r in range(world)
    ]
    x = [torch.randn(n, WIDTH, generator=draw, dtype=torch.float64) for n in lengths]
    chosen = [torch.randint(experts, (n, k), generator=draw) for n in lengths]
    if how == "one expert":
        chosen = [torch.full_like(c, experts - 1) for c in chosen]
    if how == "empty experts":
        chosen = [c // LOCAL * LOCAL for c in chosen]
    scores = [torch.rand(n, k, generator=draw, dtype=torch.float64) for n in lengths]
    return x, chosen, scores, torch.randn(experts, WIDTH, OUT, generator=draw, dtype=torch.float64)


def _dense(x: Tensor, chosen: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
    made = torch.stack([torch.tanh(x @ w) for w in weights], 1)
    return (made.gather(1, chosen[..., None].expand(*chosen.shape, OUT)) * scores[..., None]).sum(1)


def _loss(y: Tensor) -> Tensor:
    return (y * torch.arange(1.0, OUT + 1, dtype=y.dtype)).square().sum()


@CASES.over("random", "one expert", "empty experts", "some ranks", "no tokens")
def as_one_process(rank: int, world: int, how: str) -> None:
    """Values, and gradients of tokens, scores and experts; the experts' is that of the mean of the losses."""
    for k in (1, 2):
        given, chosen, scored, weights = _inputs(world, how, k)
        x, scores = given[rank].clone().requires_grad_(), scored[rank].clone().requires_grad_()
        mine = weights[rank * LOCAL : (rank + 1) * LOCAL].clone().requires_grad_()
        index = chosen[rank] if k > 1 or rank % 2 else chosen[rank][:, 0]
        tokens, counts, handle = trigram.moe.dispatch(x, index, world * LOCAL)
        everywhere = torch.cat(chosen).flatten().bincount(minlength=world * LOCAL)
        assert counts.tolist() == everywhere[rank * LOCAL : (rank + 1) * LOCAL].tolist()
        y = trigram.moe.combine(handle, _apply(mine, tokens, counts), scores)
        _loss(y).backward()

        all_x = [t.clone().requires_grad_() for t in given]
        all_scores = [t.clone().requires_grad_() for t in scored]
        whole = weights.clone().requires_grad_()
        outputs = [_dense(*of, whole) for of in zip(all_x, chosen, all_scores, strict=True)]
        close(y.detach(), outputs[rank].detach(), 1e-12, "values")
        for out in outputs:
            _loss(out).backward()
        assert whole.grad is not None and mine.grad is not None and x.grad is not None
        close(x.grad, all_x[rank].grad, 1e-11, "gradient of the tokens")  # type: ignore[arg-type]
        close(scores.grad, all_scores[rank].grad, 1e-11, "gradient of the scores")  # type: ignore[arg-type]
        expected = whole.grad[rank * LOCAL : (rank + 1) * LOCAL] / world
        close(mine.grad, expected, 1e-11, "gradient of the experts")


@CASES
def a_rank_without_tokens_takes_part_in_backward(rank: int, world: int) -> None:
    """Its layer returns what depends on nothing, and x needs no gradient in the first of the two."""
    for needs in (False, True):
        x = torch.ones(4, WIDTH, requires_grad=needs)
        w = torch.ones(WIDTH, OUT, requires_grad=True)
        tokens, _, handle = trigram.moe.dispatch(x, torch.zeros(4, dtype=torch.int64), world)
        made = tokens @ w if len(tokens) else torch.empty(0, OUT)
        trigram.moe.combine(handle, made).sum().backward()
        assert rank or (w.grad is not None and bool(((w.grad - 4).abs() < 1e-5).all()))


@CASES.over("bf16", "int8")
def codecs(rank: int, world: int, name: str) -> None:
    """The rows and their gradients are coded: near, and not equal."""
    given, chosen, _, weights = _inputs(world, "random", 2)
    mine = weights[rank * LOCAL : (rank + 1) * LOCAL].float()
    got = []
    for codec in (None, name):
        x = given[rank].float().requires_grad_()
        tokens, counts, handle = trigram.moe.dispatch(x, chosen[rank], world * LOCAL, codec=codec)
        y = trigram.moe.combine(handle, _apply(mine, tokens, counts))
        _loss(y).backward()
        got.append((y.detach(), x.grad))
    for exact, coded in zip(*got, strict=True):
        assert exact is not None and coded is not None
        assert 0 < relative(coded, exact) < 0.1


@CASES
def wrong_arguments(rank: int, world: int) -> None:
    """All ranks raise, with the rank's number; the next call works."""
    right = torch.ones(3, WIDTH), torch.zeros(3, dtype=torch.int64)
    last = rank == world - 1
    bad: list[tuple[Tensor, Tensor, str]] = [
        (right[0], right[1] + world, "from 0 to"),
        (right[0], right[1].int(), "int64"),
        (right[0], right[1][:2], "(3,)"),
        (right[0].long(), right[1], "floats"),
    ]
    for x, index, word in bad:
        args = (x, index) if last else right
        text = raises(trigram.MisuseError, trigram.moe.dispatch, *args, world)
        says(text, f"rank {world - 1}", word if last else "see its error")
    wide = torch.ones(3, WIDTH + last)
    if world > 1:
        text = raises(trigram.MismatchError, trigram.moe.dispatch, wide, right[1], world)
        says(text, "the width of x", f"rank {world - 1}")
        says(raises(trigram.MisuseError, trigram.moe.dispatch, *right, world + 1), "multiple")
    tokens, _, handle = trigram.moe.dispatch(*right, world)
    says(
        raises(
            trigram.MisuseError, trigram.moe.combine, handle, tokens[1:] if len(tokens) else torch.ones(1, 1)
        ),
        "a row for each",
        f"rank {rank}",
    )
    says(raises(trigram.MisuseError, trigram.moe.combine, handle, tokens, torch.ones(3, 2)), "scores")
    assert trigram.moe.combine(handle, tokens).shape == (3, WIDTH)


@CASES
def group_sizes(rank: int, world: int) -> None:
    says(raises(trigram.MisuseError, trigram.moe.groups, world + 1), "divisor")
    for size in (s for s in range(1, world + 1) if world % s == 0):
        sharing, replicas = trigram.moe.groups(size)
        assert sharing.ranks == [rank // size * size + i for i in range(size)]
        assert replicas.ranks == list(range(rank % size, world, size))


@pytest.fixture(scope="module", params=[2, long(1), long(3), long(4)])
def outcome(request: pytest.FixtureRequest) -> dict[str, str | None]:
    return launch(__name__, "CASES", list(CASES), request.param)


@pytest.mark.parametrize("name", list(CASES))
def test_dispatch(outcome: dict[str, str | None], name: str) -> None:
    assert outcome[name] is None, outcome[name]


def _train(rank: int, world: int, grouped: bool) -> tuple[list[float], list[float]]:
    import sys

    from tests.support.harness import ROOT

    sys.path.insert(0, str(ROOT / "examples"))
    import mixture_of_experts

    if not grouped and hasattr(F, "grouped_mm"):
        del F.grouped_mm
    return mixture_of_experts.main()


@pytest.mark.parametrize(("world", "grouped"), [(4, True), long(4, False), long(2, True), long(3, True)])
def test_example_trains_as_one_process(world: int, grouped: bool) -> None:
    """Four ranks: two sets of two, so experts have copies. The loss falls."""
    for losses, alone in run(world, _train, grouped, timeout=120):
        assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < 1e-5, (losses, alone)
        assert losses[-1] < losses[0] - 1
