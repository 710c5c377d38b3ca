"""Optimizers whose state is divided among the ranks, against the same optimizers with all of it."""
