"""What a training loop may do: each against one process on the whole batch.

Each check fails when its handling is removed: a gradient is then missing, local or counted twice, or a
rank waits for one that never comes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.support.cases import Cases
from tests.support.checks import equal, raises, same_on_all_ranks, says
from tests.support.twin_training import Pair, mlp, sgd, square, x

CASES = Cases()


@CASES
def plain(rank: int, world: int) -> None:
    """Seeds differ: rank 0's weights reach everybody (checked by Pair), then training is as alone."""
    Pair(rank, world, mlp).train(square, 6)


@CASES.over(True, False)
def zero_grad(rank: int, world: int, set_to_none: bool) -> None:
    """With False the gradients stay the same tensors; with True autograd makes new ones."""
    pair = Pair(rank, world, mlp)
    pair.train(square, 3, set_to_none=set_to_none)
    pair.train(square, 2, first=3, set_to_none=not set_to_none)
    pair.train(square, 2, first=5, set_to_none=set_to_none)


@CASES
def no_sync(rank: int, world: int) -> None:
    """Ranks accumulate over different numbers of silent steps: what is sent in one would have no partner."""
    pair = Pair(rank, world, mlp)
    for step in range(4):
        pair.zero(set_to_none=step % 2 == 0)
        with trigram.no_sync(pair.ours):
            for micro in range(1 + rank):
                square(pair.ours, rank, 100 * step + micro).backward()
        for r in range(world):
            for micro in range(1 + r):
                (square(pair.alone, r, 100 * step + micro) / world).backward()
        pair.backward(square, 100 * step + 50)
        pair.check_gradients(f"accumulated, step {step}")
        pair.update()
        pair.check_weights(f"accumulated, after step {step}")


@CASES
def no_sync_leaves_gradients_local(rank: int, world: int) -> None:
    pair = Pair(rank, world, mlp)
    with trigram.no_sync(pair.ours):
        square(pair.ours, rank, 0).backward()
    square(pair.alone, rank, 0).backward()
    pair.check_gradients("inside no_sync")


@CASES
def two_backwards_in_one_step(rank: int, world: int) -> None:
    """Both are synchronised; the second must not average the first again."""
    pair = Pair(rank, world, mlp)
    for step in range(3):
        pair.zero(set_to_none=step % 2 == 0)
        pair.backward(square, 2 * step)
        pair.backward(square, 2 * step + 1)
        pair.check_gradients(f"two backwards, step {step}")
        pair.update()
    pair.check_weights("two backwards")


@CASES
def two_forwards_one_backward(rank: int, world: int) -> None:
    def loss(model: nn.Module, r: int, step: int) -> Tensor:
        return square(model, r, step) + 2 * square(model, r, step + 1000)

    Pair(rank, world, mlp).train(loss)


@CASES
def forwards_without_backward(rank: int, world: int) -> None:
    """An evaluation on one rank only, and a loss that is thrown away, do not disturb the next step."""

    def make() -> nn.Module:
        model = mlp()
        model.register_buffer("table", torch.full((3,), 0.5))  # buffers are what an evaluation might exchange
        return model

    pair = Pair(rank, world, make)
    pair.train(square, 2)
    if rank == 0:
        pair.ours.eval()
        with torch.no_grad():
            pair.ours(x(0, 77))
        pair.ours.train()
    square(pair.ours, rank, 55)
    pair.train(square, 2, first=2)


@CASES
def clipping(rank: int, world: int) -> None:
    """The norm is the mean gradient's, the same everywhere."""
    pair = Pair(rank, world, mlp)
    for step in range(4):
        pair.zero()
        pair.backward(lambda m, r, s: 50 * square(m, r, s), step)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (pair.ours, pair.alone)]
        assert abs(norms[0] / norms[1] - 1) < 1e-5 and norms[1] > 0.1, norms
        pair.check_gradients(f"clipped, step {step}")
        pair.update()
        pair.check_weights(f"clipped, after step {step}")
        same_on_all_ranks(rank, world, f"norm-{step}", [norms[0]])


