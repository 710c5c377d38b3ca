"""Every algorithm that the tests train: how it is asked for, its reference, and what it must do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.reference.central import (
    CentralWeights,
    CodedGradients,
    Fragments,
    FullGradients,
    PowerSGD,
    QAdam,
    Shares,
)
from tests.reference.gossip import AsyncPairs, Choco, Edges, Gossip, OuterGossip, PushSum
from tests.reference.graphs import Graph, graph
from tests.reference.simulation import Algorithm, Part
from trigram.algorithms import graphs


def every_third(done: int) -> bool:
    return done % 3 == 0


def irregular(done: int) -> bool:
    return done in (1, 2, 4, 7)


def always(done: int) -> bool:
    return True


def lent(kind: str) -> Callable[[int], Graph]:
    """A random graph is trigram's own; algorithms/test_reference_graphs.py checks its properties."""

    def on(n: int) -> Graph:
        found = graphs.find(kind, n)
        return lambda round: torch.as_tensor(found.matrix(round)).float()

    return on


def fixed(kind: str) -> Callable[[int], Graph]:
    return lambda n: graph(kind, n)


def coded_gossip(kind: str, n: int, codec: str, **more: Any) -> Gossip:
    """By edge where the graph changes; among two ranks, one_peer and pairs do not."""
    w = lent(kind)(n) if kind == "random" else graph(kind, n, symmetric=True)
    changes = kind == "random" or (kind in ("one_peer", "pairs") and n > 2)
    return (Edges if changes else Choco)(w, codec, **more)


@dataclass(frozen=True)
class Row:
    """An algorithm, how it is asked for, and what it must do."""

    algorithm: str
    reference: Callable[[int], Algorithm]  # of the world's size
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    given: bool = False  # the optimizer goes to with_bagua too
    coded: bool = False  # a codec rounds
    same: bool = False  # all ranks hold the same bits after every step
    agree: int = 0  # H: all ranks hold the same bits in the forward after each H-th step
    steps: int = 8

    @property
    def warmup(self) -> int:
        return int(self.options.get("warmup_steps", 0))


ROWS: dict[str, Row] = {}


def row(label: str, algorithm: str, reference: Callable[[int], Algorithm], **more: Any) -> None:
    known = set(Row.__dataclass_fields__)
    options = {k: v for k, v in more.items() if k not in known}
    assert label not in ROWS
    ROWS[label] = Row(algorithm, reference, options, **{k: v for k, v in more.items() if k in known})


# Gradients.
for _o in ("sgd", "momentum", "adam"):
    row(f"gradient_allreduce {_o}", "gradient_allreduce", lambda n: FullGradients(), optimizer=_o, same=True)
    row(f"bytegrad {_o}", "bytegrad", lambda n: CodedGradients("int8"), optimizer=_o, same=True, coded=True)
row("central full sync", "central/full/sync", lambda n: FullGradients(), same=True)
row("lossless", "lossless", lambda n: FullGradients(), same=True)
row("bytegrad block", "bytegrad", lambda n: CodedGradients("int8", 64), block=64, same=True, coded=True)
row(
    "bytegrad warmup",
    "bytegrad",
    lambda n: CodedGradients("int8"),
    warmup_steps=3,
    optimizer="momentum",
    same=True,
    coded=True,
)
for _c in ("int8", "int4", "fp8", "bf16", "f16", "sign", "topk:0.1"):
    row(f"central {_c}", f"central/{_c}/sync", lambda n, c=_c: CodedGradients(c), same=True, coded=True)
