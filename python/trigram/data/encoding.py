"""Samples as bytes, and what a sample's identity is made of.

A record is a pickle (protocol 5) followed by the buffers of its tensors and arrays, so that these are copied
once and not pickled.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch

_ALIGN = 64


class _Pickler(pickle.Pickler):
    """Leaves the memory of plain CPU tensors out of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        """How a tensor is pickled; ``NotImplemented``: as usual."""
        if (
            type(value) is not torch.Tensor
            or not value.is_cpu
            or value.layout is not torch.strided
            or value.requires_grad
            or value.is_quantized
            or value.is_conj()
            or value.is_neg()
        ):
            return NotImplemented
        return _tensor, (pickle.PickleBuffer(_memory(value)), value.dtype, tuple(value.shape))


def _memory(t: torch.Tensor) -> Any:
    """A copy of a tensor's values."""
    whole = t.contiguous()
    return bytearray(ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.nbytes else b"")


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(memory):
        return torch.empty(shape, dtype=dtype, device="cpu")
    if not isinstance(memory, memoryview):
        memory = bytearray(memory)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def encode(sample: Any) -> bytes:
    """A sample as bytes; raises what ``pickle`` raises if it cannot be pickled."""
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    _Pickler(out, protocol=5, buffer_callback=buffers.append).dump(sample)
    parts = [out.getbuffer(), *(b.raw() for b in buffers)]
    lengths = [part.nbytes for part in parts]
    record = bytearray(struct.pack(f"<Q{len(lengths)}Q", len(lengths), *lengths))
    for part in parts:
        record += bytes(-len(record) % _ALIGN)
        record += part
    return bytes(record)


def decode(record: bytearray) -> Any:
    """The sample of a record, whose memory its tensors and arrays then use."""
    (count,) = struct.unpack_from("<Q", record)
    lengths = struct.unpack_from(f"<{count}Q", record, 8)
    at, parts, whole = 8 + 8 * count, [], memoryview(record)
    for length in lengths:
        at += -at % _ALIGN
        parts.append(whole[at : at + length])
        at += length
    return pickle.loads(parts[0], buffers=parts[1:])


def update(feed: Callable[[bytes], Any], value: Any) -> None:
    """Feeds a value to a hash, alike in all processes for equal values of common types."""
    if isinstance(value, torch.Tensor):
        feed(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        feed(bytes(_memory(value.detach().cpu().resolve_conj().resolve_neg())))
    elif isinstance(value, dict):
        feed(f"dict {len(value)}".encode())
        for key, of in value.items():
            update(feed, key)
            update(feed, of)
    elif isinstance(value, (list, tuple)):
        feed(f"{type(value).__name__} {len(value)}".encode())
        for of in value:
            update(feed, of)
    elif value is None or isinstance(value, (str, bytes, int, float, complex)):
        feed(f"{type(value).__name__} {value!r}".encode())
    else:
        feed(encode(value))
