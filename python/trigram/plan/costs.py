"""Measures what the arithmetic of averages costs on this machine: nothing of it is assumed.

Each measurement repeats real calls on values of the size of a bucket; the median of the processor time
counts, which other processes do not lengthen. Where ranks share cores, :mod:`trigram.plan.step` lengthens it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from trigram import codecs
from trigram.averaging.powersgd import arithmetic
from trigram.codecs import lossless
from trigram.gradients.compressors import NEEDS_FEEDBACK
from trigram.plan.inputs import CodecCost, Costs, ExactCodes
from trigram.steps.fidelity import CODECS

ELEMENTS = 1 << 20
"""Values of a bucket of 4 MiB."""
REPEATS = 5
_CHUNKED = "chunktopk:0.02"
"""Of weight differences only, so it is none of :data:`CODECS`."""
TOUCHED = 64 << 20
"""Bytes of the copy whose time counts: more than caches hold."""


def measure(
    shapes: Sequence[tuple[int, ...]],
    elements: int = ELEMENTS,
    ranks: Sequence[int] = (2,),
    touched: int = TOUCHED,
) -> Costs:
    """Measures codecs, PowerSGD and copies in this process; about a second.

    Args:
        shapes: The shapes of the model's parameters, for PowerSGD; a sample of them is measured.
        elements: Values that a codec gets at a time.
        ranks: The ranks of PowerSGD.
        touched: Bytes of the copy whose time counts.

    Returns:
        The costs. ``shared`` is the copy's: within a host every byte is read and written once. ``wire`` is 0.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(elements, generator=generator, dtype=torch.float32, device="cpu")
    found = {name: _codec(name, values) for name in (*CODECS, _CHUNKED)}
    source = torch.ones(touched // 8, dtype=torch.float32, device="cpu")
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source)) / source.nbytes
    return Costs(found, {str(rank): _powersgd(shapes, rank) for rank in ranks}, copy, copy, 0.0)


def _codec(name: str, values: torch.Tensor) -> CodecCost:
    codec, n = codecs.find(name), values.numel()
    residual = (
        torch.zeros(n, dtype=torch.float32, device="cpu")
        if name.partition(":")[0] in NEEDS_FEEDBACK
        else None
    )
    out, code = torch.zeros(n, dtype=torch.float32, device="cpu"), codec.encode(values)
    return CodecCost(
        seconds(lambda: codec.encode(values, code, residual)) / n,
        seconds(lambda: codec.decode(code, out)) / n,
        seconds(lambda: codec.decode(code, out, 1.0)) / n,
    )


def exact(own: torch.Tensor, mean: torch.Tensor) -> ExactCodes:
    """What exact codes cost.

    Args:
        own: A sample of a rank's gradients: float32, one-dimensional, on the CPU.
        mean: A sample of their means.
    """
    n = own.numel()
    code = torch.empty(lossless.most(max(n, mean.numel())), dtype=torch.uint8, device="cpu")
    of_mean = lossless.encode(mean, code) / mean.numel()
    length = lossless.encode(own, code)
    out = torch.zeros_like(own)
    cost = CodecCost(
        seconds(lambda: lossless.encode(own, code)) / n,
        seconds(lambda: lossless.decode(code[:length], out)) / n,
        seconds(lambda: lossless.decode(code[:length], out, add=True)) / n,
    )
    return ExactCodes(length / n, of_mean, cost)


def _powersgd(shapes: Sequence[tuple[int, ...]], rank: int) -> float:
    """Seconds of the arithmetic of one step, per value of the matrices of a sample."""
    sample: list[tuple[int, ...]] = []
    for shape in shapes:
        rows = shape[0] if len(shape) > 1 else 1
        columns = torch.Size(shape).numel() // max(rows, 1)
        if len(shape) > 1 and rank * (rows + columns) < rows * columns:
            sample.append((rows, columns))
        if sum(r * c for r, c in sample) > 2 * ELEMENTS:
            break
    if not sample:
        return 0.0
    matrices = [
        (
            torch.randn(r, c, dtype=torch.float32, device="cpu"),
            torch.randn(c, rank, dtype=torch.float32, device="cpu"),
        )
        for r, c in sample
    ]
    return seconds(lambda: [arithmetic(m, q) for m, q in matrices]) / sum(r * c for r, c in sample)


def seconds(call: Callable[[], object]) -> float:
    """The median processor time that a call takes this thread; the first call is not counted."""
    call()
    times = []
    for _ in range(REPEATS):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return statistics.median(times)
