"""Hooks on a model that hold a weak reference to their owner and are not copied or pickled with the model."""

from __future__ import annotations

import weakref
from typing import Any


class _NoHook:
    """Stands for the hook in a copy or pickle of the model, and does nothing."""

    def __call__(self, *_: Any) -> None:
        """Does nothing."""


class WeakHook:
    """Calls ``owner.method(*args, ...)`` while the owner is alive."""

    def __init__(self, owner: Any, method: str, *args: Any) -> None:
        self._owner = weakref.ref(owner)
        self._method = method
        self._args = args

    def __call__(self, *args: Any) -> None:
        """Calls the method."""
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)(*self._args, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _NoHook()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _NoHook, ()
