"""Whether a function of a script can be called as it will be: told before training, not in its first step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def misfit(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str | None:
    """Why the function cannot be called with these arguments; None: it can, or does not say what it takes."""
    why = None
    for follows in (True, False):  # a decorator may give some of what it wraps takes
        try:
            signature = inspect.signature(function, follow_wrapped=follows)
        except Exception:  # some of C do not say, and annotations may name what is not there
            return None
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            why = why or f"{error}: it is {getattr(function, '__name__', function)}{signature}"
        else:
            return None
    return why
