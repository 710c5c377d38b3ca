"""Checks of the GPU codecs against the CPU's, bit for bit; codecs/test_triton.py runs them in a process.

`python -m tests.support.kernel_run DEVICE CASE...` prints what failed as JSON. On `cpu` Triton must
interpret its kernels: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import torch

import trigram
from tests.support.codec_cases import DTYPES, MAX, normal
from trigram import codecs
from trigram.codecs.registry import find_kernel

BLOCKWISE = ["int8", "int4", "fp8", "sign"]
SPARSE = ["topk:0.01", "topk:0.3", "topk:1", "randomk:0.1", "randomk:1"]
SLOW = ("sign", "topk")  # when interpreted: of these fewer combinations are tried
NAMES = ["bf16", "f16", *BLOCKWISE, *SPARSE]
LENGTHS = [0, 1, 7, 8, 9, 31, 33, 64, 65, 255, 257, 1000, 4097, 20_011]
TARGETS = [
    (torch.float32, None),
    (torch.float16, None),
    (torch.bfloat16, None),
    (torch.float32, 1 / 3),
    (torch.float32, -0.0),
]
SEEDS = [0, 1, 2**31, 2**32 - 1, 2**63 + 5, 2**64 - 1]
DEVICE = "cpu"


def to_bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """The same bits; of floats any NaN for a NaN, as processors make different ones."""
    actual = actual.cpu()
    differ = to_bits(actual) != to_bits(expected)
    if actual.is_floating_point():
        differ &= ~(actual.isnan() & expected.isnan())
    if bool(differ.any()):
        i = int(differ.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} differ, the first is {i}: "
            f"{actual[i].item()!r}, not {expected[i].item()!r}"
        )


def kinds(name: str, n: int, salt: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Numbers of all kinds that matter to a codec, of float32."""
    rng = np.random.default_rng(1000 * n + salt)

    def scaled(least: int, most: int) -> np.ndarray:
        x = rng.standard_normal(n) * 10.0 ** rng.integers(least, most, n)
        return np.clip(x, -3.4e38, 3.4e38).astype(np.float32)

    yield "normal", normal(n, salt)
    yield "huge", torch.from_numpy(rng.uniform(-3.4e38, 3.4e38, n).astype(np.float32))
    yield "tiny", torch.from_numpy(scaled(-38, -37))
    yield "subnormal", torch.from_numpy(scaled(-44, -38))
    yield "wild", torch.from_numpy(scaled(-44, 39))
    yield "zeros", torch.from_numpy(rng.choice(np.array([0.0, -0.0], np.float32), n))
    yield "ties", torch.from_numpy(rng.integers(-3, 4, n).astype(np.float32))
    spike = torch.zeros(n)
    spike[n // 2 : n // 2 + 1] = -1e6
    yield "spike", spike + normal(n, salt) * 1e-3
    yield "most", torch.from_numpy(rng.choice(np.array([MAX, -MAX, 0, 1e38], np.float32), n))
    for least in {"int": [1e-36], "fp8": [1e-35]}.get(
        name[:3], []
    ):  # blocks whose sizes are below this are zero
        for ulps in (-1, 0):
            edge = (np.float32(least).view(np.int32) + np.int32(ulps)).view(np.float32)
            yield f"{least} {ulps}", torch.from_numpy(rng.choice(np.array([edge, 0], np.float32), n))
    if name == "sign":
        yield "order", orders(n, 256, rng)
    broken = normal(n, salt + 1)
    for bad in (math.nan, math.inf, -math.inf):
        if n:
            broken[int(rng.integers(n))] = bad
    yield "broken", broken
    yield "bits", torch.from_numpy(rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32))


