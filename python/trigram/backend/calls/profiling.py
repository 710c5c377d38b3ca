"""Events of calls for torch's profiler: ``trigram:all_reduce``, with the shapes of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

enabled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler runs; a call looks at nothing else while none does."""

PREFIX = "trigram:"


def begin(what: str, tensors: Sequence[torch.Tensor]) -> Any:
    """Begins the event of a call; :func:`end` ends it, also on another thread."""
    event: Any = torch._C._profiler._RecordFunctionFast(PREFIX + what, list(tensors), {})
    event.__enter__()
    return event


def end(event: Any) -> None:
    """Ends an event; None is no event."""
    if event is not None:
        event.__exit__(None, None, None)


def ending(event: Any, finish: Callable[[], None] | None) -> Callable[[], None]:
    """What remains to do after a call, and then to end its event."""

    def run() -> None:
        try:
            if finish is not None:
                finish()
        finally:
            end(event)

    return run
