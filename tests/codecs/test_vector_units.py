"""The engine's loops give the same bits on every vector unit that this processor has."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import trigram
from tests.support.harness import run
from trigram import codecs

NAMES = ("bf16", "f16", "int8", "int4", "fp8", "sign", "topk:0.1", "randomk:0.1", "chunktopk:0.1")
FLAGS = {"scalar": (), "avx2": ("avx2", "fma"), "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl")}


def _bits(rank: int, world: int) -> str:
    generator = torch.Generator().manual_seed(rank)
    digest = hashlib.sha256()

    def add(t: torch.Tensor) -> None:
        digest.update(t.contiguous().view(torch.uint8).numpy().tobytes())

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        values = torch.randn(10_007, generator=generator).to(dtype)
        for name in NAMES:
            codec = codecs.find(name)
            residual = torch.randn(values.numel(), generator=generator)
            code = codec.encode(values, residual=residual, seed=7)
            decoded = torch.empty_like(values)
            codec.decode(code, decoded)
            for t in (code, residual, decoded):
                add(t)
        for op in ("sum", "avg", "min", "max", "prod"):
            reduced = values.clone()
            trigram.all_reduce(reduced, op)
            add(reduced)
    return digest.hexdigest()


def test_the_same_bits_on_every_unit() -> None:
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    flags = set(next((line.split() for line in lines if line.startswith("flags")), []))
    units = [unit for unit, needs in FLAGS.items() if flags.issuperset(needs)]
    if len(units) < 2:
        pytest.skip("this processor has neither AVX2 nor AVX-512: there is nothing to compare")
    bits = {unit: run(2, _bits, env={"TRIGRAM_VECTOR_UNIT": unit}) for unit in units}
    assert all(each == bits["scalar"] for each in bits.values()), bits
