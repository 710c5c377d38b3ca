"""Graphs of gossip: who sends to whom, round by round. Public: ``find``, ``kinds`` and ``Graph``."""

from trigram.algorithms.graphs import Graph, find, kinds

__all__ = ["Graph", "find", "kinds"]
