"""Keeps Dynamo out of this package.

Compiled graphs call collectives through C++, which calls our Python: Dynamo would compile those frames, and
fail. Its own interface for that is ``torch._dynamo.disable``, whose import takes a second that most scripts
need not spend; what follows is what that does to a function.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any


def skip(*classes: type) -> None:
    """Tells the interpreter's hook to run the methods of these classes, and what they call, as they are."""
    for kind in classes:
        for value in vars(kind).values():
            if isinstance(value, FunctionType):
                _skip(value.__code__)
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and hasattr(rules, "add"):
        rules.add("trigram")


def _skip(code: Any) -> None:
    # Here, because mypy finds no such module: it is part of torch's extension.
    from torch._C._dynamo import eval_frame  # type: ignore[attr-defined]

    hook: Any = eval_frame
    if hasattr(hook, "set_code_exec_strategy"):
        skipped = hook._FrameAction.SKIP
        hook.set_code_exec_strategy(code, hook._FrameExecStrategy(skipped, skipped))
    elif hasattr(hook, "skip_code"):  # torch 2.7 and earlier
        hook.skip_code(code)