def orders(n: int, block: int, rng: np.random.Generator) -> torch.Tensor:
    """Blocks whose mean in f64 lies between two floats or just above, by the order in which it is summed.

    Where the large value comes before small ones of its lane, or of other lanes, these are lost.
    """
    x = np.zeros(n, np.float32)
    for start in range(0, n, block):
        part = x[start : start + block]
        size = len(part)
        total = size * ((1 << 24) + 1 + 4 * int(rng.integers(1 << 20)))
        large = np.float32(total & ~0xFFFF)
        lane = int(rng.integers(8))
        match rng.integers(4):
            case 0:
                part[lane::8] = 2.0**-22
                at = lane
            case 1:
                part[lane::8] = 2.0**-22
                at = (size - 1 - lane) // 8 * 8 + lane
            case 2:
                part[:8] = 2.0**-22
                at = 8 * int(rng.integers(max(1, size // 8)))
            case _:
                part[::8] = 2.0**-22
                at = size - 1
        at = min(max(at, 0), size - 1)
        part[at] = large
        part[at - 1] = np.float32(total - int(large))
    return torch.from_numpy(x)


def decodes(name: str, block: int | None, encoded: torch.Tensor, n: int, target: int, what: str) -> None:
    """Both decode the same; where the CPU refuses, the GPU says NaN."""
    dtype, weight = TARGETS[target % len(TARGETS)]
    cpu = normal(n, 7).to(dtype)
    gpu = cpu.clone().to(DEVICE)
    find_kernel(name, block).decode(encoded.to(DEVICE), gpu, weight)
    try:
        codecs.find(name, block).decode(encoded, cpu, weight)
    except trigram.CorruptError:
        cpu.fill_(math.nan)
    same(gpu, cpu, f"{what}: decoded to {dtype}, weight {weight}")


def agrees(
    name: str, block: int | None, src: torch.Tensor, keep: int, seed: int, targets: list[int], what: str
) -> None:
    """Bytes, residuals and numbers are the CPU's. `keep`: nothing, feedback, remainder."""
    codec, kernel, n = codecs.find(name, block), find_kernel(name, block), src.numel()
    what = f"{name} block {block} n {n} {src.dtype} {what} keep {keep}"
    assert kernel.size(n) == codec.size(n), what
    cpu = [None, normal(n, 3) * 0.01, torch.full((n,), math.nan)][keep]
    gpu = None if cpu is None else cpu.clone().to(DEVICE)
    encoded = torch.full((codec.size(n),), 0xA5, dtype=torch.uint8)
    out = encoded.clone().to(DEVICE)
    codec.encode(src, encoded, cpu, keep == 1, seed)
    kernel.encode(src.to(DEVICE), out, gpu, keep == 1, seed)
    same(out, encoded, f"{what}: bytes")
    if cpu is not None and gpu is not None:
        same(gpu, cpu, f"{what}: residual")
    for target in targets:
        decodes(name, block, encoded, n, target, what)


def check_lengths(name: str) -> None:
    turn, rota = count(), count(len(name))
    for n in LENGTHS:
        for dtype in [DTYPES[next(rota) % 3]] if name.startswith(SLOW) else DTYPES:
            i = next(turn)
            keeps = range(3) if n in (33, 1000) else [(i + i // 3) % 3]
            for keep in keeps:
                agrees(name, None, normal(n).to(dtype), keep, SEEDS[i % len(SEEDS)], [i + keep], "")


def check_kinds(name: str) -> None:
    turn = count()
    for dtype in DTYPES:
        for kind, x in kinds(name, 1003, 0):
            i = next(turn)
            if name.startswith(SLOW) and dtype != torch.float32 and i % 4 > 0:
                continue
            targets = list(range(len(TARGETS))) if dtype == torch.float32 else [i]
            agrees(name, None, x.to(dtype), i % 3, i, targets, kind)
    for keep in range(3):
        for kind, x in kinds(name, 37, keep):
            i = next(turn)
            if not name.startswith(SLOW) or i % 5 == 0:
                agrees(name, None, x, keep, 5, [keep], kind)
    for n in (256, 264, 235, 2048 + 4):
        for salt in range(2 if name == "sign" else 0):
            agrees(name, None, orders(n, 256, np.random.default_rng(n + salt)), 0, 0, [], "order")
    every = torch.arange(-(2**15), 2**15, 1 if name in ("bf16", "f16") else 61, dtype=torch.int32)
    for dtype in DTYPES[1:]:
        agrees(name, None, every.to(torch.int16).view(dtype), 2, 6, [0], "every")


def check_blocks(name: str) -> None:
    turn = count()
    for block in (8, 24, 96, 2048):
        for n in (7, 25, 1000, 4097):
            every = list(kinds(name, n, block))
            for _ in range(1 if name == "sign" else 3):
                i = next(turn)
                kind, x = every[i % len(every)]
                agrees(name, block, x.to(DTYPES[i // 3 % 3]), i % 3, 0, [i], kind)


def check_rounds(name: str) -> None:
    n, codec, kernel = 1003, codecs.find(name), find_kernel(name)
    for dtype in (torch.float32, torch.float16):
        cpu = torch.zeros(n)
        gpu = cpu.clone().to(DEVICE)
        out = torch.empty(codec.size(n), dtype=torch.uint8, device=DEVICE)
        for step in range(4):
            src = normal(n, step).to(dtype)
            if step == 2:
                src[100] = math.inf  # told once, then forgotten
            encoded = codec.encode(src, None, cpu, True, step)
            kernel.encode(src.to(DEVICE), out, gpu, True, step)
            same(out, encoded, f"{name} step {step}: bytes")
            same(gpu, cpu, f"{name} step {step}: residual")


def check_places(name: str) -> None:
    """Anywhere in memory, and nothing beside it is written."""
    n, codec, kernel = 1003, codecs.find(name), find_kernel(name)
    encoded, guard = codec.encode(normal(n), seed=9), 0xA5
    for shift in (1, 2, 3, 4, 12):  # the last two at words, see words.aligned
        wide = torch.zeros(n + 16, device=DEVICE)
        wide[shift : shift + n] = normal(n).to(DEVICE)
        residual = torch.full((n + 16,), 7.0, device=DEVICE)
        size = codec.size(n)
        out = torch.full((size + 16,), guard, dtype=torch.uint8, device=DEVICE)
        part = out[shift : shift + size]
        kernel.encode(wide[shift : shift + n], part, residual[shift : shift + n], False, 9)
        same(part, encoded, f"{name} shifted by {shift}")
        assert bool((out[:shift] == guard).all() and (out[shift + size :] == guard).all()), name
        assert bool((residual[:shift] == 7).all() and (residual[shift + n :] == 7).all()), name
        for dtype in DTYPES:
            expected = torch.empty(n, dtype=dtype)
            codec.decode(encoded, expected)
            numbers = torch.full((n + 16,), 7.0, dtype=dtype, device=DEVICE)
            kernel.decode(part, numbers[shift : shift + n])
            same(numbers[shift : shift + n], expected, f"{name} shifted by {shift} to {dtype}")
            assert bool((numbers[:shift] == 7).all() and (numbers[shift + n :] == 7).all()), name


def check_bytes(name: str) -> None:
    """Bytes that nobody encoded."""
    rng, turn, codec = np.random.default_rng(7), count(), codecs.find(name)
    for n in (1, 33, 1000):
        size = codec.size(n)
        valid = codec.encode(normal(n)).numpy()
        anything = [np.zeros(size, np.uint8), np.full(size, 255, np.uint8)]
        anything += [rng.choice(np.array([0x7E, 0xFE, 0x0F, 0], np.uint8), size) for _ in range(4)]
        anything += [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(6)]
        for _ in range(10):
            mutant = valid.copy()
            for at in rng.integers(0, size, int(rng.integers(1, 4))):
                mutant[at if rng.random() < 0.5 else -1 - at % max(1, size // 4)] ^= 1 << int(rng.integers(8))
            anything.append(mutant)
            swapped = valid.copy()
            a, b = rng.integers(size - min(size, 1 + size // 3), size, 2)
            swapped[[a, b]] = swapped[[b, a]]
            anything.append(swapped)
        for raw in anything:
            decodes(name, None, torch.from_numpy(raw), n, next(turn), f"{name} n {n}")


CHECKS: dict[str, Callable[[str], None]] = {
    "lengths": check_lengths,
    "kinds": check_kinds,
    "blocks": check_blocks,
    "rounds": check_rounds,
    "places": check_places,
    "bytes": check_bytes,
}
CASES = [f"{check}-{name}" for check in CHECKS for name in (BLOCKWISE if check == "blocks" else NAMES)]


def _tell(case: str) -> None:
    """What failed is on the page of tools/gpu_report.py even if the rest takes too long."""
    if named := os.environ.get("TRIGRAM_FIGURES"):
        with Path(named).open("a") as lines:
            lines.write(json.dumps({"what": case, "value": "failed", "unit": "", "least": None}) + "\n")


def main(device: str, cases: list[str]) -> None:
    global DEVICE
    DEVICE = device
    np.seterr(all="ignore")
    failures: dict[str, str | None] = {}
    for case in cases:
        check, _, name = case.partition("-")
        try:
            CHECKS[check](name)
            failures[case] = None
        except Exception:
            failures[case] = traceback.format_exc()
            _tell(case)
    json.dump(failures, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
