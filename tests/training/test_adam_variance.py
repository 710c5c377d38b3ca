"""Adam's second moment of the mean gradient, against Adam written down in NumPy; and what it leaves alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trigram
from tests.support.harness import run
from trigram.optimizers import adam_variance, optimizer_hooks

LR, EPS, STEPS = 0.01, 1e-8, 40
Array = np.ndarray[Any, np.dtype[np.float64]]


def gradients(steps: int = STEPS) -> list[Array]:
    """A part that all batches share, noise, and rows that are mostly 0."""
    random = np.random.default_rng(3)
    noise = random.normal(size=(steps, 6, 5))
    noise[:, 4:] *= random.random((steps, 2, 1)) < 0.2
    return [np.asarray(g) for g in noise + np.array([3, 0.3, 0, 0, 0, 0])[:, None]]


def reference(
    x: Array, ranks: int, betas: tuple[float, float], l2: float, decay: float, sign: float
) -> list[Array]:
    """Adam, whose second moment averages g^2 for ten steps and then g^2/n + (1 - 1/n) max(g m, 0)."""
    m, v, seen = np.zeros_like(x), np.zeros_like(x), []
    for t, raw in enumerate(gradients(), 1):
        g = sign * raw + l2 * x
        before = m / (1 - betas[0] ** (t - 1)) if t > 1 else m
        m = betas[0] * m + (1 - betas[0]) * g
        x = x * (1 - LR * decay)
        # The step itself is Adam's own.
        used = betas[1] * v + (1 - betas[1]) * g * g
        x = x - LR * (m / (1 - betas[0] ** t)) / (np.sqrt(used / (1 - betas[1] ** t)) + EPS)
        q = g * g / ranks + (1 - 1 / ranks) * np.maximum(g * before, 0) if t > 10 else g * g
        v = betas[1] * v + (1 - betas[1]) * q
        seen.append(x)
    return seen


def test_a_counter_that_is_not_read_gives_the_same_numbers() -> None:
    """On a GPU; none of its numbers may be infinite in the first steps, when they are multiplied by 0."""
    for step in range(1, 14):
        known, part = adam_variance._unread(torch.tensor(float(step)), 0.9, 0.001)
        want = (0.9 * (1 - 0.9 ** (step - 1)), 0.001) if step > adam_variance._FIRST else (1.0, 0.0)
        assert [float(known), float(part)] == pytest.approx(want, rel=1e-6), step


def train(kind: type[torch.optim.Adam], ranks: int, dtype: torch.dtype, **options: Any) -> list[Array]:
    start = np.random.default_rng(4).normal(size=(6, 5))
    param = nn.Parameter(torch.tensor(start, dtype=dtype))
    optimizer = kind([param], lr=LR, **options)
    seen = []
    for g in gradients():
        param.grad = torch.tensor(g, dtype=dtype)
        if not options.get("fused"):  # a layout of its own, which fused optimizers do not take
            param.grad = torch.tensor(g.T.copy(), dtype=dtype).T
        optimizer.step()
        adam_variance.adapt(optimizer, {id(param)}, ranks)
        seen.append(param.detach().double().numpy().copy())
    return seen


def rows_of(step: int, rank: int) -> list[int]:
    """One that is in every gradient, now and then twice, and one that is in that of one rank in turn."""
    return [0, 1 + step % 4, 0] if rank == step % 3 else [0]


def sparse_gradient(step: int, rank: int, shape: tuple[int, int]) -> torch.Tensor:
    rows = rows_of(step, rank)
    values = torch.randn(len(rows), shape[1], generator=torch.Generator().manual_seed(97 * step + rank))
    return torch.sparse_coo_tensor(torch.tensor([rows]), 0.5 + values, shape)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_sparse_adam(ranks: int, sign: int) -> None:
    shape, (b1, b2) = (6, 5), (0.8, 0.95)
    x = np.random.default_rng(4).normal(size=shape)
    param = nn.Parameter(torch.tensor(x))
    optimizer = torch.optim.SparseAdam([param], lr=LR, betas=(b1, b2), eps=EPS, maximize=sign < 0)
    m, v = np.zeros(shape), np.zeros(shape)
    for t in range(1, STEPS + 1):
        param.grad = sparse_gradient(t, 1, shape).double()
        optimizer.step()
        adam_variance.adapt(optimizer, {id(param)}, ranks)
        whole, here = sign * param.grad.to_dense().numpy(), sorted(set(rows_of(t, 1)))
        g, before = whole[here], m[here]
        often = b1**ranks
        m[here] = often * before + (1 - often) * g
        least = (b2 * v[here] + (1 - b2) * g * g) / ranks
        q = g * g / ranks + (1 - 1 / ranks) * np.maximum(g * before, 0)
        v[here] = np.maximum(b2 * v[here] + (1 - b2) * q, least)
        size = LR * np.sqrt(1 - b2**t) / (1 - b1**t)
        x[here] -= size * m[here] / (np.sqrt(v[here]) + EPS)
        np.testing.assert_allclose(param.detach().numpy(), x, rtol=1e-9)


def test_rare_rows_move_as_with_ddp() -> None:
    """Each row is in a gradient of one of four ranks in turn: the mean of the ranks' weights moves as far as
    those of DDP, whose moments decay four times as often; without the adaptation a fifth as far."""
    n, shape = 4, (1, 200)
    far = {}
    for kind in ("ddp", "adapted", "own"):
        params = [nn.Parameter(torch.zeros(shape)) for _ in range(1 if kind == "ddp" else n)]
        optimizers = [torch.optim.SparseAdam([p], lr=LR) for p in params]
        random = torch.Generator().manual_seed(5)
        for step in range(16):
            g = 1 + torch.randn(shape, generator=random)
            for rank, (param, optimizer) in enumerate(zip(params, optimizers, strict=True)):
                there = kind == "ddp" or step % n == rank
                value = g / n if kind == "ddp" else g
                index = torch.zeros(1, int(there), dtype=torch.int64)
                param.grad = torch.sparse_coo_tensor(index, value if there else value[:0], shape)
                optimizer.step()
                if kind == "adapted":
                    adam_variance.adapt(optimizer, {id(param)}, n)
        far[kind] = float(torch.stack([p.detach() for p in params]).mean(0).mean())
    assert abs(far["adapted"] / far["ddp"] - 1) < 0.1, far
    assert far["own"] / far["ddp"] < 0.5, far


def _averages(rank: int, world: int, second_moment: str) -> bool:
    """A training through trigram is that of all ranks in this process, adapted after each step or not."""
    table = nn.Embedding(4, 3, sparse=True)
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(world)]
    optimizers = [torch.optim.SparseAdam([p], lr=LR) for p in params]
    with torch.no_grad():
        table.weight.fill_(1.0)
    model = trigram.with_bagua(table, "central/full/every:1", second_moment=second_moment)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=LR)
    for step in range(9):
        rows = [torch.tensor([0, 1 + (step + j) % 3, 0]) for j in range(world)]
        optimizer.zero_grad()
        model(rows[rank]).square().sum().mul(1 + rank).backward()
        optimizer.step()
        for j, (param, each) in enumerate(zip(params, optimizers, strict=True)):
            each.zero_grad()
            nn.functional.embedding(rows[j], param, sparse=True).square().sum().mul(1 + j).backward()
            each.step()
            if second_moment == "mean":
                adam_variance.adapt(each, {id(param)}, world)
        mean = torch.stack([p.detach() for p in params]).mean(0)
        with torch.no_grad():
            for param in params:
                param.copy_(mean)
    return bool(torch.allclose(table.weight, mean, rtol=1e-5))


@pytest.mark.parametrize("second_moment", ["mean", "own"])
def test_tables_that_are_averaged(second_moment: str) -> None:
    assert run(3, _averages, second_moment) == [True] * 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("kind", "options", "l2", "decay", "sign"),
    [
        (torch.optim.Adam, {}, 0.0, 0.0, 1),
        (torch.optim.Adam, {"betas": (0.8, 0.95), "foreach": True}, 0.0, 0.0, 1),
        (torch.optim.Adam, {"weight_decay": 0.1}, 0.1, 0.0, 1),
        (torch.optim.Adam, {"maximize": True, "fused": True}, 0.0, 0.0, -1),
        (torch.optim.AdamW, {"weight_decay": 0.1}, 0.0, 0.1, 1),
        (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True, "betas": (0.9, 0.95)}, 0.0, 0.1, 1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_second_moment_of_the_mean(
    ranks: int, kind: Any, options: dict[str, Any], l2: float, decay: float, sign: float, dtype: torch.dtype
) -> None:
    start = np.random.default_rng(4).normal(size=(6, 5))
    wanted = reference(start, ranks, options.get("betas", (0.9, 0.999)), l2, decay, sign)
    # With L2 the gradient's part for the decay is of the weights after the step, not before.
    bound = 2e-3 if l2 else 1e-9 if dtype == torch.float64 else 2e-4
    for ours, theirs in zip(train(kind, ranks, dtype, **options), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=bound, atol=bound)


def test_it_makes_steps_longer_where_gradients_are_noise_only() -> None:
    start = np.random.default_rng(4).normal(size=(6, 5))
    own, mean = train(torch.optim.Adam, 1, torch.float64), train(torch.optim.Adam, 7, torch.float64)
    path = lambda run: np.abs(np.diff(np.array([start, *run]), axis=0))[20:].sum(0)  # noqa: E731
    longer = path(mean) / path(own)
    assert longer[2:4].min() > 1.2, longer
    assert longer[0].max() < 1.2, longer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD([p], 0.1, momentum=0.9),
        lambda p: torch.optim.Adam([p], 0.1, amsgrad=True),
        lambda p: torch.optim.Adagrad([p], 0.1),
        lambda p: torch.optim.RMSprop([p], 0.1),
    ],
)
def test_other_optimizers_are_left_alone(make: Any) -> None:
    runs = []
    for ranks in (1, 5):
        param = nn.Parameter(torch.ones(6, 5))
        optimizer = make(param)
        for g in gradients():
            param.grad = torch.tensor(g, dtype=torch.float32)
            optimizer.step()
            adam_variance.adapt(optimizer, {id(param)}, ranks)
        runs.append(param.detach())
    assert runs[0].equal(runs[1])


class Own(torch.optim.AdamW):
    """An update of its own, as of a library; subclasses say which moments it has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(step=torch.tensor(0.0), **self.moments(p))
            state["step"] += 1
            for m in state.values():
                m.add_(1.0)
            p.sub_(0.01)

    def moments(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.ones_like(p), "exp_avg_sq": torch.ones_like(p)}


