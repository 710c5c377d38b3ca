"""The options of c10d's calls, and the older forms of the calls, without options.

C++ and ``torch.distributed`` pass an object of options. Scripts that call a process group themselves may
pass a root, an operator and a timeout instead; these functions make options of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trigram.errors import MisuseError
from trigram.runtime import engine_codes

_OP_CODES: dict[int, int] = {
    hash(op): code
    for op, code in engine_codes.OPS.items()
    if not isinstance(op, str) and isinstance(op, dist.ReduceOp.RedOpType)
}
# A ReduceOp of the options equals the enum's member only from its own side, so that a dict by member does
# not find it; their hashes are equal.
_PREMULTIPLIED = hash(dist.ReduceOp.PREMUL_SUM)
SUM = engine_codes.OPS["sum"]
AVG = engine_codes.OPS["avg"]


def reduce_op(op: Any, what: str) -> tuple[int, Any]:
    """The engine's code of a ``ReduceOp``, and the factor of ``PREMUL_SUM`` (None for other operators).

    Raises:
        MisuseError: The engine has no such operator.
    """
    number = hash(op)
    if number == _PREMULTIPLIED:
        return SUM, _factor(op)
    code = _OP_CODES.get(number)
    if code is None:
        raise MisuseError(f"{what}: {op} is not supported; use one of {', '.join(engine_codes.OP_NAMES)}")
    return code, None


def _factor(op: Any) -> Any:
    if hasattr(op, "factor"):
        return op.factor
    return op.__getstate__()[1]  # torch before 2.13 shows it only to pickle


def is_async(opts: Any) -> bool:
    """Whether a call with these options returns before it has finished."""
    try:
        return bool(opts.asyncOp)
    except AttributeError:  # torch 2.7 has it in some options only
        return True


def listed(given: Any) -> list[Any]:
    """The tensors of an argument that is a tensor or a list of them."""
    return [given] if isinstance(given, torch.Tensor) else list(given)


def options(kind: type, given: Any, timeout: Any = None, **fields: Any) -> Any:
    """The options of a call: those given, or new ones with these fields.

    Args:
        kind: The class of the options.
        given: What stands where options stand: options, None, or the first field.
        timeout: A timeout of the call.
        **fields: Further fields, by name; None leaves one as it is.
    """
    if isinstance(given, kind):
        return given
    made = kind()
    if given is not None:
        fields[next(iter(fields), "timeout")] = given
    if timeout is not None:
        fields["timeout"] = timeout
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    return made


def only(given: list[Any], what: str) -> Any:
    """The one tensor of a list.

    Raises:
        MisuseError: There are more, or none: one rank has one device here.
    """
    if len(given) != 1:
        raise MisuseError(f"{what}: expected one tensor for this rank, got {len(given)}")
    return given[0]
