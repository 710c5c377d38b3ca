"""Every codec against the NumPy reference: bytes, numbers, residuals; and bytes that nobody encoded."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import trigram
from tests import codec_reference as reference
from tests.checks import close, equal, raises, says
from trigram import codecs

BLOCKWISE = ["int8", "int4", "fp8", "sign"]
SPARSE = ["topk:0.01", "topk:0.1", "randomk:0.01", "randomk:0.1"]
NAMES = ["bf16", "f16", *BLOCKWISE, *SPARSE]
MORE = [*NAMES, "topk:0.3", "topk:1", "randomk:0.37", "randomk:1"]
BLOCKS = [(name, block) for name in BLOCKWISE for block in (8, 24, 64, 96, 1024, 2048)]
LENGTHS = [1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 4097]
LONG = 100_003
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
REFUSED = (trigram.MisuseError, trigram.UnsupportedError)
MAX = float(reference.MAX)
GUARD = 64


def array(t: torch.Tensor) -> np.ndarray:
    return t.detach().float().numpy().copy() if t.dtype != torch.uint8 else t.numpy().copy()


def tensor(a: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(a)).to(dtype)


def normal(n: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * n + salt))


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.int16)


def decoded(
    codec: codecs.Codec, encoded: torch.Tensor, n: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.full((n,), 7.25, dtype=dtype)
    assert codec.decode(encoded, out) is None
    return out


def through(codec: codecs.Codec, x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    return decoded(codec, codec.encode(x, seed=seed), len(x))


def same_bytes(actual: torch.Tensor, expected: np.ndarray, what: str) -> None:
    assert actual.dtype == torch.uint8
    equal(actual, torch.from_numpy(expected), f"{what}: bytes")


def agrees(name: str, block: int | None, src: torch.Tensor, what: str = "", seed: int = 0) -> None:
    """Bytes and numbers as in the reference, for finite input."""
    codec, ref, n = codecs.find(name, block), reference.find(name, block), len(src)
    what = f"{name} block {block} n {n} {src.dtype} {what}"
    before = src.clone()
    expected = ref.encode(array(src), seed)
    encoded = codec.encode(src, seed=seed)
    assert codec.size(n) == ref.size(n) == len(expected) == encoded.numel(), what
    same_bytes(encoded, expected, what)
    equal(decoded(codec, encoded, n), tensor(ref.decode(expected, n)), what)
    equal(src, before, f"{what}: the input")


def floats(rng: np.random.Generator, n: int) -> tuple[str, np.ndarray]:
    """Finite numbers of some kind, without a negative zero (whose sign the specification leaves open)."""
    kind = rng.choice(
        ["normal", "small", "large", "ties", "sparse", "constant", "shifted", "wild", "subnormal", "outlier"]
    )
    x = rng.standard_normal(n).astype(np.float32)
    match kind:
        case "small":
            x *= np.float32(1e-9)
        case "large":
            x *= np.float32(1e30)
        case "ties":
            x = rng.integers(-3, 4, n).astype(np.float32)
        case "sparse":
            x[rng.random(n) < 0.9] = 0
        case "constant":
            x[:] = np.float32(rng.standard_normal())
        case "shifted":
            x += np.float32(100)
        case "wild":
            x *= np.float32(10) ** rng.integers(-30, 36, n).astype(np.float32)
        case "subnormal":
            x *= np.float32(1e-40)
        case "outlier":
            x[rng.integers(n)] = np.float32(1e6)
    return str(kind), x + np.float32(0)  # -0 + 0 is 0


# ---------------------------------------------------------------------- what is sent


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
    x = normal(n).mul(3).round() if name.startswith("topk") else normal(n)
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


@pytest.mark.parametrize("name", ["bf16", *BLOCKWISE, *SPARSE])
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


# ---------------------------------------------------------------------- over time


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
                    assert name.startswith(("topk", "randomk")), (
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
