"""A wrapped model: its methods, its copies, torch's interface, and back to a plain model again."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trigram
from tests.reference.torch_gloo import gloo
from tests.support.algorithm_run import loss, net
from tests.support.cases import Cases
from tests.support.checks import close, equal, fingerprint, raises, same_on_all_ranks, says
from tests.support.twin_training import x

CASES = Cases()
ALGORITHMS = ["gradient_allreduce", "topk", "decentralized", "local_sgd", "async", "async_decentralized"]


def train(model: nn.Module, rank: int, first: int, steps: int, lr: float = 0.05) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": saved,
}

# Unwrapping.


@CASES.over(*ALGORITHMS)
def unwrap(rank: int, world: int, algorithm: str) -> None:
    """The model trains alone as one that was never wrapped, and can be wrapped again."""
    model = net()
    keys = list(model.state_dict())
    attributes = set(vars(model))
    assert not trigram.is_wrapped(model)
    assert trigram.with_bagua(model, algorithm) is model
    assert trigram.is_wrapped(model)
    train(model, rank, 0, 5)
    assert trigram.unwrap(model) is model
    assert not trigram.is_wrapped(model)
    assert list(model.state_dict()) == keys and set(vars(model)) == attributes
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    alone = copy.deepcopy(model)
    if rank == 0:  # no other rank need take part
        train(model, rank, 5, 3)
        train(alone, rank, 5, 3)
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            equal(a.detach(), b.detach(), "alone")
    trigram.with_bagua(model, "gradient_allreduce")
    same_on_all_ranks(rank, world, f"rewrapped-{algorithm}", [p.detach() for p in model.parameters()])
    train(model, rank, 8, 3)
    same_on_all_ranks(rank, world, f"trained-{algorithm}", [p.detach() for p in model.parameters()])
    assert trigram.stats(model)["steps"] == 3


@CASES
def unwrap_applies_what_is_under_way(rank: int, world: int) -> None:
    """An overlapping averaging step that has begun ends with all ranks, and its result is kept."""
    model = trigram.with_bagua(net(), "decentralized", topology="complete")
    train(model, rank, 0, 1)
    apart = fingerprint(model.parameters())
    model(x(rank, 0))  # a boundary: the averaging step begins
    trigram.unwrap(model)
    assert fingerprint(model.parameters()) != apart
    for p in model.parameters():
        mean = p.detach().clone()
        trigram.all_reduce(mean, "avg")
        close(p.detach(), mean, 1e-6, "averaged over the complete graph")


@CASES
def wrapped_twice(rank: int, world: int) -> None:
    """As a notebook's cell that is run again does: the error names the ways out."""
    model = trigram.with_bagua(net(), "decentralized")
    text = raises(trigram.MisuseError, trigram.with_bagua, model, "bytegrad")
    says(text, "hooked already", "trigram.switch", "trigram.unwrap")
    trigram.with_bagua(trigram.unwrap(model), "bytegrad")
    assert trigram.stats(model)["algorithm"] == "bytegrad"


@CASES
def unwrap_a_bare_model(rank: int, world: int) -> None:
    says(raises(trigram.MisuseError, trigram.unwrap, net()), "unwrap", "with_bagua")
    model = trigram.unwrap(trigram.with_bagua(net()))
    says(raises(trigram.MisuseError, trigram.unwrap, model), "unwrap")
    for call in (trigram.stats, trigram.consensus, trigram.algorithm_state):
        says(raises(trigram.MisuseError, call, model), "with_bagua")


@CASES
def unwrapped_models_are_freed(rank: int, world: int) -> None:
    model = trigram.with_bagua(net(), "async")
    train(model, rank, 0, 3)
    gone = weakref.ref(trigram.unwrap(model))
    del model
    gc.collect()
    assert gone() is None


@CASES
def copies_of_an_unwrapped_model_have_no_methods(rank: int, world: int) -> None:
    model = trigram.with_bagua(net())
    twin = copy.deepcopy(model)
    trigram.with_bagua(twin)
    trigram.unwrap(twin)
    assert not hasattr(twin, "no_sync") and hasattr(model, "no_sync")


# Methods.