@CASES
def two_models(rank: int, world: int) -> None:
    """A GAN: the generator's loss passes through the discriminator, whose gradients it leaves behind."""

    def generator() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))

    g = Pair(rank, world, generator, lambda m: torch.optim.Adam(m.parameters(), lr=0.01), tolerance=1e-4)
    d = Pair(rank, world, mlp)

    def d_loss(models: tuple[nn.Module, nn.Module], r: int, step: int) -> Tensor:
        fake = models[0](x(r, step, 8, 4)).detach()
        return (
            nn.functional.softplus(models[1](fake)).mean()
            + nn.functional.softplus(-models[1](x(r, step))).mean()
        )

    def g_loss(models: tuple[nn.Module, nn.Module], r: int, step: int) -> Tensor:
        return nn.functional.softplus(-models[1](models[0](x(r, step, 8, 4, salt=1)))).mean()

    for step in range(5):
        for optimised, loss in ((d, d_loss), (g, g_loss)):
            optimised.zero()
            loss((g.ours, d.ours), rank, step).backward()
            for r in range(world):
                (loss((g.alone, d.alone), r, step) / world).backward()
            optimised.check_gradients(f"GAN, step {step}")
            optimised.update()
            optimised.check_weights(f"GAN, after step {step}")


@CASES
def on_a_group(rank: int, world: int) -> None:
    """Two groups train two models at once."""
    members = [r for r in range(world) if (r == 0) == (rank == 0)]
    groups = [trigram.new_group([0]), trigram.new_group(list(range(1, world)))]
    torch.manual_seed(5 + rank)
    model = trigram.with_bagua(mlp(), group=groups[min(rank, 1)])
    torch.manual_seed(5 + members[0])
    alone = mlp()
    square(model, rank, 0).backward()
    for r in members:
        (square(alone, r, 0) / len(members)).backward()
    for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
        equal(ours, expected, "the weights of the group's first rank")
        assert ours.grad is not None and expected.grad is not None
        assert float((ours.grad - expected.grad).norm()) <= 1e-6


@CASES
def algorithm_by_environment(rank: int, world: int) -> None:
    """TRIGRAM_ALGORITHM is taken when the script names none, and only then: an unknown one shows that."""
    import os

    os.environ["TRIGRAM_ALGORITHM"] = "gradient_pigeon"
    try:
        text = raises(trigram.TrigramError, trigram.with_bagua, mlp())
        says(text, "gradient_pigeon", "gradient_allreduce")
        Pair(rank, world, mlp).train(square, 1)  # names gradient_allreduce itself
        os.environ["TRIGRAM_ALGORITHM"] = "gradient_allreduce"
        model = trigram.with_bagua(mlp())
        square(model, rank, 0).backward()
        same_on_all_ranks(
            rank, world, "by-environment", [p.grad for p in model.parameters() if p.grad is not None]
        )
    finally:
        del os.environ["TRIGRAM_ALGORITHM"]


@CASES
def unknown_names(rank: int, world: int) -> None:
    names = [a["name"] for a in trigram.algorithms()]
    assert "gradient_allreduce" in names
    says(raises(trigram.TrigramError, trigram.with_bagua, mlp(), "nonsense"), "nonsense", *names)
    says(raises((trigram.TrigramError, TypeError), trigram.with_bagua, mlp(), wheels=4), "wheels")


@CASES
def the_module_stays_itself(rank: int, world: int) -> None:
    """The same object, the same class, the same keys; an optimizer made before it is still the right one."""
    module = mlp()
    before, optimizer = list(module.state_dict()), sgd(module)
    model = trigram.with_bagua(module)
    assert model is module and type(model) is nn.Sequential and list(model.state_dict()) == before
    assert {id(p) for p in model.parameters()} == {id(p) for g in optimizer.param_groups for p in g["params"]}
    kept = [p.detach().clone() for p in model.parameters()]
    square(model, rank, 0).backward()
    optimizer.step()
    assert all(bool((p != k).any()) for p, k in zip(model.parameters(), kept, strict=True))
    assert list(model.state_dict()) == before


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_as_one_process(in_launch: Callable[..., None], transport: str, world: int, case: str) -> None:
    in_launch("CASES", case, world, transport=transport)
