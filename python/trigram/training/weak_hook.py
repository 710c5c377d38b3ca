"""Hooks on a model that know their owner weakly, and stay behind when the model is copied or pickled."""

from __future__ import annotations

import weakref
from typing import Any


class _LeftBehind:
    """What becomes of a hook in a copy of the model: nothing."""

    def __call__(self, *_: Any) -> None:
        """Does nothing."""


class WeakHook:
    """Calls ``owner.method(*args, ...)`` for as long as the owner lives."""

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
        return _LeftBehind()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _LeftBehind, ()
