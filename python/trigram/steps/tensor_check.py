"""Which parameters and buffers a model may have: every rank must be able to receive them.

A rank whose model has another tensor would fail alone, while the other ranks wait for it. So the ranks agree
first, and all raise the same error.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trigram.errors import MisuseError, UnsupportedError
from trigram.gpu import device
from trigram.runtime import engine_codes
from trigram.runtime.group import Group
from trigram.runtime.records import all_gather_bytes

_OPAQUE = {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
"""Dtypes that torch cannot copy."""
_WITHOUT_VALUES = "\0"
"""Marks a problem for which the error is a ``MisuseError``."""


def check_tensors(model: nn.Module, group: Group | None, ignored: Collection[str] = ()) -> None:
    """Raises if the model has a parameter or buffer that cannot be sent; the message names it.

    Args:
        model: The module.
        group: Its ranks, which call it together and raise together; None: this rank alone checks.
        ignored: Names of parameters and buffers that trigram leaves alone.

    Raises:
        MisuseError: A parameter or buffer has no values yet (lazy modules, the meta device).
        UnsupportedError: Its layout, device or dtype is not supported.
    """
    mine = _problem(model, ignored)
    told = [mine] if group is None else [each.decode() for each in all_gather_bytes(group, mine.encode())]
    for place, problem in enumerate(told):
        if problem:
            kind = MisuseError if problem.startswith(_WITHOUT_VALUES) else UnsupportedError
            where = "" if group is None else f" of rank {group.ranks[place]}"
            raise kind(f"with_bagua: the model{where} has {problem.removeprefix(_WITHOUT_VALUES)}")


def _problem(model: nn.Module, ignored: Collection[str]) -> str:
    """What is wrong with the first tensor that cannot be sent; empty if all can."""
    parameters = [("parameter", n, t) for n, t in model.named_parameters()]
    for kind, name, t in [*parameters, *(("buffer", n, t) for n, t in model.named_buffers())]:
        if name in ignored:
            continue
        what = f"the {kind} {name}"
        if is_lazy(t):
            return (
                f"{_WITHOUT_VALUES}{what}, which is not initialized: a lazy module learns its shape from its "
                "first inputs; run one forward pass before with_bagua"
            )
        if t.is_meta:
            return (
                f"{_WITHOUT_VALUES}{what} on the meta device, so without values; call "
                "model.to_empty(device=...) and initialize the model first"
            )
        if t.layout != torch.strided:
            return f"{what} of layout {t.layout}; only dense tensors are sent: register t.to_dense() instead"
        if not t.is_cpu and t.device.type not in device.kinds:
            return f"{what} on {t.device}; move the model to the CPU or to a GPU"
        if t.is_quantized:
            return f"{what} of dtype {t.dtype}, whose scales cannot be sent; register t.dequantize() instead"
        if str(t.dtype) in _OPAQUE:
            return f"{what} of dtype {t.dtype}, which torch cannot copy; register it as a view of torch.uint8"
        if t.requires_grad and t.dtype.to_real() not in engine_codes.AVERAGED:
            return f"{what} of dtype {t.dtype}, which cannot be trained; set requires_grad=False on it"
    return ""
