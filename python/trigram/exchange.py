"""The old place of ``AveragingStep`` (as ``Exchange``) and ``Mean``, which are in :mod:`trigram.mixing`."""

from __future__ import annotations

import warnings
from typing import Any

from trigram import mixing

_NEW_NAMES = {"Exchange": "AveragingStep", "Mean": "Mean"}


def __getattr__(name: str) -> Any:
    if name not in _NEW_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _NEW_NAMES[name]
    warnings.warn(f"trigram.exchange.{name} is now trigram.mixing.{new}", DeprecationWarning, stacklevel=2)
    return getattr(mixing, new)
