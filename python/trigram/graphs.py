"""Topologies of gossip: which rank sends to which, in each averaging step. Public: ``find``, ``kinds``,
``Graph``."""

from trigram.algorithms.graphs import Graph, find, kinds

__all__ = ["Graph", "find", "kinds"]