row(
    "signsgd",
    "signsgd",
    lambda n: CodedGradients("sign"),
    optimizer="momentum",
    same=True,
    coded=True,
    steps=10,
)
row("signsgd block", "signsgd", lambda n: CodedGradients("sign", 64), block=64, same=True, coded=True)
row("topk", "topk", lambda n: CodedGradients("topk:0.01"), optimizer="adam", same=True, coded=True)
row("topk fraction", "topk", lambda n: CodedGradients("topk:0.05"), fraction=0.05, same=True, coded=True)
row(
    "topk momentum",
    "topk",
    lambda n: CodedGradients("topk:0.05", momentum=0.9),
    fraction=0.05,
    momentum=0.9,
    given=True,
    same=True,
    coded=True,
    steps=10,
)
row(
    "topk warmup",
    "topk",
    lambda n: CodedGradients("topk:0.05"),
    fraction=0.05,
    warmup_steps=3,
    same=True,
    coded=True,
)
row("powersgd", "powersgd", lambda n: PowerSGD(2), warmup_steps=0, same=True, steps=10)
row(
    "powersgd rank",
    "powersgd",
    lambda n: PowerSGD(4),
    rank=4,
    warmup_steps=2,
    optimizer="momentum",
    same=True,
)
row("powersgd written", "central/powersgd:1/sync", lambda n: PowerSGD(1), warmup_steps=0, same=True)
for _bits in (8, 1):
    row(
        f"qadam {_bits}",
        "qadam",
        lambda n, bits=_bits: QAdam(bits, lr=0.01),
        bits=_bits,
        warmup_steps=3,
        optimizer="qadam",
        given=True,
        same=True,
        coded=True,
        steps=10,
    )
row(
    "qadam decay",
    "qadam",
    lambda n: QAdam(8, block=64, lr=0.02, betas=(0.8, 0.99), weight_decay=0.1),
    block=64,
    warmup_steps=4,
    optimizer="qadam with decay",
    given=True,
    same=True,
    coded=True,
)

# Weights, central.
row("local_sgd", "local_sgd", lambda n: CentralWeights(2), every=2, agree=2)
row(
    "local_sgd long",
    "local_sgd",
    lambda n: CentralWeights(3),
    every=3,
    optimizer="long adam",
    agree=3,
    steps=17,
)
row("local_sgd adam", "local_sgd", lambda n: CentralWeights(3), every=3, optimizer="adam", agree=3)
for _o in ("momentum", "adam"):
    row(
        f"local_sgd state {_o}",
        "local_sgd",
        lambda n: CentralWeights(2, state=True),
        every=2,
        optimizer=_o,
        given=True,
        agree=2,
    )
row("local_sgd warmup", "local_sgd", lambda n: CentralWeights(2), every=2, warmup_steps=4, agree=2)
row("local_sgd overlap", "local_sgd", lambda n: CentralWeights(2, overlap=True), every=2, overlap=True)
row("local_sgd default", "local_sgd", lambda n: CentralWeights(8), agree=8, steps=10)
ALL = slice(None)
HALVES: list[Part] = [  # the third parameter, of 29 rows, is larger than half of the weights
    [(0, ALL), (1, ALL), (2, slice(13))],
    [(2, slice(13, None)), (3, ALL), (4, ALL), (5, ALL)],
]
THIRDS: list[Part] = [  # neither its rows nor its columns are small for that: the more, which are 33 columns
    [(0, ALL), (1, ALL), (2, (ALL, slice(7)))],
    [(2, (ALL, slice(7, 22)))],
    [(2, (ALL, slice(22, None))), (3, ALL), (4, ALL), (5, ALL)],
]
row("local_sgd fragments", "local_sgd", lambda n: Fragments(4, HALVES), every=4, fragments=2, steps=10)
row(
    "local_sgd fragments overlap",
    "local_sgd",
    lambda n: Fragments(3, THIRDS, overlap=True),
    every=3,
    fragments=3,
    overlap=True,
    optimizer="adam",
)
row(
    "diloco fragments",
    "diloco",
    lambda n: Fragments(4, HALVES, outer=(0.7, 0.9)),
    every=4,
    fragments=2,
    optimizer="momentum",
    steps=14,
)
row(
    "diloco fragments int8",
    "central/int8/every:4",
    lambda n: Fragments(4, HALVES, codec="int8", outer=(0.7, 0.9)),
    fragments=2,
    outer_lr=0.7,
    outer_momentum=0.9,
    coded=True,
    steps=10,
)
row("central full every", "central/full/every:3", lambda n: CentralWeights(3), agree=3)
for _share in (0.3, 1.0):
    row(f"share {_share}", f"central/share:{_share}/sync", lambda n, s=_share: Shares(s), steps=12)
