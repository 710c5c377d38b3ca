"""``model.no_sync()`` and ``model.join()``: methods that scripts expect of a wrapped model.

They are attributes of the module itself, so that it keeps its class and the keys of its ``state_dict``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from trigram.errors import MisuseError
from trigram.model import blocks

_BLOCKS: dict[str, Callable[..., Any]] = {"no_sync": blocks.no_sync, "join": blocks.join}


class _Method:
    """A method of a wrapped model; it does not keep the model alive."""

    def __init__(self, name: str, model: nn.Module) -> None:
        self.__name__ = name
        self.__doc__ = _BLOCKS[name].__doc__
        self._model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See the function of the same name in ``trigram``; its first argument is the model."""
        model = self._model()
        assert model is not None
        return _BLOCKS[self.__name__](model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _MethodOfCopy(self.__name__)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return _MethodOfCopy, (self.__name__,)


class _MethodOfCopy:
    """Takes the place of a method in a copy or pickle of a wrapped model, which is not wrapped."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises.

        Raises:
            MisuseError: Always.
        """
        raise MisuseError(
            f"{self.__name__}: this model is a copy of a wrapped model and not wrapped itself; call "
            "trigram.with_bagua on it first"
        )


def add(model: nn.Module) -> None:
    """Gives the model the methods whose names it does not use itself."""
    for name in _BLOCKS:
        own = model.__dict__.get(name)
        if isinstance(own, _Method | _MethodOfCopy) or not hasattr(model, name):
            model.__dict__[name] = _Method(name, model)


def remove(model: nn.Module) -> None:
    """Removes the methods that :func:`add` gave the model."""
    for name in _BLOCKS:
        if isinstance(model.__dict__.get(name), _Method | _MethodOfCopy):
            del model.__dict__[name]
