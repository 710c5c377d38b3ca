"""Ends the averaging of models that the script has dropped, under asynchronous algorithms.

The hooks of such a model, with its weights, outlive the model, because other ranks may still wait for its
messages. They end when the script has dropped the model on all ranks.
"""

from __future__ import annotations

import gc

from trigram.averaging.groups import ModelGroups
from trigram.runtime import job
from trigram.runtime.records import all_gather_bytes
from trigram.training.running_models import Running, RunningModels


def release_dropped(groups: ModelGroups) -> None:
    """Frees the models that all ranks of a group have dropped.

    Models of elastic jobs stay: a joining rank may need their state.

    Args:
        groups: The process groups of another model of the same ranks; all of them call this.
    """
    mine = {
        hooks.groups.control.ordinal: hooks
        for hooks, kept in job.here().part(RunningModels).models.items()
        if kept is None and hooks.groups.group.ranks == groups.group.ranks
    }
    if any(hooks.model() is not None for hooks in mine.values()):
        gc.collect()  # a model that the script has dropped may be in a reference cycle
    dropped = b"".join(n.to_bytes(8, "little") for n, hooks in mine.items() if hooks.model() is None)
    answers = [
        {data[at : at + 8] for at in range(0, len(data), 8)}
        for data in all_gather_bytes(groups.control, dropped)
    ]
    for number in sorted(int.from_bytes(n, "little") for n in set.intersection(*answers)):
        _end(mine[number])


def _end(hooks: Running) -> None:
    """Ends the averaging of one model; all ranks call it."""
    hooks.drain()
    hooks.close()
    hooks.schedule.close()
    job.here().part(RunningModels).remove(hooks)