class LowRank(Own):
    def moments(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.ones(2, p.shape[1]), "exp_avg_sq": torch.ones(2, p.shape[1])}


class Padded(Own):
    def moments(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.ones(4096), "exp_avg_sq": torch.ones(4096)}


class OneMoment(Own):
    def moments(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"exp_avg": torch.ones_like(p)}


class ThreeBetas(Own):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["betas"] = (0.9, 0.99, 0.999)


class FewOptions(OneMoment):
    def __init__(self, params: Any, lr: float) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr})


class Cropped(torch.optim.Adam):
    """torch's step, and moments that it has made small since."""

    def step(self, closure: Any = None) -> Any:
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].new_zeros(state["whole"])
        loss = super().step(closure)
        for state in self.state.values():
            state["whole"] = state["exp_avg"].shape
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name][:1].clone()
        return loss


@pytest.mark.parametrize("kind", [Own, LowRank, Padded, OneMoment, ThreeBetas, FewOptions, Cropped])
def test_updates_and_moments_of_a_subclass_are_left_alone(
    kind: type[torch.optim.Adam], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(adam_variance.logs, "warning", said.append)
    param = nn.Parameter(torch.randn(6, 5))
    optimizer = kind([param], lr=0.01)
    for _ in range(15):
        param.grad = torch.randn(6, 5)
        optimizer.step()
        before = {k: v.clone() for k, v in optimizer.state[param].items() if torch.is_tensor(v)}
        adam_variance.adapt(optimizer, {id(param)}, 3)
        assert all(torch.equal(optimizer.state[param][k], v) for k, v in before.items())
    assert len(said) == 1 and kind.__name__ in said[0]


class Clips(torch.optim.AdamW):
    """torch's step, with something before it and something in the state."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_value_(self.param_groups[0]["params"], 100.0)
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = 1
        return loss


def test_a_subclass_that_makes_torchs_step_is_adapted() -> None:
    plain = type("Plain", (torch.optim.AdamW,), {})
    for kind in (plain, Clips):
        ours, theirs = (train(k, 3, torch.float64) for k in (kind, torch.optim.AdamW))
        np.testing.assert_array_equal(ours, theirs)


def test_a_parameter_of_another_model_and_one_without_gradient_are_left_alone() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = torch.optim.Adam(params, 0.1)
    for step in range(20):
        for param in params:
            param.grad = torch.tensor([1.0, -1.0, 1.0]) * (-1) ** step
        if step == 19:
            params[2].grad = None
        before = optimizer.state[params[2]]["exp_avg_sq"].clone() if step == 19 else None
        optimizer.step()
        adam_variance.adapt(optimizer, {id(params[0]), id(params[2])}, 4)
    second = [optimizer.state[param]["exp_avg_sq"] for param in params]
    assert bool((second[0] < 0.9 * second[1]).all())
    assert before is not None
    assert second[2].equal(before)


def test_moments_in_16_bits_are_left_alone() -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.Adam([param], 0.1)
    for _ in range(12):
        param.grad = torch.ones(3, dtype=torch.bfloat16)
        optimizer.step()
        before = optimizer.state[param]["exp_avg_sq"].clone()
        adam_variance.adapt(optimizer, {id(param)}, 4)
        assert optimizer.state[param]["exp_avg_sq"].equal(before)


@pytest.mark.parametrize("decay", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("rows", [4, 5])
def test_l2_decay_from_zero_keeps_the_moment_positive(decay: float, rows: int) -> None:
    """Adam has used the decay of the weights before the step, which began at zero; the moment became
    negative, and the weights NaN. A transposed gradient takes the way without the loop in Rust."""
    param = nn.Parameter(torch.zeros(rows, 4))
    optimizer = torch.optim.Adam([param], lr=1e-3, weight_decay=decay)
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        few = torch.rand(4, rows, generator=random) < 0.02  # most have their first gradient late
        grad = 1e-6 * torch.randn(4, rows, generator=random) * few
        param.grad = grad.T if rows == 5 else grad.T.contiguous()
        optimizer.step()
        before = optimizer.state[param]["exp_avg_sq"].clone()
        adam_variance.adapt(optimizer, {id(param)}, 4)
        after = optimizer.state[param]["exp_avg_sq"]
        assert bool((after >= before / 4 * 0.999).all())
    assert bool(param.isfinite().all())


def test_memory_that_is_laid_out_for_convolutions() -> None:
    """In the order of channels_last, and in rows: the same."""
    seen = []
    for layout in (torch.contiguous_format, torch.channels_last):
        param = nn.Parameter(torch.zeros(4, 3, 2, 2).to(memory_format=layout))
        optimizer = torch.optim.Adam([param], lr=1e-3)
        random = torch.Generator().manual_seed(0)
        for _ in range(30):
            param.grad = torch.randn(4, 3, 2, 2, generator=random).to(memory_format=layout)
            optimizer.step()
            adam_variance.adapt(optimizer, {id(param)}, 3)
        seen.append(param.detach())
    torch.testing.assert_close(*seen)


class _Outer(torch.optim.Adam):
    """An optimizer whose step calls that of its parent class; torch tells the hooks of both."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_that_calls_its_parents_is_one_update() -> None:
    torch.optim.Adam([nn.Parameter(torch.ones(1))])  # torch wraps the parent's step when one is made
    param = nn.Parameter(torch.ones(3))
    optimizer = _Outer([param], lr=0.1)
    told: list[str] = []

    class Listener:
        """What `optimizer_hooks` asks of a listener."""

        waits_for_closure, updating = False, []
        parameters = type("Parameters", (), {"ids": {id(param)}})()
        model = staticmethod(lambda: param)
        times = type("Times", (), {"enter": lambda *_: None})()
        before_update = staticmethod(lambda mine: told.append("before"))
        after_update = staticmethod(lambda mine, optimizer: told.append("after"))

    listener: Any = Listener()
    optimizer_hooks.listen(listener)
    try:
        for _ in range(3):
            param.grad = torch.ones(3)
            optimizer.step()
    finally:
        optimizer_hooks.leave(listener)
    assert told == ["before", "after"] * 3
