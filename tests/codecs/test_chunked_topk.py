"""The codec chunktopk: its numbers are those of a reference, its code for GPU tensors has the same bits, and
it trusts no bytes.

The tests of all codecs beside this one have it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.reference.codec_roundtrip import decoded as reference
from tests.reference.codec_roundtrip import encoded_size
from tests.support.checks import raises
from tests.support.codec_cases import DTYPES, floats, normal
from tests.support.kernel_run import TARGETS, kinds, same
from trigram import codecs
from trigram.codecs.registry import find_kernel
from trigram.errors import CorruptError, MisuseError, UnsupportedError

LENGTHS = [1, 2, 63, 4095, 4096, 4097, 3 * 4096 + 5]


def through(name: str, x: torch.Tensor) -> torch.Tensor:
    codec, out = codecs.find(name), torch.full_like(x, 7.25)
    codec.decode(codec.encode(x), out)
    return out


@pytest.mark.parametrize("fraction", ["0.001", "0.02", "0.3", "1"])
@pytest.mark.parametrize("n", LENGTHS)
def test_it_is_the_reference(n: int, fraction: str) -> None:
    name, rng = f"chunktopk:{fraction}", np.random.default_rng(n)
    for _ in range(12):
        kind, values = floats(rng, n)
        x = torch.from_numpy(values)
        assert codecs.find(name).encode(x).numel() == codecs.find(name).size(n) == encoded_size(name, n)
        expected, found = reference(name, x), through(name, x)
        assert ((found != 0) <= (expected != 0)).all(), kind
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, msg=kind)


def test_of_equal_values_the_first() -> None:
    found = through("chunktopk:0.3", torch.ones(10))
    assert found.tolist() == [1.0] * 3 + [0.0] * 7


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_spoils_its_chunk(bad: float) -> None:
    x = normal(3 * 4096)
    x[5000] = bad
    found, expected = through("chunktopk:0.02", x), reference("chunktopk:0.02", x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, equal_nan=True)
    assert found.isnan().sum() == 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_feedback(dtype: torch.dtype) -> None:
    """With feedback what was dropped is sent later; without it the residual is this encoding's error."""
    codec, x = codecs.find("chunktopk:0.1"), normal(5000).to(dtype)
    residual, out, total = torch.zeros(5000), torch.empty(5000), torch.zeros(5000)
    for _ in range(60):
        codec.decode(codec.encode(x, residual=residual), out)
        total += out
    torch.testing.assert_close(total + residual, 60 * x.float(), rtol=1e-4, atol=1e-3)
    assert float((total / 60 - x.float()).norm() / x.float().norm()) < 0.2
    residual.fill_(9.0)
    codec.decode(codec.encode(x, residual=residual, feedback=False), out)
    torch.testing.assert_close(out + residual, x.float())


@pytest.mark.parametrize("fraction", ["0.0001", "0.02", "0.3", "1"])
@pytest.mark.parametrize("n", [0, *LENGTHS])
def test_the_code_for_gpus_has_the_same_bits(n: int, fraction: str) -> None:
    """It is made of torch's operations, which work on CPU tensors too."""
    name = f"chunktopk:{fraction}"
    codec, kernel = codecs.find(name), find_kernel(name)
    for salt, (kind, values) in enumerate(kinds(name, n, 3)):
        x, code = values.to(DTYPES[salt % 3]), torch.empty(codec.size(n), dtype=torch.uint8)
        kernel.encode(x, code)
        same(codec.encode(x), code, kind)
        for dtype, weight in TARGETS:
            out, expected = normal(n, 1).to(dtype), normal(n, 1).to(dtype)
            codec.decode(code, out, weight)
            kernel.decode(code, expected, weight)
            same(out, expected, f"{kind} {dtype} {weight}")
        for feedback in (True, False):
            residual, expected = normal(n, 2), normal(n, 2)
            kernel.encode(x, code, expected, feedback)
            same(codec.encode(x, residual=residual, feedback=feedback), code, f"{kind} {feedback}")
            same(residual, expected, f"{kind} {feedback}: residual")


DAMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "too short": lambda code: code[:-1],
    "a place more": lambda code: code.index_fill(0, torch.tensor([len(code) - 1]), 255),
    "no places": lambda code: torch.cat([code[:60], torch.zeros_like(code[60:])]),
    "an infinite magnitude": lambda code: torch.cat([torch.tensor([math.inf]).view(torch.uint8), code[4:]]),
    "a negative magnitude": lambda code: torch.cat([torch.tensor([-1.0]).view(torch.uint8), code[4:]]),
    "half a magnitude": lambda code: torch.cat([torch.tensor([math.nan]).view(torch.uint8), code[4:]]),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damaged_bytes(damage: str) -> None:
    codec, out = codecs.find("chunktopk:0.02"), torch.zeros(4096)
    code = DAMAGES[damage](codec.encode(normal(4096)))
    with pytest.raises(CorruptError, match=r"chunktopk|bytes") as error:
        codec.decode(code, out, None, 3)
    assert error.value.rank == 3
    assert not out.any()
    find_kernel("chunktopk:0.02").decode(code, out)  # on a GPU nothing raises
    assert bool(out.isnan().all())


def test_any_bytes_decode_or_raise() -> None:
    codec, rng = codecs.find("chunktopk:0.5"), np.random.default_rng(5)
    decodes = 0
    for n in (2, 4, 8, 16):
        for _ in range(300):
            code = torch.from_numpy(rng.integers(0, 256, codec.size(n), dtype=np.uint8))
            out = torch.zeros(n)
            try:
                codec.decode(code, out)
                decodes += 1
            except CorruptError:
                pass
    assert 0 < decodes < 1200


def test_refusals() -> None:
    for name in ("chunktopk", "chunktopk:0", "chunktopk:1.1", "chunktopk:x", "chunktopk:nan"):
        assert "chunktopk:0.02" in raises(UnsupportedError, codecs.find, name)
    codec, x = codecs.find("chunktopk:0.02"), normal(100)
    assert "block=64" in raises(UnsupportedError, codecs.find, "chunktopk:0.02", 64)
    raises(MisuseError, codec.encode, x, torch.empty(3, dtype=torch.uint8))
    raises(MisuseError, codec.encode, x, None, torch.zeros(99))
    raises(UnsupportedError, codec.encode, x.double())
