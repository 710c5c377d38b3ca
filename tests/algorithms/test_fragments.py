"""Fragments: how weights are divided, which numbers a model takes, and states of other divisions."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trigram
from tests.support.algorithm_run import net
from tests.support.checks import raises, says
from tests.support.elastic_run import come
from tests.support.harness import Ranks, flag, run, say, scratch
from tests.support.twin_training import x
from trigram.collectives.coalesced import Part, as_real, now
from trigram.mixing import Mean
from trigram.model.wrapped import lookup
from trigram.training.fragments import Fragment, divide, of_model

SIZES = [(100, 5, 1, 3, 10, 5, 5), (1, 100, 1), (7,), (5, 5, 5, 5), (0, 0, 9)]


def _whole(sizes: Sequence[int]) -> Fragment:
    return of_model([torch.empty(1000 * size, device="cpu") for size in sizes])


def _lengths(fragments: Sequence[Fragment]) -> list[int]:
    return [sum(p.numel() for same in fragment for p in same) for fragment in fragments]


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 16])
def test_fragments_are_of_equal_size_and_hold_each_value_once(count: int) -> None:
    layouts: dict[str, Tensor] = {
        "embedding": torch.empty(500, 64),
        "one row": torch.empty(1, 20000),
        "few rows": torch.empty(3, 4000),
        "channels last": torch.empty(64, 32, 3, 3).to(memory_format=torch.channels_last),
        "a transposed matrix": torch.empty(70, 90).t(),
        "complex": torch.empty(80, 20, dtype=torch.complex64),
        "a complex number": torch.empty((), dtype=torch.complex64),
        "bias": torch.empty(64),
        "scalar": torch.empty(()),
        "bfloat16": torch.empty(100, 300, dtype=torch.bfloat16),
        "small bfloat16": torch.empty(30, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 5),
        "1-D": torch.empty(12345),
    }
    params = list(layouts.values())
    before = 0
    for p in params:  # numbers that all dtypes hold
        values = as_real(p)
        values.copy_(torch.arange(before, before + values.numel()).remainder(251).view(values.shape))
        before += values.numel()
    fragments = divide(of_model(params), count)
    assert len(fragments) == count
    sizes = [sum(as_real(p).numel() for p in params if p.dtype != torch.bfloat16), 30030]
    most = sum(-(-size // count) + 2 * size // count // 16 for size in sizes) + 64
    assert max(_lengths(fragments)) <= most
    # What comes once: each value, and in the order of the model.
    for dtype, size in zip((torch.float32, torch.bfloat16), sizes, strict=True):
        parts = [p for fragment in fragments for same in fragment for p in same if p.dtype == dtype]
        assert sum(p.numel() for p in parts) == size
        for view in now(parts):
            view.add_(1)
    assert all(
        bool((as_real(p).flatten() == expected).all())
        for p, expected in zip(params, _counted(params), strict=True)
    )


def _counted(params: Sequence[Tensor]) -> list[Tensor]:
    found, before = [], 0
    for p in params:
        n = as_real(p).numel()
        found.append(torch.arange(before, before + n).remainder(251).add(1).to(as_real(p).dtype))
        before += n
    return found


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("pieces", [True, False])
def test_the_number_that_is_proposed_is_taken(sizes: tuple[int, ...], pieces: bool) -> None:
    weights = _whole(sizes)

    def of(asked: int, every: int = 0) -> list[Fragment]:
        return divide(weights, asked, every, pieces)

    for asked in range(1, 20):
        try:
            found = of(asked)
        except trigram.MisuseError as error:
            assert not pieces, "all of these have more values than fragments"
            proposed = int(re.findall(r"use fragments=(\d+)", str(error))[0])
            assert 1 <= proposed < asked
            found = of(proposed)
            assert len(found) == proposed
            divides = int(
                re.findall(r"use fragments=(\d+)", raises(trigram.MisuseError, of, asked, asked))[0]
            )
            assert asked % divides == 0 and len(of(divides)) == divides
        else:
            assert len(found) == asked
        assert sum(_lengths(found)) == 1000 * sum(sizes)
        if not pieces:
            assert [id(t) for part in found for same in part for t in same] == [id(t) for t in weights[0]]


def test_more_fragments_than_values_are_refused() -> None:
    few = of_model([torch.empty(3, device="cpu"), torch.empty((), device="cpu")])
    says(raises(trigram.MisuseError, divide, few, 9), "fragments=9", "too few", "use fragments=4")
    assert _lengths(divide(few, 4)) == [1, 1, 1, 1]


def test_by_default_as_many_as_the_size_asks_for() -> None:
    embedding, rest = torch.empty(2 << 20, device="cpu"), torch.empty(1 << 20, device="cpu")
    assert _lengths(divide(of_model([embedding, rest]), None)) == [3 << 17] * 8
    assert len(divide(of_model([embedding, rest]), None, pieces=False)) < 8
    pairs = torch.empty(4, dtype=torch.complex64, device="cpu")  # beside real numbers of their size
    assert _lengths([of_model([rest, pairs])]) == [(1 << 20) + 8]
    assert len(of_model([rest, pairs])) == 1


# Parameters in several fragments.


class _Language(nn.Module):
    """An embedding that is most of the model, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 6)
        self.mixing = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(
            (self.embedding(tokens).to(torch.complex64) @ self.mixing.to(torch.complex64)).real
        )
        return out


