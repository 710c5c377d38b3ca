"""Data for data-parallel training: batches that cost all ranks the same time, and a cache that a host shares.

What lives here: :class:`BalancedBatchSampler` (``sampler.py``) and its plan (``plan.py``).
Uses: errors, runtime.
"""

from trigram.data.cache import CachedDataset
from trigram.data.sampler import BalancedBatchSampler

__all__ = ["BalancedBatchSampler", "CachedDataset"]
