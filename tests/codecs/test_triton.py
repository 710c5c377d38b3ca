"""The GPU codecs have the CPU's bits: interpreted everywhere, compiled where there is a GPU."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import trigram
from tests.support import gpu_rehearsal, kernel_compile, kernel_run
from tests.support.checks import raises, says
from tests.support.marks import long_unless, pairs_with
from trigram.codecs.registry import find_kernel

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
INTERPRETS = (3, 4)  # the first version of Triton whose interpreter runs these kernels


def interpreter_is_too_old() -> str | None:
    """Why interpreted kernels cannot be tested here, if so."""
    found = importlib.metadata.version("triton")
    if tuple(int(part) for part in found.split(".")[:2]) >= INTERPRETS:
        return None
    return f"the interpreter of Triton {found} cannot run these kernels; that of 3.4, with torch 2.8, can"


@functools.cache
def failures(device: str, cases: tuple[str, ...]) -> dict[str, str | None]:
    """All cases in a process or two: how Triton runs is settled before it is imported, by torch or by us."""
    if gpu_rehearsal.REHEARSES:
        device = "cpu"
    environment = os.environ | {"TRITON_INTERPRET": "1" if device == "cpu" else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.kernel_run", device]
    # On a GPU compiling takes the time, on as many processors as there are.
    count = min(8, os.cpu_count() or 1) if device == "cuda" else 1 if len(cases) <= len(SHORT) else 2
    shares = [share for k in range(count) if (share := cases[k::count])]
    pipe = subprocess.PIPE
    runs = [
        subprocess.Popen([*command, *share], stdout=pipe, stderr=pipe, text=True, env=environment)
        for share in shares
    ]
    read: dict[str, str | None] = {}
    for run in runs:
        out, err = run.communicate()
        assert run.returncode == 0, err
        read |= json.loads(out)
    return read


# Interpreted kernels are slow: each check by some codecs, each codec in some checks. On a GPU all are run.
SHORT = [
    *("lengths-int8", "kinds-fp8", "blocks-int4"),
    *("rounds-bf16", "rounds-sign", "rounds-topk:0.01", "rounds-randomk:0.1"),
    *(c for c in kernel_run.CASES if c.startswith("places")),
    *("bytes-fp8", "bytes-topk:0.01", "bytes-randomk:1"),
]
BITS = [pytest.param("cuda", case, marks=pytest.mark.gpu) for case in kernel_run.CASES]
BITS += pairs_with("cpu", long_unless(SHORT, kernel_run.CASES))


@needs_triton
@pytest.mark.parametrize(("device", "case"), BITS)
def test_bits(request: pytest.FixtureRequest, device: str, case: str) -> None:
    if device == "cuda" and not torch.cuda.is_available() and not gpu_rehearsal.REHEARSES:
        pytest.skip("there is no GPU")
    if device == "cpu" and (reason := interpreter_is_too_old()):
        pytest.skip(reason)
    items = [getattr(i, "callspec", None) for i in request.session.items if i.module is request.module]  # type: ignore[attr-defined]
    chosen = [i.params["case"] for i in items if i is not None and i.params.get("device") == device]
    failure = failures(device, tuple(chosen))[case]
    if failure is not None:
        pytest.fail(failure, pytrace=False)


# Types, specialised arguments and what the compiler refuses: an interpreter has none of them.
CAPABILITY = 90
BY_WORDS = [f"{name}/{kernel_compile.WORDS}" for name in ("bf16", "int8", "int4")]
QUICK = [*(kernel_compile.label(*case) for case in kernel_compile.SHORT), *BY_WORDS]


# Compiled by `make test`: one that packs bits.
FEW = [kernel_compile.label(*case) for case in kernel_compile.SHORT if case[0] == "int4"]
COMPILED = list(dict.fromkeys([*QUICK, *(kernel_compile.label(*case) for case in kernel_compile.LONG)]))


@functools.cache
def compiled(cases: tuple[str, ...]) -> dict[str, str | None]:
    """All cases in one process, with a cache of its own."""
    command = [sys.executable, "-m", "tests.support.kernel_compile", str(CAPABILITY), *cases]
    with tempfile.TemporaryDirectory(prefix="trigram-test-") as folder:
        environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {"_encode", "_decode"} <= set(told["launched"]), told["launched"]
    return dict(told["failures"])


@needs_triton
@pytest.mark.parametrize("case", long_unless(FEW, COMPILED))
def test_compiles_for_a_gpu(case: str) -> None:
    if not ptxas() or interpreter_is_too_old():
        pytest.skip("this Triton has no ptxas, or is older than 3.4")
    chosen = FEW if case in FEW else [c for c in COMPILED if c not in FEW]
    failure = compiled(tuple(chosen))[case]
    if failure is not None:
        pytest.fail(failure, pytrace=False)


def ptxas() -> bool:
    """Whether Triton brings NVIDIA's assembler."""
    found = importlib.util.find_spec("triton")
    places = [] if found is None else found.submodule_search_locations or []
    return any((Path(place) / "backends/nvidia/bin/ptxas").exists() for place in places)


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    """Neither the kernels with trigram, nor with them what needs Triton (which torch may import itself)."""
    code = "import sys, trigram; assert 'trigram.codecs.triton' not in sys.modules; "
    code += "import trigram.codecs.triton; sys.exit('trigram.codecs.triton.floats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    says(raises(trigram.UnsupportedError, find_kernel, "int8"), "triton", "pip install")


@needs_triton
def test_names_are_checked_as_for_the_cpu() -> None:
    for name, block in (("int7", None), ("topk", None), ("bf16", 64), ("int8", 7)):
        raises(trigram.UnsupportedError, find_kernel, name, block)
    assert find_kernel("int4", 64).size(100) == trigram.codecs.find("int4", 64).size(100)