row(
    "share adam",
    "central/share/every:2",
    lambda n: Shares(0.25, 2),
    share=0.25,
    optimizer="long adam",
    steps=17,
)
row("sparta", "sparta", lambda n: Shares(0.4), share=0.4)
row("share overlap", "central/share:0.5/every:1", lambda n: Shares(0.5, overlap=True), overlap=True)
row(
    "share async",
    "central/share:0.2/async",
    lambda n: Shares(0.2, script=irregular),
    script=irregular,
    steps=12,
)
row("diloco", "diloco", lambda n: CentralWeights(2, outer=(0.7, 0.9)), every=2, agree=2)
row(
    "diloco options",
    "diloco",
    lambda n: CentralWeights(3, outer=(0.5, 0.6)),
    every=3,
    outer_lr=0.5,
    outer_momentum=0.6,
    optimizer="adam",
    agree=3,
    steps=10,
)
row(
    "diloco overlap",
    "diloco",
    lambda n: CentralWeights(2, outer=(0.7, 0.9), overlap=True),
    every=2,
    overlap=True,
)
for _c in ("int8", "int4", "bf16", "sign", "topk:0.1"):
    row(
        f"central {_c} every",
        f"central/{_c}/every:2",
        lambda n, c=_c: CentralWeights(2, c),
        coded=True,
        steps=9,
    )
row(
    "central int8 every 1",
    "central/int8/every:1",
    lambda n: CentralWeights(1, "int8", 64),
    block=64,
    optimizer="momentum",
    coded=True,
)
row(
    "central int8 overlap",
    "central/int8/every:2",
    lambda n: CentralWeights(2, "int8", overlap=True),
    overlap=True,
    coded=True,
)
row(
    "central int4 fragments overlap",
    "central/int4/every:3",
    lambda n: Fragments(3, THIRDS, codec="int4", overlap=True),
    fragments=3,
    overlap=True,
    optimizer="adam",
    coded=True,
)
row(
    "central int8 outer",
    "central/int8/every:2",
    lambda n: CentralWeights(2, "int8", outer=(0.7, 0.9)),
    outer_lr=0.7,
    outer_momentum=0.9,
    coded=True,
)
row(
    "sparseloco",
    "sparseloco",
    lambda n: CentralWeights(2, "chunktopk:0.1", feedback=0.95),
    every=2,
    fraction=0.1,
    coded=True,
    agree=2,
    steps=10,
)
row(
    "sparseloco adam",
    "sparseloco",
    lambda n: CentralWeights(3, "chunktopk:0.05", feedback=0.8, outer=(0.7, 0.0)),
    every=3,
    fraction=0.05,
    feedback=0.8,
    outer_lr=0.7,
    optimizer="adam",
    coded=True,
    agree=3,
    steps=12,
)
row(
    "sparseloco overlap",
    "sparseloco",
    lambda n: CentralWeights(2, "chunktopk:0.1", feedback=0.95, overlap=True),
    every=2,
    fraction=0.1,
    overlap=True,
    coded=True,
)
row(
    "sparseloco async",
    "central/chunktopk:0.1/async",
    lambda n: CentralWeights(codec="chunktopk:0.1", feedback=0.9, script=irregular),
    feedback=0.9,
    script=irregular,
    coded=True,
    steps=12,
)
row(
    "central chunktopk every",
    "central/chunktopk:0.1/every:2",
    lambda n: CentralWeights(2, "chunktopk:0.1"),
    coded=True,
    steps=9,
)
row(
    "central int8 feedback",
    "central/int8/every:2",
    lambda n: CentralWeights(2, "int8", feedback=0.5),
    feedback=0.5,
    coded=True,
    agree=2,
)
for _name, _s in (("third", every_third), ("irregular", irregular), ("always", always)):
    row(f"async {_name}", "async", lambda n, s=_s: CentralWeights(script=s), script=_s)
    row(
        f"async_low_precision {_name}",
        "async_low_precision",
        lambda n, s=_s: CentralWeights(codec="int8", script=s),
        script=_s,
        coded=True,
    )
row(
    "async fragments",
    "async",
    lambda n: Fragments(1, THIRDS, script=irregular),
    script=irregular,
    fragments=3,
    optimizer="momentum",
    steps=10,
)
row(
    "async_low_precision fragments",
    "async_low_precision",
    lambda n: Fragments(1, HALVES, codec="int8", script=always),
    script=always,
    fragments=2,
    coded=True,
    steps=10,
)
row("async adam", "async", lambda n: CentralWeights(script=irregular), script=irregular, optimizer="adam")
row("async staleness", "async", lambda n: CentralWeights(script=always), staleness=1, optimizer="momentum")
row("async written", "central/full/async:1", lambda n: CentralWeights(script=always))
row(
    "async_low_precision staleness",
    "async_low_precision",
    lambda n: CentralWeights(codec="int8", block=64, script=always),
    block=64,
    staleness=1,
    coded=True,
)
for _c in ("sign", "topk:0.1", "bf16"):
    row(
        f"central {_c} async",
        f"central/{_c}/async:1",
        lambda n, c=_c: CentralWeights(codec=c, script=always),
        coded=True,
    )

# Weights, gossip.
row("decentralized", "decentralized", lambda n: Gossip(graph("one_peer", n)))
row("decentralized adam", "decentralized", lambda n: Gossip(graph("one_peer", n)), optimizer="adam")
row(
    "decentralized long",
    "decentralized",
    lambda n: Gossip(graph("one_peer", n)),
    optimizer="long adam",
    steps=18,
)
row(
    "decentralized long own",
    "decentralized",
    lambda n: Gossip(graph("one_peer", n)),
    optimizer="adam",
    second_moment="own",
    steps=14,
)
row(
    "decentralized long warmup",
    "decentralized",
    lambda n: Gossip(graph("ring", n)),
    optimizer="long adam",
    topology="ring",
    warmup_steps=13,
    steps=18,
)
row(
    "decentralized pause",
    "decentralized",
    lambda n: Gossip(graph("one_peer", n), overlap=False),
    overlap=False,
    optimizer="momentum",
)
FIXED = ("ring", "exponential", "torus", "complete")
for _k in (*FIXED, "pairs", "random"):
    _find = lent(_k) if _k == "random" else fixed(_k)
    row(f"decentralized {_k}", "decentralized", lambda n, f=_find: Gossip(f(n)), topology=_k)
row(
    "decentralized warmup",
    "decentralized",
    lambda n: Gossip(graph("ring", n)),
    topology="ring",
    warmup_steps=3,
)
row("gossip every", "gossip:exponential/full/every:3", lambda n: Gossip(graph("exponential", n), every=3))
row(
    "gossip every pause",
    "gossip:pairs/full/every:2",
    lambda n: Gossip(graph("pairs", n), every=2, overlap=False),
    overlap=False,
)
row("noloco", "noloco", lambda n: OuterGossip(lent("random")(n), 0.7, 0.5, every=2), every=2, steps=12)
row(
    "noloco adam",
    "noloco",
    lambda n: OuterGossip(graph("ring", n), 0.6, 0.8, every=3, overlap=False),
    every=3,
    topology="ring",
    outer_lr=0.6,
    outer_momentum=0.8,
    overlap=False,
    optimizer="adam",
    steps=12,
)
row(
    "gossip outer lr",
    "gossip:one_peer/full/sync",
    lambda n: OuterGossip(graph("one_peer", n), 0.5, 0.0),
    outer_lr=0.5,
)
row(
    "low_precision_decentralized",
    "low_precision_decentralized",
    lambda n: Choco(graph("ring", n), "int8"),
    coded=True,
)
row(
    "low_precision_decentralized adam",
    "low_precision_decentralized",
    lambda n: Choco(graph("ring", n), "int8", 64),
    block=64,
    optimizer="adam",
    coded=True,
)
row(
    "low_precision_decentralized pause",
    "low_precision_decentralized",
    lambda n: Choco(graph("ring", n), "int8", gamma=0.5, overlap=False),
    gamma=0.5,
    overlap=False,
    optimizer="momentum",
    coded=True,
)
for _k in ("exponential", "torus", "complete"):
    row(
        f"low_precision_decentralized {_k}",
        "low_precision_decentralized",
        lambda n, k=_k: Choco(graph(k, n, symmetric=True), "int8"),
        topology=_k,
        coded=True,
    )
