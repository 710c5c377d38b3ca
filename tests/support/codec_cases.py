"""The codecs and numbers that their tests go through, and how these look at them."""

from __future__ import annotations

import numpy as np
import torch

from tests.reference import codecs as reference
from tests.support.checks import equal
from trigram import codecs

BLOCKWISE = ["int8", "int4", "fp8", "sign"]
SPARSE = ["topk:0.01", "topk:0.1", "randomk:0.01", "randomk:0.1"]
NAMES = ["bf16", "f16", *BLOCKWISE, *SPARSE]
CHUNKED = ["chunktopk:0.02", "chunktopk:0.3", "chunktopk:1"]
MORE = [*NAMES, "topk:0.3", "topk:1", "randomk:0.37", "randomk:1", *CHUNKED]
LONG = 100_003
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MAX = float(reference.MAX)


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
