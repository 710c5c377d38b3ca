"""Hooks on a model that hold a weak reference to their owner and are not copied or pickled with the model."""

from __future__ import annotations

import weakref
from typing import Any

from trigram.runtime import dynamo


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
    may run the backward pass of a model."""

    def __init__(self, owner: Any, method: str, *args: Any) -> None:
        self._owner = weakref.ref(owner)
        self._method = method
        self._args = args

    @dynamo.disable
    def __call__(self, *args: Any) -> None:
        """Calls the method."""
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)(*self._args, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _NoHook()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _NoHook, ()