@CASES.over("gradient_allreduce", "bytegrad")
def methods_no_sync(rank: int, world: int, algorithm: str) -> None:
    """`model.no_sync()` does what `trigram.no_sync(model)` does."""
    one = net()
    other = trigram.with_bagua(copy.deepcopy(one), algorithm)
    trigram.with_bagua(one, algorithm)
    for model, block in ((one, one.no_sync), (other, lambda: trigram.no_sync(other))):
        with block():
            loss(model, rank, 0).backward()
        loss(model, rank, 1).backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        equal(a.grad, b.grad, "gradients")
    same_on_all_ranks(rank, world, f"no-sync-{algorithm}", [p.grad for p in one.parameters()])
    assert trigram.stats(one)["steps"] == 1


@CASES
def methods_join(rank: int, world: int) -> None:
    model = trigram.with_bagua(net())
    with model.join():
        train(model, rank, 0, 2 + rank)
    same_on_all_ranks(rank, world, "join", [p.detach() for p in model.parameters()])
    assert trigram.stats(model)["steps"] == 1 + world


class OwnMethods(nn.Module):
    """A model whose class and children use the names."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(6, 3)

    def no_sync(self) -> str:
        return "mine"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.join(inputs)


@CASES
def own_methods_stay(rank: int, world: int) -> None:
    model = trigram.with_bagua(OwnMethods())
    assert model.no_sync() == "mine" and isinstance(model.join, nn.Linear)
    trigram.unwrap(model)
    assert model.no_sync() == "mine" and isinstance(model.join, nn.Linear)


@CASES.over(*COPIES)
def copies(rank: int, world: int, how: str) -> None:
    """A copy has the class, the keys and the weights; its methods name the cause; it can be wrapped."""
    model = trigram.with_bagua(net(), "decentralized")
    train(model, rank, 0, 3)
    twin = COPIES[how](model)
    assert type(twin) is type(model) and list(twin.state_dict()) == list(model.state_dict())
    assert fingerprint(twin.parameters()) == fingerprint(model.parameters())
    assert not trigram.is_wrapped(twin) and trigram.is_wrapped(model)
    for name in ("no_sync", "join"):
        says(raises(trigram.MisuseError, getattr(twin, name)), name, "copy", "trigram.with_bagua")
    again = COPIES[how](twin)
    says(raises(trigram.MisuseError, again.no_sync), "copy")
    if rank == 0:  # alone
        train(twin, rank, 3, 2)
    trigram.with_bagua(again, "gradient_allreduce")
    with again.no_sync():
        loss(again, rank, 3).backward()
    loss(again, rank, 4).backward()
    same_on_all_ranks(rank, world, f"copies-{how}", [p.grad for p in again.parameters()])


@CASES
def methods_do_not_keep_the_model(rank: int, world: int) -> None:
    model = trigram.with_bagua(net())
    train(model, rank, 0, 2)
    gone = weakref.ref(model)
    gc.disable()
    del model
    assert gone() is None, "a reference cycle"
    gc.enable()


@CASES.over("gradient_allreduce", "local_sgd", "async")
def join_of_two(rank: int, world: int, algorithm: str) -> None:
    """Two models in one block, on unequal numbers of inputs; `join(a)` in `join(b)` is refused."""
    models = [trigram.with_bagua(net(), algorithm), trigram.with_bagua(net(), "gradient_allreduce")]
    with trigram.join(*models):
        for step in range(2 + rank):
            for model in models:
                train(model, rank, step, 1)
    for model in models:
        if algorithm == "gradient_allreduce" or model is models[1]:
            same_on_all_ranks(
                rank,
                world,
                f"two-{algorithm}-{models.index(model)}",
                [p.detach() for p in model.parameters()],
            )
            assert trigram.stats(model)["steps"] == 1 + world
    with trigram.join(models[1]):
        says(raises(trigram.MisuseError, trigram.join, *models), "join(a, b)")
    for model in models:
        train(model, rank, 9, 1)


@CASES.over("gradient_allreduce", "decentralized", "local_sgd")
def join_throws(rank: int, world: int, algorithm: str) -> None:
    """All ranks raise when the first has no more inputs, and name it."""
    model = trigram.with_bagua(net(), algorithm, **({"every": 1} if algorithm == "local_sgd" else {}))
    done = []

    def block() -> None:
        with trigram.join(model, throw_on_early_termination=True):
            for step in range(2 if rank == 0 else 6):
                train(model, rank, step, 1)
                done.append(step)

    says(raises(trigram.MisuseError, block), "rank(s) 0 have no more inputs", "throw_on_early_termination")
    assert 2 <= len(done) <= 3
    other = trigram.with_bagua(net(), algorithm)
    with other.join(throw_on_early_termination=True):
        train(other, rank, 11, 2)


@CASES
def join_refuses(rank: int, world: int) -> None:
    model = trigram.with_bagua(net())
    says(raises(trigram.MisuseError, trigram.join), "models")
    says(raises(trigram.MisuseError, trigram.join, model, model), "different")
    says(raises(trigram.MisuseError, trigram.join, model, net()), "with_bagua")
    asynchronous = trigram.with_bagua(net(), "async")
    says(
        raises(
            trigram.UnsupportedError,
            lambda: trigram.join(model, asynchronous, throw_on_early_termination=True),
        ),
        "asynchronous",
    )


# A new job.


@CASES.over(*ALGORITHMS)
def a_new_job(rank: int, world: int, algorithm: str) -> None:
    """After `shutdown` and `init` the model is named as one of another job, and can be wrapped anew."""
    model = trigram.with_bagua(net(), algorithm)
    train(model, rank, 0, 3)
    trigram.shutdown()
    assert not trigram.is_wrapped(model)
    says(raises(trigram.MisuseError, trigram.algorithm_state, model), "shutdown", "with_bagua", "unwrap")
    trigram.init()
    assert not trigram.is_wrapped(model)
    for call in (trigram.consensus, trigram.stats, lambda m: trigram.switch(m, "bytegrad")):
        says(raises(trigram.MisuseError, call, model), "shutdown", "with_bagua", "unwrap")
    assert trigram.with_bagua(model, "bytegrad") is model
    train(model, rank, 3, 3)
    same_on_all_ranks(rank, world, f"new-job-{algorithm}", [p.detach() for p in model.parameters()])
    assert trigram.stats(model)["steps"] == 3


@CASES
def unwrap_in_no_job(rank: int, world: int) -> None:
    """After `shutdown`, `unwrap` sends nothing, and the model trains alone."""
    model = trigram.with_bagua(net(), "async")
    train(model, rank, 0, 3)
    trigram.shutdown()
    trigram.unwrap(model)
    train(model, rank, 3, 2)
    assert not trigram.is_initialized() and not hasattr(model, "no_sync")
    trigram.init()


# torch's interface.


@CASES
def ddp_trains_like_torchs(rank: int, world: int) -> None:
    """The same keys, and with two ranks the same bits."""
    weights = []
    with gloo(rank, world):
        for kind in (DistributedDataParallel, trigram.DistributedDataParallel):
            torch.manual_seed(3)
            model = kind(net(), find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(6):
                with model.no_sync() if step % 2 == 0 else contextlib.nullcontext():
                    loss(model, rank, step).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            weights.append(model.state_dict())
            assert isinstance(model.module, nn.Module) and not hasattr(model, "0")
    theirs, ours = weights
    assert list(theirs) == list(ours) and all(k.startswith("module.") for k in ours)
    for name, t in theirs.items():
        close(ours[name], t, 0.0 if world == 2 else 1e-6, name)


@CASES
def ddp_is_a_wrapped_model(rank: int, world: int) -> None:
    """What trigram does with a model it does with this one, and with its module."""
    module = net()
    model = trigram.DistributedDataParallel(module, algorithm="decentralized", topology="complete")
    assert model.module is module and trigram.is_wrapped(model) and trigram.is_wrapped(module)
    train(model, rank, 0, 2)
    assert trigram.stats(model) == trigram.stats(model) | {"steps": 2, "algorithm": "decentralized"}
    assert trigram.stats(module)["steps"] == 2
    trigram.switch(model, "bytegrad")
    train(model, rank, 2, 2)
    trigram.consensus(model)
    kept = trigram.algorithm_state(model)
    trigram.load_algorithm_state(module, kept)
    with model.join():
        train(model, rank, 4, 1 + rank)
    same_on_all_ranks(rank, world, "ddp", [p.detach() for p in model.parameters()])
    assert trigram.unwrap(model) is module
    assert not trigram.is_wrapped(model) and not trigram.is_wrapped(module)
    trigram.DistributedDataParallel(module)


@CASES.over(*COPIES)
def ddp_copies(rank: int, world: int, how: str) -> None:
    twin = COPIES[how](trigram.DistributedDataParallel(net()))
    assert not trigram.is_wrapped(twin) and not trigram.is_wrapped(twin.module)
    says(raises(trigram.MisuseError, twin.no_sync), "with_bagua")
    if rank == 0:
        train(twin, rank, 0, 1)


ACCEPTED: dict[str, Any] = {
    "dim": 1,
    "init_sync": False,
    "find_unused_parameters": True,
    "check_reduction": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "broadcast_buffers": False,
    "bucket_cap_mb": 5,
    "device_ids": ["cpu"],
}
REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "delay_all_reduce_named_params": ([], ("ignore",)),
    "param_to_hook_all_reduce": (0, ("ignore",)),
    "mixed_precision": (1, ("torch.autocast", "bf16")),
    "device_mesh": (1, ("process_group", "get_group")),
    "device_ids": ([0, 1], ("one process per device",)),
    "output_device": (0, ("device_ids",)),
    "bucket_cap_mb": (-1, ("greater than 0",)),
}


@CASES
def ddp_arguments(rank: int, world: int) -> None:
    """Each of torch's is accepted, or refused by its name with what to do instead."""
    for name, value in ACCEPTED.items():
        model = trigram.DistributedDataParallel(net(), **{name: value})
        loss(model, rank, 0).backward()
    for name, (value, words) in REFUSED.items():
        text = raises(
            trigram.TrigramError,
            lambda name=name, value=value: trigram.DistributedDataParallel(net(), **{name: value}),
        )
        says(text, name.replace("_cap", ""), *words)
    says(raises(trigram.MisuseError, trigram.DistributedDataParallel, net(), ["meta"]), "device_ids", "cpu")
    model = trigram.DistributedDataParallel(net())
    says(raises(trigram.UnsupportedError, model.register_comm_hook, None, None), "algorithm=")
    says(raises(trigram.UnsupportedError, model.join, False), "sample_weight")
    with model.join(enable=False):
        loss(model, rank, 0).backward()
    group = trigram.new_group(range(world - 1))
    if rank < world - 1:
        assert trigram.stats(trigram.DistributedDataParallel(net(), process_group=group))["ranks"] == list(
            group.ranks
        )


