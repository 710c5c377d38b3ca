"""Trigram: a communication library for data-parallel PyTorch training.

Change *how* workers talk, keep the training loop::

    import trigram

    model = trigram.with_bagua(model)   # instead of DistributedDataParallel(model)

Start the ranks with torchrun, or anything that provides a ``torch.distributed.Store``.
"""

from trigram._core import __version__
from trigram.algorithms import Trigram, algorithms
from trigram.collectives import (
    Work,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    empty,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from trigram.errors import (
    AbortedError,
    AuthError,
    ConfigError,
    CorruptError,
    IoError,
    MismatchError,
    MisuseError,
    PeerLostError,
    TimeoutError,
    TrigramError,
    UnsupportedError,
)
from trigram.training import join, no_sync, stats, with_bagua
from trigram.world import (
    Group,
    init,
    is_initialized,
    new_group,
    rank,
    shutdown,
    world_size,
)

__all__ = [
    "AbortedError",
    "AuthError",
    "ConfigError",
    "CorruptError",
    "Group",
    "IoError",
    "MismatchError",
    "MisuseError",
    "PeerLostError",
    "TimeoutError",
    "Trigram",
    "TrigramError",
    "UnsupportedError",
    "Work",
    "__version__",
    "algorithms",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "empty",
    "gather",
    "init",
    "is_initialized",
    "join",
    "new_group",
    "no_sync",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "shutdown",
    "stats",
    "with_bagua",
    "world_size",
]
