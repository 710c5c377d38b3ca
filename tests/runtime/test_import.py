"""PY-5: importing trigram patches nothing. (This module does not import it: the rank does.)"""

from __future__ import annotations

import threading

import torch

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
