"""Serialization of states, nested containers of tensors and numbers, to send them to other ranks.

The format is 8 bytes of length, a description in JSON, and the tensors' bytes; :func:`unpack` checks all
lengths. It is not pickle, because unpickling data from the network could execute code.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from trigram.errors import CorruptError, UnsupportedError

_HEADER = 8
_NAMES = (
    "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool "
    "complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2"
)
_DTYPES = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}


def pack(value: Any, what: str) -> torch.Tensor:
    """Serializes ``value``, as a 1-D tensor of uint8.

    Args:
        value: None, bools, numbers, strings, tensors, and lists, tuples and dicts of them.
        what: The call, for error messages.

    Raises:
        UnsupportedError: ``value`` contains an object of another type.
    """
    tensors: list[torch.Tensor] = []
    text = json.dumps(_describe(value, tensors, what)).encode()
    sizes = [t.numel() * t.element_size() for t in tensors]
    out = torch.empty(_HEADER + len(text) + sum(sizes), dtype=torch.uint8, device="cpu")
    out[:_HEADER] = torch.frombuffer(bytearray(len(text).to_bytes(_HEADER, "little")), dtype=torch.uint8)
    out[_HEADER : _HEADER + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    at = _HEADER + len(text)
    for t, size in zip(tensors, sizes, strict=True):
        if size:
            out[at : at + size] = t.detach().cpu().contiguous().flatten().view(torch.uint8)
        at += size
    return out


def unpack(data: torch.Tensor, rank: int) -> Any:
    """The inverse of :func:`pack`.

    Args:
        data: The bytes, uint8.
        rank: The rank that sent them, for the error.

    Raises:
        CorruptError: The bytes are invalid.
    """
    try:
        length = int.from_bytes(bytes(data[:_HEADER].tolist()), "little")
        if not 0 <= length <= data.numel() - _HEADER:
            raise ValueError(
                f"it claims a description of {length} bytes, but has {data.numel()} bytes in total"
            )
        described = json.loads(data[_HEADER : _HEADER + length].numpy().tobytes())
        value, end = _restore(described, data, _HEADER + length)
        if end != data.numel():
            raise ValueError(f"{data.numel() - end} bytes remain after the last tensor")
        return value
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, RuntimeError) as e:
        raise CorruptError(
            f"corrupt data from rank {rank}: cannot decode the state that it sent: {e}", rank
        ) from e


def _describe(value: Any, tensors: list[torch.Tensor], what: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES or value.layout not in (torch.strided, torch.sparse_coo):
            raise UnsupportedError(
                f"{what}: cannot send a tensor of dtype {value.dtype} and layout {value.layout}; states hold "
                f"dense and sparse COO tensors of {', '.join(_DTYPES)}"
            )
        if value.is_sparse:  # as it is: the sum of rows that are there twice could differ in its last bits
            parts = [_describe(t, tensors, what) for t in (value._indices(), value._values())]
            return {"sparse": [*parts, list(value.shape), value.is_coalesced()]}
        tensors.append(value)
        return {"tensor": name, "shape": list(value.shape)}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_describe(v, tensors, what) for v in value]}
    if isinstance(value, dict):
        items = [[_describe(k, tensors, what), _describe(v, tensors, what)] for k, v in value.items()]
        return {"dict": items}
    raise UnsupportedError(
        f"{what}: cannot send an object of type {type(value).__name__}; states hold None, bools, numbers, "
        "strings, tensors, and lists, tuples and dicts of them"
    )


def _restore(described: Any, data: torch.Tensor, at: int) -> tuple[Any, int]:
    if not isinstance(described, dict):
        if isinstance(described, list):
            raise ValueError("a container without a type")
        return described, at
    if "tensor" in described:
        dtype, shape = _DTYPES[described["tensor"]], [int(n) for n in described["shape"]]
        size = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or at + size > data.numel():
            raise ValueError(f"a tensor of shape {shape} in the remaining {data.numel() - at} bytes")
        t = torch.empty(shape, dtype=dtype, device="cpu")
        if size:
            t.view(-1).view(torch.uint8).copy_(data[at : at + size])
        return t, at + size
    ((kind, inner),) = described.items()
    if kind == "float":
        return float(inner), at
    items: list[Any] = []
    if kind == "sparse":
        (indices, values), at = _restore_all(inner[:2], data, at)
        shape, coalesced = inner[2:]
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=coalesced, check_invariants=True, device="cpu"
        ), at
    if kind == "dict":
        for pair in inner:
            (name, value), at = _restore_all(pair, data, at)
            items.append((name, value))
        return dict(items), at
    items, at = _restore_all(inner, data, at)
    return {"list": list, "tuple": tuple}[kind](items), at


def _restore_all(described: list[Any], data: torch.Tensor, at: int) -> tuple[list[Any], int]:
    values = []
    for one in described:
        value, at = _restore(one, data, at)
        values.append(value)
    return values, at
