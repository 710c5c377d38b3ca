"""States of sharded optimizers are those of plain ones: they are saved, loaded and resumed
interchangeably."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.reference.torch_gloo import gloo
from tests.sharded.twins import Net, Twins, adamw, same_state
from tests.support.cases import Cases
from tests.support.checks import raises, says
from tests.support.harness import scratch, until
from tests.support.twin_training import mlp

CASES = Cases()


@CASES.over("before the first step", "in the middle")
def load_a_plain_state(rank: int, world: int, when: str) -> None:
    """A checkpoint of a plain optimizer resumes sharded, and one of a sharded resumes plain."""
    first = Twins(rank, world)
    first.train(steps=3)
    for source in (0, 1):
        model, optimizer = first.pairs[source]
        state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        second = Twins(rank, world)
        if when == "in the middle":
            second.train(7, 2)
        for model, optimizer in second.pairs:
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(state))
            same_state(optimizer.state_dict(), state, f"loaded from {source}")
        second.train(3, 3)
        second.check_state("resumed")


@CASES
def other_world_sizes(rank: int, world: int) -> None:
    """What all ranks have saved, fewer ranks resume."""
    first = Twins(rank, world)
    first.train(steps=3)
    model, optimizer = first.pairs[1]
    path = scratch() / f"checkpoint-{world}"
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if rank == 0:
        torch.save(saved, path)
    trigram.barrier()
    fewer = trigram.new_group(list(range(world - 1)))
    if rank == world - 1:
        return
    second = Twins(rank, world, group=fewer) if world > 2 else None
    loaded = torch.load(path)
    if second is None:  # one rank, without any communication
        torch.manual_seed(5)
        alone = Net()
        plain = adamw(alone)
        plain.load_state_dict(loaded["optimizer"])
        same_state(plain.state_dict(), saved["optimizer"], "plain")
        return
    for model, optimizer in second.pairs:
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(copy.deepcopy(loaded["optimizer"]))
    second.train(3, 2)
    second.check_state("fewer ranks")


@CASES
def state_from_before_wrapping(rank: int, world: int) -> None:
    """An optimizer that has stepped is wrapped; its state is cut at the first step."""

    def stepped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    twins = Twins(rank, world, mlp, stepped)
    twins.train(steps=3)
    twins.check_state("wrapped later")


@CASES
def distributed_checkpoint(rank: int, world: int) -> None:
    """torch.distributed.checkpoint saves and loads it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    expected = copy.deepcopy(optimizer.state_dict())
    with gloo(rank, world):
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(scratch() / f"dcp-{world}"))
        twins.train(2, 2)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(scratch() / f"dcp-{world}"))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    same_state(optimizer.state_dict(), expected, "loaded")


@CASES.over("full", "shards")
def with_algorithm_state(rank: int, world: int, gradients: str) -> None:
    """A checkpoint of everything, resumed by a new model, also with buckets of another size."""
    first = Twins(rank, world, gradients=gradients)
    first.train(steps=3)
    model, optimizer = first.pairs[1]
    algorithm = trigram.algorithm_state(model)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    second = Twins(rank, world, gradients=gradients)
    for model, optimizer in second.pairs:
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
    trigram.load_algorithm_state(second.models[1], algorithm)
    second.train(3, 3)
    trigram.load_algorithm_state(second.models[1], algorithm)
    second.train(6, 2)
    second.check_state("resumed")


@CASES
def only_one_rank_saves(rank: int, world: int) -> None:
    """state_dict on one rank only: an error on all, at once, that says so."""
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    if rank == 0:
        says(raises(trigram.MismatchError, optimizer.state_dict), "state_dict()", "all ranks")
    else:
        optimizer.zero_grad()
        says(raises(trigram.MismatchError, lambda: twins.loss(model, 5).backward()), "different")


@CASES
def only_one_rank_loads(rank: int, world: int) -> None:
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    state = copy.deepcopy(optimizer.state_dict())
    if rank == 0:
        says(raises(trigram.MismatchError, optimizer.load_state_dict, state), "load_state_dict()")
    else:
        optimizer.zero_grad()
        raises(trigram.MismatchError, lambda: twins.loss(model, 5).backward())


@CASES
def different_states(rank: int, world: int) -> None:
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    _, optimizer = twins.pairs[1]
    state = copy.deepcopy(optimizer.state_dict())
    for s in state["state"].values():
        s["step"] += rank
    says(
        raises(trigram.MismatchError, optimizer.load_state_dict, state),
        "rank(s) 1",
        "another optimizer state",
    )


