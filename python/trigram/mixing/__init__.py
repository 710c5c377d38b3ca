"""Averaging steps of weights: among all ranks, among neighbours, asynchronous. Public:
``AveragingStep``, ``Mean`` and the ``ModelGroups`` that a step communicates in.

What lives here: the base class of a step (``step.py``), means over all ranks (``central.py``), gossip
(``gossip.py``), asynchronous gossip (``async_gossip``), averages of those who are there (``quorum``), the
optimizer's state (``optimizer_state.py``).
Uses: errors, runtime, codecs, algorithms, gpu, collectives, averaging. It does not import
:mod:`trigram.elastic`.
"""

from trigram.averaging.groups import ModelGroups
from trigram.mixing.central import Mean
from trigram.mixing.step import AveragingStep

__all__ = ["AveragingStep", "Mean", "ModelGroups"]
