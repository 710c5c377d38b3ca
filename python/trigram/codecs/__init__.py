"""Codecs: lossy compression of float tensors. Public: ``find`` and ``Codec``.

What lives here: the codec (``codec.py``), codecs by name (``registry.py``) and
their GPU kernels (``triton/``, and ``chunked_topk.py``, which is made of torch's
operations). The CPU's loops are in ``rust/core/src/codec``. Uses: errors.
"""

from trigram.codecs.codec import Codec
from trigram.codecs.registry import find

__all__ = ["Codec", "find"]
