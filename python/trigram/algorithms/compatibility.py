"""Which features do not go together, and why. docs/compatibility.md is made from it.

A pair of features that is not here works, and a test trains with it. Which trigrams there are, and which
options each has, ``parse.py`` says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

from trigram.algorithms.trigram import Algorithm
from trigram.errors import UnsupportedError

Feature = Literal[
    "an algorithm that averages weights",
    "averages of neighbours",
    "an asynchronous algorithm",
    "a robust average",
    "a codec",
    "powersgd",
    "a sparse codec",
    "QAdam's momentum",
    "an average added with trigram.register",
    "an averaging step added with trigram.register",
    "outer_lr=",
    "outer_momentum=",
    "overlap=True",
    "fragments=",
    "every= of a function",
    "quorum=",
    "warmup_steps=",
    "state='sharded'",
    "gradients='shards'",
    "overlap=True of a sharded optimizer",
    "fused=True",
    "sample_weight=",
    "check_finite=True",
    "check_replicas=",
    "filters=",
    "modules with sparse=True",
    "elastic=True",
    "state='sharded' with elastic=True",
    "init(spare=True)",
    "init(replica_size=)",
    "group=",
    "algorithm='auto'",
    "TRIGRAM_GRADIENTS",
    "trigram.join",
]


class Refusal(NamedTuple):
    """Two features that do not go together.

    Attributes:
        one, other: The features.
        why: The reason, and what to do instead.
    """

    one: Feature
    other: Feature
    why: str


_WHOLE_STATE = (
    "between averages each rank needs the whole state of its own weights; choose an algorithm that averages "
    "gradients"
)
_IN_FULL = (
    "gradients='shards' sums gradients in full, without codecs, robust and registered averages; use "
    "gradients='full'"
)
_UNCOMPRESSED = (
    "only uncompressed gradients arrive together with the word which parameters any rank has used; use one "
    "of both"
)
_AT_THE_END = (
    "it is known for all ranks only at the end of backward, when weights have been updated; use one of both"
)
_NO_STEP = (
    "a rank without inputs makes no optimizer step, and the others need its part of the weights; give all "
    "ranks as many batches"
)
_FEW_SENDERS = (
    "each element is sent by few ranks, so nearly all values sent would be discarded as outliers; use int8, "
    "int4, fp8 or sign"
)

REFUSALS = (
    Refusal("state='sharded'", "an algorithm that averages weights", _WHOLE_STATE),
    Refusal("fused=True", "an algorithm that averages weights", _WHOLE_STATE),
    Refusal("state='sharded'", "QAdam's momentum", _WHOLE_STATE),
    Refusal("fused=True", "QAdam's momentum", _WHOLE_STATE),
    Refusal("gradients='shards'", "a codec", _IN_FULL),
    Refusal("gradients='shards'", "a robust average", _IN_FULL),
    Refusal("gradients='shards'", "an average added with trigram.register", _IN_FULL),
    Refusal("fused=True", "a codec", _UNCOMPRESSED),
    Refusal("fused=True", "a robust average", _UNCOMPRESSED),
    Refusal("fused=True", "an average added with trigram.register", _UNCOMPRESSED),
    Refusal(
        "a robust average",
        "powersgd",
        "it compares the tensors of single ranks, and powersgd sends matrices that are meaningful only after "
        "summation; use int8 or another codec",
    ),
    Refusal("a robust average", "a sparse codec", _FEW_SENDERS),
    Refusal(
        "a robust average",
        "QAdam's momentum",
        "a rank's momentum would still contain the values that were discarded; use gradients, weights or "
        "differences",
    ),
    Refusal(
        "a robust average",
        "an averaging step added with trigram.register",
        "the step computes its averages itself; use who='central'",
    ),
    Refusal("quorum=", "every= of a function", "late ranks count by their own steps; use a number"),
    Refusal(
        "every= of a function",
        "averages of neighbours",
        "neighbours would not notice that they average at different steps; use a number",
    ),
    Refusal(
        "check_finite=True",
        "an algorithm that averages weights",
        "it checks gradients before they are sent; remove it, or use a robust average (central:median/...), "
        "which leaves out NaN and infinite values and names the rank that sent them",
    ),
    Refusal(
        "check_replicas=",
        "an algorithm that averages weights",
        "the ranks hold different weights between averaging steps; remove check_replicas=",
    ),
    Refusal(
        "filters=",
        "an algorithm that averages weights",
        "they change gradients before they are averaged; change gradients between backward() and "
        "optimizer.step()",
    ),
    Refusal(
        "filters=",
        "modules with sparse=True",
        "they do not see sparse gradients, which would be sent as they are; create the modules with "
        "sparse=False",
    ),
    Refusal("check_finite=True", "fused=True", _AT_THE_END),
    Refusal("sample_weight=", "fused=True", _AT_THE_END),
    Refusal(
        "sample_weight=",
        "a robust average",
        "a robust average counts ranks, so one rank with a wrong weight would count as many; remove "
        "sample_weight=",
    ),
    Refusal(
        "sample_weight=",
        "averages of neighbours",
        "the graph fixes the weights of neighbours, so that the mean over all ranks does not change; remove "
        "sample_weight=",
    ),
    Refusal(
        "sample_weight=",
        "an asynchronous algorithm",
        "its ranks are at different steps, so no averaging step belongs to one set of samples; remove "
        "sample_weight=",
    ),
    Refusal(
        "sample_weight=",
        "an averaging step added with trigram.register",
        "the step computes the average without it; remove sample_weight=",
    ),
    Refusal(
        "sample_weight=",
        "an average added with trigram.register",
        "it need not be linear; remove sample_weight=",
    ),
    Refusal(
        "QAdam's momentum",
        "modules with sparse=True",
        "its momenta are dense; create the modules with sparse=False, or choose another algorithm",
    ),
    Refusal(
        "elastic=True",
        "algorithm='auto'",
        "ranks that join would have to follow its trials; measure with trigram plan, and pass "
        'plan="plan.json"',
    ),
    Refusal("elastic=True", "group=", "an elastic job trains on all its ranks; remove group="),
    Refusal(
        "elastic=True",
        "fused=True",
        "a step in which a rank is lost could not be repeated; remove fused=",
    ),
    Refusal(
        "elastic=True",
        "gradients='shards'",
        "a lost rank takes its part of the gradients with it; use gradients='full'",
    ),
    Refusal(
        "elastic=True",
        "overlap=True of a sharded optimizer",
        "a rank may be lost while weights are collected; use overlap=False",
    ),
    Refusal(
        "state='sharded' with elastic=True",
        "warmup_steps=",
        "the state would be divided when the warm-up ends, and a rank may be lost meanwhile; choose an "
        "algorithm without warm-up",
    ),
    Refusal("elastic=True", "TRIGRAM_GRADIENTS", "ranks come and go; unset TRIGRAM_GRADIENTS"),
    Refusal(
        "init(spare=True)",
        "an algorithm that averages weights",
        "a spare follows the mean of gradients, in which it does not count; start it as an ordinary rank",
    ),
    Refusal(
        "init(spare=True)",
        "QAdam's momentum",
        "the momentum that a spare has would count; start it as an ordinary rank",
    ),
    Refusal(
        "init(spare=True)",
        "an average added with trigram.register",
        "it need not be linear, so the zeros of a spare would count; start it as an ordinary rank",
    ),
    Refusal(
        "init(replica_size=)",
        "state='sharded'",
        "which ranks have which part of the state is kept for one group of ranks, not for each place in a "
        "replica; shard with fully_shard inside the replica",
    ),
    Refusal(
        "init(replica_size=)",
        "an asynchronous algorithm",
        "a rank that waits for its replica in calls of torch answers no other place, and ranks would wait in "
        "a circle; choose an algorithm whose ranks are in step",
    ),
    Refusal(
        "trigram.join",
        "elastic=True",
        "a rank that has no more inputs ends its script, and the others continue without it",
    ),
    Refusal("trigram.join", "state='sharded'", _NO_STEP),
    Refusal("trigram.join", "fused=True", _NO_STEP),
)


def check(name: str, features: Collection[Feature]) -> None:
    """Raises if two of the features do not go together.

    Args:
        name: Of the algorithm or the call, for the message.
        features: What a model asks for.
    """
    for one, other, why in REFUSALS:
        if one in features and other in features:
            raise UnsupportedError(f"{name}: {one} is not supported with {other}: {why}")


def features(algorithm: Algorithm) -> set[Feature]:
    """What an algorithm and its options are."""
    return set(_features(algorithm))


def _features(algorithm: Algorithm) -> Iterator[Feature]:
    options, what = algorithm.options, algorithm.value.what.partition(":")[0]
    if not algorithm.gradients:
        yield "an algorithm that averages weights"
    if algorithm.kind != "central":
        yield "averages of neighbours"
    elif algorithm.graph:
        yield "a robust average"
    if algorithm.every is None:
        yield "an asynchronous algorithm"
    if what not in ("full", "share"):
        yield "a codec"
    if what == "powersgd":
        yield "powersgd"
    if what in ("topk", "randomk", "chunktopk"):
        yield "a sparse codec"
    if algorithm.value.carry == "momentum":
        yield "QAdam's momentum"
        yield "warmup_steps="  # with warmup_steps=0 too: the second moment is that of the warm-up
    elif options.warmup_steps:
        yield "warmup_steps="
    if algorithm.average is not None:
        yield "an average added with trigram.register"
    if algorithm.step is not None:
        yield "an averaging step added with trigram.register"
    if options.outer_lr != 1:
        yield "outer_lr="
    if options.outer_momentum:
        yield "outer_momentum="
    if (options.fragments or 1) > 1:
        yield "fragments="
    if options.due is not None:
        yield "every= of a function"
    if options.quorum is not None:
        yield "quorum="
    if options.sharded:
        yield "state='sharded'"
    if options.gradients == "shards":
        yield "gradients='shards'"
    if options.overlap:
        yield "overlap=True of a sharded optimizer" if options.sharded else "overlap=True"
    if options.fused:
        yield "fused=True"
