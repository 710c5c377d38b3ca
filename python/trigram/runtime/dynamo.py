"""Keeps Dynamo out of this package.

Hooks run inside of compiled models, and compiled graphs call collectives through C++, which calls our Python:
Dynamo would compile those frames, and fail. Its own interface for that is ``torch.compiler.disable``, which
imports ``torch._dynamo``: a second and 80 MB that most scripts need not spend, and a temporary folder that
some do not have. What follows is what that does to a function.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Any)


def skip(*classes: type) -> None:
    """Tells the interpreter's hook to run the methods of these classes, and what they call, as they are."""
    for kind in classes:
        for value in vars(kind).values():
            if isinstance(value, FunctionType):
                _skip(value.__code__)
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and hasattr(rules, "add"):
        rules.add("trigram")


def disable(function: F) -> F:
    """In place of ``torch.compiler.disable``: Dynamo runs this function, and what it calls, as it is."""
    if not hasattr(
        _hook(), "set_code_exec_strategy"
    ):  # torch 2.7 and earlier: what it calls would be compiled
        disabled: F = torch.compiler.disable(function)
        return disabled
    _skip(function.__code__)
    function._torchdynamo_disable = True
    return function


def _skip(code: Any) -> None:
    hook = _hook()
    if hasattr(hook, "set_code_exec_strategy"):
        skipped = hook._FrameAction.SKIP
        hook.set_code_exec_strategy(code, hook._FrameExecStrategy(skipped, skipped))
    elif hasattr(hook, "skip_code"):
        hook.skip_code(code)


def _hook() -> Any:
    # Here, because mypy finds no such module: it is part of torch's extension.
    from torch._C._dynamo import eval_frame  # type: ignore[attr-defined]

    return eval_frame
