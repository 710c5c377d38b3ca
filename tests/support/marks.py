"""Markers for parametrized tests."""

from __future__ import annotations

from typing import Any

import pytest


def long(*values: Any, id: str | None = None) -> Any:
    """Parameters of a test that only `make test-all` runs."""
    return pytest.param(*values, id=id, marks=pytest.mark.long)


def long_unless(short: Any, values: Any) -> list[Any]:
    """All values; those that are not in `short` are run by `make test-all` only."""
    return [v if v in short else long(*v) if isinstance(v, tuple) else long(v) for v in values]


def pairs_with(first: Any, seconds: list[Any]) -> list[Any]:
    """A pair for each of the second values, which keep their marks."""
    return [
        pytest.param(first, *s.values, marks=s.marks) if hasattr(s, "values") else (first, s) for s in seconds
    ]
