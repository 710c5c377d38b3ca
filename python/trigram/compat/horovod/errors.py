"""Errors as Horovod's scripts expect them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trigram.errors import TrigramError


class HorovodInternalError(RuntimeError):
    """A call has failed on all of its ranks; the error of Trigram that it was is its ``__cause__``."""


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """A block whose errors of Trigram become Horovod's."""
    try:
        yield
    except TrigramError as error:
        raise HorovodInternalError(str(error)) from error