for _k in ("one_peer", "pairs", "random"):
    row(
        f"low_precision_decentralized {_k}",
        "low_precision_decentralized",
        lambda n, k=_k: coded_gossip(k, n, "int8"),
        topology=_k,
        coded=True,
        steps=10,
    )
for _c in ("bf16", "f16", "fp8", "int4", "sign", "topk:0.1", "topk:0.01"):
    row(f"gossip ring {_c}", f"gossip:ring/{_c}/sync", lambda n, c=_c: Choco(graph("ring", n), c), coded=True)
for _c in ("int8", "bf16", "sign", "topk:0.1"):
    row(
        f"gossip random {_c}",
        f"gossip:random/{_c}/sync",
        lambda n, c=_c: Edges(lent("random")(n), c),
        coded=True,
        steps=10,
    )
row(
    "gossip pairs int8 every",
    "gossip:pairs/int8/every:2",
    lambda n: coded_gossip("pairs", n, "int8", every=2),
    coded=True,
    steps=10,
)
row(
    "gossip exponential topk every",
    "gossip:exponential/topk:0.1/every:2",
    lambda n: Choco(graph("exponential", n, symmetric=True), "topk:0.1", every=2, overlap=False),
    overlap=False,
    coded=True,
)
row("push_sum", "push_sum", lambda n: PushSum(lent("push:random")(n)))
row(
    "push_sum pause",
    "push_sum",
    lambda n: PushSum(lent("push:random")(n), overlap=False),
    overlap=False,
    optimizer="momentum",
)
for _k in ("one_peer", "exponential"):
    row(f"push_sum {_k}", "push_sum", lambda n, k=_k: PushSum(graph(k, n)), topology=_k, optimizer="adam")
row("push written", "push:random/full/every:2", lambda n: PushSum(lent("push:random")(n), every=2))

# Weights, gossip, asynchronous.
for _name, _s in (("third", every_third), ("irregular", irregular)):
    row(
        f"async_decentralized {_name}",
        "async_decentralized",
        lambda n, s=_s: AsyncPairs(lent("random")(n), s),
        script=_s,
        steps=10,
    )
for _name, _codec in (("async_decentralized", None), ("async_low_precision_decentralized", "int8")):
    row(
        f"{_name} fragments",
        _name,
        lambda n, c=_codec: AsyncPairs(lent("random")(n), always, c, parts=THIRDS),
        topology="random",
        script=always,
        fragments=3,
        coded=_codec is not None,
        steps=12,
    )
row(
    "async_decentralized pairs",
    "async_decentralized",
    lambda n: AsyncPairs(graph("pairs", n), always),
    script=always,
    topology="pairs",
    optimizer="adam",
)
for _k in ("random", "pairs"):
    _find = lent(_k) if _k == "random" else fixed(_k)
    row(
        f"async_low_precision_decentralized {_k}",
        "async_low_precision_decentralized",
        lambda n, f=_find: AsyncPairs(f(n), irregular, "int8", 64),
        script=irregular,
        topology=_k,
        block=64,
        coded=True,
        steps=10,
    )
row(
    "gossip random topk async",
    "gossip:random/topk:0.1/async:4",
    lambda n: AsyncPairs(lent("random")(n), every_third, "topk:0.1"),
    script=every_third,
    coded=True,
    steps=10,
)

NAMES_ONCE = [  # each name with the options that make it interesting within a few steps
    "gradient_allreduce sgd",
    "bytegrad sgd",
    "lossless",
    "decentralized",
    "low_precision_decentralized",
    "async third",
    "async_low_precision third",
    "async_decentralized third",
    "async_low_precision_decentralized random",
    "qadam 8",
    "local_sgd",
    "diloco",
    "noloco",
    "sparta",
    "sparseloco",
    "powersgd",
    "topk fraction",
    "signsgd",
    "push_sum",
]
GRADIENTS = [k for k in NAMES_ONCE if ROWS[k].same]  # and momentum
