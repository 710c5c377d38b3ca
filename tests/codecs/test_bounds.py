"""How near what is decoded comes to what was encoded, and what becomes of numbers that are not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.reference import codecs as reference
from tests.support.checks import close, equal
from tests.support.codec_cases import (
    BLOCKWISE,
    CHUNKED,
    DTYPES,
    LONG,
    MAX,
    MORE,
    SPARSE,
    agrees,
    array,
    decoded,
    floats,
    normal,
    same_bytes,
    tensor,
    through,
)
from trigram import codecs

# ---------------------------------------------------------------------- how near


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_error_of_integers(name: str) -> None:
    """At most one step (and a bit of the last place); a step is the range over 255 or 15; 0 is 0."""
    rng = np.random.default_rng(3)
    most, block = (255, 512) if name == "int8" else (15, 32)
    for case in range(60):
        kind, x = floats(rng, int(rng.integers(1, 3000)))
        x[rng.random(len(x)) < 0.05] = 0
        ref = reference.find(name)
        assert isinstance(ref, reference.Integers)
        encoded = codecs.find(name).encode(tensor(x))
        y = array(decoded(codecs.find(name), encoded, len(x)))
        step = ref.steps(array(encoded), len(x)).astype(np.float64)
        ulp = np.spacing(np.abs(x)).astype(np.float64)
        nothing = step == 0
        err = np.abs(y.astype(np.float64) - x)
        assert (err[~nothing] <= (step * (1 + 1e-5) + ulp)[~nothing]).all(), (case, kind)
        assert (np.abs(x[nothing]) <= 1e-36).all() and (y[nothing] == 0).all(), (case, kind)
        assert (y[x == 0] == 0).all(), (case, kind)
        for start in range(0, len(x), block):
            part = x[start : start + block].astype(np.float64)
            span = max(part.max(), 0) - min(part.min(), 0)
            assert step[start] <= span / most * (1 + 2.0**-14) + 1e-43, (case, kind)


def test_error_of_fp8() -> None:
    """Half of a last place: 1/16 of the number, or 1/1024 of the scale below 2^-6 scales."""
    rng = np.random.default_rng(4)
    for _ in range(60):
        kind, x = floats(rng, int(rng.integers(1, 2000)))
        y = array(through(codecs.find("fp8"), tensor(x))).astype(np.float64)
        for start in range(0, len(x), 128):
            part = x[start : start + 128].astype(np.float64)
            largest = np.abs(part).max()
            if largest < float(reference.NOTHING_FP8):
                assert (y[start : start + 128] == 0).all(), kind
                continue
            bound = np.maximum(np.abs(part) / 16, largest / 448 / 1024) * (1 + 1e-4)
            assert (np.abs(y[start : start + 128] - part) <= bound).all(), kind


@pytest.mark.parametrize(("name", "places"), [("bf16", 8), ("f16", 11)])
def test_error_of_halves(name: str, places: int) -> None:
    x = normal(LONG)
    x = x[x.abs() > 2.0**-14]
    close(through(codecs.find(name), x), x, x.abs().double() * 2.0**-places, name)


@pytest.mark.parametrize("name", ["bf16", *BLOCKWISE, *SPARSE, *CHUNKED])
def test_small_numbers_are_not_coarser(name: str) -> None:
    """Gradients of size 1e-9 (and 1e-25, 1e25) keep what numbers of size 1 keep; exactly, by powers of 2."""
    codec, x = codecs.find(name), normal(5003)
    usual = through(codec, x)
    for power in (-30, -83, 83):
        equal(through(codec, x * 2.0**power), usual * 2.0**power, f"2^{power}")


@pytest.mark.parametrize("name", MORE)
def test_extreme_but_finite(name: str) -> None:
    """Finite in, finite out (but for the halves, which overflow), and about as large at most."""
    n = 600
    for what, x in {
        "largest": torch.full((n,), MAX),
        "most negative": torch.full((n,), -MAX),
        "both": torch.where(torch.arange(n) % 2 == 0, MAX, -MAX),
        "huge": torch.linspace(-3e38, 3e38, n),
        "huge and tiny": torch.where(torch.arange(n) % 3 == 0, 3e38, 1e-45),
        "near the largest": MAX * (1 - torch.rand(n, generator=torch.Generator().manual_seed(1)) * 1e-6),
        "subnormal": torch.full((n,), 1e-45),
        "subnormals": normal(n) * 1e-40,
        "smallest normal": torch.full((n,), 2.0**-126),
        "zero": torch.zeros(n),
        "just nothing": torch.linspace(-4.9e-37, 4.9e-37, n),
        "just something": torch.linspace(-1.1e-36, 1.1e-36, n),
        "just something of fp8": torch.linspace(-1.1e-35, 1.1e-35, n),
        "just something, and zeros": torch.where(torch.arange(n) % 2 == 0, 0.0, 1.05e-35),
        "constant": torch.full((n,), 0.1),
        "negative constant": torch.full((n,), -1e20),
        "one": torch.zeros(n).index_fill_(0, torch.tensor([n - 1]), -5.0),
    }.items():
        for dtype in DTYPES:
            src = x.to(dtype)
            if not src.isfinite().all():
                continue
            residual = torch.zeros(n)
            encoded = codecs.find(name).encode(src, residual=residual)
            out = decoded(codecs.find(name), encoded, n)
            if name in ("bf16", "f16"):
                equal(out, src.to(torch.bfloat16 if name == "bf16" else torch.float16).float(), what)
            else:
                assert bool(out.isfinite().all()), f"{what}: {out[~out.isfinite()][:3]}"
                largest = float(src.abs().max())
                assert float(out.abs().max()) <= largest * 1.04 + 1e-45, what  # int8, int4: up to half a step
            left = torch.nan_to_num(src.float() - out, nan=0.0, posinf=0.0, neginf=0.0)
            equal(residual, left, f"{what}: residual")
            agrees(name, None, src + 0.0, what)


@pytest.mark.parametrize(("name", "edge"), [("int8", 1e-36), ("int4", 1e-36), ("fp8", 1e-35)])
def test_where_nothing_begins(name: str, edge: float) -> None:
    """Below all is 0, header and codes; above, nothing is lost but what always is."""
    codec, half = codecs.find(name), 0.49 * edge
    for x in (
        torch.full((64,), 0.99 * edge),
        torch.full((64,), -0.99 * edge),
        torch.linspace(-half, half, 64),
    ):
        assert not codec.encode(x).any(), name
        agrees(name, None, x)
    for factor in (1.01, 1.2, 1.3, 1.35, 2, 10):
        largest = factor * edge
        for x in (
            torch.linspace(0, largest, 31),
            torch.linspace(-largest, largest, 32),
            torch.full((9,), largest),
        ):
            out = through(codec, x)
            err = {"int8": 2.1 / 255, "int4": 2.1 / 15, "fp8": 1 / 16}[name] * largest
            close(out, x, err, f"{name} {largest}")
            agrees(name, None, x, f"{largest}")


# ---------------------------------------------------------------------- what is not finite


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", MORE)
def test_not_finite(name: str, bad: float) -> None:
    """Carried as it is, or by its whole block, or by all; never into what the next block decodes to."""
    n, codec, ref = 1500, codecs.find(name), reference.find(name)
    for dtype in DTYPES:
        for at in ([0], [n - 1], [700], [1, 3, 900], range(0, n, 7)):
            x = normal(n).to(dtype)
            x[list(at)] = bad
            residual = normal(n, 1)
            expected_bytes, expected, left = ref.apply(array(x), array(residual), True, 3)
            encoded = codec.encode(x, residual=residual, seed=3)
            out = decoded(codec, encoded, n)
            equal(out, tensor(expected), f"{name} {at}")
            if isinstance(ref, reference.Blocks):
                width = 4 + ref.payload(ref.block)
                for start in range(0, n, ref.block):
                    part = out[start : start + ref.block]
                    if any(start <= i < start + ref.block for i in at):
                        assert bool(part.isnan().all()), (name, start)
                    else:
                        place = start // ref.block * width
                        same_bytes(
                            encoded[place : place + width], expected_bytes[place : place + width], name
                        )
            elif name.startswith("randomk"):
                assert bool(out.isnan().all()), name
            for kind in (torch.float16, torch.bfloat16):
                equal(decoded(codec, encoded, n, kind), out.to(kind), f"{name} as {kind}")
            assert bool(residual.isfinite().all())
            equal(residual, tensor(left), f"{name} {at}: residual")


@pytest.mark.parametrize("name", MORE)
def test_all_not_finite(name: str) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for n in (1, 31, 600):
            x, residual = torch.full((n,), bad), torch.ones(n)
            encoded = codecs.find(name).encode(x, residual=residual)
            out = decoded(codecs.find(name), encoded, n)
            assert not out.isfinite().all()
            assert bool(residual.isfinite().all()), name
            remainder = torch.ones(n)
            codecs.find(name).encode(x, residual=remainder, feedback=False)
            equal(
                remainder, x - out, f"{name}: remainder"
            )  # weights that are not finite do not look as if they were


@pytest.mark.parametrize("name", MORE)
def test_sum_with_residual_overflows(name: str) -> None:
    """Then it is an infinity that travels, and it is forgotten."""
    n = 600
    for sign in (1, -1):
        x, residual = normal(n), normal(n, 1)
        x[300], residual[300] = sign * MAX, sign * MAX
        expected, left = reference.find(name).apply(array(x), array(residual), True)[1:]
        encoded = codecs.find(name).encode(x, residual=residual)
        equal(decoded(codecs.find(name), encoded, n), tensor(expected), name)
        equal(residual, tensor(left), f"{name}: residual")
        assert bool(residual.isfinite().all())
