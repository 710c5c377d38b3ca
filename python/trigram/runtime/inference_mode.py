"""Tensors that outlive ``torch.inference_mode``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def kept_tensors() -> Iterator[None]:
    """A block that makes tensors which are written later, wherever it runs: a tensor that is made inside
    ``torch.inference_mode`` can never be written outside of it. Ranks of an elastic job may regroup, and so
    make new ones, while a script evaluates."""
    grad = torch.is_grad_enabled()  # which ``inference_mode(False)`` sets
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield
