"""Codecs: lossy compression of float tensors. Public: ``find`` and ``Codec``.

What lives here: the codec (``codec.py``), one made of torch's operations
(``chunked_topk.py``), codecs by name (``registry.py``) and their GPU kernels
(``triton/``). The CPU's loops are in ``rust/core/src/codec``. Uses: errors.
"""

from trigram.codecs.codec import Codec
from trigram.codecs.registry import find

__all__ = ["Codec", "find"]
