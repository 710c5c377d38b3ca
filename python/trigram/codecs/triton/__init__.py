"""The codecs of :mod:`trigram.codecs` for tensors on a GPU, in Triton: the same bytes, the same numbers.

One file per codec, as in ``rust/core/src/codec``, whose bits these are; what block codecs share is in
``blocks``, what codecs that drop values share in ``sparse``. Nothing here waits for the GPU. Triton is
imported by :func:`kernel_of`, not before: it takes seconds.

Where a NaN is computed (not carried), its payload is the processor's. Bytes that are no code cannot
raise without waiting, so they decode to NaN throughout.
"""

from __future__ import annotations

from trigram.codecs.codec import Codec
from trigram.codecs.triton.kernel import Kernel
from trigram.errors import UnsupportedError

__all__ = ["Kernel", "kernel_of"]


def kernel_of(codec: Codec) -> Kernel:
    """The kernel of a codec.

    Raises:
        UnsupportedError: Triton is not installed.
    """
    try:
        import triton  # noqa: F401
    except ImportError as e:
        raise UnsupportedError(
            f"codec {codec.name!r} on a GPU needs triton, which is not installed; install it with pip "
            "install triton (torch's CUDA and ROCm builds for Linux include it)"
        ) from e
    kind = codec.name.partition(":")[0]
    if kind == "topk":
        from trigram.codecs.triton.topk import TopK  # imports Triton

        return TopK(codec)
    if kind == "randomk":
        from trigram.codecs.triton.randomk import RandomK  # imports Triton

        return RandomK(codec)
    # These import Triton.
    from trigram.codecs.triton import affine, fp8, halves, sign
    from trigram.codecs.triton.blocks import Blocks  # imports Triton

    plans = {
        "bf16": halves.BF16,
        "f16": halves.F16,
        "int8": affine.INT8,
        "int4": affine.INT4,
        "fp8": fp8.FP8,
        "sign": sign.SIGN,
    }
    return Blocks(codec, plans[kind])
