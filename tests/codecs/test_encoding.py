"""What every codec sends, against the NumPy reference: bytes, numbers, residuals, and how many bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.reference import codecs as reference
from tests.support.checks import equal
from tests.support.codec_cases import (
    BLOCKWISE,
    DTYPES,
    LONG,
    MAX,
    MORE,
    agrees,
    array,
    bits,
    decoded,
    floats,
    normal,
    same_bytes,
    tensor,
    through,
)
from trigram import codecs

BLOCKS = [(name, block) for name in BLOCKWISE for block in (8, 24, 64, 96, 1024, 2048)]
LENGTHS = [1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 4097]


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_and_numbers(name: str, dtype: torch.dtype) -> None:
    for n in [*LENGTHS, LONG]:
        agrees(name, None, normal(n).to(dtype), seed=n)


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_bytes_and_numbers_of_other_blocks(name: str, block: int) -> None:
    for n in (1, 7, 8, 9, 23, 24, 25, 97, 1000, 4097, LONG):
        agrees(name, block, normal(n))


def test_defaults_of_blocks() -> None:
    for name, block in (("int8", 512), ("int4", 32), ("fp8", 128), ("sign", 256)):
        x = normal(2000)
        equal(codecs.find(name).encode(x), codecs.find(name, block=block).encode(x), name)


@pytest.mark.parametrize("seed", range(10))
def test_fuzz(seed: int) -> None:
    """Any numbers, lengths, blocks and types; with residuals of any size, both ways."""
    rng = np.random.default_rng(seed)
    for case in range(40):
        name = str(rng.choice(MORE))
        block = (
            int(rng.choice([8, 16, 32, 64, 128, 256, 512]))
            if name in BLOCKWISE and rng.random() < 0.5
            else None
        )
        n = int(rng.choice([rng.integers(1, 70), rng.integers(1, 3000)]))
        dtype = DTYPES[int(rng.integers(3))]
        kind, values = floats(rng, n)
        src = tensor(values).to(dtype)
        src = torch.where(src.isfinite() & (src != 0), src, torch.zeros_like(src))
        what = f"seed {seed} case {case} {kind}"
        draw = int(rng.integers(0, 2**63))
        agrees(name, block, src, what, draw)
        codec, ref = codecs.find(name, block), reference.find(name, block)
        for feedback in (True, False):
            residual = tensor(floats(rng, n)[1]) * float(rng.choice([1.0, 1e-3, 1e3]))
            residual = torch.where(residual.isfinite() & (residual != 0), residual, torch.zeros(()))
            encoded, numbers, left = ref.apply(array(src), array(residual), feedback, draw)
            if feedback and not np.isfinite(array(src) + array(residual)).all():
                continue  # the bytes of what is not finite are free
            same_bytes(
                codec.encode(src, None, residual, feedback, draw), encoded, f"{name} {what} {feedback}"
            )
            equal(decoded(codec, tensor(encoded, torch.uint8), n), tensor(numbers), f"{name} {what}")
            equal(residual, tensor(left), f"{name} {what} feedback {feedback}: residual")


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_halves_are_casts(name: str, dtype: torch.dtype) -> None:
    """As torch rounds, of all kinds of floats (every exponent, ties, overflow), but for the bits of a NaN."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    x[:50_000] &= 0xFFFF8000  # ties of bf16
    x[50_000:100_000] &= 0xFFFFF000  # ties of f16
    x[100_000:150_000] = rng.uniform(-70000, 70000, 50_000).astype(np.float32).view(np.uint32)
    edges = [
        0,
        -0.0,
        65504,
        65519.996,
        65520,
        -65520,
        MAX,
        -MAX,
        math.inf,
        -math.inf,
        1e-45,
        2.0**-24,
        2.0**-25,
    ]
    values = torch.cat([tensor(x.view(np.float32)), torch.tensor(edges)])
    nans = torch.tensor([0x7F800001, -0x7FFFFF, 0x7FFFFFFF, -1, 0x7FC00000, 0x7F80FFFF], dtype=torch.int32)
    values = torch.cat([values, nans.view(torch.float32)])
    encoded = codecs.find(name).encode(values)
    halves, expected = encoded.view(dtype), values.to(dtype)
    number = ~values.isnan()
    equal(bits(halves)[number], bits(expected)[number], name)
    assert bool(halves[~number].isnan().all())
    equal(through(codecs.find(name), values), expected.float(), name)


def test_halves_of_halves_are_themselves() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        x = every.view(dtype)
        number = ~x.isnan()
        encoded = codecs.find(name).encode(x)
        equal(encoded.view(torch.int16)[number], every[number], name)
        back = decoded(codecs.find(name), encoded, len(x), dtype)
        equal(bits(back)[number], every[number], name)


def test_fp8_is_torch_s() -> None:
    """Codes and numbers, against torch.float8_e4m3fn."""
    x = torch.cat([normal(LONG), torch.linspace(-1, 1, 4099)])
    encoded = codecs.find("fp8").encode(x)
    for start in range(0, len(x), 128):
        part = x[start : start + 128]
        at = start // 128 * 132
        scale = encoded[at : at + 4].view(torch.float32) if at % 4 == 0 else None
        assert scale is not None
        equal(scale, part.abs().max().view(1) / 448, f"scale at {start}")
        expected = (part * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        equal(encoded[at + 4 : at + 4 + len(part)], expected.view(torch.uint8), f"codes at {start}")
    every = torch.arange(256).to(torch.uint8)
    values = every.view(torch.float8_e4m3fn).float()
    one = torch.ones(1).view(torch.uint8)
    equal(decoded(codecs.find("fp8", 256), torch.cat([one, every]), 256), values, "every code")
    finite = ~values.isnan()
    finite[[0x7E, 0xFE]] = False  # 448 in front keeps the scale at 1
    x = torch.cat([torch.tensor([448.0]), values[finite]])
    encoded = codecs.find("fp8", 256).encode(x)
    equal(encoded, torch.cat([one, torch.tensor([0x7E], dtype=torch.uint8), every[finite]]), "all as codes")
    grid = values[:0x7F]
    ties = (grid[1:] + grid[:-1]) / 2
    x = torch.cat([torch.tensor([448.0]), ties, -ties])[:256]
    codes = codecs.find("fp8", 256).encode(x)[4:]
    equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8), "halfway")