ATTRIBUTES = (
    *("process_group", "device_ids", "output_device", "dim", "device", "device_type", "module"),
    *("broadcast_buffers", "require_forward_param_sync", "require_backward_grad_sync", "static_graph"),
    *("find_unused_parameters", "gradient_as_bucket_view", "parameters_to_ignore", "bucket_bytes_cap"),
    *("is_multi_device_module", "will_sync_module_buffers", "join_hook", "_set_static_graph"),
)
"""Of torch's class, what public scripts read and set."""


@CASES
def ddp_attributes(rank: int, world: int) -> None:
    """Those that scripts read are there, and accumulation by `require_backward_grad_sync` is no_sync's."""
    module = net()
    with gloo(rank, world):
        expected = _accumulated(DistributedDataParallel(copy.deepcopy(module)), rank)
    model = trigram.DistributedDataParallel(module, bucket_cap_mb=5, find_unused_parameters=True)
    for name in ATTRIBUTES:
        assert hasattr(model, name), name
    assert model.bucket_bytes_cap == 5 << 20 and model.device == torch.device("cpu")
    model._set_static_graph()
    assert model.static_graph and model._get_ddp_logging_data()["world_size"] == world
    says(raises(trigram.UnsupportedError, model.join_hook), "trigram.join")
    for ours, theirs_ in zip(_accumulated(model, rank), expected, strict=True):
        close(ours, theirs_, 1e-6, "accumulated")
    assert trigram.stats(model)["steps"] == 2 and model.require_backward_grad_sync


def _accumulated(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """The weights after two updates with the gradients of three passes each, as nanoGPT accumulates."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        model.require_backward_grad_sync = step % 3 == 2
        loss(model, rank, step).backward()
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2, 3])
def test_wrapping(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm", patience=60)