def _language() -> _Language:
    torch.manual_seed(0)
    return _Language()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    tokens = torch.randint(0, 40, (16,), generator=torch.Generator().manual_seed(100 * rank + step))
    (model(tokens) - x(rank, step, 16, 3)).square().mean().backward()
    optimizer.step()


def _given_other_memory(rank: int, world: int) -> None:
    """``p.data = ...`` as `module.to`, `load` and quantizers do it: averages follow the parameter."""
    models = []
    for moves in (False, True):
        model = trigram.with_bagua(_language(), "local_sgd", every=4, fragments=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(12):
            if moves and step == 5:
                for p in model.parameters():
                    p.data = p.data.clone()
            _step(model, optimizer, rank, step)
        trigram.unwrap(model)
        models.append(model)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_parameters_that_get_other_memory_are_averaged_where_they_are() -> None:
    run(2, _given_other_memory)


def _each_algorithm(rank: int, world: int) -> None:
    for name, options in OPTIONS.items():
        model = _language()
        if ":median" in name:  # which takes real numbers only
            model.mixing = nn.Parameter(model.mixing.real.clone())
        trigram.with_bagua(model, name, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            _step(model, optimizer, rank, step)
        state = trigram.algorithm_state(model)
        assert state["carrier"]["pieces"] is True
        trigram.load_algorithm_state(model, state)
        trigram.unwrap(model)


OPTIONS: dict[str, dict[str, Any]] = {
    "local_sgd": {"every": 4, "fragments": 4},
    "diloco": {"every": 4, "fragments": 4},
    "sparseloco": {"every": 4, "fragments": 4},
    "central/powersgd:1/every:4": {"fragments": 2},
    "central/share:0.5/every:4": {"fragments": 4},
    "central:median/full/every:4": {"fragments": 4},
    "gossip:ring/full/every:4": {"fragments": 4},
    "gossip:ring/int8/every:4": {"fragments": 4},
    "gossip:random/int8/every:4": {"fragments": 4},
    "push:exponential/full/every:4": {"fragments": 4},
    "noloco": {"every": 4, "fragments": 4},
    "async": {"fragments": 4},
    "async_low_precision": {"fragments": 4},
    "async_decentralized": {"fragments": 4},
    "async_low_precision_decentralized": {"fragments": 4},
}


@pytest.mark.parametrize("world", [2, 3])
def test_every_algorithm_divides_parameters(world: int) -> None:
    run(world, _each_algorithm)


# States of versions that divided no parameter.


def _as_before(name: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose fragments are those of such a version."""
    model = trigram.with_bagua(_language(), name, **options)
    wrapped = lookup(model, "test")
    algorithm = wrapped.algorithm
    wrapped.restart(replace(algorithm, options=replace(algorithm.options, pieces=False)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _older_state(rank: int, world: int) -> None:
    def always(step: int) -> bool:
        return True

    for name, options in {
        "diloco": {"every": 2, "fragments": 2},
        "async_low_precision": {"fragments": 2, "script": always},
        "async_low_precision_decentralized": {"fragments": 2, "script": always},
    }.items():
        model, optimizer = _as_before(name, **options)
        for step in range(5):
            _step(model, optimizer, rank, step)
        state, weights = trigram.algorithm_state(model), {k: v.clone() for k, v in model.state_dict().items()}
        assert "pieces" not in state["carrier"]
        for step in range(5, 10):
            _step(model, optimizer, rank, step)
        trigram.algorithm_state(model)  # ends what is under way

        other = trigram.with_bagua(_language(), name, **options)
        now = torch.optim.SGD(other.parameters(), lr=0.1)
        other.load_state_dict(weights)
        mine = trigram.algorithm_state(other)
        trigram.load_algorithm_state(other, state)
        for step in range(5, 10):
            _step(other, now, rank, step)
        again = trigram.algorithm_state(other)
        assert "pieces" not in again["carrier"], "the next state is of the same division"
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), name
        trigram.load_algorithm_state(other, mine)  # and back
        assert trigram.algorithm_state(other)["carrier"]["pieces"] is True

        # A state that fits nothing leaves the model as it was.
        broken = {**state, "carrier": {**state["carrier"], "rounds": {}}}
        raises(trigram.MisuseError, trigram.load_algorithm_state, other, broken)
        assert trigram.algorithm_state(other)["carrier"]["pieces"] is True
        _step(other, now, rank, 10)
        trigram.unwrap(model)
        trigram.unwrap(other)


def test_states_of_undivided_parameters_go_on() -> None:
    run(2, _older_state)


def _of_one_fragment(rank: int, world: int) -> None:
    """So many whole parameters are not to be had: the state does not fit, and nothing has changed."""
    source = trigram.with_bagua(nn.Linear(64, 64), "local_sgd", every=4)
    state = trigram.algorithm_state(source)
    model = trigram.with_bagua(nn.Linear(64, 64), "local_sgd", every=4, fragments=4)
    torch.nn.init.constant_(model.weight, 10.0 + rank)
    error = raises(trigram.MisuseError, trigram.load_algorithm_state, model, state)
    says(error, "parts", "are expected", "fragments=")
    assert float(model.weight[0, 0]) == 10.0 + rank
    model(torch.ones(2, 64)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert trigram.stats(model)["steps"] == 1


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    run(2, _of_one_fragment)


def _joins_undivided(rank: int, world: int) -> tuple[int, ...]:
    trigram.init(elastic=True)
    again = (scratch() / "flag-again").exists()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trigram.with_bagua(model, "local_sgd", optimizer=optimizer, elastic=True, every=4, fragments=2)
    if not again:
        state = trigram.algorithm_state(model)
        del state["carrier"]["pieces"]  # as an earlier version saved it
        trigram.load_algorithm_state(model, state)
    flag(f"entered-{rank}")
    for step in range(trigram.stats(model)["steps"], 300):
        if rank == 1 and step == 5 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(x(rank, step, 4, 16)).square().mean().backward()
        optimizer.step()
        say(("did", step))
        time.sleep(0.01)
    assert "pieces" not in trigram.algorithm_state(model)["carrier"]
    return tuple(trigram.stats(model)["ranks"])


def test_a_rank_joins_a_job_of_undivided_parameters() -> None:
    with Ranks(2, _joins_undivided) as ranks:
        ranks.await_said(0, ("did", 20), 60)
        (ranks.dir / "flag-again").touch()
        come(ranks, 1, run=_joins_undivided)
        assert ranks.results(120) == [(0, 1)] * 2


def _load(rank: int, world: int) -> None:
    saved = trigram.with_bagua(net(), "local_sgd", every=4, fragments=2)
    state = trigram.algorithm_state(saved)
    other = trigram.with_bagua(net(), "local_sgd", every=4)
    says(raises(trigram.MisuseError, trigram.load_algorithm_state, other, state), "rounds", "2", "1")
    trigram.load_algorithm_state(saved, state)


def test_another_number_of_fragments_is_refused() -> None:
    run(2, _load)


def _older(rank: int, world: int) -> None:
    """Pairs had one object of references before there were fragments."""
    name = "async_low_precision_decentralized"
    model = trigram.with_bagua(net(), name)
    state = trigram.algorithm_state(model)
    found = _holder(state)
    found["references"] = found["references"][0]
    trigram.load_algorithm_state(model, state)
    other = trigram.with_bagua(net(), name, fragments=2)
    says(raises(trigram.MisuseError, trigram.load_algorithm_state, other, state), "fragments=1")


def _holder(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state that has the references."""
    if "references" in state:
        return state
    parts = [_holder(part) for part in state.values() if isinstance(part, dict)]
    return next((part for part in parts if part), {})


def test_pairs_go_on_from_a_state_without_fragments() -> None:
    run(2, _older)


# Registered classes.


class _Whole(Mean):
    def __init__(self, tensors: Sequence[Tensor], groups: Any) -> None:
        assert all(isinstance(t, Tensor) for t in tensors)
        super().__init__(tensors, groups)


class _InPieces(Mean):
    takes_pieces = True

    def __init__(self, tensors: Sequence[Part], groups: Any) -> None:
        assert any(not isinstance(t, Tensor) for t in tensors)
        super().__init__(tensors, groups)


def _registered(rank: int, world: int) -> None:
    value = trigram.Trigram("central", "full", "every:4", "weights")
    trigram.register("whole", value, step=_Whole)
    trigram.register("in pieces", value, step=_InPieces)
    error = raises(trigram.MisuseError, trigram.with_bagua, nn.Linear(50, 20), "whole", fragments=4)
    says(error, "takes_pieces", "use fragments=2")
    trigram.with_bagua(_language(), "whole", fragments=2)
    trigram.with_bagua(nn.Linear(50, 20, bias=False), "in pieces", fragments=4)


def test_a_registered_class_says_whether_it_takes_pieces() -> None:
    run(2, _registered)