@pytest.mark.parametrize("fraction", ["0.001", "0.01", "0.1", "0.5", "1"])
def test_topk_keeps_the_largest(fraction: str) -> None:
    for n in (1, 10, 99, 100, 101, 1000, LONG):
        x, codec = normal(n, 5), codecs.find(f"topk:{fraction}")
        k = max(1, math.ceil(float(fraction) * n))
        ref = reference.find(f"topk:{fraction}")
        assert isinstance(ref, reference.TopK)
        values, indices = ref.read(array(codec.encode(x)), n)
        expected = x.abs().topk(k).indices.sort().values
        equal(torch.from_numpy(indices), expected, f"indices of {n}")
        equal(tensor(values), x[expected], f"values of {n}")


def test_topk_of_equals_takes_the_first() -> None:
    for n in (5, 100, 1000, LONG):
        for name in ("topk:0.01", "topk:0.3"):
            k = max(1, math.ceil(float(name[5:]) * n))
            out = through(codecs.find(name), torch.where(torch.arange(n) % 2 == 0, 2.0, -2.0))
            assert out.count_nonzero() == k
            assert bool((out[:k] != 0).all())
            out = through(codecs.find(name), torch.zeros(n))
            equal(out, torch.zeros(n))
            agrees(name, None, torch.randint(-2, 3, (n,), generator=torch.Generator().manual_seed(n)) + 0.0)


def test_topk_orders_nan_and_infinity_first() -> None:
    x = normal(100)
    x[70], x[20], x[50] = math.nan, math.inf, -math.inf
    for k, kept in ((1, {70}), (2, {20, 70}), (3, {20, 50, 70})):
        out = through(codecs.find(f"topk:{k / 100}"), x)
        assert set(out.nonzero().flatten().tolist()) == kept
        equal(out[list(kept)], x[list(kept)])
    x = torch.full((64,), math.nan)
    x[::3] = -x[::3]
    assert through(codecs.find("topk:0.25"), x).nonzero().flatten().tolist() == list(range(16))


def test_randomk_draws_one_of_each_part() -> None:
    for n in (1, 2, 10, 99, 1000):
        for fraction in (0.01, 0.1, 0.5, 1.0):
            ref = reference.RandomK(fraction)
            for seed in (0, 1, 2**32, 2**63 - 1, 2**64 - 1):
                x = torch.arange(1.0, n + 1)
                encoded = codecs.find(f"randomk:{fraction}").encode(x, seed=seed)
                assert int.from_bytes(bytes(encoded[:8].tolist()), "little") == seed
                where = (decoded(codecs.find(f"randomk:{fraction}"), encoded, n) - 1).tolist()
                sent = [i for i, w in enumerate(where) if w >= 0]
                assert sent == ref.chosen(seed, n).tolist(), (n, fraction, seed)
    x, often = torch.ones(50), torch.zeros(50)
    for seed in range(2000):
        often += through(codecs.find("randomk:0.1"), x, seed)
    assert often.min() > 130 and often.max() < 275, often.tolist()  # 200 each, sigma 13


@pytest.mark.parametrize("name", MORE)
def test_sizes(name: str) -> None:
    codec, ref = codecs.find(name), reference.find(name)
    for n in [*range(1, 700), 10**6, 10**9, 3 * 10**9 + 1]:
        assert codec.size(n) == ref.size(n), n


@pytest.mark.parametrize("name", MORE)
def test_nothing(name: str) -> None:
    codec = codecs.find(name)
    encoded = codec.encode(torch.empty(0), residual=torch.empty(0))
    assert encoded.numel() == codec.size(0)
    codec.decode(encoded, torch.empty(0))


@pytest.mark.parametrize("name", MORE)
def test_same_input_same_bytes(name: str) -> None:
    """Wherever the numbers lie in memory, and into whatever is written."""
    codec, n = codecs.find(name), 20_011
    x = normal(n).mul(3).round() if "topk" in name else normal(n)
    first = codec.encode(x, seed=9)
    for shift in (1, 2, 3):
        wide, out = torch.zeros(n + 8), torch.full((codec.size(n) + 8,), 0xA5, dtype=torch.uint8)
        wide[shift : shift + n] = x
        part = out[shift : shift + codec.size(n)]
        again = codec.encode(wide[shift : shift + n], part, seed=9)
        assert again.data_ptr() == part.data_ptr() and again.numel() == part.numel()
        equal(part, first, f"{name} shifted by {shift}")
        assert bool((out[:shift] == 0xA5).all() and (out[shift + codec.size(n) :] == 0xA5).all())
        numbers = torch.full((n + 8,), 7.0)
        codec.decode(part, numbers[shift : shift + n])
        equal(numbers[shift : shift + n], decoded(codec, first, n))
        assert bool((numbers[:shift] == 7).all() and (numbers[shift + n :] == 7).all())
