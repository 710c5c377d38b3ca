"""What is known of each algorithm's loss: the table of docs/benchmarks.md, "Loss after the same number of
samples"; a test compares the two."""

from __future__ import annotations

from trigram.algorithms.parse import find
from trigram.algorithms.trigram import Algorithm

TASKS = ("digits", "gpt", "characters")
LOSS_PERCENT: dict[str, tuple[float, float, float]] = {
    "gradient_allreduce": (0.3, 0.0, -0.1),
    "bytegrad": (-9.4, 0.3, -0.8),
    "decentralized": (-7.8, 0.8, 1.8),
    "low_precision_decentralized": (-11.0, 0.3, 2.0),
    "async": (-9.6, -0.1, 2.2),
    "async_low_precision": (-9.4, -0.1, 2.5),
    "async_decentralized": (-14.1, -0.4, 3.3),
    "async_low_precision_decentralized": (0.4, -0.6, 0.4),
    "qadam": (3.3, 0.0, 0.3),
    "local_sgd": (-4.8, 0.2, 1.1),
    "diloco": (-8.3, 0.3, 1.8),
    "noloco": (-5.0, 0.5, 1.6),
    "sparta": (-7.0, 0.4, 2.1),
    "sparseloco": (-4.6, 0.5, 2.5),
    "powersgd": (0.7, 0.6, 0.1),
    "topk": (-0.1, 0.7, 0.2),
    "signsgd": (7.1, 0.3, 2.3),
    "push_sum": (-7.7, 0.8, 1.8),
}
"""Held-out loss relative to DDP's, in percent, on the three tasks; negative is better."""
WITH_SETTINGS = (
    "local_sgd",
    "diloco",
    "noloco",
    "sparta",
    "sparseloco",
    "powersgd",
    "topk",
    "signsgd",
    "push_sum",
)
"""Measured with the settings that their cards in docs/algorithms.md recommend, which send more bytes."""
CLOSE_CODECS = ("int8", "bf16", "f16")
KINDS = ("exact", "close", "different")
ALLOWED = {"exact": ("exact",), "close": ("exact", "close"), "any": KINDS}
"""What each recommendation may choose from."""


def kind(algorithm: Algorithm) -> str:
    """How much an algorithm changes the training.

    Returns:
        ``exact``: the mean gradient, as DDP; ``close``: the same with rounding whose effect on the loss is
        within noise; ``different``: another training, learning rates may have to change.
    """
    if algorithm.value.carry != "gradients" or algorithm.aggregation or algorithm.step or algorithm.average:
        return "different"
    if algorithm.value.what in ("full", "lossless"):
        return "exact"
    return "close" if algorithm.value.what in CLOSE_CODECS else "different"


def known(name: str) -> str:
    """What is known of the loss of an algorithm, in a few words; with * it is that of its card's settings."""
    found = LOSS_PERCENT.get(name)
    if found is None:
        return {"exact": "as DDP's", "close": "not measured; rounds each value once per phase"}.get(
            kind(find(name)), "not measured"
        )
    text = ", ".join(f"{task} {value:+.1f} %" for task, value in zip(TASKS, found, strict=True))
    return f"{text} *" if name in WITH_SETTINGS else text
