"""Codecs over time: what was not sent is kept, and comes later; or is told."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.reference import codecs as reference
from tests.support.checks import close, equal
from tests.support.codec_cases import (
    DTYPES,
    MORE,
    SPARSE,
    array,
    decoded,
    normal,
    same_bytes,
    tensor,
    through,
)
from trigram import codecs


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_feedback_loses_nothing(name: str, dtype: torch.dtype) -> None:
    """Bit for bit as in the reference step after step; what was sent and what is left are what came in."""
    n, codec, ref = 1003, codecs.find(name), reference.find(name)
    residual, expected = torch.zeros(n), np.zeros(n, np.float32)
    came, went, sizes = torch.zeros(n).double(), torch.zeros(n).double(), torch.zeros(n).double()
    for step in range(30):
        src = normal(n, step).to(dtype)
        encoded, numbers, expected = ref.apply(array(src), expected, True, step)
        actual = codec.encode(src, residual=residual, seed=step)
        same_bytes(actual, encoded, f"step {step}")
        out = decoded(codec, actual, n)
        equal(out, tensor(numbers), f"step {step}")
        equal(residual, tensor(expected), f"step {step}: residual")
        came, went, sizes = (
            came + src.double(),
            went + out.double(),
            sizes + residual.abs().double() + src.abs(),
        )
    close(went + residual.double(), came, sizes * 2.0**-22 + 1e-5, name)


@pytest.mark.parametrize("name", ["sign", "topk:0.1", "randomk:0.1", "int4"])
def test_feedback_sends_all_in_the_end(name: str) -> None:
    """The same gradient, again and again: its mean arrives, as a codec without feedback cannot make it."""
    n, steps = 512, 400
    x, codec = normal(n), codecs.find(name)
    residual, total = torch.zeros(n), torch.zeros(n)
    for step in range(steps):
        total += decoded(codec, codec.encode(x, residual=residual, seed=step), n)
    assert float((total / steps - x).norm() / x.norm()) < 0.1
    if name in ("sign", "topk:0.1"):
        assert float((through(codec, x) - x).norm() / x.norm()) > 0.3


@pytest.mark.parametrize("name", MORE)
def test_remainder(name: str) -> None:
    """Without feedback the old residual is not looked at, and what was lost now is told."""
    codec, ref = codecs.find(name), reference.find(name)
    for n in (1, 33, 1000):
        for old in (0.0, 3.0, math.nan):
            for dtype in DTYPES:
                src, residual = normal(n).to(dtype), torch.full((n,), old)
                encoded, numbers, left = ref.apply(array(src), array(residual), False, 5)
                same_bytes(codec.encode(src, residual=residual, feedback=False, seed=5), encoded, name)
                equal(residual, tensor(left), f"{name} {n} {old}")
                equal(residual, src.float() - tensor(numbers), f"{name} {n} {old}")


def test_sparse_residual_is_what_was_not_sent() -> None:
    for name in SPARSE:
        x, residual = normal(1000), normal(1000, 1)
        m = x + residual
        out = decoded(codecs.find(name), codecs.find(name).encode(x, residual=residual), 1000)
        equal(residual, torch.where(out != 0, 0.0, m), name)
        equal(out + residual, m, name)
