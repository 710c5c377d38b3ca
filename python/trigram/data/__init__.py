"""Data for data-parallel training: batches that cost all ranks the same time, batches of elastic jobs, and a
cache that a host shares.

What lives here: :class:`BalancedBatchSampler` (``sampler.py``) and its plan (``plan.py``);
:class:`ElasticLoader` (``elastic_loader.py``) and who gets which samples (``dealing.py``);
:class:`CachedDataset` (``cache.py``), its samples as bytes (``encoding.py``), a host's file (``store.py``)
and the samples of other hosts (``peers.py``).
Uses: errors, runtime, collectives.
"""

from trigram.data.cache import CachedDataset
from trigram.data.elastic_loader import ElasticLoader
from trigram.data.sampler import BalancedBatchSampler

__all__ = ["BalancedBatchSampler", "CachedDataset", "ElasticLoader"]
