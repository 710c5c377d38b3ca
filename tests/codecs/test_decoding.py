"""Decoding: into every type, with a weight, bytes that nobody encoded; and how codecs are misused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import trigram
from tests.reference import codecs as reference
from tests.support.checks import close, equal, raises, says
from tests.support.codec_cases import (
    BLOCKWISE,
    MORE,
    agrees,
    array,
    decoded,
    normal,
    tensor,
)
from trigram import codecs

REFUSED = (trigram.MisuseError, trigram.UnsupportedError)
GUARD = 64


# ---------------------------------------------------------------------- decoding


@pytest.mark.parametrize("name", MORE)
def test_decode_into_halves(name: str) -> None:
    """As the same numbers in f32, rounded."""
    codec = codecs.find(name)
    for n in (1, 33, 1000):
        for scale in (1.0, 1e-9, 1e6):  # the last overflows f16
            encoded = codec.encode(normal(n) * scale)
            for dtype in (torch.float16, torch.bfloat16):
                equal(decoded(codec, encoded, n, dtype), decoded(codec, encoded, n).to(dtype), f"{name} {n}")


@pytest.mark.parametrize("name", MORE)
def test_decode_with_weight(name: str) -> None:
    codec = codecs.find(name)
    for n in (1, 31, 33, 1000, 4097):
        encoded, start = codec.encode(normal(n), seed=2), normal(n, 1)
        v = decoded(codec, encoded, n)
        for weight in (0.5, 1.0, -2.0, 0.0):  # products are exact, so there is one right sum
            out = start.clone()
            assert codec.decode(encoded, out, weight) is None
            equal(out, start + weight * v, f"{name} {weight}")
        out = start.clone()
        codec.decode(encoded, out, weight=1 / 3)
        product = v.double() * float(np.float32(1 / 3))
        slack = (product.abs() + (start.double() + product).abs()) * 2.0**-23
        close(out, (start.double() + product).float(), slack, name)


def test_decode_with_weight_touches_what_was_sent_only() -> None:
    for name in ("topk:0.1", "randomk:0.1"):
        x, codec = normal(500), codecs.find(name)
        encoded = codec.encode(x)
        sent = decoded(codec, encoded, 500) != 0
        out = torch.where(sent, 0.0, 5.5)
        codec.decode(encoded, out, 2.0)
        equal(out, torch.where(sent, 2 * x, torch.tensor(5.5)), name)


@pytest.mark.parametrize("name", MORE)
def test_wrong_lengths_are_corrupt(name: str) -> None:
    codec = codecs.find(name)
    for n in (1, 33, 600):
        encoded = codec.encode(normal(n))
        size = codec.size(n)
        for length in {0, 1, size // 2, size - 4, size - 1, size + 1, size + 4, 2 * size}:
            if length == size or length < 0:
                continue
            wrong = torch.zeros(length, dtype=torch.uint8)
            wrong[: min(size, length)] = encoded[:length]
            for weight in (None, 1.0):
                raises(trigram.CorruptError, codec.decode, wrong, torch.zeros(n), weight)
        if codec.size(n + 100) != size:
            raises(trigram.CorruptError, codec.decode, encoded, torch.zeros(n + 100))


def mutants(rng: np.random.Generator, valid: np.ndarray) -> Iterator[np.ndarray]:
    """Bytes of the right length: anything, extremes, and valid ones with a few bits or bytes changed."""
    size = len(valid)
    yield np.zeros(size, np.uint8)
    yield np.full(size, 0xFF, np.uint8)
    for _ in range(12):
        yield rng.integers(0, 256, size, dtype=np.uint8)
        bits = (rng.random((size, 8)) < rng.choice([0.05, 0.5, 0.95])).astype(np.uint8)
        yield np.packbits(bits, axis=1).reshape(-1)
    for _ in range(40):
        b = valid.copy()
        for _ in range(int(rng.integers(1, 4))):
            b[int(rng.integers(size))] ^= 1 << int(rng.integers(8))
        yield b
        b = valid.copy()
        start = int(rng.integers(size))
        b[start : start + 8] = rng.integers(0, 256, len(b[start : start + 8]), dtype=np.uint8)
        yield b
        b = valid.copy()
        b[[start, -1]] = b[[-1, start]]
        yield b


@pytest.mark.parametrize("name", MORE)
def test_any_bytes(name: str) -> None:
    """CorruptError or numbers, and nothing outside of `out` is written."""
    rng = np.random.default_rng(7)
    codec = codecs.find(name)
    for n in (1, 33, 130, 1000):
        for raw in mutants(rng, array(codec.encode(normal(n)))):
            encoded = torch.from_numpy(raw)
            for dtype, weight in ((torch.float32, None), (torch.float32, -1.5), (torch.bfloat16, None)):
                wide = torch.full((n + 2 * GUARD,), 7.25, dtype=dtype)
                try:
                    codec.decode(encoded, wide[GUARD : GUARD + n], weight)
                except trigram.CorruptError:
                    assert name.startswith(("topk", "randomk", "chunktopk")), (
                        f"{name}: any code of the right length is one"
                    )
                guard = torch.cat([wide[:GUARD], wide[GUARD + n :]])
                equal(guard, torch.full_like(guard, 7.25), name)
            equal(encoded, torch.from_numpy(raw.copy()))


def test_topk_says_what_is_corrupt() -> None:
    name, n = "topk:0.05", 100
    codec, ref = codecs.find(name), reference.TopK(0.05)
    k, b, bitmap = ref.shape(n)
    assert (k, b, bitmap) == (5, 4, 12)
    values = np.arange(1, 6, dtype=np.float32)

    def decode(indices: list[int]) -> torch.Tensor:
        return decoded(codec, torch.from_numpy(ref.write(values, np.array(indices), n)), n)

    right = torch.zeros(n)
    right[[0, 1, 17, 98, 99]] = tensor(values)
    equal(decode([0, 1, 17, 98, 99]), right)
    for beyond in (100, 103, 111):
        raises(trigram.CorruptError, decode, [0, 1, 17, 98, beyond])
    valid = ref.write(values, np.array([0, 1, 17, 98, 99]), n)
    for place in range(8):  # 12 bits are the bitmap; the 4 above hold nothing
        for byte in (-2, -1):
            b2 = valid.copy()
            b2[byte] ^= 1 << place
            raises(trigram.CorruptError, decoded, codec, torch.from_numpy(b2), n)
    above = valid.copy()
    above[-2:] = np.packbits(np.array([1, 1, 1, 1] + [0] * 8 + [1, 0, 0, 0], np.uint8), bitorder="little")
    raises(trigram.CorruptError, decoded, codec, torch.from_numpy(above), n)


# ---------------------------------------------------------------------- misuse


BAD = [
    "int7",
    "",
    "int",
    "BF17",
    "bf16:8",
    "int8:512",
    "sign:",
    "randomk",
    "randomk:0",
    "randomk:2",
    "randomk:nan",
]
BAD += ["chunktopk", "chunktopk:", "chunktopk:0", "chunktopk:1.1", "chunktopk:x", "chunktopk:nan"]
BAD += ["topk", "topk:", "topk:0", "topk:-0.1", "topk:1.01", "topk:nan", "topk:inf", "topk:a", "topk:0.1:2"]


@pytest.mark.parametrize("name", BAD)
def test_unknown_names(name: str) -> None:
    text = raises(trigram.UnsupportedError, codecs.find, name)
    if name:
        says(text, name.partition(":")[0])


@pytest.mark.parametrize("name", BLOCKWISE)
def test_bad_blocks(name: str) -> None:
    """Refused; what the specification does not speak of is refused or right."""
    for block in (1, 7, 33, 100, 4096, 65536):
        try:
            codecs.find(name, block)
        except trigram.UnsupportedError:
            continue
        agrees(name, block, normal(1001))
    for block in (0, -1, -512):
        raises(trigram.UnsupportedError, codecs.find, name, block)


@pytest.mark.parametrize("name", MORE)
def test_misuse(name: str) -> None:
    """Refused in words; and nothing is written."""
    codec, n = codecs.find(name), 100
    x, size = normal(n), codecs.find(name).size(n)
    encoded = codec.encode(x)
    for src in (x.double(), x.int(), normal(2 * n)[::2]):
        raises(REFUSED, codec.encode, src)
    for out in (
        torch.zeros(size, dtype=torch.int8),
        torch.zeros(size),
        torch.zeros(size - 1, dtype=torch.uint8),
        torch.zeros(2 * size, dtype=torch.uint8)[::2],
    ):
        raises(REFUSED, codec.encode, x, out)
        assert not out.any()
    for residual in (
        torch.zeros(n).double(),
        torch.zeros(n).half(),
        torch.zeros(n - 1),
        torch.zeros(n + 1),
        torch.zeros(2 * n)[::2],
    ):
        raises(REFUSED, codec.encode, x, None, residual)
        assert not residual.any()
    for target in (torch.zeros(n).double(), torch.zeros(n, dtype=torch.int32), torch.zeros(2 * n)[::2]):
        raises(REFUSED, codec.decode, encoded, target)
        assert not target.any()
    raises(REFUSED, codec.decode, encoded.to(torch.int8), torch.zeros(n))
    raises(REFUSED, codec.decode, encoded.repeat_interleave(2)[::2], torch.zeros(n))
    for dtype in (torch.float16, torch.bfloat16):
        raises(REFUSED, codec.decode, encoded, torch.zeros(n, dtype=dtype), 0.5)
