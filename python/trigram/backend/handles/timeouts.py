"""Timeouts as torch gives them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def seconds(given: Any) -> float | None:
    """A timeout in seconds; None if the caller has set none, for which torch has 0 and -1 ms."""
    if given is None:
        return None
    value = given.total_seconds() if isinstance(given, timedelta) else float(given)
    return value if value > 0 else None