@CASES
def a_state_that_does_not_fit(rank: int, world: int) -> None:
    """torch's own error, and nothing is lost."""
    twins = Twins(rank, world)
    twins.train(steps=2)
    _, optimizer = twins.pairs[1]
    other: Any = adamw(nn.Linear(2, 2)).state_dict()
    raises(ValueError, optimizer.load_state_dict, other)
    twins.check_state("after the error")
    twins.train(2, 2)


@CASES
def an_interrupted_state(rank: int, world: int) -> None:
    """A state_dict that raises leaves nothing behind, and training goes on from the same state."""
    twins = Twins(rank, world)
    twins.train(steps=2)
    _, optimizer = twins.pairs[1]

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = optimizer.register_state_dict_pre_hook(fails)
    raises(KeyboardInterrupt, optimizer.state_dict)
    handle.remove()
    twins.train(2, 2)
    twins.check_state("after the interruption")


@CASES
def a_state_by_hand(rank: int, world: int) -> None:
    """A script puts state under parameters, and a load that ranks do not agree on leaves it there."""
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    plain, optimizer = twins.optimizers
    for p, q in zip(twins.models[0].parameters(), twins.models[1].parameters(), strict=True):
        optimizer.state[q] = copy.deepcopy(plain.state[p])
    twins.train(2, 2)
    twins.check_state("by hand")
    state = copy.deepcopy(plain.state_dict())
    other = copy.deepcopy(state)
    if rank == 1:
        for s in other["state"].values():
            s["step"] += 1
    raises(trigram.MismatchError, optimizer.load_state_dict, other)
    for s in optimizer.state.values():
        if s:
            s["step"].fill_(float(state["state"][0]["step"]))
    twins.train(4, 2)
    twins.check_state("after a load that failed")


@CASES
def saved_in_a_hook(rank: int, world: int) -> None:
    """A hook after the step, older than the sharding, saves the whole state."""
    saved: list[Any] = []

    def with_hook(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        optimizer.register_step_post_hook(lambda o, *_: saved.append(copy.deepcopy(o.state_dict())))
        return optimizer

    twins = Twins(rank, world, mlp, with_hook)
    twins.train(steps=3)
    for plain, ours in zip(saved[::2], saved[1::2], strict=True):
        same_state(ours, plain, "in a hook", twins.tolerance)


@CASES
def of_one_value(rank: int, world: int) -> None:
    """Ranks without slices have state too, for torch.distributed.checkpoint."""
    model = nn.Linear(6, 1, bias=False)
    optimizer = adamw(model)
    trigram.with_bagua(model, "sharded", optimizer=optimizer)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert optimizer.state
    assert list(optimizer.state_dict()["state"]) == [0]


@CASES
def replaced_layer(rank: int, world: int) -> None:
    """A layer is replaced in the model and the optimizer: its state is gone, that of others stays."""
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    for model, optimizer in twins.pairs:
        old = set(model[4].parameters())
        torch.manual_seed(9)
        model[4] = nn.Linear(16, 3).to(twins.dtype)
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p not in old]
        for p in old:
            optimizer.state.pop(p, None)
        optimizer.add_param_group({"params": list(model[4].parameters())})
    twins.train(2, 2)
    twins.check_state("another head")
    trigram.unwrap(twins.models[1])
    twins.check_state("unwrapped")


@CASES
def consensus_in_time(rank: int, world: int) -> None:
    """Weights under way are awaited for as long as the caller says, and are there later."""
    twins = Twins(rank, world, mlp, overlap=True)
    twins.train(steps=2)
    for model, optimizer in twins.pairs:
        optimizer.zero_grad()
        twins.loss(model, 2).backward()
    twins.optimizers[0].step()
    given_up = scratch() / f"given-up-{world}"
    if rank == world - 1:
        until(given_up.exists, 30.0, "rank 0 to give up")
    twins.optimizers[1].step()
    if rank == 0:
        raises(trigram.TimeoutError, trigram.consensus_state_dict, twins.models[1], timeout=0.2)
        given_up.touch()
    twins.check("later")


@CASES.over("save", "load")
def after_a_pass_that_failed(rank: int, world: int, call: str) -> None:
    """One rank's pass raises; the next call is about the state: it ends the pass on all ranks."""
    twins = Twins(rank, world, mlp)
    twins.train(steps=2)
    model, optimizer = twins.pairs[1]
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    hidden = model[0](torch.ones(2, 6, dtype=twins.dtype))
    if rank == 0:
        hidden.register_hook(lambda _: 1 / 0)
    raises((ZeroDivisionError, trigram.AbortedError), lambda: model[1:](hidden).sum().backward())
    if call == "load":
        optimizer.load_state_dict(state)
    else:
        same_state(optimizer.state_dict(), state, "saved")
    twins.train(2, 2)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_states(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")
