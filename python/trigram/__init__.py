"""Trigram: a communication library for data-parallel PyTorch training.

It changes how the ranks of a job communicate, and leaves the training loop as it is::

    import trigram

    model = trigram.with_bagua(model)   # instead of DistributedDataParallel(model)

Start the ranks with torchrun, or with anything that provides a ``torch.distributed.Store``.

``trigram.TimeoutError`` is not in ``__all__``: ``from trigram import *`` must not shadow the builtin, of
which it is a subclass.
"""

import sys
from typing import TYPE_CHECKING

from trigram import _command
from trigram._core import __version__

if TYPE_CHECKING or _command.names.used or not _command.runs(sys.argv, sys.orig_argv):
    from trigram.algorithms.names import algorithms, register
    from trigram.algorithms.trigram import Trigram
    from trigram.backend import register as _register_backend  # noqa: F401  # so that the name is registered
    from trigram.collectives.calls import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        gather,
        reduce,
        reduce_scatter,
        scatter,
    )
    from trigram.collectives.messages import recv, send
    from trigram.collectives.work import Work
    from trigram.elastic.draining import drain, draining
    from trigram.elastic.recovery import public_recover as recover
    from trigram.errors import (
        AbortedError,
        AuthError,
        ConfigError,
        CorruptError,
        DrainError,
        IoError,
        LaunchError,
        MismatchError,
        MisuseError,
        PeerLostError,
        TimeoutError,  # noqa: F401  # public as an attribute, see above
        TrigramError,
        UnsupportedError,
    )
    from trigram.gradients.in_parts import clip_grad_norm_
    from trigram.launching import launch
    from trigram.model.blocks import join, no_sync
    from trigram.model.boundary import step
    from trigram.model.checkpoint import algorithm_state, load_algorithm_state
    from trigram.model.consensus import consensus, consensus_state_dict
    from trigram.model.counters import stats
    from trigram.model.ddp import DistributedDataParallel
    from trigram.model.elastic_gather import elastic_all_gather
    from trigram.model.shards import local_shards
    from trigram.model.with_bagua import is_wrapped, switch, unwrap, with_bagua
    from trigram.observe import dump as _dump  # noqa: F401  # so that TRIGRAM_DUMP works
    from trigram.observe import metrics as _metrics  # noqa: F401  # so that TRIGRAM_METRICS works
    from trigram.observe import rank_report as _report  # noqa: F401  # so that TRIGRAM_REPORT works
    from trigram.observe import snapshots as _snapshots  # noqa: F401  # so that TRIGRAM_TOP works
    from trigram.observe import torch_steps as _torch_steps  # noqa: F401  # so that these know all steps
    from trigram.observe.timeline import timeline
    from trigram.optimizers.qadam import QAdam
    from trigram.runtime.group import Group
    from trigram.runtime.job import Job
    from trigram.runtime.memory import empty
    from trigram.runtime.world import init, is_initialized, is_spare, new_group, rank, shutdown, world_size
    from trigram.training.ddp_hook import ddp_hook
else:
    __getattr__ = _command.names

__all__ = [
    "AbortedError",
    "AuthError",
    "ConfigError",
    "CorruptError",
    "DistributedDataParallel",
    "DrainError",
    "Group",
    "IoError",
    "Job",
    "LaunchError",
    "MismatchError",
    "MisuseError",
    "PeerLostError",
    "QAdam",
    "Trigram",
    "TrigramError",
    "UnsupportedError",
    "Work",
    "__version__",
    "algorithm_state",
    "algorithms",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "clip_grad_norm_",
    "consensus",
    "consensus_state_dict",
    "ddp_hook",
    "drain",
    "draining",
    "elastic_all_gather",
    "empty",
    "gather",
    "init",
    "is_initialized",
    "is_spare",
    "is_wrapped",
    "join",
    "launch",
    "load_algorithm_state",
    "local_shards",
    "new_group",
    "no_sync",
    "rank",
    "recover",
    "recv",
    "reduce",
    "reduce_scatter",
    "register",
    "scatter",
    "send",
    "shutdown",
    "stats",
    "step",
    "switch",
    "timeline",
    "unwrap",
    "with_bagua",
    "world_size",
]
