"""The codecs of :mod:`trigram.codecs` as Triton kernels, for tensors on a GPU.

They produce the same bytes and the same values as the CPU's code in ``rust/core/src/codec``, bit for bit;
only the payload of a NaN that is computed, not copied, is up to the processor. There is one file per codec;
block codecs share ``blocks``, codecs that send only some of the values share ``sparse``.

No kernel waits for the GPU. Invalid bytes can therefore not raise an error: all values decode to NaN.
Importing Triton takes seconds, so only :func:`kernel_of` imports it.
"""

from __future__ import annotations

from trigram.codecs.codec import Codec
from trigram.codecs.triton.kernel import Kernel
from trigram.errors import UnsupportedError

__all__ = ["Kernel", "kernel_of"]


def kernel_of(codec: Codec) -> Kernel:
    """The GPU kernel of a codec.

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

    formats = {
        "bf16": halves.BF16,
        "f16": halves.F16,
        "int8": affine.INT8,
        "int4": affine.INT4,
        "fp8": fp8.FP8,
        "sign": sign.SIGN,
    }
    return Blocks(codec, formats[kind])
