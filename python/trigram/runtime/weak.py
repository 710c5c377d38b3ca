"""Weak collections that several threads change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")


def copied(items: Callable[[], Iterable[_T]]) -> list[_T]:
    """What is in a weak collection now. While one is copied, another thread may add to it, and then Python
    raises ``RuntimeError``: it is copied again.

    Args:
        items: The collection's ``__iter__``, ``items`` or the like.
    """
    while True:
        with contextlib.suppress(RuntimeError):
            return list(items())
