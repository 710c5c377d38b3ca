"""Codecs by name, each with its GPU kernel."""

from __future__ import annotations

from trigram.codecs.chunked_topk import ChunkedTopK
from trigram.codecs.codec import Codec, GpuKernel, use_kernels
from trigram.errors import UnsupportedError


def find(name: str, block: int | None = None) -> Codec:
    """Finds a codec by name: bf16, f16, int8, int4, fp8, sign, ``topk:FRACTION``, ``randomk:FRACTION`` or
    ``chunktopk:FRACTION``.

    Args:
        name: As in the WHAT of a trigram.
        block: Values per block, for int8, int4, fp8 and sign; a multiple of 8 up to 2048.

    Raises:
        UnsupportedError: There is no such codec, or its parameter or block is invalid.
    """
    if block is not None and block <= 0:
        raise UnsupportedError(f"codec {name!r}: block={block} is invalid; it must be positive")
    return Codec(name, block)


def find_kernel(name: str, block: int | None = None) -> GpuKernel:
    """The GPU kernel of the codec that :func:`find` finds.

    Raises:
        UnsupportedError: There is no such codec, or Triton is not installed.
    """
    return _kernel(find(name, block))


def _kernel(codec: Codec) -> GpuKernel:
    if codec.name.startswith("chunktopk:"):
        return ChunkedTopK(codec)
    from trigram.codecs import triton  # only when a GPU needs it: importing Triton takes seconds

    return triton.kernel_of(codec)


use_kernels(_kernel)
