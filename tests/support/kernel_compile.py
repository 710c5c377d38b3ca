"""Compiles the codecs' kernels for an NVIDIA GPU on a machine without one; codecs/test_triton.py runs it.

`python -m tests.support.kernel_compile CAPABILITY CODEC...` prints as JSON what failed to compile, and what
was compiled. Encoding and decoding are called as ever: with tensors of the CPU and a driver that knows only
the GPU's kind, each launch ends with the machine code (Triton's wheel has ptxas). So types and specialised
arguments are those of a real launch, which an interpreter does not have: an int of 32 or 64 bits, one that is
1, an address that is a multiple of 16.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import torch

from trigram.codecs.registry import find_kernel

assembly: dict[str, str] = {}
"""The assembly of the kernels launched last, by name."""
BLOCKWISE = ["int8", "int4", "fp8", "sign"]
WORDS = "words"
# The codec, values per block, and how many values there are.
SHORT = [
    *(
        ("bf16", None, 4097),
        ("f16", None, 4097),
        ("int8", None, 4097),
        ("int4", None, 4096),
        ("fp8", None, 4097),
    ),
    *(("sign", None, 4097), ("topk:0.01", None, 4097), ("randomk:0.01", None, 4097)),
]
LONG = [
    *((name, block, n) for name in BLOCKWISE for block in (None, 8, 24, 2048) for n in (1, 16, 100_003)),
    *((name, None, n) for name in ("bf16", "f16") for n in (1, 16, 100_003)),
    *(
        (name, None, n)
        for name in ("topk:0.01", "topk:0.3", "topk:1", "randomk:0.1", "randomk:1")
        for n in (1, 16, 100_003)
    ),
]


class _Driver:
    """What Triton asks a driver before it launches."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(capability: int, cases: list[str]) -> None:
    import triton  # not to name the cases
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_Driver(GPUTarget("cuda", capability, 32)))
    launched: set[str] = set()
    run = JITFunction.run

    def compiles(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"], self.fn.__name__
        launched.add(self.fn.__qualname__)
        assembly[self.fn.__qualname__] = kernel.asm["ptx"]
        return kernel

    JITFunction.run = compiles
    failures: dict[str, str | None] = {}
    for case in cases:
        name, _, rest = case.partition("/")
        block, _, n = rest.partition("/")
        try:
            if rest == WORDS:
                by_words(name)
            else:
                goes_through(name, int(block) or None, int(n))
            failures[case] = None
        except Exception:
            failures[case] = traceback.format_exc()
    json.dump({"failures": failures, "launched": sorted(launched), "triton": triton.__version__}, sys.stdout)


def bytes_at_once(name: str, shift: int) -> dict[str, int]:
    """How many accesses of single bytes the kernels have, with codes that begin `shift` bytes after a
    multiple of 16."""
    n = 1 << 16
    kernel = find_kernel(name)
    code = torch.zeros(kernel.size(n) + 16, dtype=torch.uint8)
    assert code.data_ptr() % 16 == 0
    part = code[shift : shift + kernel.size(n)]
    assembly.clear()
    kernel.encode(torch.zeros(n), part)
    kernel.decode(part, torch.zeros(n))
    return {name: text.count("global.b8") for name, text in assembly.items()}


def by_words(name: str) -> None:
    """Codes at a multiple of 4 are accessed as those at a multiple of 16 are; elsewhere byte by byte."""
    least = bytes_at_once(name, 0)
    for shift in (4, 8, 12):
        assert bytes_at_once(name, shift) == least, (name, shift, assembly.keys())
    most = bytes_at_once(name, 1)
    assert all(most[kernel] > least[kernel] for kernel in ("_encode", "_decode")), (name, least, most)


def label(name: str, block: int | None, n: int) -> str:
    """A case as it is named on the command line."""
    return f"{name}/{block or 0}/{n}"


def goes_through(name: str, block: int | None, n: int) -> None:
    """Every dtype, with and without a residual, stored and added."""
    kernel = find_kernel(name, block)
    code = torch.zeros(kernel.size(n), dtype=torch.uint8)
    for turn, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        x = torch.zeros(n, dtype=dtype)
        for residual, feedback in ((None, True), (torch.zeros(n), True), (torch.zeros(n), False)):
            kernel.encode(x, code, residual, feedback, seed=2**63 + turn)
        kernel.decode(code, x)
    kernel.decode(code, torch.zeros(n), 0.5)
    # Nowhere in particular.
    wide = torch.zeros(n + 1)
    kernel.encode(wide[1:], torch.zeros(kernel.size(n) + 1, dtype=torch.uint8)[1:], torch.zeros(n + 1)[1:])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
