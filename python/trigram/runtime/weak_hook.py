"""Hooks on a model that hold a weak reference to their owner and are not copied or pickled with the model."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from trigram.runtime import dynamo, job

_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


class _NoTorchScript:
    """What ``torch.jit.script``, which compiles a module's hooks with it, finds in place of a function."""

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":
            raise AttributeError(
                "torch.jit.script compiles the hooks of a module too, and trigram's are no TorchScript; "
                "script the model before with_bagua or after trigram.unwrap, or use torch.jit.trace"
            )
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")


class _NoHook(_NoTorchScript):
    """Stands for the hook in a copy or pickle of the model, and does nothing."""

    def __call__(self, *_: Any) -> None:
        """Does nothing."""


class WeakHook(_NoTorchScript):
    """Calls ``owner.method(*args, ...)`` while the owner is alive; outside of graphs, for compiled functions
    may run the backward pass of a model. The call is in the job in which the hook was made: autograd has
    threads of its own for GPUs."""

    def __init__(self, owner: Any, method: str, *args: Any) -> None:
        self._job = job.here()
        self._owner = weakref.ref(owner)
        self._method = method
        self._args = args

    def __call__(self, *args: Any) -> None:
        """Calls the method; an exported graph, which is traced through here, has no part of it."""
        if not _is_exporting():
            self._call(*args)

    @dynamo.disable
    def _call(self, *args: Any) -> None:
        owner = self._owner()
        if owner is not None:
            self._in_job(getattr(owner, self._method), *self._args, *args)

    def _in_job(self, method: Callable[..., object], *args: Any) -> None:
        if job.here() is self._job:
            method(*args)
        else:
            with self._job.here():
                method(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _NoHook()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _NoHook, ()
