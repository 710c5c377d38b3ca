"""What is refused, before anything is sent, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trigram
from tests.support.algorithm_run import loss, net
from tests.support.cases import Cases
from tests.support.checks import raises, same_on_all_ranks, says

CASES = Cases()

# Illegal by itself: algorithm, options, words of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "name": ("gossip_girl", {}, ("gossip_girl", "gradient_allreduce", "push_sum", "diloco", "qadam")),
    "who": ("middle/full/sync", {}, ("middle", "central", "gossip")),
    "what": ("central/int7/sync", {}, ("int7", "int8", "topk")),
    "when": ("central/full/tomorrow", {}, ("tomorrow", "sync", "every", "async")),
    "one part": ("central", {}, ("central", "WHO/WHAT/WHEN")),
    "without what": ("central/every:4", {}, ("central/full/every:4",)),
    "graph": ("gossip:star/full/sync", {}, ("star", "ring", "exponential")),
    "topology": ("decentralized", {"topology": "star"}, ("star", "ring", "exponential")),
    "topology of one without": ("bytegrad", {"topology": "ring"}, ("topology", "bytegrad")),
    "option": ("diloco", {"wings": 2}, ("wings", "diloco", "outer_lr")),
    "outer_lr": ("diloco", {"outer_lr": float("inf")}, ("outer_lr", "finite")),
    "option of another": ("signsgd", {"outer_lr": 0.5}, ("outer_lr", "signsgd")),
    "warmup of the first": ("gradient_allreduce", {"warmup_steps": 3}, ("warmup_steps",)),
    "never": ("central/full/every:0", {}, ("every", "0")),
    "never, as an option": ("local_sgd", {"every": 0}, ("every", "0")),
    "every half": ("central/full/every:0.5", {}, ("every", "0.5")),
    "more than all": ("central/topk:2/sync", {}, ("topk", "2")),
    "more than all, as an option": ("topk", {"fraction": 1.5}, ("1.5",)),
    "nothing": ("topk", {"fraction": 0.0}, ("0",)),
    "less than nothing": ("central/randomk:-0.1/sync", {}, ("randomk", "-0.1")),
    "into the past": ("central/full/async:-1", {}, ("async", "-1")),
    "into the past, as an option": ("async", {"staleness": -1}, ("staleness", "-1")),
    "staleness in step": ("bytegrad", {"staleness": 2}, ("staleness", "bytegrad")),
    "staleness every": ("local_sgd", {"staleness": 2}, ("staleness", "local_sgd")),
    "staleness of gossip in step": ("decentralized", {"staleness": 2}, ("staleness", "decentralized")),
    "script in step": ("decentralized", {"script": bool}, ("script", "decentralized")),
    "rank of none": ("powersgd", {"rank": 0}, ("rank", "0")),
    "bits": ("qadam", {"bits": 4}, ("bits", "4")),
    "block": ("bytegrad", {"block": 7}, ("block", "7")),
    "warmup into the past": ("powersgd", {"warmup_steps": -1}, ("warmup_steps", "-1")),
    "warmup of truth": ("powersgd", {"warmup_steps": True}, ("warmup_steps", "True")),
    "overlap by number": ("decentralized", {"overlap": 1}, ("overlap", "1", "True or False")),
    "powersgd over gossip": ("gossip:ring/powersgd:2/sync", {}, ("powersgd", "gossip")),
    "share of gradients": (
        trigram.Trigram("central", "share:0.1", carry="gradients"),
        {},
        ("share", "weights"),
    ),
    "share of neighbours": ("gossip:ring/share:0.1/sync", {}, ("share", "central")),
    "share of the robust": ("central:median/share:0.1/sync", {}, ("share", "central")),
    "share of nothing": ("central/share:0/sync", {}, ("share", "0.05")),
    "share without a number": ("central/share/sync", {}, ("share", "0.05")),
    "share and an outer step": ("central/share:0.1/every:4", {"outer_lr": 0.5}, ("outer_lr",)),
    "chunks of gradients": ("central/chunktopk:0.1/sync", {}, ("chunktopk", "gradients")),
    "chunks for neighbours": ("gossip:ring/chunktopk:0.1/every:4", {}, ("chunktopk", "neighbours")),
    "chunks of the robust": ("central:median/chunktopk:0.1/every:4", {}, ("chunktopk", "few ranks")),
    "chunks of nothing": ("central/chunktopk:0/every:4", {}, ("chunktopk", "0.02")),
    "chunks with a block": ("sparseloco", {"block": 64}, ("block",)),
    "feedback above one": ("sparseloco", {"feedback": 1.5}, ("feedback", "1.5")),
    "feedback of nothing": ("diloco", {"feedback": 0.9}, ("feedback",)),
    "feedback of the robust": ("central:median/int8/every:4", {"feedback": 0.9}, ("feedback",)),
    "push with a codec": ("push:random/int8/sync", {}, ("push",)),
    "push asynchronously": ("push:random/full/async", {}, ("push",)),
    "momentum of another": ("bytegrad", {"momentum": 0.9}, ("momentum", "bytegrad")),
}


def still_works(rank: int, world: int, name: str) -> None:
    """Nobody has been left in a call."""
    model = trigram.with_bagua(net(), "bytegrad")
    loss(model, rank, 0).backward()
    same_on_all_ranks(rank, world, name, [p.grad for p in model.parameters() if p.grad is not None])


@CASES.over(*REFUSED)
def refused(rank: int, world: int, label: str) -> None:
    algorithm, options, words = REFUSED[label]
    module = net()
    optimizer = trigram.QAdam(module.parameters()) if algorithm == "qadam" else None
    says(
        raises(
            trigram.UnsupportedError, trigram.with_bagua, module, algorithm, optimizer=optimizer, **options
        ),
        *words,
    )
    still_works(rank, world, f"refused-{label}")
    trigram.with_bagua(module, "bytegrad")  # it was not hooked


@CASES.over("gossip of gradients", "gradients every", "gradients asynchronously", "momentum of weights")
def carries(rank: int, world: int, label: str) -> None:
    """A carry that does not go with the rest."""
    who, what, when, carry = {
        "gossip of gradients": ("gossip:ring", "full", "sync", "gradients"),
        "gradients every": ("central", "full", "every:4", "gradients"),
        "gradients asynchronously": ("central", "int8", "async", "gradients"),
        "momentum of weights": ("gossip:ring", "int8", "sync", "momentum"),
    }[label]
    text = raises(
        trigram.UnsupportedError,
        lambda: trigram.with_bagua(net(), trigram.Trigram(who, what, when, carry=carry)),
    )
    says(text, carry)
    still_works(rank, world, f"carries-{label}")


@CASES
def a_value_works_like_its_name(rank: int, world: int) -> None:
    model = trigram.with_bagua(net(), trigram.Trigram("gossip:ring", "int8", "sync"))
    for step in range(3):
        model.zero_grad()
        loss(model, rank, step).backward()
    assert trigram.stats(model)["steps"] == 3


@CASES
def two_momenta(rank: int, world: int) -> None:
    """topk's momentum beside an optimizer's."""
    module = net()
    for optimizer in (
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(module.parameters()),
    ):
        text = raises(
            (trigram.UnsupportedError, trigram.MisuseError),
            lambda optimizer=optimizer: trigram.with_bagua(module, "topk", optimizer=optimizer, momentum=0.9),
        )
        says(text, "momentum", "optimizer")
    text = raises(
        (trigram.UnsupportedError, trigram.MisuseError),
        lambda: trigram.with_bagua(module, "topk", momentum=0.9),  # who knows what else there is?
    )
    says(text, "momentum", "optimizer")
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    trigram.with_bagua(module, "topk", optimizer=plain, momentum=0.9)


@CASES
def several_optimizers(rank: int, world: int) -> None:
    module = net()
    several = [torch.optim.SGD([p], lr=0.1) for p in module.parameters()]
    for algorithm in ("gradient_allreduce", "local_sgd", "async"):
        says(
            raises(trigram.MisuseError, trigram.with_bagua, module, algorithm, optimizer=several),
            "optimizer=",
            "list",
        )


@CASES
def qadam_without_its_optimizer(rank: int, world: int) -> None:
    for optimizer in (None, lambda m: torch.optim.Adam(m.parameters())):
        module = net()
        given = None if optimizer is None else optimizer(module)
        text = raises(
            (trigram.UnsupportedError, trigram.MisuseError),
            lambda module=module, given=given: trigram.with_bagua(module, "qadam", optimizer=given),
        )
        says(text, "qadam", "QAdam")
    still_works(rank, world, "qadam-without")


@CASES
def options_differ(rank: int, world: int) -> None:
    """Ranks that ask for different things are told so, not left to exchange nonsense."""
    for one, other in (
        (("bytegrad", {}), ("bytegrad", {"block": 64})),
        (("local_sgd", {"every": 2}), ("local_sgd", {"every": 3})),
        (("decentralized", {}), ("async", {})),
        (("decentralized", {"topology": "ring"}), ("decentralized", {"topology": "complete"})),
    ):
        algorithm, options = other if rank == world - 1 else one
        module = net()
        raises(trigram.MismatchError, lambda: trigram.with_bagua(module, algorithm, **options))  # noqa: B023
    still_works(rank, world, "options-differ")


@CASES
def hooked_twice(rank: int, world: int) -> None:
    model = trigram.with_bagua(net(), "decentralized")
    raises(trigram.MisuseError, trigram.with_bagua, model, "bytegrad")


@CASES.over("consensus", "algorithm_state", "switch", "load_algorithm_state")
def a_bare_model(rank: int, world: int, call: str) -> None:
    more: dict[str, tuple[Any, ...]] = {"switch": ("bytegrad",), "load_algorithm_state": ({},)}
    function: Callable[..., Any] = getattr(trigram, call)
    module: nn.Module = net()
    says(raises(trigram.MisuseError, function, module, *more.get(call, ())), "with_bagua")


@CASES
def dense_momenta_of_sparse_gradients(rank: int, world: int) -> None:
    """Also with a warm-up, which would average the sparse gradients and leave them to the optimizer."""
    module = nn.Embedding(5, 3, sparse=True)
    for warmup in (0, 10):
        own = {"optimizer": trigram.QAdam(module.parameters(), lr=0.1), "warmup_steps": warmup}
        says(raises(trigram.UnsupportedError, trigram.with_bagua, module, "qadam", **own), "sparse=True")
    still_works(rank, world, "sparse-momenta")


@CASES
def every_algorithm_is_listed(rank: int, world: int) -> None:
    names = [a["name"] for a in trigram.algorithms() if a["available"]]
    assert len(names) == 19 and names[0] == "gradient_allreduce"
    says(raises(trigram.UnsupportedError, trigram.with_bagua, net(), "nonsense"), "nonsense", *names)


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("world", [2])
def test_refused(in_launch: Callable[..., None], world: int, case: str) -> None:
    in_launch("CASES", case, world, transport="shm")
