"""PY-5: importing trigram patches nothing, and shadows no builtin. (The ranks import it, not this module.)"""

from __future__ import annotations

import ast
import subprocess
import sys
import threading

import torch

from tests.support import patience
from tests.support.harness import run


def _state() -> dict[str, int]:
    """The identity of everything that a library might be tempted to replace."""
    places = {
        "Tensor": torch.Tensor,
        "Module": torch.nn.Module,
        "Optimizer": torch.optim.Optimizer,
        "distributed": torch.distributed,
        "DDP": torch.nn.parallel.DistributedDataParallel,
        "autograd": torch.autograd,
        "torch": torch,
    }
    return {f"{name}.{k}": id(v) for name, place in places.items() for k, v in vars(place).items()}


def _imported(rank: int, world: int) -> tuple[list[str], int]:
    before, threads = _state(), threading.active_count()
    import trigram

    assert not trigram.is_initialized()
    after = _state()
    return [k for k in before if after.get(k) != before[k]], threading.active_count() - threads


def test_import_patches_nothing() -> None:
    ((changed, threads),) = run(1, _imported)
    assert not changed and threads == 0


def _import_star(rank: int, world: int) -> tuple[bool, bool, bool]:
    import builtins

    import trigram
    import trigram.errors

    names: dict[str, object] = {}
    exec("from trigram import *", names)
    return (
        "TimeoutError" in names,
        trigram.TimeoutError is trigram.errors.TimeoutError,
        "TimeoutError" in trigram.errors.__all__
        and issubclass(trigram.errors.TimeoutError, builtins.TimeoutError),
    )


def test_import_star_leaves_the_builtin_timeout_error() -> None:
    (found,) = run(1, _import_star)
    assert found == (False, True, True)


_LOADED = """
import sys, torch
before = set(sys.modules)
import trigram
print({name.partition(".")[0] for name in set(sys.modules) - before})
"""


def test_import_loads_itself_alone() -> None:
    """Beside torch: no compiler, which takes a second, 80 MB in each rank, and a temporary folder."""
    done = subprocess.run(
        [sys.executable, "-c", _LOADED],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=True,
    )
    assert ast.literal_eval(done.stdout) - sys.stdlib_module_names == {"trigram"}
