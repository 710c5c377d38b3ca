"""Deprecated module: ``trigram.exchange.Exchange`` is now :class:`trigram.mixing.AveragingStep`."""

from __future__ import annotations

import warnings
from typing import Any

from trigram.mixing import AveragingStep


def __getattr__(name: str) -> Any:
    if name == "Exchange":
        warnings.warn(
            "trigram.exchange.Exchange is deprecated; use trigram.mixing.AveragingStep",
            DeprecationWarning,
            stacklevel=2,
        )
        return AveragingStep
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
